"""The update of one agent on one rollout.

    rollout -> token rewards -> advantages -> mini-batches -> loss of each token -> gradient -> Adam
"""
import math
import warnings
from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from cory.errors import UserError
from cory.machine.distributed import processes
from cory.machine.sharding import as_many_as_others, gradient_norm, is_sharded
from cory.ppo import formulas
from cory.ppo.advantages import find_estimator
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, passes, take


def ppo_update(agent: Agent, rollout: Rollout, score: Tensor) -> dict[str, float]:
    """Token-level PPO on scores, of responses (B,) or of tokens (B, T): `num_ppo_epochs` shuffled passes over
    the rollout. Returns metrics, those of `losses` as means over the tokens of all steps, measured before
    each of them.
    """
    rng, mask_BT = agent.generator(), rollout.mask_BT
    if score.shape not in (mask_BT.shape, mask_BT.shape[:1]):
        raise UserError(f"{agent.name}'s scores are {tuple(score.shape)}, responses {tuple(mask_BT.shape)}")
    score = score.to(mask_BT)
    rollout = with_advantages(rollout, score, agent)
    sums, grad_norms = defaultdict(float), []               # of each metric, over the tokens of all steps
    for batch in mini_batches(rollout, agent, rng):
        divisor = processes().sum(sum(rows.divisor_B.sum() for rows in batch))
        for rows in batch:
            for name, x in add_gradient(agent, rows, divisor).items():
                sums[name] += x
        grad_norms.append(apply_gradient(agent))
    totals = dict(zip(sums, processes().sum(torch.stack([*sums.values()])).tolist(), strict=True))
    tokens = totals.pop("tokens")
    of_update = {"score": formulas.score_of_responses(score, mask_BT).mean().item(), "kl_coef": agent.kl_coef,
                 "grad_norm": fmean(grad_norms), "learning_rate": agent.optimizer.param_groups[0]["lr"]}
    if rollout.value_BT is not None:
        real = mask_BT.bool()
        of_update["explained_variance"] = formulas.explained_variance(rollout.value_BT[real],
                                                                      rollout.return_BT[real])
    return dict(**{name: total / tokens for name, total in totals.items()}, **of_update)    # no name twice


def with_advantages(rollout: Rollout, score: Tensor, agent: Agent) -> Rollout:
    """Turns scores and the KL into token rewards, then into advantages and value targets; and adds what the
    loss is a mean over.
    """
    cfg, mask_BT = agent.cfg, rollout.mask_BT
    kl_coef = agent.kl_coef if cfg.kl_in == "reward" else 0.0
    reward_BT = formulas.token_rewards(score, rollout.kl_BT, mask_BT, kl_coef)
    estimate = find_estimator(cfg)
    found = estimate(reward_BT=reward_BT, mask_BT=mask_BT, value_BT=rollout.value_BT, group_B=rollout.group_B,
                     gamma=cfg.gamma, lam=cfg.lam, rollout=rollout)
    advantage_BT, return_BT = found if estimate.critic else (found, None)
    if estimate.whiten:
        advantage_BT = formulas.whiten(advantage_BT, mask_BT)
    weight_BT, divisor_B = formulas.loss_weights(mask_BT, cfg.loss_mean, cfg.max_response_length)
    return replace(rollout, advantage_BT=advantage_BT, return_BT=return_BT, weight_BT=weight_BT,
                   divisor_B=divisor_B)


def mini_batches(rollout: Rollout, agent: Agent, rng: np.random.Generator) -> Iterator[list[Rollout]]:
    """For each optimizer step of the shuffled epochs, this process's mini-batches: a backward pass each."""
    cfg, B, device = agent.cfg, len(rollout.mask_BT), rollout.mask_BT.device
    for _ in range(cfg.num_ppo_epochs):
        order = torch.from_numpy(rng.permutation(B)).to(device)
        for step in order.split(cfg.rows_per_optimizer_step):
            mine = take(rollout, step[processes().rows(len(step))])
            of_passes = passes(mine, agent.policy, cfg.mini_batch_size)
            if cfg.shard:
                of_passes = as_many_as_others(of_passes)
            yield [take(mine, index) for index in of_passes]


def losses(agent: Agent, rows: Rollout, logp_BT: Tensor, entropy_BT: Tensor, value_BT: Tensor | None,
           policy_loss: Callable = formulas.policy_loss) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective for complete responses: the loss of each token, (B, T), and metrics, each (B, T). One of
    your own (`--loss`) has these arguments, and may call this one for the rest, say with another policy loss.

        loss = policy_loss + kl_coef k3 [--kl_in loss] + vf_coef value_loss [with a critic]

    logp_BT, entropy_BT, value_BT: of the present policy and critic, differentiable; on padding logp_BT is the
    rollout's. The loss is averaged as `--loss_mean` says, a metric over the real tokens of the update. `rows`
    are some rows of a step, of similar length: a row's loss must not depend on the others.
    """
    cfg = agent.cfg
    loss_BT, is_clipped_BT = policy_loss(
        log_ratio_BT=logp_BT - rows.logp_BT, advantage_BT=rows.advantage_BT, mask_BT=rows.mask_BT,
        low=cfg.cliprange, high=cfg.cliprange)
    metrics = {"policy_loss": loss_BT, "entropy": entropy_BT, "clip_fraction": is_clipped_BT,
               "approx_kl": formulas.kl_k3(rows.logp_BT, logp_BT)}         # of KL(pi_old || pi)
    if cfg.kl_in == "loss":
        kl_loss_BT = formulas.kl_k3(logp_BT, rows.ref_logp_BT)
        loss_BT = loss_BT + agent.kl_coef * kl_loss_BT
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

    loss_BT, metrics = agent.cfg.find("loss")(agent, rows, logp_BT, entropy_BT, value_BT)
    ((loss_BT[real] * rows.weight_BT[real]).sum() / divisor).backward()
    for group in agent.optimizer.param_groups:
        if all(p.grad is None for p in group["params"]):
            part = "critic" if group["is_critic"] else "policy"
            warnings.warn(f"no weight of {agent.name}'s {part} has a gradient", stacklevel=2)
    of_tokens = dict(**metrics, tokens=rows.mask_BT)
    return {name: x_BT.detach()[real].double().sum() for name, x_BT in of_tokens.items()}


def apply_gradient(agent: Agent) -> float:
    """Sums gradients over processes, clips, steps, clears. Returns the norm before clipping."""
    parameters = [*agent.trainable_parameters().values()]
    processes().sum_gradients([p for p in parameters if not is_sharded(p)])     # FSDP has summed the others
    rates = [group["lr"] for group in agent.optimizer.param_groups]
    if not min(rates) >= 0:
        raise UserError("lr_schedule", agent.cfg.lr_schedule, f"a rate of {agent.name} is {min(rates)}")
    moved = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(moved)
    if not math.isfinite(norm):
        raise UserError("grad_norm", norm, f"{agent.name} has diverged; the gradient was not "
                       "applied. Fix a score, advantage or loss of your own, or restart with a lower "
                       "--learning_rate or with --max_grad_norm 1")
    if 0 < agent.cfg.max_grad_norm < norm:
        for p in moved:
            p.grad *= agent.cfg.max_grad_norm / norm
    agent.optimizer.step()
    agent.optimizer.zero_grad(set_to_none=True)
    return norm
