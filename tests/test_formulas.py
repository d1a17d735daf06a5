"""Formulas against arithmetic done by hand (written out beside it), where test_one_page.py and test_update.py
do not compute them otherwise.
"""
import math

import pytest
import torch
from toys import close

from cory.ppo import formulas


def test_scores_of_tokens_stay_where_they_are():
    score_BT = torch.tensor([
        [1.0, 5, 99],
        [3, 99, 99]])
    kl_BT = torch.tensor([
        [1.0, 2, 99],
        [4, 99, 99]])
    mask_BT = (score_BT != 99).float()
    reward_BT = formulas.token_rewards(score_BT, kl_BT, mask_BT, 0.1)
    close(reward_BT, [
        [0.9, 4.8, 0],              # 1 - 0.1*1, 5 - 0.1*2
        [2.6, 0, 0]])               # 3 - 0.1*4


@pytest.mark.parametrize("constant", [0.0, 0.1, -7.3, 1e4, 1e19, -3e38])
def test_constants_are_whitened_to_0(constant):
    x_BT = torch.full((4, 5), constant)
    white_BT = formulas.whiten(x_BT, torch.ones_like(x_BT))
    assert (white_BT == 0).all()


def test_large_values_are_whitened_without_overflow():
    # mean 2e19, deviation 1e19, whose square is beyond float32
    x_BT = torch.tensor([[1e19, 3e19]])
    white_BT = formulas.whiten(x_BT, torch.ones_like(x_BT))
    close(white_BT, [[-1.0, 1.0]])


def test_explained_variance_by_hand():
    # errors 1, -1, 0, 0: variance 1/2; returns 0, 2, 4, 6: variance 5
    value_N = torch.tensor([-1.0, 3, 4, 6])
    return_N = torch.tensor([0.0, 2, 4, 6])
    assert formulas.explained_variance(value_N, return_N) == pytest.approx(0.9)


def test_a_constant_critic_explains_no_variance():
    # squares in float32 would miss this by thousands
    return_N = torch.tensor([100.0, 100.0 + 2**-17] * 50)
    value_N = torch.full((100,), 0.1)
    assert formulas.explained_variance(value_N, return_N) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("returns", [
    [3.0, 3, 3],
    # equal but for the rounding of sums
    [1.0, 1 + 2**-23, 1 - 2**-24]])
def test_no_variance_of_equal_returns_is_explained(returns):
    value_N = torch.tensor([0.0, 1, -1])
    assert formulas.explained_variance(value_N, torch.tensor(returns)) == 0


def test_kl_by_hand():
    logp_NV = torch.tensor([[0.5, 0.5, 0.0]]).log()
    ref_logp_NV = torch.tensor([[0.25, 0.75, 0.0]]).log()
    # 0 log 0 = 0, of -inf in both
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    close(formulas.kl_full(logp_NV, ref_logp_NV), [kl])
    # pi(a) = 0.5, pi0(a) = 0.25: k1 = log 2;  r = 1/2, k3 = 1/2 - 1 + log 2
    logp_N = logp_NV[:, 0]
    ref_logp_N = ref_logp_NV[:, 0]
    close(formulas.kl_k1(logp_N, ref_logp_N), [math.log(2)])
    close(formulas.kl_k3(logp_N, ref_logp_N), [math.log(2) - 0.5])
