"""Estimators against arithmetic done by hand, but GAE, which the page computes; and those of one's own."""
import pytest
import torch
from toys import agent_of, bigram, close

from cory.errors import UserError
from cory.ppo.advantages import estimator, grpo, reinforce, rloo
from cory.ppo.sampling import collect_rollout
from cory.ppo.update import add_advantages

REWARD = torch.tensor([[1.0, 2.0, 99.0], [0.0, 5.0, 1.0], [4.0, 99.0, 99.0], [-1.0, 1.0, 0.0]])
MASK = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])      # returns 3, 6 | 4, 0


def test_reinforce_by_hand():
    # gamma 0.5. row 0: 1 + 0.5*2, 2;  row 1: 0 + 0.5*5 + 0.25*1, 5 + 0.5*1, 1;  row 3: -1 + 0.5*1, 1, 0
    close(reinforce(REWARD, MASK, 0.5)[0], [[2, 2, 0], [2.75, 5.5, 1], [4, 0, 0], [-0.5, 1, 0]])


@pytest.mark.parametrize("estimate, of_two, of_four", [
    # two queries with two responses each: 3 - 6, 6 - 3 | 4 - 0, 0 - 4
    # one query with four, returns 3, 6, 4, 0: 3 - 10/3, 6 - 7/3, 4 - 9/3, 0 - 13/3
    (rloo, [-3, 3, 4, -4], [-1 / 3, 11 / 3, 1, -13 / 3]),
    # means 4.5 and 2, or 13/4; population standard deviations 1.5 and 2; variance
    # (9 + 36 + 16 + 0)/4 - (13/4)^2 = 4.6875
    (grpo, [-1, 1, 1, -1], [x / 4.6875**0.5 for x in (-0.25, 2.75, 0.75, -3.25)])])
def test_comparisons_within_groups_by_hand(estimate, of_two, of_four):
    for group, expected in (([7, 7, 0, 0], of_two), ([0] * 4, of_four)):
        advantage_BT, _ = estimate(reward_BT=REWARD, mask_BT=MASK, group_B=torch.tensor(group))
        close(advantage_BT, torch.tensor(expected)[:, None] * MASK, 1e-5)
    # rows apart, and groups of unlike size, are compared as their numbers say
    order = torch.tensor([2, 0, 3, 1])
    of_rows = torch.tensor(of_two)[order]
    group_B = torch.tensor([0, 7, 0, 7])
    advantage_BT, _ = estimate(reward_BT=REWARD[order], mask_BT=MASK[order], group_B=group_B)
    close(advantage_BT, of_rows[:, None] * MASK[order], 1e-5)


def test_grpo_of_equal_returns_is_0():
    """Also where their float mean misses them by an ulp."""
    for value, k in ((7.0, 4), (1.3, 8), (-0.1, 8)):
        advantage_BT, _ = grpo(torch.full((k, 1), value), torch.ones(k, 1), torch.zeros(k).long())
        assert advantage_BT.abs().max() == 0


@estimator(critic=False, whiten=False, grouped=True)
def own(reward_BT, mask_BT, group_B, **_):                  # whole numbers
    advantage_BT, _ = rloo(reward_BT, mask_BT, group_B)
    return (3 * advantage_BT).round().long(), None


def test_an_estimator_of_ones_own_is_neither_whitened_nor_has_a_critic_unless_it_says_so():
    agent = agent_of(bigram(), advantage="test_advantages:own", responses_per_query=4, init_kl_coef=0.0)
    rollout = add_advantages(collect_rollout(agent, ["a"] * 8, ["a"] * 8, 3), torch.arange(8.0), agent)
    # returns 0..3: minus the mean of the others -2, -2/3, 2/3, 2, times 3
    close(rollout.advantage_BT, torch.tensor([-6.0, -2, 2, 6] * 2)[:, None] * rollout.mask_BT)
    assert rollout.return_BT is None and agent.critic is None


def test_a_comparison_needs_a_second_response():
    with pytest.raises(UserError, match="add, for example, --responses_per_query"):
        agent_of(bigram(), advantage="test_advantages:own")
