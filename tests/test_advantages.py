"""Each estimator against arithmetic done by hand; the bandit; and what an estimator of one's own may ask
for.
"""
import json

import pytest
import torch
from toys import bigram, settings

import train_imdb
from cory.config import ADVANTAGES
from cory.errors import UserError
from cory.ppo import formulas
from cory.ppo.advantages import estimator, gae, grpo, needs_critic, reinforce, rloo
from cory.ppo.agent import Agent
from cory.ppo.rollout import collect_rollout
from cory.ppo.update import make_experience, ppo_update


def close(a, b, tolerance=1e-6):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=torch.float32), atol=tolerance, rtol=tolerance)


REWARD = torch.tensor([[1.0, 2.0, 99.0], [0.0, 5.0, 1.0], [4.0, 99.0, 99.0], [-1.0, 1.0, 0.0]])
MASK = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])      # returns 3, 6 | 4, 0


def test_gae_by_hand_on_ragged_rows():
    reward = torch.tensor([[1.0, 2.0, 3.0], [1.0, 4.0, 99.0]])
    value = torch.tensor([[0.5, 1.0, 1.5], [0.5, 2.0, 77.0]])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    # gamma 0.9, lam 0.5, so gamma lam = 0.45
    # row 0: d2 = 3 - 1.5 = 1.5;  d1 = 2 + 0.9*1.5 - 1 = 2.35;  d0 = 1 + 0.9*1 - 0.5 = 1.4
    #        A2 = 1.5;  A1 = 2.35 + 0.45*1.5 = 3.025;  A0 = 1.4 + 0.45*3.025 = 2.76125
    # row 1: d1 = 4 - 2 = 2 (the episode ends: V of padding is not looked at);  d0 = 1 + 0.9*2 - 0.5 = 2.3
    #        A0 = 2.3 + 0.45*2 = 3.2
    close(gae(reward, value, mask, gamma=0.9, lam=0.5), [[2.76125, 3.025, 1.5], [3.2, 2.0, 0.0]])


def test_gae_with_gamma_and_lambda_one_is_reward_to_go():
    reward, value, mask = torch.randn(4, 6), torch.randn(4, 6), torch.ones(4, 6)
    close(gae(reward, value, mask, 1.0, 1.0) + value, reward.flip(1).cumsum(1).flip(1), 1e-5)


def test_gae_does_not_look_at_padding():
    reward, value = torch.randn(2, 4), torch.randn(2, 4)
    mask = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1]])
    noisy = [torch.where(mask.bool(), x, torch.full_like(x, 1e6)) for x in (reward, value)]
    close(gae(reward * mask, value, mask, 1.0, 0.95), gae(*noisy, mask, 1.0, 0.95))


def test_reinforce_by_hand():
    # gamma 0.5. row 0: 1 + 0.5*2, 2;  row 1: 0 + 0.5*5 + 0.25*1, 5 + 0.5*1, 1;  row 3: -1 + 0.5*1, 1, 0
    close(reinforce(REWARD, MASK, 0.5), [[2, 2, 0], [2.75, 5.5, 1], [4, 0, 0], [-0.5, 1, 0]])


def test_rloo_by_hand():
    # two queries with two responses each: 3 - 6, 6 - 3 | 4 - 0, 0 - 4
    close(rloo(REWARD, MASK, 2), [[-3, -3, 0], [3, 3, 3], [4, 0, 0], [-4, -4, -4]])
    # one query with four, returns 3, 6, 4, 0: 3 - 10/3, 6 - 7/3, 4 - 9/3, 0 - 13/3
    close(rloo(REWARD, MASK, 4)[:, 0], [-1 / 3, 11 / 3, 1, -13 / 3])


def test_grpo_by_hand():
    # two queries: means 4.5 and 2, population standard deviations 1.5 and 2
    close(grpo(REWARD, MASK, 2), [[-1, -1, 0], [1, 1, 1], [1, 0, 0], [-1, -1, -1]], 1e-5)
    # one query: mean 13/4, variance (9 + 36 + 16 + 0)/4 - (13/4)^2 = 4.6875
    close(grpo(REWARD, MASK, 4)[:, 0], torch.tensor([-0.25, 2.75, 0.75, -3.25]) / 4.6875**0.5, 1e-5)
    # equal returns: nothing to learn, also where their float mean misses them by an ulp
    for value, k in ((7.0, 4), (1.3, 8), (-0.1, 8)):
        assert grpo(torch.full((k, 1), value), torch.ones(k, 1), k).abs().max() == 0


def test_without_the_std_grpo_is_rloo_up_to_a_factor():
    reward, mask = torch.randn(12, 5), torch.ones(12, 5)
    std = reward.sum(1).view(-1, 4).std(1, correction=0).repeat_interleave(4)[:, None]
    close(grpo(reward, mask, 4) * (std + 1e-6), rloo(reward, mask, 4) * 3 / 4, 1e-4)


def test_a_baseline_of_the_others_keeps_the_expected_gradient():
    """E[(R_i - mean of the others) grad log pi(a_i)] is the policy gradient: all 7^2 pairs of a bandit
    with k = 2.
    """
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    reward = torch.arange(7.0)
    p = logits.softmax(0)
    exact, = torch.autograd.grad((p * reward).sum(), logits)
    p, logp, gradient = p.detach(), logits.log_softmax(0), torch.zeros(7)
    for a in range(7):
        of_a, = torch.autograd.grad(logp[a], logits, retain_graph=True)
        for b in range(7):
            advantage = rloo(reward[[a, b]][:, None], torch.ones(2, 1), 2)[0, 0]
            gradient += p[a] * p[b] * advantage * of_a
    close(gradient, exact, 1e-5)


# --- the bandit ---
FLAGS = [dict(), dict(advantage="reinforce"), dict(advantage="rloo", responses_per_query=4),
         dict(advantage="grpo", responses_per_query=4),
         dict(advantage="grpo", responses_per_query=4, kl_in="loss"), dict(whiten_advantages="false"),
         dict(ent_coef=0.01), dict(lr_schedule="cosine", warmup_iterations=3), dict(lr_schedule="linear")]


@pytest.mark.parametrize("changes", FLAGS, ids=str)
def test_reward_rises_on_a_one_step_bandit(changes):
    model = bigram(torch.zeros(7, 7))
    cfg = settings(batch_size=64, mini_batch_size=64, init_kl_coef=0.0, learning_rate=0.05, iterations=15,
                   **changes)
    agent, rewards = Agent("llm1", model, cfg, 0), []
    for iteration in range(1, 16):
        rollout = collect_rollout(agent, model, ["a"] * 64, 1, cfg)
        score = (rollout.response_BT[:, 0] == 2).float()
        rewards.append(score.mean().item())
        ppo_update(agent, rollout, score, iteration, cfg)
    assert rewards[0] < 0.35 and rewards[-1] > (0.6 if "lr_schedule" in changes else 0.85), rewards


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_without_reward_and_with_a_large_eta_the_policy_returns_to_the_reference(kl_in):
    model = bigram(torch.zeros(7, 7))
    cfg = settings(batch_size=64, mini_batch_size=64, init_kl_coef=5.0, kl_penalty="k1", learning_rate=0.03,
                   kl_in=kl_in, iterations=25)
    agent = Agent("llm1", model, cfg, 0)
    agent.policy.lm.head.weight.data += torch.randn(7, 7, generator=torch.Generator().manual_seed(3))
    kl = []
    for iteration in range(1, 26):
        rollout = collect_rollout(agent, model, ["a"] * 64, 1, cfg)
        p = agent.policy.lm.head.weight[:, 0].log_softmax(0)
        kl.append((p.exp() * (p + torch.tensor(7.0).log())).sum().item())
        metrics = ppo_update(agent, rollout, torch.zeros(64), iteration, cfg)
    assert kl[0] > 0.2 and kl[-1] < 0.1 * kl[0], kl
    assert ("kl_loss" in metrics) == (kl_in == "loss")


def test_the_mean_gradient_of_k3_is_that_of_the_reversed_kl():
    logits = torch.randn(7, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ref = torch.randn(7, generator=torch.Generator().manual_seed(2)).log_softmax(0)
    logp, gradient = logits.log_softmax(0), torch.zeros(7)
    reversed_kl, = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), logits, retain_graph=True)
    for a in range(7):
        of_a, = torch.autograd.grad(formulas.kl_k3(logp[a:a + 1], ref[a:a + 1]).sum(), logits,
                                    retain_graph=True)
        gradient += logp[a].exp().detach() * of_a
    close(gradient, reversed_kl, 1e-5)


# --- the critic ---
def test_no_critic_exists_where_none_is_used(small_flags, tmp_path):
    flags = ["--advantage", "rloo", "--responses_per_query", "4", "--iterations", "2", "--run_dir",
             str(tmp_path / "r")]
    train_imdb.main([*small_flags, *flags])
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").open()]
    assert not any("value" in key or "explained" in key for row in rows for key in row)
    assert not list((tmp_path / "r").rglob("value_head*"))
    from safetensors import safe_open
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        assert not any("value_head" in name for name in safe_open(path, "pt").keys())
    samples = [json.loads(line) for line in (tmp_path / "r" / "samples.jsonl").open()]
    of_first = [row["query"] for row in samples if row["iteration"] == 1]
    assert len(of_first) == len(set(of_first)) == 2                     # 8 responses, 4 to a query
    for name in ADVANTAGES:
        agent = Agent("llm1", bigram(), settings(advantage=name, responses_per_query=4), 0)
        assert (agent.policy.value_head is not None) == (name == "gae") == needs_critic(estimator(name, 4))
        assert any("value_head" in n for n in agent.policy.trained()) == (name == "gae")


# --- one's own ---
def half(reward_BT, mask_BT, group_size):
    return rloo(reward_BT, mask_BT, group_size) / 2


def with_critic(reward_BT, value_BT):
    return reward_BT - value_BT


def strange(reward_BT, magic):
    return reward_BT


def test_an_estimator_of_ones_own_goes_by_name_and_asks_for_what_it_needs():
    cfg = settings(advantage="test_advantages:half", responses_per_query=4, whiten_advantages="false")
    model = bigram()
    agent = Agent("llm1", model, cfg, 0)
    assert agent.policy.value_head is None
    rollout = collect_rollout(agent, model, ["a"] * 8, 3, cfg)
    experience = make_experience(rollout, torch.arange(8.0), 0.0, cfg)
    # returns 0..3: minus the mean of the others -2, -2/3, 2/3, 2, halved
    close(experience.advantage_BT[:4, 0], [-1, -1 / 3, 1 / 3, 1])
    cfg = settings(advantage="test_advantages:with_critic")
    assert Agent("llm1", model, cfg, 0).policy.value_head is not None


@pytest.mark.parametrize("name, k, says", [
    ("test_advantages:strange", 4, "asks for magic; it can have gamma, group_size, lam"),
    ("test_advantages:half", 1, "add --responses_per_query"),
    ("test_advantages:hlaf", 1, "did you mean half"),
    ("no_such_module:f", 1, "there is no module no_such_module")])
def test_estimators_that_cannot_be_are_refused(name, k, says):
    with pytest.raises(UserError, match=says):
        estimator(name, k)
