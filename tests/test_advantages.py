"""Estimators against arithmetic done by hand, except GAE, which the page computes; and custom estimators."""
import pytest
import torch
from toys import agent_of, bigram, close

from cory.errors import UserError
from cory.ppo.advantages import estimator, grpo, reinforce, rloo
from cory.ppo.sampling import collect_rollout
from cory.ppo.update import add_advantages

# returns 3, 6 | 4, 0; 99 on padding
REWARD = torch.tensor([
    [1.0, 2, 99],
    [0, 5, 1],
    [4, 99, 99],
    [-1, 1, 0]])
MASK = (REWARD != 99).float()


def test_reinforce_by_hand():
    # gamma 0.5
    advantage_BT, _ = reinforce(REWARD, MASK, 0.5)
    close(advantage_BT, [
        [2, 2, 0],          # 1 + 0.5*2, 2
        [2.75, 5.5, 1],     # 0 + 0.5*5 + 0.25*1, 5 + 0.5*1, 1
        [4, 0, 0],
        [-0.5, 1, 0]])      # -1 + 0.5*1, 1, 0


PAIRS = torch.tensor([7, 7, 0, 0])
FOUR = torch.tensor([0, 0, 0, 0])


@pytest.mark.parametrize("estimate, group_B, expected_B", [
    # two queries with two responses each: 3 - 6, 6 - 3 | 4 - 0, 0 - 4
    (rloo, PAIRS, [-3, 3, 4, -4]),
    # one query with four: 3 - 10/3, 6 - 7/3, 4 - 9/3, 0 - 13/3
    (rloo, FOUR, [-1 / 3, 11 / 3, 1, -13 / 3]),
    # means 4.5 and 2, population standard deviations 1.5 and 2
    (grpo, PAIRS, [-1, 1, 1, -1]),
    # mean 13/4, variance (9 + 36 + 16 + 0)/4 - (13/4)^2 = 75/16: -1, 11, 3, -13 over sqrt(75)
    (grpo, FOUR, [-0.1154701, 1.2701706, 0.3464102, -1.5011107])])
def test_comparisons_within_groups_by_hand(estimate, group_B, expected_B):
    """Also where a group's rows do not stand together."""
    expected_BT = torch.tensor(expected_B)[:, None] * MASK
    apart = [2, 0, 3, 1]
    for order in ([0, 1, 2, 3], apart):
        group = group_B[order]
        advantage_BT, _ = estimate(REWARD[order], MASK[order], group_B=group)
        close(advantage_BT, expected_BT[order], 1e-5)


@pytest.mark.parametrize("value", [7.0, 1.3, -0.1])
def test_grpo_of_equal_returns_is_0(value):
    """Also where their float mean misses them by an ulp."""
    reward_BT = torch.full((8, 1), value)
    group_B = torch.zeros(8).long()
    advantage_BT, _ = grpo(reward_BT, torch.ones_like(reward_BT), group_B)
    assert advantage_BT.abs().max() == 0


@estimator(critic=False, whiten=False, grouped=True)
def whole_numbers(reward_BT, mask_BT, group_B, **_):
    advantage_BT, _ = rloo(reward_BT, mask_BT, group_B)
    return (3 * advantage_BT).round().long(), None


CUSTOM = "test_advantages:whole_numbers"


def test_a_custom_estimator_has_neither_whitening_nor_a_critic_unless_marked_so():
    agent = agent_of(bigram(), advantage=CUSTOM, responses_per_query=4, init_kl_coef=0.0)
    prompts = ["a"] * 8
    rollout = collect_rollout(agent, prompts, prompts, 3)
    rollout = add_advantages(rollout, torch.arange(8.0), agent)
    # returns 0..3: minus the mean of the others -2, -2/3, 2/3, 2, times 3
    expected_B = torch.tensor([-6.0, -2, 2, 6] * 2)
    close(rollout.advantage_BT, expected_B[:, None] * rollout.mask_BT)
    assert rollout.return_BT is None
    assert agent.critic is None


def test_a_comparison_needs_a_second_response():
    with pytest.raises(UserError, match="add, for example, --responses_per_query"):
        agent_of(bigram(), advantage=CUSTOM)
