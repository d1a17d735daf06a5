"""The formulas of PPO and its learning-rate schedules, as pure functions of tensors and floats.

Shapes: B batch rows, T response tokens, N response tokens gathered from many rows, V vocabulary.
Masks: 1 = real response token, 0 = padding. Log-probabilities, entropies and KL are in nats, in float32.
"""
import math

import torch
from torch import Tensor


def whiten(x_BT: Tensor, mask_BT: Tensor, eps: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` over real tokens (population variance), 0 on padding.

    Over the whole rollout, so that the size of mini-batches does not change it. In float64, after subtracting
    the maximum, so that equal values give exactly 0.
    """
    real = mask_BT.bool()
    x_N = x_BT[real].double()
    x_N = x_N - x_N.max()
    x_N = x_N - x_N.mean()
    white_N = x_N * torch.rsqrt((x_N**2).mean() + eps)
    return torch.zeros_like(x_BT).masked_scatter(real, white_N.to(x_BT.dtype))


def explained_variance(value_N: Tensor, return_N: Tensor) -> float:
    """`1 - Var(return - V) / Var(return)`: 1 is perfect, < 0 worse than a constant. 0 for returns that are
    equal up to rounding.
    """
    value_N, return_N = value_N.double(), return_N.double()
    rounding = 1e-5 * max(value_N.abs().max().item(), return_N.abs().max().item())     # sums of float32
    if return_N.std(correction=0).item() <= rounding:
        return 0.0
    return 1 - ((return_N - value_N).var(correction=0) / return_N.var(correction=0)).item()


def token_logprobs(logp_NV: Tensor, token_N: Tensor) -> Tensor:
    """`log pi(token)` read off each row's log-probabilities. Returns (N,)."""
    return logp_NV.gather(-1, token_N[:, None]).squeeze(-1)


def entropy(p_NV: Tensor, logp_NV: Tensor) -> Tensor:
    """`H = -sum_v p_v log p_v` of each row, (N,), from 0 to log V; log-probabilities must be finite."""
    return -torch.einsum("nv,nv->n", p_NV, logp_NV)


def kl_full(logp_NV: Tensor, ref_logp_NV: Tensor) -> Tensor:
    """`KL(pi || pi0) = sum_v pi(v) (log pi(v) - log pi0(v))` per state, exact: paper, eq. 2. (N,).

    As a reward it does not depend on the drawn token and acts only through later states, unlike `kl_k1`.
    """
    p_NV = logp_NV.softmax(-1)              # softmax(log p) = p; on a CPU faster than exp
    # 0 log 0 = 0, also where both are -inf
    log_ratio_NV = torch.where(p_NV > 0, logp_NV - ref_logp_NV, 0.0)
    return torch.linalg.vecdot(p_NV, log_ratio_NV)


def kl_k1(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """`k1 = log pi(a) - log pi0(a)` of the sampled token (Schulman 2020). (N,), any sign.

    Where a is drawn from pi its expectation is `kl_full`. As a reward, with
    rewards-to-go, gamma 1 and no clipping, it gives the policy gradient of the response's KL.
    """
    return logp_N - ref_logp_N


def kl_k3(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """`k3 = r - 1 - log r`, `r = pi0(a) / pi(a)` (Schulman 2020). (N,), never negative.

    Where a is drawn from pi its expectation is `kl_full`. As a loss (GRPO, `--kl_in loss`) its expected
    gradient is that of KL(pi0 || pi), which agrees with that of KL(pi || pi0) to first order around pi = pi0.
    """
    log_r = ref_logp_N - logp_N
    return log_r.exp() - 1 - log_r


def token_rewards(score_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, kl_coef: float) -> Tensor:
    """`r_t = -kl_coef * kl_t`, plus the score on each row's last real token (paper eq. 2).

    score_B (B,); kl_BT (B, T): nats. Every row has a real token. Returns (B, T), 0 on padding.
    """
    reward_BT = -kl_coef * kl_BT * mask_BT
    last_B1 = mask_BT.sum(1, keepdim=True).long() - 1
    return reward_BT.scatter_add(1, last_B1, score_B[:, None].to(reward_BT))


def policy_loss(log_ratio_N: Tensor, advantage_N: Tensor, low: float, high: float) -> Tensor:
    """Clipped surrogate (Schulman et al. 2017, eq. 7; the paper's eq. 11), one loss per token.

        ratio = pi(a) / pi_old(a)        loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)

    The paper has low = high; a larger `high` is DAPO's clip-higher (arXiv:2503.14476, sec. 3.1).
    """
    ratio_N = log_ratio_N.exp()
    return -torch.min(ratio_N * advantage_N, ratio_N.clamp(1 - low, 1 + high) * advantage_N)


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, cliprange_value: float) -> Tensor:
    """Clipped value loss (paper, eq. 10 and 13) per token; `old_value` is the rollout's and stays constant.

        V_clip = V_old + clip(V - V_old, -eps, eps)        loss = 1/2 max((V - R)^2, (V_clip - R)^2)

    DIFFERS: the factor 1/2 is TRL's, not the paper's.
    """
    clipped_N = old_value_N + (value_N - old_value_N).clamp(-cliprange_value, cliprange_value)
    return 0.5 * torch.max((value_N - return_N) ** 2, (clipped_N - return_N) ** 2)


# Learning-rate schedules: a factor at each progress of training, from 0 to just below 1.
def constant(progress: float) -> float:
    return 1.0


def linear(progress: float) -> float:
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov & Hutter, arXiv:1608.03983, without restarts)."""
    return (1.0 + math.cos(math.pi * progress)) / 2
