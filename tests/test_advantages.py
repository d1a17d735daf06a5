"""Each estimator against arithmetic done by hand; the bandit; and estimators of one's own."""
from dataclasses import replace

import pytest
import torch
from toys import agent_of, bigram, close, generator

from cory.errors import UserError
from cory.ppo import formulas
from cory.ppo.advantages import gae, grpo, reinforce, rloo
from cory.ppo.rollout import collect_rollout
from cory.ppo.update import ppo_update, with_advantages

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


# --- the bandit ---
GROUPS = dict(responses_per_query=4)
FLAGS = [dict(), dict(advantage="reinforce"), dict(advantage="rloo", **GROUPS),
         dict(advantage="grpo", **GROUPS), dict(advantage="grpo", kl_in="loss", **GROUPS),
         dict(lr_schedule="cosine"), dict(lr_schedule="linear")]


@pytest.mark.parametrize("changes", FLAGS, ids=str)
def test_reward_rises_on_a_one_step_bandit(changes):
    agent = agent_of(bigram(torch.zeros(7, 7)), batch_size=64, mini_batch_size=64, init_kl_coef=0.0,
                     iterations=15, **changes)
    rewards = []
    for iteration in range(1, 16):
        agent.set_learning_rate(iteration)
        rollout = collect_rollout(agent, ["a"] * 64, 1)
        score_B = (rollout.response_BT[:, 0] == 2).float()
        rewards.append(score_B.mean().item())
        ppo_update(agent, rollout, score_B)
    assert rewards[0] < 0.35 and rewards[-1] > (0.6 if "lr_schedule" in changes else 0.85), rewards


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_without_reward_and_with_a_large_eta_the_policy_returns_to_the_reference(kl_in):
    agent = agent_of(bigram(torch.zeros(7, 7)), batch_size=64, mini_batch_size=64, init_kl_coef=5.0,
                     kl_penalty="k1", learning_rate=0.03, kl_in=kl_in)
    agent.policy.lm.head.weight.data += torch.randn(7, 7, generator=generator(3))
    kl = []
    for _ in range(25):
        rollout = collect_rollout(agent, ["a"] * 64, 1)
        p = agent.policy.lm.head.weight[:, 0].log_softmax(0)
        kl.append((p.exp() * (p + torch.tensor(7.0).log())).sum().item())
        metrics = ppo_update(agent, rollout, torch.zeros(64))
    assert kl[0] > 0.2 and kl[-1] < 0.1 * kl[0], kl
    assert ("kl_loss" in metrics) == (kl_in == "loss")


# --- one's own ---
def own(reward_BT, mask_BT, group_size, factor=3):      # asks for three, has one of its own; whole numbers
    return (rloo(reward_BT, mask_BT, group_size) * factor).round().long()


def with_critic(reward_BT, value_BT):
    return reward_BT - value_BT


def strange(reward_BT, magic):
    return reward_BT


def one_each(reward_BT):
    return reward_BT.sum(1)


def test_an_estimator_of_ones_own_goes_by_name_and_asks_for_what_it_needs():
    agent = agent_of(bigram(), advantage="test_advantages:own", responses_per_query=4, init_kl_coef=0.0)
    rollout = with_advantages(collect_rollout(agent, ["a"] * 8, 3), torch.arange(8.0), agent)
    # returns 0..3: minus the mean of the others -2, -2/3, 2/3, 2, times 3
    advantage_BT = torch.tensor([-6.0, -2, 2, 6] * 2)[:, None] * rollout.mask_BT
    close(rollout.advantage_BT, advantage_BT)               # a comparison within groups is not whitened
    assert rollout.return_BT is None and agent.policy.value_head is None
    agent = agent_of(bigram(), advantage="test_advantages:with_critic", init_kl_coef=0.0)
    assert agent.policy.value_head is not None
    rollout = replace(rollout, value_BT=torch.zeros_like(rollout.mask_BT))
    rollout = with_advantages(rollout, torch.arange(8.0), agent)
    close(rollout.advantage_BT, formulas.whiten(rollout.return_BT, rollout.mask_BT))


@pytest.mark.parametrize("name, k, says", [
    ("strange", 4, "asks for magic; it can have gamma, group_size, lam"),
    ("own", 1, "add --responses_per_query"),
    ("one_each", 1, r"one_each is \(8,\): must be a tensor of shape \(8, ")])
def test_estimators_that_cannot_be_are_refused(name, k, says):
    with pytest.raises(UserError, match=says):
        agent = agent_of(bigram(), advantage=f"test_advantages:{name}", responses_per_query=k)
        ppo_update(agent, collect_rollout(agent, ["a"] * 8, 3), torch.zeros(8))
