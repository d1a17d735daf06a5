"""The PPO update of one agent on one rollout."""
import torch
from torch import Tensor

from cory import formulas
from cory.agent import Agent
from cory.config import Config
from cory.errors import UserError
from cory.rollout import LOGPROBS_AT_ONCE, Experience, Rollout, experience

SUMS = ("policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl", "error", "squared_error", "tokens")


def ppo_update(agent: Agent, turn: Rollout, score_B: Tensor, cfg: Config) -> dict[str, float]:
    """Token-level PPO on task scores (B,): `num_ppo_epochs` shuffled passes, then one step of the KL controller.

    Losses are token means over a whole optimizer step, so that neither the mini-batch size nor the accumulation changes the
    gradient. Raises `UserError` before a gradient that is not finite reaches a parameter.
    Returns the metrics of the update (README, "Metrics"): means over every token of every epoch, as the update saw them.
    """
    batch = experience(turn, score_B, agent.kl_coef, cfg.gamma, cfg.lam)
    sums, grad_norms = torch.zeros(len(SUMS), dtype=torch.float64), []
    for _ in range(cfg.num_ppo_epochs):
        for mini_batches in batch.optimizer_steps(cfg.mini_batch_size, cfg.gradient_accumulation_steps, agent.generator):
            step_tokens = sum(m.mask_BT.sum() for m in mini_batches)
            for mini_batch in mini_batches:
                loss, parts = loss_sum(agent, mini_batch, cfg)
                (loss / step_tokens).backward()
                sums += parts
            grad_norms.append(optimizer_step(agent, cfg.max_grad_norm))
    stats = summary(sums, batch) | {"kl_coef": agent.kl_coef, "grad_norm": sum(grad_norms) / len(grad_norms)}
    if cfg.adap_kl_ctrl:
        kl = turn.kl_B.mean().item()
        agent.kl_coef = formulas.adapted_kl_coef(agent.kl_coef, kl, cfg.kl_target, cfg.kl_horizon, len(score_B))
    return stats


def loss_sum(agent: Agent, batch: Experience, cfg: Config) -> tuple[Tensor, Tensor]:
    """Loss summed over the N real tokens of a mini-batch: `sum_t policy_loss_t + vf_coef value_loss_t`; and `SUMS` of it."""
    real = batch.mask_BT.bool()
    take = lambda x_BT: x_BT[real]                                                              # (B, T) -> (N,)
    hidden_NH = take(agent.policy.response_hidden(batch.prompt_BP, batch.prompt_mask_BP, batch.response_BT))
    logp_NV, value_N = agent.policy.logprobs(hidden_NH), agent.policy.values(hidden_NH)
    logp_N, old_logp_N = formulas.token_logprobs(logp_NV, take(batch.response_BT)), take(batch.logp_BT)
    policy_N = formulas.policy_loss(logp_N, old_logp_N, take(batch.advantage_BT), cfg.cliprange)
    value_loss_N = formulas.value_loss(value_N, take(batch.value_BT), take(batch.return_BT), cfg.cliprange_value)
    loss = policy_N.sum() + cfg.vf_coef * value_loss_N.sum()
    with torch.no_grad():
        chunk = max(1, LOGPROBS_AT_ONCE // logp_NV.shape[1])
        entropy = sum(formulas.entropy(part).sum() for part in logp_NV.split(chunk))
        clipped = ((logp_N - old_logp_N).exp() - 1).abs() > cfg.cliprange
        approx_kl = formulas.kl_k3(old_logp_N, logp_N)                                          # of pi_old against pi
        error_N = value_N - take(batch.return_BT)
        parts = (policy_N.sum(), value_loss_N.sum(), entropy, clipped.sum(), approx_kl.sum(), error_N.sum(), (error_N**2).sum(),
                 real.sum())
    return loss, torch.stack([p.double() for p in parts]).cpu()


def optimizer_step(agent: Agent, max_grad_norm: float) -> float:
    """Clips if asked to, steps, clears. Returns the gradient's norm before clipping."""
    gradients = [p.grad for p in agent.policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if not norm.isfinite():
        raise UserError("grad_norm", norm.item(), f"the gradient of {agent.name} is not finite; the parameters are as before this "
                        "step. Lower --learning_rate or set --max_grad_norm 1, and --resume from the last checkpoint")
    if max_grad_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(agent.policy.parameters(), max_grad_norm, norm)
    agent.optimizer.step()
    agent.optimizer.zero_grad(set_to_none=True)
    return norm.item()


def summary(sums: Tensor, batch: Experience) -> dict[str, float]:
    """Token means of `SUMS`; explained variance is `1 - Var(return - V) / Var(return)`, at most 1."""
    mean = dict(zip(SUMS, (sums / sums[-1]).tolist()))
    return_variance = batch.return_BT[batch.mask_BT.bool()].double().var(correction=0).item()
    error_variance = mean["squared_error"] - mean["error"] ** 2
    return {k: mean[k] for k in ("policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl")} | {
        "value_error": mean["squared_error"], "explained_variance": 1 - error_variance / max(return_variance, 1e-12)}
