"""Advantage estimators as pure functions. Shapes and masks as in `cory.ppo.formulas`.

`--advantage` names one of these or one of the user's own. An estimator asks for what it needs by the names of
its parameters (`OFFERED`). Any other parameter must have a default value. B is the whole batch, in every
process. The group_size responses to a query stand in consecutive rows. An estimator returns the advantages,
(B, T), 0 on padding. If it asks for value_BT, a critic is trained towards advantage + V, so return them
unnormalised. `--whiten_advantages auto` whitens all but rloo and grpo afterwards. `Config` knows those of
this file by name: `whitens`, `has_critic` and `require_combinations`.
"""
import inspect
from typing import Callable

import torch
from torch import Tensor

from cory.config import ADVANTAGES
from cory.errors import UserError
from cory.names import find

# what an estimator can ask for; `make_experience` in update.py gives it
OFFERED = {"reward_BT", "mask_BT", "value_BT", "group_size", "gamma", "lam"}


def gae(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16; the paper's eq. 12).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    V and A are 0 after the last real token, also of a response cut by the length limit: it is scored as it
    stands, so the episode is over.
    """
    B, T = reward_BT.shape
    advantage_BT = torch.zeros_like(reward_BT)
    next_value_B = next_advantage_B = reward_BT.new_zeros(B)
    for t in reversed(range(T)):
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t]
        advantage_BT[:, t] = (delta_B + gamma * lam * next_advantage_B) * mask_BT[:, t]
        next_value_B = value_BT[:, t] * mask_BT[:, t]
        next_advantage_B = advantage_BT[:, t]
    return advantage_BT


def reinforce(reward_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """Rewards to go, without critic or baseline (Williams 1992): `A_t = sum_{s >= t} gamma^(s - t) r_s`.

    Whitening over the batch (`--whiten_advantages auto`) then gives it the mean over all tokens as baseline.
    """
    # GAE with V = 0 and lam = 1
    return gae(reward_BT, torch.zeros_like(reward_BT), mask_BT, gamma, lam=1.0)


def rloo(reward_BT: Tensor, mask_BT: Tensor, group_size: int) -> Tensor:
    """REINFORCE with a leave-one-out baseline (Ahmadian et al., arXiv:2402.14740, sec. 2.3).

        R_i = sum_t r_t        A_i = R_i - 1/(k-1) sum_{j != i} R_j

    k is `group_size`, 2 or more. R_i is the score of response i and, with `--kl_in reward`, its KL penalty.

    All tokens of a response get the same advantage. DIFFERS from that paper: PPO's clipped ratio of each
    token, over `num_ppo_epochs`, instead of one plain step.
    """
    return_Gk = grouped_returns(reward_BT, mask_BT, group_size)
    others_Gk = (return_Gk.sum(1, keepdim=True) - return_Gk) / (group_size - 1)
    return (return_Gk - others_Gk).view(-1, 1) * mask_BT


def grpo(reward_BT: Tensor, mask_BT: Tensor, group_size: int) -> Tensor:
    """Group-relative advantage (Shao et al., arXiv:2402.03300, sec. 4.1.2), k = `group_size` >= 2.

        A_i = (R_i - mean_group R) / (std_group R + 1e-6)        R as in `rloo`

    with the population's standard deviation; equal returns give exactly 0. All tokens of a response get the
    same advantage. DIFFERS from that paper: the loss is a mean over all tokens of an optimizer step, not
    first within each response (Dr. GRPO, Liu et al., arXiv:2503.20783, on why).
    """
    return_Gk = grouped_returns(reward_BT, mask_BT, group_size)
    # less the largest: equal returns are then exactly 0, which their rounded mean can miss
    return_Gk = return_Gk - return_Gk.amax(1, keepdim=True)
    centred_Gk = return_Gk - return_Gk.mean(1, keepdim=True)
    std_G1 = return_Gk.std(1, correction=0, keepdim=True)
    return (centred_Gk / (std_G1 + 1e-6)).view(-1, 1) * mask_BT


def grouped_returns(reward_BT: Tensor, mask_BT: Tensor, group_size: int) -> Tensor:
    """(B / k, k): the sum of each response's token rewards, one row for each query's k responses."""
    return (reward_BT * mask_BT).sum(1).view(-1, group_size)


def estimator(advantage: str, responses_per_query: int) -> Callable[..., Tensor]:
    """The estimator of that name. Raises `UserError` if it asks for what is not offered."""
    function = find("advantage", advantage, ADVANTAGES)
    try:
        asked = parameter_names(function)
    except (TypeError, ValueError) as error:            # of PyTorch's own, say
        raise UserError("advantage", advantage, "has no parameters that Python knows; wrap it") from error
    if unknown := sorted(asked - OFFERED):
        way_out = f"asks for {', '.join(unknown)}; it can have {', '.join(sorted(OFFERED))}"
        raise UserError("advantage", advantage, way_out)
    if "group_size" in asked and responses_per_query < 2:
        way_out = "compares the responses to a query and there is one; add --responses_per_query 4, say"
        raise UserError("advantage", advantage, way_out)
    return function


def parameter_names(function: Callable) -> set[str]:
    """What an estimator asks for: parameters that are offered, or that have no default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.name in OFFERED or p.default is p.empty}
