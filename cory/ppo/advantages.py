"""Advantage estimators as pure functions. Shapes and masks as in `cory.ppo.formulas`.

`--advantage` names one of these or a custom one, marked by `@estimator`. It is called with keywords:
reward_BT, mask_BT, value_BT (None without a critic), group_B, gamma, lam, and the whole `rollout`. Responses
with the same number in group_B are compared. It returns the advantages, (B, T), 0 on padding, and what the
critic learns, (B, T), or None.
"""
from typing import Callable

import torch
from torch import Tensor

from cory.config import Config

Estimate = tuple[Tensor, Tensor | None]         # (advantages, what the critic learns)


def estimator(critic: bool, whiten: bool, grouped: bool = False) -> Callable:
    """Marks a function as an advantage estimator.

    critic: it needs a critic, and returns what this learns. whiten: its advantages are whitened over the
    batch. grouped: it compares the responses to one query, so that it needs at least two of them.
    """
    def mark(function):
        function.critic = critic
        function.whiten = whiten
        function.grouped = grouped
        return function
    return mark


def find_estimator(cfg: Config) -> Callable:
    function = cfg.resolve("advantage")
    needed = 2 if function.grouped else 1
    cfg.require("responses_per_query", cfg.responses_per_query >= needed,
                f"{cfg.advantage} compares the responses to a query; add, for example, "
                "--responses_per_query 4")
    return function


@estimator(critic=True, whiten=True)
def gae(reward_BT, value_BT, mask_BT, gamma: float, lam: float, **_) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16; the paper's eq. 12): (A, A + V).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    V and A are 0 after the last real token, even of a truncated response, which counts as terminal.
    """
    B, T = reward_BT.shape
    advantage_BT = torch.zeros_like(reward_BT)
    next_value_B = reward_BT.new_zeros(B)
    next_advantage_B = reward_BT.new_zeros(B)
    for t in reversed(range(T)):
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        advantage_BT[:, t] = advantage_B * mask_BT[:, t]
        next_advantage_B = advantage_BT[:, t]
        next_value_B = value_BT[:, t] * mask_BT[:, t]
    return advantage_BT, (advantage_BT + value_BT) * mask_BT


@estimator(critic=False, whiten=True)
def reinforce(reward_BT, mask_BT, gamma: float, **_) -> Estimate:
    """Reward-to-go, without a critic (Williams 1992): `A_t = sum_{s >= t} gamma^(s - t) r_s`. Whitening then
    gives it the mean over all tokens as baseline.
    """
    value_BT = torch.zeros_like(reward_BT)              # GAE with V = 0 and lam = 1
    advantage_BT, _ = gae(reward_BT, value_BT, mask_BT, gamma, lam=1.0)
    return advantage_BT, None


@estimator(critic=False, whiten=False, grouped=True)
def rloo(reward_BT, mask_BT, group_B, **_) -> Estimate:
    """REINFORCE with a leave-one-out baseline (Ahmadian et al., arXiv:2402.14740, sec. 2.3).

        R_i = sum_t r_t        A_i = R_i - 1/(k-1) sum_{j != i} R_j

    over the k >= 2 responses of a group. R_i is the score of response i minus, with `--kl_in reward`, its KL
    penalty. DIFFERS from that paper: PPO's clipped ratio of each token, over `num_ppo_epochs`, not one plain
    step. A_i is k / (k - 1) times Dr. GRPO's (arXiv:2503.20783), whose loss has `--loss_mean constant`.
    """
    return_B = (reward_BT * mask_BT).sum(1)
    others_sum_B = group_sum(return_B, group_B) - return_B
    baseline_B = others_sum_B / (group_size(group_B) - 1)
    return (return_B - baseline_B)[:, None] * mask_BT, None


@estimator(critic=False, whiten=False, grouped=True)
def grpo(reward_BT, mask_BT, group_B, **_) -> Estimate:
    """Group-relative advantage (Shao et al., arXiv:2402.03300, sec. 4.1.2).

        A_i = (R_i - mean_group R) / (std_group R + 1e-6)        R as in `rloo`

    with the population standard deviation; equal returns give exactly 0. That paper's loss is the mean over
    responses of their means over tokens: `--loss_mean responses`.
    """
    return_B = (reward_BT * mask_BT).sum(1)
    centred_B = return_B - group_mean(return_B, group_B)
    std_B = group_mean(centred_B**2, group_B).sqrt()
    advantage_B = centred_B / (std_B + 1e-6)
    return advantage_B[:, None] * mask_BT, None


def group_sum(x_B, group_B) -> Tensor:
    """(B,): for each row the sum over its group."""
    _, number_B = group_B.unique(return_inverse=True)               # 0, 1, ..., whatever the groups' numbers
    return torch.zeros_like(x_B).index_add(0, number_B, x_B)[number_B]


def group_size(group_B) -> Tensor:
    return group_sum(torch.ones_like(group_B), group_B)


def group_mean(x_B, group_B) -> Tensor:
    """For each row the mean over its group, in float64, where the sum of equal float32 numbers is exact."""
    return group_sum(x_B.double(), group_B) / group_size(group_B)
