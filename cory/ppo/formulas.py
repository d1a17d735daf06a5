"""The formulas of PPO, as pure functions of tensors and floats.

Shapes: B batch rows, T response tokens, N response tokens gathered from many rows, V vocabulary.
Masks: 1 = real response token, 0 = padding. Log-probabilities, entropies and KL are in nats, in float32.
"""
import torch
from torch import Tensor


def whiten(x_BT, mask_BT, eps: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` over real tokens (population variance), 0 on padding.

    Over the whole rollout, so that the size of mini-batches does not change it. In float64, where the sum of
    equal float32 numbers is exact: equal inputs give exactly 0.
    """
    real = mask_BT.bool()
    x_N = x_BT[real].double()
    x_N = x_N - x_N.mean()
    white_N = x_N * torch.rsqrt((x_N**2).mean() + eps)
    return torch.zeros_like(x_BT).masked_scatter(real, white_N.to(x_BT.dtype))


def explained_variance(value_N, return_N) -> float:
    """`1 - Var(return - V) / Var(return)`: 1 is perfect, < 0 worse than a constant. 0 for returns that are
    equal up to rounding.
    """
    value_N = value_N.double()
    return_N = return_N.double()
    largest = torch.cat([value_N, return_N]).abs().max()
    if return_N.std(correction=0) <= 1e-5 * largest:            # the rounding of sums of float32
        return 0.0
    unexplained = (return_N - value_N).var(correction=0)
    return 1 - (unexplained / return_N.var(correction=0)).item()


def token_logprobs(logp_NV, token_N) -> Tensor:
    """`log pi(token)` read off each row's log-probabilities. Returns (N,)."""
    return logp_NV.gather(-1, token_N[:, None]).squeeze(-1)


def entropy(p_NV, logp_NV) -> Tensor:
    """`H = -sum_v p_v log p_v` of each row, (N,), from 0 to log V; log-probabilities must be finite."""
    return -torch.einsum("nv,nv->n", p_NV, logp_NV)


def kl_full(logp_NV, ref_logp_NV) -> Tensor:
    """`KL(pi || pi0) = sum_v pi(v) (log pi(v) - log pi0(v))` per state, exact: paper, eq. 2. (N,).

    It does not depend on the drawn token: as a reward it acts on the choice of a token only through the
    states that follow, unlike `kl_k1`.
    """
    p_NV = logp_NV.softmax(-1)              # softmax(log p) = p; on a CPU faster than exp
    # 0 log 0 = 0, also where both are -inf
    log_ratio_NV = torch.where(p_NV > 0, logp_NV - ref_logp_NV, 0.0)
    return torch.linalg.vecdot(p_NV, log_ratio_NV)


def kl_k1(logp_N, ref_logp_N) -> Tensor:
    """`k1 = log pi(a) - log pi0(a)` of the sampled token (Schulman 2020). (N,), any sign.

    Where a is drawn from pi its expectation is `kl_full`. As a reward, with rewards-to-go, gamma 1 and no
    clipping, it gives the policy gradient of the response's KL.
    """
    return logp_N - ref_logp_N


def kl_k3(logp, ref_logp) -> Tensor:
    """`k3 = r - 1 - log r`, `r = pi0(a) / pi(a)` (Schulman 2020), of each token; never negative.

    If a is drawn from pi, which is nowhere 0, its expectation is `kl_full`. As a loss (GRPO, `--kl_in loss`)
    its expected gradient is that of KL(pi0 || pi). Around pi = pi0 this is, to first order, that of
    KL(pi || pi0).
    """
    log_r = ref_logp - logp
    return log_r.exp() - 1 - log_r


def token_rewards(score: Tensor, kl_BT, mask_BT, kl_coef: float) -> Tensor:
    """`r_t = -kl_coef * kl_t`, plus the score on each row's last real token (paper eq. 2); a score of each
    token, as of process rewards, stays where it is.

    score (B,) or (B, T); kl_BT: nats; kl_coef: reward per nat. Every row has a real token. Returns (B, T), 0
    on padding.
    """
    reward_BT = -kl_coef * kl_BT * mask_BT
    if score.shape == mask_BT.shape:
        return reward_BT + score * mask_BT
    last_B1 = mask_BT.sum(1, keepdim=True).long() - 1
    return reward_BT.scatter_add(1, last_B1, score[:, None])


def score_of_responses(score: Tensor, mask_BT) -> Tensor:
    """(B,): a score of each token, (B, T), is summed over its response."""
    if score.dim() == 1:
        return score
    return (score * mask_BT).sum(1)


def policy_loss(log_ratio_BT, advantage_BT, low: float, high: float, **_) -> tuple[Tensor, Tensor]:
    """Clipped surrogate (Schulman et al. 2017, eq. 7; the paper's eq. 11): the loss of each token, and where
    the clip has changed it.

        ratio = pi(a) / pi_old(a)        loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)

    The paper has low = high; a larger `high` is DAPO's clip-higher (arXiv:2503.14476, sec. 3.1).
    """
    ratio_BT = log_ratio_BT.exp()
    objective_BT = ratio_BT * advantage_BT
    clipped_objective_BT = ratio_BT.clamp(1 - low, 1 + high) * advantage_BT
    loss_BT = -torch.min(objective_BT, clipped_objective_BT)
    return loss_BT, clipped_objective_BT < objective_BT


def value_loss(value, old_value, return_, cliprange_value: float) -> Tensor:
    """Clipped value loss (paper, eq. 10 and 13) of each token; `old_value` is the rollout's and constant.

        V_clip = V_old + clip(V - V_old, -eps, eps)        loss = 1/2 max((V - R)^2, (V_clip - R)^2)

    DIFFERS: the factor 1/2 is TRL's, not the paper's.
    """
    clipped_value = old_value + (value - old_value).clamp(-cliprange_value, cliprange_value)
    squared_error = (value - return_) ** 2
    clipped_squared_error = (clipped_value - return_) ** 2
    return 0.5 * torch.max(squared_error, clipped_squared_error)


def loss_weights(mask_BT, loss_mean: str, max_length: int) -> tuple[Tensor, Tensor]:
    """The normalization of the loss: (weight_BT, divisor_B). The loss of an optimizer step is the sum of its
    tokens' weighted losses over the sum of its rows' divisors:

        tokens:     sum_it loss_it / sum_i length_i                         (TRL; DAPO, arXiv:2503.14476)
        responses:  1/B sum_i 1/length_i sum_t loss_it                      (GRPO, arXiv:2402.03300)
        constant:   1/B sum_i 1/max_length sum_t loss_it                    (Dr. GRPO, arXiv:2503.20783)
    """
    length_B = mask_BT.sum(1)
    if loss_mean == "tokens":
        return mask_BT, length_B
    one_B = torch.ones_like(length_B)
    if loss_mean == "responses":
        return mask_BT / length_B[:, None], one_B
    return mask_BT / max_length, one_B
