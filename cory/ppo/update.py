"""The PPO update of one agent on one rollout."""
import torch
from torch import Tensor

from cory.ppo import formulas
from cory.ppo.agent import Agent
from cory.config import Config
from cory.errors import UserError
from cory.ppo.rollout import Experience, Rollout, experience, head_rows

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
        for mini_batches in batch.optimizer_steps(cfg.rows_per_optimizer_step, cfg.mini_batch_size, agent.generator):
            step_tokens = sum(m.mask_BT.sum() for m in mini_batches)
            for mini_batch in mini_batches:
                sums += add_gradient(agent, mini_batch, step_tokens, cfg)
            grad_norms.append(optimizer_step(agent, cfg.max_grad_norm))
    stats = summary(sums, batch) | {"kl_coef": agent.kl_coef, "grad_norm": sum(grad_norms) / len(grad_norms)}
    if cfg.adap_kl_ctrl:
        kl = turn.kl_B.mean().item()
        agent.kl_coef = formulas.adapted_kl_coef(agent.kl_coef, kl, cfg.kl_target, cfg.kl_horizon, len(score_B))
    return stats


def add_gradient(agent: Agent, batch: Experience, step_tokens: Tensor, cfg: Config) -> Tensor:
    """Adds the gradient of `sum_t (policy_loss_t + vf_coef value_loss_t) / step_tokens` over a mini-batch's N real tokens.

    Returns `SUMS` of it, float64. The loss is a sum over tokens, so that the head runs forward and backward for a few tokens at
    a time, down to the gradient of their hidden states; the transformer's backward pass follows once. Memory for (N, V) then
    does not grow with the mini-batch, and nothing is computed twice.
    """
    real = batch.mask_BT.bool()
    hidden_NH = agent.policy.response_hidden(batch.prompt_BP, batch.prompt_mask_BP, batch.response_BT)[real]
    leaf_NH = hidden_NH.detach().requires_grad_()
    columns = (leaf_NH, *(x_BT[real] for x_BT in (batch.response_BT, batch.logp_BT, batch.advantage_BT, batch.value_BT, batch.return_BT)))
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    for hidden, token, old_logp, advantage, old_value, returns in zip(*(x.split(head_rows(agent.policy)) for x in columns)):
        (logp, entropy), value = agent.policy.logp_and_entropy(hidden, token), agent.policy.values(hidden)
        policy_loss = formulas.policy_loss(logp, old_logp, advantage, cfg.cliprange)
        value_loss = formulas.value_loss(value, old_value, returns, cfg.cliprange_value)
        ((policy_loss.sum() + cfg.vf_coef * value_loss.sum()) / step_tokens).backward()
        with torch.no_grad():
            clipped = ((logp - old_logp).exp() - 1).abs() > cfg.cliprange
            approx_kl = formulas.kl_k3(old_logp, logp)                                          # of pi_old against pi
            error = value - returns
            columns_of_sums = (policy_loss, value_loss, entropy, clipped, approx_kl, error, error**2)
            sums += torch.stack([x.double().sum() for x in (*columns_of_sums, torch.ones_like(value))]).cpu()
    hidden_NH.backward(leaf_NH.grad)
    return sums


def optimizer_step(agent: Agent, max_grad_norm: float) -> float:
    """Clips if asked to, steps, clears. Returns the gradient's norm before clipping."""
    parameters = list(agent.policy.trained().values())
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if not norm.isfinite():
        raise UserError("grad_norm", norm.item(), f"the gradient of {agent.name} is not finite; it was not applied. Start a new run "
                        "with a lower --learning_rate or with --max_grad_norm 1")
    if max_grad_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
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
