"""The update of one agent on one rollout.

    rollout -> token rewards -> advantages -> mini-batches -> loss of each token -> gradient -> Adam
"""
import math
from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from cory.config import Config
from cory.distributed import processes
from cory.errors import UserError
from cory.ppo import formulas
from cory.ppo.advantages import find_estimator
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, passes, take
from cory.sharding import as_many_as_others, gradient_norm, is_sharded


def ppo_update(agent: Agent, rollout: Rollout, score: Tensor) -> dict[str, float]:
    """Token-level PPO on scores, of responses (B,) or of tokens (B, T): `num_ppo_epochs` shuffled passes over
    the rollout, or fewer if the policy has moved by `max_approx_kl`. Returns metrics, those of `losses` as
    means over the tokens of all steps, measured before each of them.
    """
    cfg, rng, mask_BT = agent.cfg, agent.generator(), rollout.mask_BT
    # equal in all processes, also where it was drawn, or asked for
    score = processes().from_main(score.to(mask_BT))
    kl_coef = agent.kl_coef if rollout.kl_coef_B is None else rollout.kl_coef_B.mean().item()
    rollout = with_advantages(rollout, score, agent)
    sums, grad_norms = {}, []                               # of each metric, over the tokens of all steps
    for batch in mini_batches(rollout, agent, rng):
        divisor = processes().sum(sum(rows.divisor_B.sum() for rows in batch))
        of_step = {}
        for rows in batch:
            of_step = added(of_step, add_gradient(agent, rows, divisor))
        sums = added(sums, of_step)
        if cfg.max_approx_kl and means(of_step)["approx_kl"] > cfg.max_approx_kl:
            agent.optimizer.zero_grad(set_to_none=True)
            break
        grad_norms.append(apply_gradient(agent))
    of_update = {"score": formulas.score_of_responses(score, mask_BT).mean().item(), "kl_coef": kl_coef,
                 "grad_norm": fmean(grad_norms or [0.0]),
                 "learning_rate": agent.optimizer.param_groups[0]["lr"]}
    if cfg.max_approx_kl:
        of_update["optimizer_steps"] = len(grad_norms)
    if rollout.value_BT is not None:
        real = mask_BT.bool()
        of_update["explained_variance"] = formulas.explained_variance(rollout.value_BT[real],
                                                                      rollout.return_BT[real])
    return dict(**means(sums), **of_update)     # a name in both raises


def added(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds further sums to those so far, which must be of the same metrics."""
    if sums and sums.keys() != more.keys():
        raise UserError("metrics", sorted(sums.keys() ^ more.keys()), "are of some rows only; `losses` must "
                        "return the same metrics for all")
    return {name: sums.get(name, 0.0) + x for name, x in more.items()}


def means(sums: dict[str, Tensor]) -> dict[str, float]:
    """Metrics as means over the tokens of all processes, from their sums and the number of tokens."""
    totals = dict(zip(sums, processes().sum(torch.stack([*sums.values()])).tolist(), strict=True))
    tokens = totals.pop("tokens")
    return {name: total / tokens for name, total in totals.items()}


def with_advantages(rollout: Rollout, score: Tensor, agent: Agent) -> Rollout:
    """Turns scores and the KL into token rewards, then into advantages and value targets; and adds what the
    loss is a mean over.
    """
    cfg, mask_BT = agent.cfg, rollout.mask_BT
    if score.shape not in (mask_BT.shape, mask_BT.shape[:1]):
        raise UserError("scores", tuple(score.shape), f"must be one for each response or token, "
                        f"{tuple(mask_BT.shape[:1])} or {tuple(mask_BT.shape)}")
    kl_coef_B = rollout.kl_coef_B
    if kl_coef_B is None:
        kl_coef_B = torch.full_like(mask_BT[:, 0], agent.kl_coef)
    if kl_coef_B.shape != mask_BT.shape[:1]:
        raise UserError("kl_coef_B", tuple(kl_coef_B.shape), "must have one eta for each response")
    in_reward_B = kl_coef_B if cfg.kl_in == "reward" else torch.zeros_like(kl_coef_B)
    reward_BT = formulas.token_rewards(score, rollout.kl_BT, mask_BT, in_reward_B)

    estimate = find_estimator(cfg)
    if estimate.grouped:
        require_groups(rollout, cfg)
    found = estimate(reward_BT=reward_BT, mask_BT=mask_BT, value_BT=rollout.value_BT, group_B=rollout.group_B,
                     gamma=cfg.gamma, lam=cfg.lam, rollout=rollout)
    found = found if isinstance(found, tuple) else (found,)
    fit = [isinstance(x_BT, Tensor) and x_BT.shape == mask_BT.shape for x_BT in found]
    cfg.require("advantage", all(fit) and len(fit) == 1 + estimate.critic, "must return advantages, "
                f"{tuple(mask_BT.shape)}, and with a critic a pair of these and of what the critic learns")
    advantage_BT, return_BT = found if estimate.critic else (*found, None)
    advantage_BT = advantage_BT.to(mask_BT)
    if estimate.whiten:
        advantage_BT = formulas.whiten(advantage_BT, mask_BT)
    weight_BT, divisor_B = formulas.loss_weights(mask_BT, cfg.loss_mean, cfg.max_response_length)
    return replace(rollout, kl_coef_B=kl_coef_B, advantage_BT=advantage_BT, return_BT=return_BT,
                   weight_BT=weight_BT, divisor_B=divisor_B)


def require_groups(rollout: Rollout, cfg: Config) -> None:
    """Raises `UserError` unless each group has several responses, all to the same query."""
    numbers = rollout.group_B.tolist()
    if min(Counter(numbers).values()) < 2:
        raise UserError("advantage", cfg.advantage, "compares the responses of a group, and one has no other")
    if len({*zip(numbers, rollout.query, strict=True)}) > len({*numbers}):
        raise UserError("advantage", cfg.advantage, "compares responses to one query, and a group has two; "
                        "give rollouts that you join different numbers in group_B")


def mini_batches(rollout: Rollout, agent: Agent, rng: np.random.Generator) -> Iterator[list[Rollout]]:
    """For each optimizer step of the shuffled epochs, this process's mini-batches: a backward pass each."""
    cfg, B, device = agent.cfg, len(rollout.mask_BT), rollout.mask_BT.device
    for _ in range(cfg.num_ppo_epochs):
        order = torch.from_numpy(rng.permutation(B)).to(device)
        for step in order.split(cfg.rows_per_optimizer_step):
            if len(step) < processes().size:
                raise UserError("rollout", B, "leaves a step with fewer rows than there are processes")
            mine = take(rollout, step[processes().rows(len(step))])
            of_passes = passes(mine, agent.policy, cfg.mini_batch_size)
            if cfg.shard:
                of_passes = as_many_as_others(of_passes)
            yield [take(mine, index) for index in of_passes]


def losses(agent: Agent, rows: Rollout, logp_BT: Tensor, entropy_BT: Tensor,
           value_BT: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective for complete responses: the loss of each token, (B, T), and metrics, each (B, T).

        loss = policy_loss [--loss] + kl_coef k3 [--kl_in loss] + vf_coef value_loss [with a critic]

    logp_BT, entropy_BT, value_BT: of the present policy and critic, differentiable; on padding logp_BT is the
    rollout's. The loss is averaged as `--loss_mean` says, a metric over the real tokens of the update. `rows`
    are some of a step's rows, by their lengths: nothing here may relate one row to another.
    """
    cfg = agent.cfg
    high = cfg.cliprange_high or cfg.cliprange
    loss_BT, is_clipped_BT = cfg.find("loss")(
        log_ratio_BT=logp_BT - rows.logp_BT, advantage_BT=rows.advantage_BT, mask_BT=rows.mask_BT,
        low=cfg.cliprange, high=high)
    metrics = {"policy_loss": loss_BT, "entropy": entropy_BT, "clip_fraction": is_clipped_BT,
               "approx_kl": formulas.kl_k3(rows.logp_BT, logp_BT)}         # of KL(pi_old || pi)
    if cfg.kl_in == "loss":
        kl_loss_BT = formulas.kl_k3(logp_BT, rows.ref_logp_BT)
        loss_BT = loss_BT + rows.kl_coef_B[:, None] * kl_loss_BT
        metrics["kl_loss"] = kl_loss_BT
    if value_BT is not None:
        value_loss_BT = formulas.value_loss(value_BT, rows.value_BT, rows.return_BT, cfg.cliprange_value)
        loss_BT = loss_BT + cfg.vf_coef * value_loss_BT
        metrics["value_loss"] = value_loss_BT
    return loss_BT, metrics


def add_gradient(agent: Agent, rows: Rollout, divisor: Tensor) -> dict[str, Tensor]:
    """Adds the gradient of `sum_t weight_t loss_t / divisor` of some rows. Returns the sum of each metric
    over their tokens, and as `tokens` the number of these.
    """
    policy = agent.policy
    real = rows.mask_BT.nonzero(as_tuple=True)              # one GPU sync
    hidden_BTH = policy.response_hidden(rows.prompt_BP, rows.prompt_mask_BP, rows.response_BT)
    logp_BT, entropy_BT = rows.logp_BT.clone(), torch.zeros_like(rows.logp_BT)          # ratio 1 on padding
    logp_BT[real], entropy_BT[real] = policy.logp_and_entropy(hidden_BTH[real], rows.response_BT[real])
    value_BT = agent.critic(rows, hidden_BTH) if agent.critic else None

    loss_BT, metrics = losses(agent, rows, logp_BT, entropy_BT, value_BT)
    policy.activate()               # if another adapter was asked for meanwhile: layers may be recomputed
    ((loss_BT[real] * rows.weight_BT[real]).sum() / divisor).backward()
    of_tokens = dict(**metrics, tokens=rows.mask_BT)
    return {name: x_BT.detach()[real].double().sum() for name, x_BT in of_tokens.items()}


def apply_gradient(agent: Agent) -> float:
    """Sums gradients over processes, clips, steps, clears. Returns the norm before clipping."""
    agent.require_all_trained()
    parameters = [*agent.trainable_parameters().values()]
    processes().sum_gradients([p for p in parameters if not is_sharded(p)])     # FSDP has summed the others
    parameters = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(parameters)
    if not math.isfinite(norm):
        raise UserError("grad_norm", norm, f"{agent.name} has diverged; the gradient was not "
                       "applied. Fix a score, advantage or loss of your own, or restart with a lower "
                       "--learning_rate or with --max_grad_norm 1")
    if 0 < agent.cfg.max_grad_norm < norm:
        for p in parameters:
            p.grad *= agent.cfg.max_grad_norm / norm
    agent.optimizer.step()
    agent.optimizer.zero_grad(set_to_none=True)
    return norm
