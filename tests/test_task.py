"""Reading rows and dividing them; the stream of queries, and the check of rewards."""
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
from toys import bigram, error_line, settings

import train_imdb
from cory.errors import UserError
from cory.tasks.task import Data, Task, divided, load_columns

ROWS = [f"{i} is the number of a film" for i in range(200)]
WORDS = ["abcdef"[i % 6] * (1 + i // 6) for i in range(36)]         # a b c d e f aa bb ... ffffff
SPLITS = ["train.jsonl", "validation.jsonl", "test.jsonl"]
GOOD = '{"text": "a good film of one man"}\n'


def test_a_blank_last_line_and_other_files_are_skipped(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a\u2028b", "n": "1"}\n' * 2 + " \n")
    (tmp_path / "example_model_solutions.jsonl").write_text('{"question": "a"}\n')
    for place in (tmp_path, tmp_path / "train.jsonl"):
        assert load_columns(str(place), ["text"]) == {"train": ["a\u2028b"] * 2}
        assert load_columns(str(place), ["n", "text"]) == {"train": [("1", "a\u2028b")] * 2}


def test_of_the_hubs_layout_the_subset_is_read(tmp_path):
    for subset in ("main", "socratic"):
        (tmp_path / subset).mkdir()
        (tmp_path / subset / "train.csv").write_text(f"text,n\n{subset},1\n")
    assert load_columns(str(tmp_path), ["text"]) == {"train": ["main"]}


@pytest.mark.parametrize("given", [{}, {"test": ROWS[150:]}])
def test_what_is_missing_is_a_tenth_of_train_which_does_not_train_on_it(given, capsys):
    """Rows are divided by content: one that stands twice is on one side."""
    splits = {"train": ROWS[:150] * 2, **given}
    data = divided(settings(), splits)
    assert data == divided(settings(seed=1), splits)
    train, validation, test = map(len, data)
    said = f"{train} rows to train on, {validation} of validation, {test} of test\n"
    assert capsys.readouterr().out == 2 * said
    drawn = data.validation if given else data.validation + data.test
    assert len(data.validation) == 15 and len(drawn) == (15 if given else 15 + 13)      # of 150, then of 135
    assert sorted(data.train + drawn * 2) == sorted(splits["train"]) and given in ({}, {"test": data.test})
    assert divided(settings(eval_queries=12), splits) == data               # however many are asked


def test_held_out_rows_that_are_trained_on_are_counted_in_one_line(capsys):
    splits = {"train": ROWS[:100], "validation": ROWS[:8], "test": [*ROWS[98:118], ROWS[0], ROWS[0]]}
    assert divided(settings(), splits)._asdict() == splits                  # used whole, as they are
    assert capsys.readouterr().out.splitlines()[1:] == ["4 of 22 test rows also occur in the training data"]


@pytest.mark.parametrize("files, says", [
    ({"train.jsonl": GOOD * 2 + '{"text": "a'}, "cannot be read .*: line 3 column"),
    ({"train.jsonl": GOOD + '{"review": "a", "n": 1}\n'}, "row 2': needs texts in its text; it is {'review'"),
    ({"train.jsonl": GOOD + '{"text": " "}\n'}, "row 2': "),
    ({"train.csv": "text\n1\n2\n"}, "row 1': "),
    ({"train.jsonl": GOOD + '["text"]\n'}, "row 2': "),
    ({"train.jsonl": GOOD + '{"text": "a \\ud800 b"}\n'}, r"row 2': .*a \\ud800 b"),
    ({"train.jsonl": GOOD * 9}, "eval_queries is 4: .* leaves only 0 rows"),
    ({"test.jsonl": GOOD * 20}, "no split named train, only test"),
    (dict(zip(SPLITS, (GOOD, GOOD * 20, GOOD * 20))), "batch_size is 4: .* only 1 rows")])
def test_a_slip_is_one_line_before_any_model_is_loaded(files, says, small_flags, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for name, content in files.items():
        (tmp_path / "data" / name).write_text(content)
    flags = ["--dataset", tmp_path / "data", "--run_dir", tmp_path / "run", "--model", "nobody/nothing"]
    line = error_line(train_imdb.main, [*small_flags, *flags], capsys)
    assert re.search(says, line) and not (tmp_path / "run").exists(), line


def test_a_name_without_an_owner_is_never_taken_from_a_cache(tmp_path, monkeypatch):
    """`datasets` takes the folder `data` of another project from its cache, where none is here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cory.tasks.task.read_with_datasets", lambda name: {"train": [{"text": "another"}]})
    with pytest.raises(UserError, match="dataset is 'data': is not a file or folder here"):
        load_columns("data", ["text"])
    assert load_columns("owner/data", ["text"]) == {"train": ["another"]}
    assert len(load_columns("bundled:imdb/openings", ["text"])["train"]) > 1000


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


@pytest.mark.parametrize("values, says", [
    ([torch.tensor(0.5), np.float32(-2)], ""),
    (torch.tensor([0.5, -2.0], dtype=torch.bfloat16, requires_grad=True), ""),
    (torch.tensor([[0.5], [-2.0]]), ""),
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
