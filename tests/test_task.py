"""Reading rows and dividing them; the stream of queries, and rewards."""
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import bigram, refusal, settings

from cory.errors import UserError
from cory.tasks.data import Data, complete_splits, load_columns
from cory.tasks.task import Task

ROWS = [f"{i} is the number of a film" for i in range(200)]
WORDS = ["abcdef"[i % 6] * (1 + i // 6) for i in range(36)]         # a b c d e f aa bb ... ffffff
GOOD = '{"text": "a good film of one man"}\n'


def test_a_blank_last_line_and_a_byte_order_mark_are_skipped(tmp_path):
    file, row = tmp_path / "train.jsonl", '{"text": "a\u2028b", "n": "1"}\n'
    file.write_text(f"\ufeff{row}{row} \n", encoding="utf-8")
    for place in (tmp_path, file):
        assert load_columns(str(place), ["text"]) == {"train": ["a\u2028b"] * 2}
        assert load_columns(str(place), ["n", "text"]) == {"train": [("1", "a\u2028b")] * 2}


def test_of_a_folder_the_splits_are_read_and_other_formats_by_datasets(tmp_path):
    for name in ("train", "test", "other"):
        (tmp_path / f"{name}.jsonl").write_text(GOOD)
    assert load_columns(str(tmp_path), ["text"]).keys() == {"train", "test"}
    (tmp_path / "csv").mkdir()
    for name in ("train", "validation"):
        (tmp_path / "csv" / f"{name}.csv").write_text(f"text\n{name}\n")
    found = load_columns(str(tmp_path / "csv"), ["text"])
    assert found == {"train": ["train"], "validation": ["validation"]}


@pytest.mark.parametrize("given", [{}, {"test": ROWS[150:]}])
def test_what_is_missing_is_a_tenth_of_train_which_does_not_train_on_it(given):
    """Rows are divided by content: one that stands twice is on one side."""
    splits = {"train": ROWS[:150] * 2, **given}
    data = complete_splits(splits)
    assert data == complete_splits(splits)
    drawn = data.validation if given else data.validation + data.test
    assert len(data.validation) == 15 and len(drawn) == (15 if given else 15 + 13)      # of 150, then of 135
    assert sorted(data.train + drawn * 2) == sorted(splits["train"]) and given in ({}, {"test": data.test})


@pytest.mark.parametrize("flags, says", [
    ("--dataset nowhere", "dataset nowhere cannot be read: "),
    ("--dataset train.jsonl", "dataset train.jsonl cannot be read: KeyError: 'text'"),
    ("--eval_queries 9999", "eval_queries is 9999: there are only 36 rows"),
    ("--model nowhere", "model nowhere cannot be read: OSError"),
    ("--reward_model nowhere", "model nowhere cannot be read: OSError")])
def test_an_everyday_slip_is_one_line(flags, says, small_flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"review": "good"}\n')
    assert says in refusal(small_flags, "r", capsys, *flags.split())


class Letters(Task):
    def observer_prompts(self, queries, responses):
        return queries


def letters(**changes) -> Task:
    return Letters(settings(**changes), Data(WORDS[:24], [], WORDS[24:]), bigram())


def test_the_stream_depends_on_seed_and_iteration_alone_and_an_epoch_visits_every_row_once():
    task = letters(method="cory")
    batches = [task.batch(i)[0] for i in range(1, 7)]              # 3 batches of 8 to an epoch
    first, second = sum(batches[:3], []), sum(batches[3:], [])
    assert sorted(first) == sorted(second) == sorted(WORDS[:24]) and first != second
    assert sum((letters(batch_size=16).batch(i)[0] for i in (1, 2, 3)), []) == first + second   # across them
    random.seed(5)
    assert letters(method="ppo").batch(6) == task.batch(6) != letters(seed=1).batch(6)


def test_an_iteration_has_one_length_limit_drawn_uniformly_from_the_range_with_both_ends():
    task = letters()
    limits = Counter(task.batch(i)[1] for i in range(480))              # 40 expected of each
    assert sorted(limits) == [*range(4, 16)] and all(16 < n < 64 for n in limits.values())
    assert letters(min_response_length=0).batch(1)[1] == 15


def test_each_query_stands_k_times_in_a_row_and_the_different_ones_follow_the_stream():
    several = letters(batch_size=16, responses_per_query=2)
    for iteration in (1, 2, 5):
        queries, limit = letters().batch(iteration)
        assert several.batch(iteration) == ([query for query in queries for _ in range(2)], limit)


@pytest.mark.parametrize("values", [
    [torch.tensor(0.5), np.float32(-2)], torch.tensor([[0.5], [-2.0]]),
    torch.tensor([0.5, -2.0], dtype=torch.bfloat16, requires_grad=True)])
def test_rewards_are_one_number_a_response(values):
    task = letters()
    task.compute_rewards = lambda queries, responses: values
    reward = task.reward(["a", "c"], ["b", "d"])
    assert reward.tolist() == [0.5, -2] and reward.dtype == torch.float32 and not reward.requires_grad


@pytest.mark.parametrize("answer", [[0.5], torch.ones(2, 2), ([0.5, 1.0], {"praise": [0.5, 1.0, 2.0]})])
def test_another_number_of_rewards_than_of_responses_is_refused(answer):
    task = letters()
    task.compute_rewards = lambda queries, responses: answer
    with pytest.raises(UserError, match="compute_rewards gave [134] numbers for 2 responses"):
        task.reward(["a", "c"], ["b", "d"])


def test_the_parts_of_a_reward_are_means_by_name(monkeypatch):
    """Over the rows of all processes."""
    task = letters()
    terms = {"praise": [1.0, 2.0], "length": torch.tensor([0, 3])}
    task.compute_rewards = lambda queries, responses: ([1.0, 4.0], terms)
    reward, parts = task.reward_and_terms(["a", "c"], ["b", "d"])
    assert reward.tolist() == [1, 4] and parts == {"praise": 1.5, "length": 1.5}
    assert torch.equal(task.reward(["a", "c"], ["b", "d"]), reward)
    two = SimpleNamespace(local_rows=lambda n: slice(0, n // 2), gather=lambda mine: [*mine, 4.0])
    monkeypatch.setattr("cory.tasks.task.processes", lambda: two)
    task.compute_rewards = lambda queries, responses: ([1.0], {"praise": [2.0]})
    assert task.reward_and_terms(["a", "c"], ["b", "d"])[1] == {"praise": 3.0}
