"""Formulas against arithmetic done by hand (written out beside it), where test_one_page.py and test_update.py
do not compute them otherwise.
"""
import math

import pytest
import torch
from toys import close

from cory.ppo import formulas as f


def test_scores_of_tokens_stay_where_they_are():
    kl = torch.tensor([[1.0, 2, 9], [1, 9, 9], [1, 2, 3]])
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1]])
    of_tokens = torch.tensor([[1.0, 2, 9], [3, 9, 9], [4, 5, 6]])
    close(f.token_rewards(of_tokens, kl, mask, 0.1), [[0.9, 1.8, 0], [2.9, 0, 0], [3.9, 4.8, 5.7]])


def test_whitening_of_constants_and_of_large_values():
    for constant in (0.0, 0.1, -7.3, 1e4, 1e19, -3e38):
        assert (f.whiten(torch.full((4, 5), constant), torch.ones(4, 5)) == 0).all(), constant
    # 1e19 and 3e19: mean 2e19, deviation 1e19, whose square is beyond float32
    close(f.whiten(torch.tensor([[1e19, 3e19]]), torch.ones(1, 2)), [[-1.0, 1.0]])


def test_explained_variance_by_hand_and_for_nearly_constant_returns():
    # errors 1, -1, 0, 0: variance 1/2; returns 0, 2, 4, 6: variance 5
    value, returns = torch.tensor([-1.0, 3, 4, 6]), torch.tensor([0.0, 2, 4, 6])
    assert f.explained_variance(value, returns) == pytest.approx(0.9)
    # a constant critic explains nothing, which squares in float32 would miss by thousands here
    returns = torch.tensor([100.0, 100.0 + 2**-17] * 50)
    assert f.explained_variance(torch.full((100,), 0.1), returns) == pytest.approx(0, abs=1e-6)
    assert f.explained_variance(torch.randn(9), torch.full((9,), 3.0)) == 0
    # equal but for the rounding of sums
    rounded = torch.tensor([1.0, 1 + 2**-23, 1 - 2**-24])
    assert f.explained_variance(torch.tensor([0.0, 1, -1]), rounded) == 0


def test_kl_by_hand():
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.75, 0.0]]).log()
    close(f.kl_full(p, q), [0.5 * math.log(2) + 0.5 * math.log(2 / 3)])     # 0 log 0 = 0, of -inf in both
    # pi(a) = 0.5, pi0(a) = 0.25: k1 = log 2;  r = 1/2, k3 = 1/2 - 1 + log 2
    half, quarter = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    close(f.kl_k1(half, quarter), [math.log(2)])
    close(f.kl_k3(half, quarter), [math.log(2) - 0.5])
