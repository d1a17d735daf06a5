"""The stream of queries, held-out queries, and the check of rewards."""
import random
from collections import Counter

import numpy as np
import pytest
import torch
from toys import bigram, settings

from cory.config import IMDB_PRESETS, ImdbConfig
from cory.errors import UserError
from cory.flags import parse
from cory.run.run import Run
from cory.tasks.data import Data
from cory.tasks.task import Task

WORDS = ["abcdef"[i % 6] * (1 + i // 6) for i in range(36)]         # a b c d e f aa bb ... ffffff


def letters(**changes) -> Task:
    return Task(settings(**changes), Data(WORDS[:24], [], WORDS[24:]), bigram())


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
    ([1.0], r"shape \(1,\).*for 2 responses"), (torch.ones(2, 1), r"shape \(2, 1\).*for 2 responses"),
    (torch.tensor(1.0), r"shape \(\).*for 2"), ([1.0, float("nan")], r"reward is nan: sample 1 \('cd'\)"),
    ([1e300, 0.0], "reward is inf: sample 0"), (["1.5", 0.0], "is no list of numbers"),
    ([10**400, 0.0], "is no list of numbers"), (None, "is no list of numbers")])
def test_rewards_are_one_finite_number_a_response_or_refused(values, says):
    task = letters()
    task.reward_of = lambda queries, responses: values
    if says:
        with pytest.raises(UserError, match=says):
            task.reward(["a", "c"], ["b", "d"])
    else:
        reward = task.reward(["a", "c"], ["b", "d"])
        assert reward.tolist() == [0.5, -2] and reward.dtype == torch.float32 and not reward.requires_grad


def test_a_nan_reward_in_a_run_changes_no_parameter(small_flags, tmp_path):
    with Run(parse(ImdbConfig, IMDB_PRESETS, [*small_flags, "--run_dir", str(tmp_path / "r")])) as run:
        before = [[p.clone() for p in agent.policy.parameters()] for agent in run.agents]
        calls, score = [], run.task.reward_model
        # the fifth: base, the team before training (2), pioneer, observer
        run.task.reward_model = lambda texts: calls.append(0) or score(texts[:-1]) + [
            float("nan") if len(calls) == 5 else 0.0]
        with pytest.raises(UserError, match=f"reward is nan: sample {run.cfg.batch_size - 1}"):
            run.method.train(run)
        for parameters, agent in zip(before, run.agents):
            assert all(map(torch.equal, parameters, agent.policy.parameters()))
