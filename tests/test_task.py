"""Reading rows and dividing them; the stream of queries; rewards and their terms."""
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


def test_a_byte_order_mark_and_a_blank_last_line_are_skipped(tmp_path):
    file = tmp_path / "train.jsonl"
    row = '{"text": "a\u2028b", "n": "1"}\n'
    file.write_text(f"\ufeff{row}{row} \n", encoding="utf-8")
    text = "a\u2028b"
    for place in (tmp_path, file):
        assert load_columns(str(place), ["text"]) == {"train": [text, text]}
        assert load_columns(str(place), ["n", "text"]) == {"train": [("1", text)] * 2}


def test_a_folder_has_a_jsonl_file_for_each_split(tmp_path):
    for name in ("train", "test", "other"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    rows = load_columns(str(tmp_path), ["text"])
    assert rows == {"train": ["train"], "test": ["test"]}
    (tmp_path / "dev.jsonl").write_text("")
    with pytest.raises(UserError, match="contains dev.jsonl; name it validation.jsonl"):
        load_columns(str(tmp_path), ["text"])


def test_other_formats_are_read_by_datasets(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.csv").write_text(f"text\n{name}\n")
    rows = load_columns(str(tmp_path), ["text"])
    assert rows == {"train": ["train"], "validation": ["validation"]}


def test_a_lone_csv_file_is_trained_on(tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text("text\na\nb\n")
    assert load_columns(str(file), ["text"]) == {"train": ["a", "b"]}


def test_data_without_a_split_to_train_on_are_refused():
    with pytest.raises(UserError, match="no split `train`, only \\['test'\\]"):
        complete_splits({"test": ROWS})


def test_missing_splits_are_a_tenth_of_train_which_does_not_train_on_them():
    """Rows are divided by content: one that stands twice is on one side."""
    splits = {"train": ROWS[:150] * 2}
    data = complete_splits(splits)
    assert len(data.validation) == 15                   # of 150
    assert len(data.test) == 13                         # of the other 135
    held_out = data.validation + data.test
    assert sorted(data.train + held_out * 2) == sorted(splits["train"])
    assert data == complete_splits(splits)


def test_a_given_test_split_is_not_changed():
    data = complete_splits({"train": ROWS[:150], "test": ROWS[150:]})
    assert len(data.validation) == 15
    assert sorted(data.train + data.validation) == sorted(ROWS[:150])
    assert data.test == ROWS[150:]


MISTAKES = {
    "--dataset nowhere": "dataset nowhere cannot be read: ",
    "--dataset train.jsonl": "dataset train.jsonl cannot be read: KeyError: 'text'",
    "--eval_queries 9999": "eval_queries is 9999: there are only 36 rows",
    "--model nowhere": "model nowhere cannot be read: OSError",
    "--reward_model nowhere": "model nowhere cannot be read: OSError",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_common_mistake_ends_in_one_line(flags, small_flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"review": "good"}\n')
    assert MISTAKES[flags] in refusal(small_flags, "r", capsys, *flags.split())


def letters(**changes) -> Task:
    data = Data(WORDS[:24], [], WORDS[24:])
    cfg = settings(**{"min_response_length": 4} | changes)
    return Task(cfg, data, bigram())


class Showing(Task):
    def pioneer_prompts(self, queries):
        return [f"{query}:" for query in queries]

    def observer_prompts(self, queries, responses):
        return [f"{query} {response}:" for query, response in zip(queries, responses, strict=True)]


@pytest.mark.parametrize("transfer, prompts", [(True, ["a b:", "c d:"]), (False, ["a:", "c:"])])
def test_without_knowledge_transfer_an_observer_reads_what_the_pioneer_does(transfer, prompts):
    """Whichever method asks the task for its prompts."""
    data = Data(WORDS[:24], [], WORDS[24:])
    task = Showing(settings(knowledge_transfer=transfer), data, bigram())
    assert task.observer_prompts(["a", "c"], ["b", "d"]) == prompts


def queries_of(task: Task, iterations: tuple) -> list[str]:
    queries = []
    for i in iterations:
        queries += task.batch(i)[0]
    return queries


def test_each_epoch_visits_every_row_once_in_a_new_order():
    """24 rows are 3 batches of 8; of 16, the second batch reaches into the second epoch."""
    first = queries_of(letters(), (1, 2, 3))
    second = queries_of(letters(), (4, 5, 6))
    assert sorted(first) == sorted(WORDS[:24])
    assert sorted(second) == sorted(WORDS[:24])
    assert first != second
    assert queries_of(letters(batch_size=16), (1, 2, 3)) == first + second


def test_a_batch_depends_on_seed_and_iteration_alone():
    queries, limit = letters(method="cory").batch(6)
    random.seed(5)
    assert letters(method="ppo").batch(6) == (queries, limit)
    other_queries, other_limit = letters(seed=1).batch(6)
    assert other_queries != queries
    assert other_limit != limit


def test_an_iteration_has_one_length_limit_drawn_uniformly_from_the_range_with_both_ends():
    task = letters()
    limits = Counter(task.batch(i)[1] for i in range(480))              # 40 expected of each
    assert limits.keys() == {*range(4, 16)}
    assert min(limits.values()) > 16
    assert max(limits.values()) < 64
    assert letters(min_response_length=0).batch(1)[1] == 15


def test_each_query_stands_k_times_in_a_row_and_the_different_ones_follow_the_stream():
    repeating = letters(batch_size=16, responses_per_query=2)
    for iteration in (1, 2, 5):
        queries, limit = letters().batch(iteration)
        assert repeating.batch(iteration) == (np.repeat(queries, 2).tolist(), limit)


def rewarding(rewards) -> Task:
    """A task in which `compute_rewards` returns these."""
    task = letters()
    task.compute_rewards = lambda queries, responses: rewards
    return task


@pytest.mark.parametrize("rewards", [
    [torch.tensor(0.5), np.float32(-2)],
    torch.tensor([[0.5], [-2.0]]),
    torch.tensor([0.5, -2.0], dtype=torch.bfloat16, requires_grad=True)])
def test_rewards_become_one_float32_for_each_response(rewards):
    reward = rewarding(rewards).reward(["a", "c"], ["b", "d"])
    assert reward.tolist() == [0.5, -2]
    assert reward.dtype == torch.float32
    assert not reward.requires_grad


@pytest.mark.parametrize("rewards", [
    [0.5],
    torch.ones(2, 2),
    ([0.5, 1.0], {"praise": [0.5, 1.0, 2.0]})])
def test_another_number_of_rewards_than_of_responses_is_refused(rewards):
    with pytest.raises(UserError, match="compute_rewards gave [134] numbers for 2 responses"):
        rewarding(rewards).reward(["a", "c"], ["b", "d"])


def test_the_terms_of_a_reward_are_means_by_name():
    terms = {"praise": [1.0, 2.0], "length": torch.tensor([0, 5])}
    task = rewarding(([1.0, 4.0], terms))
    reward, means = task.reward_and_terms(["a", "c"], ["b", "d"])
    assert reward.tolist() == [1, 4]
    assert means == {"praise": 1.5, "length": 2.5}


def test_the_terms_of_a_reward_are_means_over_the_rows_of_all_processes(monkeypatch):
    """This process has the first of two rows; the other sends 4."""
    both = SimpleNamespace(
        local_rows=lambda n: slice(0, n // 2),
        all_gather=lambda values: [*values, 4.0])
    monkeypatch.setattr("cory.tasks.task.processes", lambda: both)
    task = rewarding(([1.0], {"praise": [2.0]}))
    _, means = task.reward_and_terms(["a", "c"], ["b", "d"])
    assert means == {"praise": 3.0}
