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

from cory.distributed import as_many_as_others, gradient_norm, processes
from cory.errors import UserError
from cory.ppo import formulas
from cory.ppo.advantages import find_estimator
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout, by_length, lm_head_tokens, take


def ppo_update(agent: Agent, rollout: Rollout, score_B: Tensor) -> dict[str, float]:
    """Token-level PPO on scores (B,): `num_ppo_epochs` shuffled passes over the rollout. Returns metrics,
    those of `losses` as means over the tokens of all epochs, measured before each optimizer step.
    """
    cfg, rng = agent.cfg, agent.generator()
    rollout = with_advantages(rollout, score_B, agent)
    zeros = torch.zeros(2, dtype=torch.float64, device=agent.policy.device)
    totals, grad_norms = defaultdict(lambda: zeros), []     # of each metric: its sum, its number of tokens
    for _ in range(cfg.num_ppo_epochs):
        for batch in mini_batches(rollout, agent, rng):
            # what the loss is divided by: the real tokens of the optimizer step, in all processes
            divisor = processes().sum(sum(rows.mask_BT.sum() for rows in batch))
            for rows in batch:
                add_gradient(agent, rows, divisor, totals)
            grad_norms.append(apply_gradient(agent))
    of_losses = {}
    for name in sorted({*processes().gather([*totals])}):
        total, tokens = processes().sum(totals[name])
        of_losses[name] = (total / tokens).item()
    metrics = {"score": score_B.mean().item(), "kl_coef": agent.kl_coef, "grad_norm": fmean(grad_norms),
               "learning_rate": agent.optimizer.param_groups[0]["lr"]}
    if rollout.value_BT is not None:
        real = rollout.mask_BT.bool()
        value_N, return_N = rollout.value_BT[real], rollout.return_BT[real]
        metrics["explained_variance"] = formulas.explained_variance(value_N, return_N)
    return dict(**of_losses, **metrics)         # a name in both raises


def with_advantages(rollout: Rollout, score_B: Tensor, agent: Agent) -> Rollout:
    """Turns scores (B,) and the KL into token rewards, then into advantages and value targets."""
    cfg, mask_BT, value_BT = agent.cfg, rollout.mask_BT, rollout.value_BT
    kl_coef = agent.kl_coef if cfg.kl_in == "reward" else 0.0
    reward_BT = formulas.token_rewards(score_B.to(mask_BT), rollout.kl_BT, mask_BT, kl_coef)

    estimate = find_estimator(cfg)
    advantage_BT = estimate(reward_BT=reward_BT, mask_BT=mask_BT, value_BT=value_BT, gamma=cfg.gamma,
                            lam=cfg.lam, group_size=cfg.responses_per_query).to(mask_BT)
    if advantage_BT.shape != mask_BT.shape:
        raise UserError("advantage", cfg.advantage, f"must return {tuple(mask_BT.shape)}, one value a token")
    return_BT = None if value_BT is None else (advantage_BT + value_BT) * mask_BT
    if estimate.whiten:
        advantage_BT = formulas.whiten(advantage_BT, mask_BT)
    return replace(rollout, advantage_BT=advantage_BT, return_BT=return_BT)


def mini_batches(rollout: Rollout, agent: Agent, rng: np.random.Generator) -> Iterator[list[Rollout]]:
    """For each optimizer step of a shuffled epoch, this process's mini-batches (one backward pass each)."""
    cfg = agent.cfg
    order = torch.from_numpy(rng.permutation(len(rollout.mask_BT))).to(rollout.mask_BT.device)
    for rows in order.split(cfg.rows_per_optimizer_step):
        of_step = take(rollout, rows[processes().rows(len(rows))])
        groups = as_many_as_others(by_length(of_step, cfg.mini_batch_size))
        yield [take(of_step, group) for group in groups]


def losses(agent: Agent, rows: Rollout, logp_BT: Tensor, entropy_BT: Tensor,
           value_BT: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective for complete responses: the loss of each token, (B, T), and metrics, each (B, T).

        loss = policy_loss + kl_coef k3 [--kl_in loss] + vf_coef value_loss [with a critic]

    logp_BT, entropy_BT, value_BT: of the present policy and critic, differentiable; on padding logp_BT is the
    rollout's. The loss is averaged over the real tokens of an optimizer step, a metric over those of the
    update, or, if it is a pair (metric, mask), over the mask's.
    """
    cfg, high = agent.cfg, agent.cfg.cliprange_high or agent.cfg.cliprange
    log_ratio_BT = logp_BT - rows.logp_BT
    policy_loss_BT = loss_BT = formulas.policy_loss(log_ratio_BT, rows.advantage_BT, cfg.cliprange, high)
    metrics = {"policy_loss": policy_loss_BT, "entropy": entropy_BT,
               "clip_fraction": policy_loss_BT != -log_ratio_BT.exp() * rows.advantage_BT,
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


def add_gradient(agent: Agent, mini_batch: Rollout, divisor: Tensor, totals: dict[str, Tensor]) -> None:
    """Adds the gradient of `sum_t loss_t / divisor` over a mini-batch, and its metrics to `totals`.

    LM head, critic and losses run forward and backward for a few rows at a time, so that few logits exist at
    once; the transformer's backward pass then runs once.
    """
    policy = agent.policy
    hidden_BTH = policy.response_hidden(mini_batch.prompt_BP, mini_batch.prompt_mask_BP,
                                        mini_batch.response_BT)
    leaf_BTH = hidden_BTH.detach().requires_grad_()
    B, T = mini_batch.mask_BT.shape
    for index in torch.arange(B, device=policy.device).split(max(1, lm_head_tokens(policy) // T)):
        rows = take(mini_batch, index)
        real = rows.mask_BT.nonzero(as_tuple=True)      # one GPU sync
        hidden = leaf_BTH[index, :rows.mask_BT.shape[1]]
        logp_BT, entropy_BT = rows.logp_BT.clone(), torch.zeros_like(rows.logp_BT)      # ratio 1 on padding
        logp_BT[real], entropy_BT[real] = policy.logp_and_entropy(hidden[real], rows.response_BT[real])
        value_BT = agent.critic(rows, hidden) if agent.critic else None

        loss_BT, metrics = losses(agent, rows, logp_BT, entropy_BT, value_BT)
        (loss_BT[real].sum() / divisor).backward()
        for name, x_BT in metrics.items():
            x_BT, mask_BT = x_BT if isinstance(x_BT, tuple) else (x_BT, rows.mask_BT)
            counted = (mask_BT * rows.mask_BT).bool()
            total = x_BT.detach()[counted].double().sum()
            totals[name] = totals[name] + torch.stack([total, counted.sum().double()])
    policy.activate()                   # checkpointed layers are recomputed now, with this adapter
    hidden_BTH.backward(leaf_BTH.grad)


def apply_gradient(agent: Agent) -> float:
    """Sums gradients over processes, clips, steps, clears. Returns the norm before clipping."""
    agent.require_all_trained()
    parameters = [*agent.trainable_parameters().values()]
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
