"""The update of one agent on one rollout.

    rollout -> token rewards -> advantages -> mini-batches -> loss of each token -> gradient -> Adam
"""
import math
from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from cory.errors import UserError
from cory.ppo import formulas
from cory.ppo.advantages import estimator
from cory.ppo.agent import Agent
from cory.ppo.batches import by_length, lm_head_tokens
from cory.ppo.lora import activate
from cory.ppo.rollout import Rollout, take
from cory.system.device import timed
from cory.system.distributed import processes
from cory.system.sharding import as_many_as_others, gradient_norm, is_sharded


def ppo_update(agent: Agent, rollout: Rollout, score_B: Tensor) -> dict[str, float]:
    """Token-level PPO on scores (B,): `num_ppo_epochs` shuffled passes over the rollout.

    Returns metrics; those of `losses` are means over the tokens of all epochs, measured before each optimizer
    step. Raises `UserError` before a gradient that is not finite reaches a parameter.
    """
    cfg, rng = agent.cfg, agent.generator()
    rollout = with_advantages(rollout, score_B, agent)
    sums, tokens, grad_norms = defaultdict(float), 0.0, []
    with timed("update", agent.policy.device):
        for _ in range(cfg.num_ppo_epochs):
            for mini_batches in optimizer_steps(rollout, agent, rng):
                step_tokens = processes().sum(sum(rows.mask_BT.sum() for rows in mini_batches))
                tokens += step_tokens.item()
                for rows in mini_batches:
                    add_gradient(agent, rows, step_tokens, sums)
                grad_norms.append(optimizer_step(agent))
    metrics = {name: processes().sum(total).item() / tokens for name, total in sums.items()}
    own = {"score": score_B.mean().item(), "kl_coef": agent.kl_coef, "grad_norm": fmean(grad_norms),
           "learning_rate": agent.optimizer.param_groups[0]["lr"]}
    if rollout.value_BT is not None:
        real = rollout.mask_BT.bool()
        value_N, return_N = rollout.value_BT[real], rollout.return_BT[real]
        own |= {"value_mse": ((value_N - return_N) ** 2).mean().item(),
                "explained_variance": formulas.explained_variance(value_N, return_N)}
    for name in metrics.keys() & own.keys():
        raise UserError("metric", name, "of `losses` has the name of another one; rename it")
    return metrics | own


def with_advantages(rollout: Rollout, score_B: Tensor, agent: Agent) -> Rollout:
    """Turns scores (B,) and the KL into token rewards, then into advantages and value targets."""
    cfg, mask_BT, value_BT = agent.cfg, rollout.mask_BT, rollout.value_BT
    require_shape("score", score_B, mask_BT.shape[:1], "a number for each response")
    kl_coef = agent.kl_coef if cfg.kl_in == "reward" else 0.0
    reward_BT = formulas.token_rewards(score_B.to(mask_BT), rollout.kl_BT, mask_BT, kl_coef)

    offered = {"reward_BT": reward_BT, "mask_BT": mask_BT, "value_BT": value_BT, "gamma": cfg.gamma,
               "lam": cfg.lam, "group_size": cfg.responses_per_query}
    estimate, asked = estimator(cfg)
    advantage_BT = estimate(**{name: offered[name] for name in asked})
    require_shape(f"advantage {cfg.advantage}", advantage_BT, mask_BT.shape, "like reward_BT")
    advantage_BT = advantage_BT.to(mask_BT)             # an estimator may return integers

    return_BT = None if value_BT is None else (advantage_BT + value_BT) * mask_BT
    if "group_size" not in asked:                       # group-relative ones stay as they are
        advantage_BT = formulas.whiten(advantage_BT, mask_BT)
    return replace(rollout, advantage_BT=advantage_BT, return_BT=return_BT)


def optimizer_steps(rollout: Rollout, agent: Agent, rng: np.random.Generator) -> Iterator[list[Rollout]]:
    """For each optimizer step of a shuffled epoch, this process's mini-batches (one backward pass each)."""
    cfg = agent.cfg
    order = torch.from_numpy(rng.permutation(len(rollout.mask_BT))).to(rollout.mask_BT.device)
    for rows in order.split(cfg.rows_per_optimizer_step):
        rows = rows[processes().rows(len(rows))]
        groups = by_length(rollout.prompt_mask_BP[rows], rollout.mask_BT[rows], cfg.mini_batch_size)
        groups = as_many_as_others(groups) if is_sharded(agent.policy.lm) else groups
        yield [take(rollout, rows[group]) for group in groups]


def losses(agent: Agent, rows: Rollout, hidden_BTH: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective for complete responses: the loss of each token, (B, T), and metrics, each (B, T).

        loss = policy_loss + kl_coef k3 [--kl_in loss] + vf_coef value_loss [with a critic]

    hidden_BTH: the policy's last hidden states, from which each response token is predicted. The loss is
    averaged over the real tokens of an optimizer step, a metric over those of the update; add a key here to
    log and plot another one.
    """
    policy, cfg, real = agent.policy, agent.cfg, rows.mask_BT.nonzero(as_tuple=True)
    logp_BT, entropy_BT = rows.logp_BT.clone(), torch.zeros_like(rows.logp_BT)      # ratio 1 on padding
    logp_BT[real], entropy_BT[real] = policy.logp_and_entropy(hidden_BTH[real], rows.response_BT[real])

    log_ratio_BT = logp_BT - rows.logp_BT
    policy_loss_BT = loss_BT = formulas.policy_loss(log_ratio_BT, rows.advantage_BT, cfg.cliprange)
    metrics = {"policy_loss": policy_loss_BT, "entropy": entropy_BT,
               "clip_fraction": policy_loss_BT != -log_ratio_BT.exp() * rows.advantage_BT,
               "approx_kl": formulas.kl_k3(rows.logp_BT, logp_BT)}         # of KL(pi_old || pi)
    if cfg.kl_in == "loss":
        kl_loss_BT = formulas.kl_k3(logp_BT, rows.ref_logp_BT)
        loss_BT = loss_BT + agent.kl_coef * kl_loss_BT
        metrics["kl_loss"] = kl_loss_BT
    if policy.value_head is not None:
        value_BT = policy.values(hidden_BTH)
        value_loss_BT = formulas.value_loss(value_BT, rows.value_BT, rows.return_BT, cfg.cliprange_value)
        loss_BT = loss_BT + cfg.vf_coef * value_loss_BT
        metrics["value_loss"] = value_loss_BT
    return loss_BT, metrics


def add_gradient(agent: Agent, mini_batch: Rollout, step_tokens: Tensor, sums: dict[str, Tensor]) -> None:
    """Adds the gradient of `sum_t loss_t / step_tokens` over a mini-batch, and its metrics to their sums.

    LM head and losses run forward and backward for a few rows at a time, so that few logits exist at once;
    the transformer's backward pass then runs once.
    """
    policy = agent.policy
    hidden_BTH = policy.response_hidden(mini_batch.prompt_BP, mini_batch.prompt_mask_BP,
                                        mini_batch.response_BT)
    leaf_BTH = hidden_BTH.detach().requires_grad_()
    B, T = mini_batch.mask_BT.shape
    for index in torch.arange(B, device=policy.device).split(max(1, lm_head_tokens(policy) // T)):
        rows = take(mini_batch, index)
        loss_BT, metrics = losses(agent, rows, leaf_BTH[index, :rows.mask_BT.shape[1]])
        real = rows.mask_BT.nonzero(as_tuple=True)      # its length is read from the GPU once
        for name, x_BT in {"loss": loss_BT, **metrics}.items():
            require_shape(name, x_BT, rows.mask_BT.shape, "one value per token; take no mean or sum")
        (loss_BT[real].sum() / step_tokens).backward()
        for name, x_BT in metrics.items():
            sums[name] = sums[name] + x_BT.detach()[real].double().sum()
    activate(policy.lm, policy.adapter)     # checkpointed layers are recomputed now, with this adapter
    hidden_BTH.backward(leaf_BTH.grad)


def optimizer_step(agent: Agent) -> float:
    """Sums gradients over processes, clips, steps, clears. Returns the norm before clipping."""
    parameters = [*agent.policy.trainable_parameters().values()]
    processes().sum_gradients(parameters)
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


def require_shape(name: str, x: Tensor, shape: torch.Size, what: str) -> None:
    """Raises `UserError` unless an edited function returned a tensor of that shape."""
    actual = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    if actual != tuple(shape):
        raise UserError(name, actual, f"must be a tensor of shape {tuple(shape)}: {what}")
