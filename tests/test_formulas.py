"""Each formula against arithmetic done by hand (written out beside it) or against its defining property."""
import math

import pytest
import torch

from cory.ppo import formulas as f


def close(a, b, tol=1e-6):
    torch.testing.assert_close(torch.as_tensor(a, dtype=torch.float32), torch.as_tensor(b, dtype=torch.float32), atol=tol, rtol=tol)


def test_token_rewards_puts_the_score_on_each_rows_last_real_token():
    kl = torch.tensor([[1.0, 2.0, 9.0], [1.0, 9.0, 9.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1]])
    # kl_coef 0.1: row 0: -0.1, -0.2 + 5; row 1: -0.1 + 6; row 2: -0.1, -0.2, -0.3 + 7; padding 0 whatever the KL there
    close(f.token_rewards(torch.tensor([5.0, 6, 7]), kl, mask, 0.1), [[-0.1, 4.8, 0], [5.9, 0, 0], [-0.1, -0.2, 6.7]])


def test_gae_by_hand_on_ragged_rows():
    reward, value = torch.tensor([[1.0, 2.0, 3.0], [1.0, 4.0, 99.0]]), torch.tensor([[0.5, 1.0, 1.5], [0.5, 2.0, 77.0]])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    # gamma 0.9, lam 0.5, so gamma lam = 0.45
    # row 0: d2 = 3 - 1.5 = 1.5;  d1 = 2 + 0.9*1.5 - 1 = 2.35;  d0 = 1 + 0.9*1 - 0.5 = 1.4
    #        A2 = 1.5;  A1 = 2.35 + 0.45*1.5 = 3.025;  A0 = 1.4 + 0.45*3.025 = 2.76125
    # row 1: d1 = 4 - 2 = 2 (the episode ends: V of padding is not looked at);  d0 = 1 + 0.9*2 - 0.5 = 2.3;  A0 = 2.3 + 0.45*2 = 3.2
    advantage, returns = f.gae(reward, value, mask, gamma=0.9, lam=0.5)
    close(advantage, [[2.76125, 3.025, 1.5], [3.2, 2.0, 0.0]])
    close(returns, [[3.26125, 4.025, 3.0], [3.7, 4.0, 0.0]])


def test_gae_with_gamma_and_lambda_one_is_reward_to_go():
    reward, mask = torch.randn(4, 6), torch.ones(4, 6)
    _, returns = f.gae(reward, torch.randn(4, 6), mask, 1.0, 1.0)
    close(returns, reward.flip(1).cumsum(1).flip(1), 1e-5)


def test_gae_does_not_look_at_padding():
    reward, value, mask = torch.randn(2, 4), torch.randn(2, 4), torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1]])
    noisy = [torch.where(mask.bool(), x, torch.full_like(x, 1e6)) for x in (reward, value)]
    for clean, dirty in zip(f.gae(reward * mask, value, mask, 1.0, 0.95), f.gae(*noisy, mask, 1.0, 0.95)):
        close(clean, dirty)


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
    ratio, advantage = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5, 1.1]), torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
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
    # V_clip = 0.2, 0.2, 0.9;  max((V-R)^2, (V_clip-R)^2) / 2 = max(1, 3.24)/2, max(0, 3.24)/2, max(1.21, 1.21)/2
    loss = f.value_loss(value, old, returns, 0.2)
    close(loss, [1.62, 1.62, 0.605])
    loss.sum().backward()
    close(value.grad[:2], [0.0, 0.0])           # the clipped branch wins: nothing to learn from this token any more
    close(value.grad[2], -1.1)


def test_token_logprobs_and_entropy_by_hand():
    logits = torch.tensor([[0.25, 0.25, 0.5], [1.0, 1e-38, 1e-38]]).log() + 3.0       # a constant changes nothing
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
    logits, ref = torch.tensor([0.3, -0.2, 0.9, 0.0], requires_grad=True), torch.tensor([0.0, 0.5, 0.1, -0.4]).log_softmax(0)
    logp = logits.log_softmax(0)
    exact = torch.autograd.grad(-0.7 * f.kl_full(logp[None], ref[None]).sum(), logits, retain_graph=True)[0]
    kl_N = (f.kl_k1(logp, ref) if penalty == "k1" else f.kl_full(logp[None], ref[None]).expand(4)).detach()
    reward = f.token_rewards(torch.zeros(4), kl_N[:, None], torch.ones(4, 1), kl_coef=0.7)[:, 0]
    loss = f.policy_loss(logp, logp.detach(), reward, 0.2)
    ascent = -torch.autograd.grad((logp.exp().detach() * loss).sum(), logits)[0]
    close(ascent, exact if expected == "the KL's gradient" else torch.zeros(4))


def test_adaptive_controller_by_hand():
    # target 6, horizon 10000, n 256.  kl 7: error 1/6;  kl 60: clipped to 0.2;  kl 0: clipped to -0.2;  kl 6: 0
    for kl, error in ((7, 1 / 6), (60, 0.2), (0, -0.2), (6, 0.0)):
        assert f.adapted_kl_coef(0.3, kl, 6.0, 10_000, 256) == pytest.approx(0.3 * (1 + error * 256 / 10_000))
    # the shortest horizon the configuration lets through (just above 0.2 n = 51.2) leaves it positive at the worst KL
    assert 0 < f.adapted_kl_coef(0.3, 0.0, 6.0, 51.3, 256) < 0.3
