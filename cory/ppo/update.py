"""The update of one agent on one rollout.

    rollout -> token rewards -> advantages -> mini-batches -> loss of each token -> gradient -> Adam
"""
import math
import warnings
from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Callable, Iterator

import torch
from torch import Tensor, nn

from cory.errors import UserError, merge_metrics
from cory.machine.distributed import processes
from cory.machine.sharding import gradient_norm, is_sharded, split_to_equal_count
from cory.ppo import formulas
from cory.ppo.advantages import find_estimator
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, micro_batches, take


def ppo_update(agent: Agent, rollout: Rollout, score: Tensor) -> dict:
    """Token-level PPO on scores, of responses (B,) or of tokens (B, T): `num_ppo_epochs` shuffled passes over
    the rollout, and then the next eta. Returns metrics; those of `losses` are means over the tokens of all
    optimizer steps, each computed before its step.
    """
    cfg = agent.cfg
    mask_BT = rollout.mask_BT
    rng = agent.generator()
    if score.shape not in (mask_BT.shape, mask_BT.shape[:1]):
        raise UserError(f"{agent.name}'s scores are {tuple(score.shape)}, responses {tuple(mask_BT.shape)}")
    score = score.to(mask_BT)
    rollout = add_advantages(rollout, score, agent)
    sums = defaultdict(float)                               # of each metric, over the tokens of all steps
    grad_norms = []
    for mini_batch in mini_batches(rollout, agent, rng):
        local_divisor = sum(micro_batch.divisor_B.sum() for micro_batch in mini_batch)
        divisor = processes().all_reduce(local_divisor)
        for micro_batch in mini_batch:
            for name, x in backward(agent, micro_batch, divisor).items():
                sums[name] += x
        grad_norms.append(optimizer_step(agent))
    tokens = cfg.num_ppo_epochs * mask_BT.sum()             # each epoch has every token once
    means = {name: processes().all_reduce(x / tokens).item() for name, x in sums.items()}
    metrics = {"score": formulas.score_of_responses(score, mask_BT).mean().item(),
               "kl_coef": agent.kl_coef,
               "grad_norm": fmean(grad_norms),
               "learning_rate": agent.optimizer.param_groups[0]["lr"]}
    if rollout.return_BT is not None:
        real = mask_BT.bool()
        value_N = rollout.value_BT[real]
        metrics["explained_variance"] = formulas.explained_variance(value_N, rollout.return_BT[real])
    controller = cfg.resolve("kl_controller")
    agent.kl_coef = float(controller(agent, rollout.kl_B))
    return merge_metrics(means, metrics)


def add_advantages(rollout: Rollout, score: Tensor, agent: Agent) -> Rollout:
    """Turns scores and the KL into token rewards, then into advantages and value targets; and adds the
    normalization of the loss.
    """
    cfg = agent.cfg
    mask_BT = rollout.mask_BT
    kl_coef = agent.kl_coef if cfg.kl_in == "reward" else 0.0
    reward_BT = formulas.token_rewards(score, rollout.kl_BT, mask_BT, kl_coef)
    estimate = find_estimator(cfg)
    advantage_BT, return_BT = estimate(
        reward_BT=reward_BT, mask_BT=mask_BT, value_BT=rollout.value_BT, group_B=rollout.group_B,
        gamma=cfg.gamma, lam=cfg.lam, rollout=rollout)
    if estimate.whiten:
        advantage_BT = formulas.whiten(advantage_BT, mask_BT)
    weight_BT, divisor_B = formulas.loss_weights(mask_BT, cfg.loss_mean, cfg.max_response_length)
    if rollout.weight_BT is not None:                       # a method's own
        weight_BT = weight_BT * rollout.weight_BT
    return replace(rollout, advantage_BT=advantage_BT, return_BT=return_BT, weight_BT=weight_BT,
                   divisor_B=divisor_B)


def mini_batches(rollout: Rollout, agent: Agent, rng) -> Iterator[list[Rollout]]:
    """For each optimizer step of the shuffled epochs, the mini-batch's rows of this process, in micro-batches
    of one backward pass each.
    """
    cfg = agent.cfg
    for _ in range(cfg.num_ppo_epochs):
        permutation = rng.permutation(len(rollout.mask_BT))
        order = torch.from_numpy(permutation).to(rollout.mask_BT.device)
        for rows in order.split(cfg.rows_per_optimizer_step):
            local_rows = processes().local_rows(len(rows))
            local = take(rollout, rows[local_rows])
            indices = micro_batches(local, agent.policy, cfg.mini_batch_size)
            if cfg.shard:
                indices = split_to_equal_count(indices)
            yield [take(local, index) for index in indices]


def losses(agent: Agent, batch: Rollout, logp_BT, entropy_BT, value_BT: Tensor | None,
           policy_loss: Callable = formulas.policy_loss) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective for complete responses: the loss of each token, (B, T), and metrics, each (B, T). A
    custom loss (`--loss`) has these arguments, and may call this one, for example with another policy loss.

        loss = policy_loss + kl_coef k3 [--kl_in loss] + vf_coef value_loss [with a critic]

    logp_BT, entropy_BT, value_BT: of the present policy and critic, differentiable; on padding logp_BT is the
    rollout's. The loss is averaged as `--loss_mean` says, a metric over the real tokens of the update. Rows
    are divided into micro-batches by their length, so a loss must not compare rows.
    """
    cfg = agent.cfg
    policy_loss_BT, is_clipped_BT = policy_loss(
        log_ratio_BT=logp_BT - batch.logp_BT, advantage_BT=batch.advantage_BT, mask_BT=batch.mask_BT,
        low=cfg.cliprange, high=cfg.cliprange)
    metrics = {"policy_loss": policy_loss_BT, "entropy": entropy_BT, "clip_fraction": is_clipped_BT,
               "approx_kl": formulas.kl_k3(batch.logp_BT, logp_BT)}         # of KL(pi_old || pi)
    loss_BT = policy_loss_BT
    if cfg.kl_in == "loss":
        kl_loss_BT = formulas.kl_k3(logp_BT, batch.ref_logp_BT)
        loss_BT = loss_BT + agent.kl_coef * kl_loss_BT
        metrics["kl_loss"] = kl_loss_BT
    if value_BT is not None:
        value_loss_BT = formulas.value_loss(value_BT, batch.value_BT, batch.return_BT, cfg.cliprange_value)
        loss_BT = loss_BT + cfg.vf_coef * value_loss_BT
        metrics["value_loss"] = value_loss_BT
    return loss_BT, metrics


def backward(agent: Agent, batch: Rollout, divisor: Tensor) -> dict:
    """Adds the gradient of `sum_t weight_t loss_t / divisor` of a micro-batch. Returns the sum of each metric
    over its tokens.
    """
    policy = agent.policy
    real = batch.mask_BT.nonzero(as_tuple=True)             # one GPU sync
    hidden_BTH = policy.response_hidden(batch.prompt_BP, batch.prompt_mask_BP, batch.response_BT)
    logp_BT = batch.logp_BT.clone()                         # ratio 1 on padding
    entropy_BT = torch.zeros_like(logp_BT)
    token_N = batch.response_BT[real]
    logp_BT[real], entropy_BT[real] = policy.logp_and_entropy(hidden_BTH[real], token_N)
    value_BT = agent.critic(batch, hidden_BTH) if agent.critic else None

    loss_function = agent.cfg.resolve("loss")
    loss_BT, metrics = loss_function(agent, batch, logp_BT, entropy_BT, value_BT)
    loss_N = loss_BT[real] * batch.weight_BT[real]
    (loss_N.sum() / divisor).backward()
    if not agent.is_trained:                                # before the first optimizer step
        warn_of_unoptimized_parameters(agent)
    return {name: x_BT.detach()[real].double().sum() for name, x_BT in metrics.items()}


def warn_of_unoptimized_parameters(agent: Agent) -> None:
    """After a backward pass, warns of the policy's parameters that have a gradient but no optimizer."""
    optimized = {*agent.trainable_parameters().values()}
    parameters = {}
    for name, x in vars(agent.policy).items():
        if isinstance(x, nn.Parameter):
            parameters[name] = x
        if isinstance(x, nn.Module):
            parameters |= x.named_parameters(prefix=name)
    for name, p in parameters.items():
        if p.grad is not None and p not in optimized:
            warnings.warn(f"{agent.name}'s {name} has a gradient, but no optimizer", stacklevel=2)


def optimizer_step(agent: Agent) -> float:
    """Sums gradients over processes, clips, steps, clears. Returns the norm before clipping."""
    parameters = [*agent.trainable_parameters().values()]
    processes().sum_gradients([p for p in parameters if not is_sharded(p)])     # FSDP has summed the others
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(with_gradient)
    if not math.isfinite(norm):
        raise UserError("grad_norm", norm, f"{agent.name} has diverged; the gradient was not "
                       "applied. Fix a score, advantage or loss of your own, or restart with a lower "
                       "--learning_rate or with --max_grad_norm 1")
    if 0 < agent.cfg.max_grad_norm < norm:
        for p in with_gradient:
            p.grad *= agent.cfg.max_grad_norm / norm
    agent.optimizer.step()
    agent.optimizer.zero_grad(set_to_none=True)
    return norm
