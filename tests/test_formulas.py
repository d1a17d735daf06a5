"""Each formula against arithmetic done by hand (written out beside it) or against its defining property."""

import math

import pytest
import torch

from cory.ppo import formulas as f


def close(a, b, tol=1e-6):
    torch.testing.assert_close(
        torch.as_tensor(a, dtype=torch.float32), torch.as_tensor(b, dtype=torch.float32), atol=tol, rtol=tol
    )


def test_token_rewards_puts_the_score_on_each_rows_last_real_token():
    kl = torch.tensor([[1.0, 2.0, 9.0], [1.0, 9.0, 9.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1]])
    # kl_coef 0.1: row 0: -0.1, -0.2 + 5; row 1: -0.1 + 6; row 2: -0.1, -0.2, -0.3 + 7; padding 0 whatever
    # the KL there
    close(
        f.token_rewards(torch.tensor([5.0, 6, 7]), kl, mask, 0.1),
        [[-0.1, 4.8, 0], [5.9, 0, 0], [-0.1, -0.2, 6.7]],
    )


def test_whiten_has_mean_0_and_variance_1_over_real_tokens_whatever_the_padding():
    x, mask = torch.randn(5, 7) * 3 + 2, (torch.rand(5, 7) > 0.4).float()
    white = f.whiten(torch.where(mask.bool(), x, torch.full_like(x, 1e4)), mask)
    real = white[mask.bool()]
    close(real.mean(), 0.0, 1e-5), close(real.var(correction=0), 1.0, 1e-4)
    assert (white[mask == 0] == 0).all()
    close(f.whiten(torch.tensor([[3.0]]), torch.ones(1, 1)), [[0.0]])
    # 1, 2, 3: mean 2, variance 2/3, so -1.2247, 0, 1.2247
    close(f.whiten(torch.tensor([[1.0, 2, 3]]), torch.ones(1, 3)), [[-1.2247449, 0, 1.2247449]])


def test_policy_loss_by_hand():
    ratio, advantage = (
        torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5, 1.1]),
        torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0]),
    )
    # -min(ratio A, clip(ratio, 0.8, 1.2) A):
    # -2;  -min(3, 2.4);  -min(1, 1.6);  -min(-3, -2.4);  -min(-1, -1.6);  -min(-2.2, -2.2)
    close(f.policy_loss(ratio.log(), torch.zeros(6), advantage, 0.2), [-2.0, -2.4, -1.0, 3.0, 1.6, 2.2])


def test_policy_loss_has_no_gradient_where_the_clip_wins():
    logp = torch.tensor([math.log(1.5), math.log(0.5), math.log(1.1)], requires_grad=True)
    f.policy_loss(logp, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), 0.2).sum().backward()
    close(logp.grad, [0.0, 0.0, -1.1])


def test_value_loss_by_hand_and_its_gradient():
    value = torch.tensor([1.0, 2.0, 0.9], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([2.0, 2.0, 2.0])
    # V_clip = 0.2, 0.2, 0.9;  max((V-R)^2, (V_clip-R)^2) / 2 = max(1, 3.24)/2, max(0, 3.24)/2, max(1.21,
    # 1.21)/2
    loss = f.value_loss(value, old, returns, 0.2)
    close(loss, [1.62, 1.62, 0.605])
    loss.sum().backward()
    close(value.grad[:2], [0.0, 0.0])  # the clipped branch wins: nothing to learn from this token any more
    close(value.grad[2], -1.1)


def test_token_logprobs_and_entropy_by_hand():
    logits = torch.tensor([[0.25, 0.25, 0.5], [1.0, 1e-38, 1e-38]]).log() + 3.0  # a constant changes nothing
    logp = logits.log_softmax(-1)
    close(f.token_logprobs(logp, torch.tensor([2, 0])), [math.log(0.5), 0.0])
    close(f.entropy(logp.exp(), logp), [1.5 * math.log(2), 0.0], 1e-5)
    close(f.entropy(torch.full((1, 8), 1 / 8), torch.zeros(1, 8).log_softmax(-1)), [math.log(8)])


def test_kl_full_by_hand_and_zero_when_equal():
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    close(f.kl_full(p, q), [0.5 * math.log(2) + 0.5 * math.log(2 / 3)])
    token = torch.tensor([-1.0])
    for kl in (f.kl_full(p, p), f.kl_k1(token, token), f.kl_k3(token, token)):
        close(kl, [0.0])
    # pi(a) = 0.5, pi0(a) = 0.25: k1 = log 2;  r = 1/2, k3 = 1/2 - 1 + log 2
    half, quarter = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    close(f.kl_k1(half, quarter), [math.log(2)]), close(f.kl_k3(half, quarter), [math.log(2) - 0.5])


def test_kl_estimators_agree_in_expectation_and_in_sign():
    generator = torch.Generator().manual_seed(0)
    logp, ref = (torch.randn(6, generator=generator).log_softmax(0) for _ in range(2))
    n = 200_000
    token = torch.multinomial(logp.exp(), n, replacement=True, generator=generator)
    exact = f.kl_full(logp[None], ref[None]).item()
    k1, k3 = f.kl_k1(logp[token], ref[token]), f.kl_k3(logp[token], ref[token])
    assert (k1 < 0).any() and (k3 >= 0).all() and exact > 0
    for estimate in (k1, k3):
        assert abs(estimate.mean().item() - exact) < 3 * estimate.std().item() / n**0.5


@pytest.mark.parametrize("penalty, expected", [("k1", "the KL's gradient"), ("full", "zero")])
def test_kl_charged_as_reward_against_the_exact_gradient_on_a_one_step_bandit(penalty, expected):
    """The expectation over actions is taken exactly: one row per action, weighted by its probability."""
    logits, ref = (
        torch.tensor([0.3, -0.2, 0.9, 0.0], requires_grad=True),
        torch.tensor([0.0, 0.5, 0.1, -0.4]).log_softmax(0),
    )
    logp = logits.log_softmax(0)
    exact = torch.autograd.grad(-0.7 * f.kl_full(logp[None], ref[None]).sum(), logits, retain_graph=True)[0]
    kl_N = (f.kl_k1(logp, ref) if penalty == "k1" else f.kl_full(logp[None], ref[None]).expand(4)).detach()
    reward = f.token_rewards(torch.zeros(4), kl_N[:, None], torch.ones(4, 1), kl_coef=0.7)[:, 0]
    loss = f.policy_loss(logp, logp.detach(), reward, 0.2)
    ascent = -torch.autograd.grad((logp.exp().detach() * loss).sum(), logits)[0]
    close(ascent, exact if expected == "the KL's gradient" else torch.zeros(4))


def test_adaptive_controller_by_hand():
    # target 6, horizon 10000, n 256.  kl 7: error 1/6;  kl 60: clipped to 0.2;  kl 0: clipped to -0.2;
    # kl 6: 0
    for kl, error in ((7, 1 / 6), (60, 0.2), (0, -0.2), (6, 0.0)):
        assert f.adapted_kl_coef(0.3, kl, 6.0, 10_000, 256) == pytest.approx(0.3 * (1 + error * 256 / 10_000))
    # the shortest horizon the configuration lets through (just above 0.2 n = 51.2) leaves it positive at
    # the worst KL
    assert 0 < f.adapted_kl_coef(0.3, 0.0, 6.0, 51.3, 256) < 0.3


# --- found by comparison with exact arithmetic ---
def test_whitening_of_constant_advantages_gives_0_whatever_their_size():
    mask = torch.ones(4, 5)
    for constant in (0.0, 0.1, -7.3, 1e4, 1e19, -3e38):
        assert (f.whiten(torch.full((4, 5), constant), mask) == 0).all(), constant
    # 1e19 and 3e19: mean 2e19, deviation 1e19, whose square is beyond float32
    close(f.whiten(torch.tensor([[1e19, 3e19]]), torch.ones(1, 2)), [[-1.0, 1.0]])


def test_explained_variance_by_hand_and_for_nearly_constant_returns():
    # errors 1, -1, 0, 0: variance 1/2; returns 0, 2, 4, 6: variance 5
    errors, returns = torch.tensor([1.0, -1, 0, 0]), torch.tensor([0.0, 2, 4, 6])
    assert f.explained_variance(errors, returns) == pytest.approx(0.9)
    returns = torch.tensor([100.0, 100.0 + 2**-17] * 50)
    value = torch.full((100,), 0.1)
    exact = value.double() - returns.double()
    # a constant critic explains nothing of it: 0 (the variance of float32 squares once gave 14306)
    assert f.explained_variance(exact, returns) == pytest.approx(0, abs=1e-6)
    assert f.explained_variance(torch.randn(9), torch.full((9,), 3.0)) == 0


def test_exact_kl_of_tokens_that_both_models_exclude_is_0_there():
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [0.0, 0.0, -torch.inf]])
    # row 0: p = 1/(1+e), e/(1+e) against 1/2, 1/2
    p = torch.tensor([1.0, math.e]) / (1 + math.e)
    expected = (p * (p.log() - math.log(0.5))).sum().item()
    got = f.kl_full(logits[:1].log_softmax(-1), logits[1:].log_softmax(-1))
    assert got.item() == pytest.approx(expected, rel=1e-6)
    assert f.kl_full(logits.log_softmax(-1)[1:], torch.zeros(1, 3).log_softmax(-1)).item() == pytest.approx(
        math.log(1.5), rel=1e-6
    )  # uniform over 2 against uniform over 3


def test_learning_rates_by_hand():
    # base 8, 2 iterations of warm-up: 8/3, 16/3; then 4 iterations at progress 0, 1/4, 1/2, 3/4
    rates = [f.learning_rate(8.0, i, 6, 2, f.linear) for i in range(1, 7)]
    assert rates == pytest.approx([8 / 3, 16 / 3, 8, 6, 4, 2])
    half = math.sqrt(0.5)
    rates = [f.learning_rate(1.0, i, 4, 0, f.cosine) for i in range(1, 5)]
    assert rates == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2])
    assert {f.learning_rate(0.3, i, 4, 0, f.constant) for i in range(1, 5)} == {0.3}


def test_a_masked_mean_is_over_real_tokens():
    x_BT = torch.tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0]])
    mask_BT = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    assert f.masked_mean(x_BT, mask_BT).item() == pytest.approx(3.0)         # 9 over 3 tokens
