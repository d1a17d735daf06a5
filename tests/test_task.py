"""The stream of queries, held-out queries, and the check of rewards."""
import random
from collections import Counter

import numpy as np
import pytest
import torch
from toys import bigram, settings

from cory.errors import UserError
from cory.tasks.task import Data
from cory.tasks.task import Task

WORDS = ["abcdef"[i % 6] * (1 + i // 6) for i in range(36)]         # a b c d e f aa bb ... ffffff


class Letters(Task):
    def observer_prompts(self, queries, responses):
        return queries


def letters(**changes) -> Task:
    return Letters(settings(**changes), Data(WORDS[:24], [], WORDS[24:]), bigram())


def test_an_epoch_visits_every_row_once_before_the_next_begins():
    batches = [letters().batch(i).queries for i in range(1, 7)]         # 3 batches of 8 to an epoch
    first, second = sum(batches[:3], []), sum(batches[3:], [])
    assert sorted(first) == sorted(second) == sorted(WORDS[:24]) and first != second


def test_the_stream_depends_on_seed_and_iteration_alone():
    task = letters(method="cory")
    task.batch(3)
    random.seed(5)
    assert letters(method="ppo").batch(7) == task.batch(7) != letters(seed=1).batch(7)


def test_an_iteration_has_one_length_limit_drawn_uniformly_from_the_range_with_both_ends():
    task = letters()
    limits = Counter(task.batch(i).max_new_tokens for i in range(480))              # 40 expected of each
    assert sorted(limits) == [*range(4, 16)] and all(16 < n < 64 for n in limits.values())
    assert letters(min_response_length=0).batch(1).max_new_tokens == 15


@pytest.mark.parametrize("k", [2, 8])
def test_each_query_stands_k_times_in_a_row_and_the_different_ones_follow_the_stream(k):
    several = letters(batch_size=8 * k, responses_per_query=k)
    for iteration in (1, 2, 5):
        queries, limit = letters().batch(iteration)
        assert several.batch(iteration) == ([query for query in queries for _ in range(k)], limit)


def test_held_out_queries_are_of_the_evaluated_split_and_the_same_for_all_seeds():
    queries = letters().held_out_queries
    assert len({*queries}) == 8 and {*queries} < {*WORDS[24:]} and letters(seed=1).held_out_queries == queries
    assert sorted(letters(eval_queries=12).held_out_queries) == sorted(WORDS[24:])      # the whole split


@pytest.mark.parametrize("values, says", [
    ([torch.tensor(0.5), np.float32(-2)], ""), (np.array([0.5, -2.0]), ""),
    (torch.tensor([0.5, -2.0], dtype=torch.bfloat16, requires_grad=True), ""),
    (torch.tensor([[0.5], [-2.0]]), ""), ([1.0], "one number for each of its 2 responses"),
    (0.5, "one number for each"), ([None, 1.0], "one number for each"), (["1", "2"], "one number for each"),
    ([1.0, float("nan")], "reward is nan: of 'cd' must be"), ([1e300, 0.0], "reward is inf: of 'ab'")])
def test_rewards_are_one_finite_number_a_response_or_refused(values, says):
    task = letters()
    task.reward_of = lambda queries, responses: values
    if says:
        with pytest.raises(UserError, match=says):
            task.reward(["a", "c"], ["b", "d"])
    else:
        reward = task.reward(["a", "c"], ["b", "d"])
        assert reward.tolist() == [0.5, -2] and reward.dtype == torch.float32 and not reward.requires_grad
