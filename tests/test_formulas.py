"""Each formula against arithmetic done by hand (written out beside it)."""
import math
from dataclasses import replace

import pytest
import torch
from toys import agent_of, bigram, close

from cory.ppo import formulas as f
from cory.ppo.agent import adaptive


def test_token_rewards_puts_the_score_on_each_rows_last_real_token():
    kl = torch.tensor([[1.0, 2.0, 9.0], [1.0, 9.0, 9.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1]])
    # kl_coef 0.1: row 0: -0.1, -0.2 + 5; row 1: -0.1 + 6; row 2: -0.1, -0.2, -0.3 + 7; padding 0 whatever
    # the KL there
    expected = [[-0.1, 4.8, 0], [5.9, 0, 0], [-0.1, -0.2, 6.7]]
    close(f.token_rewards(torch.tensor([5.0, 6, 7]), kl, mask, 0.1), expected)
    # scores of tokens stay where they are
    of_tokens = torch.tensor([[1.0, 2, 9], [3, 9, 9], [4, 5, 6]])
    close(f.token_rewards(of_tokens, kl, mask, 0.1), [[0.9, 1.8, 0], [2.9, 0, 0], [3.9, 4.8, 5.7]])


def test_what_a_loss_is_a_mean_over_by_hand():
    loss, mask = torch.tensor([[1.0, 3, 99], [5, 99, 99]]), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    # (1 + 3 + 5) / 3;  ((1 + 3) / 2 + 5) / 2;  ((1 + 3) / 4 + 5 / 4) / 2
    for of, expected in (("tokens", 3.0), ("responses", 3.5), ("constant", 1.125)):
        weight, divisor = f.loss_weights(mask, of, 4)
        assert ((loss * weight).sum() / divisor.sum()).item() == expected


def test_whitening_is_over_real_tokens_whatever_the_padding():
    # 1, 2, 3: mean 2, variance 2/3, so -1.2247, 0, 1.2247
    x, mask = torch.tensor([[1.0, 2, 1e4], [3, -1e4, 1e4]]), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    close(f.whiten(x, mask), [[-1.2247449, 0, 0], [1.2247449, 0, 0]])


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


def test_policy_loss_by_hand_and_no_gradient_where_the_clip_wins():
    logp = torch.tensor([1.25, 1.5, 0.5, 1.5, 0.75, 1.1]).log().requires_grad_()
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    # -min(ratio A, clip(ratio, 0.8, 1.3) A):
    # -min(2.5, 2.5);  -min(3, 2.6);  -min(1, 1.6);  -min(-3, -2.6);  -min(-1.5, -1.6);  -min(-2.2, -2.2)
    loss, clipped = f.policy_loss(logp, advantage, 0.2, 0.3)
    assert clipped.tolist() == [False, True, False, False, True, False]
    close(loss.detach(), [-2.5, -2.6, -1.0, 3.0, 1.6, 2.2])
    loss.sum().backward()
    close(logp.grad, [-2.5, 0.0, -1.0, 3.0, 0.0, 2.2])                      # -ratio A, or 0


def test_value_loss_by_hand_and_its_gradient():
    value = torch.tensor([1.0, 2.0, 0.9], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([2.0, 2.0, 2.0])
    # V_clip = 0.2, 0.2, 0.9
    # max((V - R)^2, (V_clip - R)^2) / 2 = max(1, 3.24) / 2, max(0, 3.24) / 2, max(1.21, 1.21) / 2
    loss = f.value_loss(value, old, returns, 0.2)
    close(loss.detach(), [1.62, 1.62, 0.605])
    loss.sum().backward()
    close(value.grad, [0.0, 0.0, -1.1])         # where the clipped branch wins there is nothing to learn


def test_kl_by_hand():
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.75, 0.0]]).log()
    close(f.kl_full(p, q), [0.5 * math.log(2) + 0.5 * math.log(2 / 3)])     # 0 log 0 = 0, of -inf in both
    # pi(a) = 0.5, pi0(a) = 0.25: k1 = log 2;  r = 1/2, k3 = 1/2 - 1 + log 2
    half, quarter = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    close(f.kl_k1(half, quarter), [math.log(2)])
    close(f.kl_k3(half, quarter), [math.log(2) - 0.5])


def test_adaptive_controller_by_hand():
    agent = agent_of(bigram(), kl_target=6.0)
    # horizon 10000, n 200 + 56.  kl 7: error 1/6;  kl 60: clipped to 0.2;  kl 0: clipped to -0.2
    for kl, error in ((7.0, 1 / 6), (60.0, 0.2), (0.0, -0.2)):
        agent.kl_coef = 0.3
        assert adaptive(agent, torch.full((256,), kl)) == pytest.approx(0.3 * (1 + error * 256 / 10_000))
    agent.cfg = replace(agent.cfg, kl_target=0.0)
    assert adaptive(agent, torch.zeros(256)) == 0.3
