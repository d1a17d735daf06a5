"""Reading rows and dividing them; the stream of queries, and the check of rewards."""
import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import bigram, error_line, settings

import train_imdb
from cory.errors import UserError
from cory.tasks.data import Data, divided, load_columns
from cory.tasks.task import Task

ROWS = [f"{i} is the number of a film" for i in range(200)]
WORDS = ["abcdef"[i % 6] * (1 + i // 6) for i in range(36)]         # a b c d e f aa bb ... ffffff
SPLITS = ["train.jsonl", "validation.jsonl", "test.jsonl"]
GOOD = '{"text": "a good film of one man"}\n'


def test_a_blank_last_line_and_a_byte_order_mark_are_skipped(tmp_path):
    file, row = tmp_path / "train.jsonl", '{"text": "a\u2028b", "n": "1"}\n'
    file.write_text(f"\ufeff{row}{row} \n", encoding="utf-8")
    for place in (tmp_path, file):
        assert load_columns(str(place), ["text"]) == {"train": ["a\u2028b"] * 2}
        assert load_columns(str(place), ["n", "text"]) == {"train": [("1", "a\u2028b")] * 2}


def write_names(folder: Path, *names: str) -> str:
    """Data files with one row each, which is the name of the file."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(json.dumps({"text": name}) if "jsonl" in name else f"text\n{name}\n")
    return str(folder)


@pytest.mark.parametrize("files, found, rest", [
    (["train.jsonl", "val.jsonl", "test.csv"],
     {"train": ["train.jsonl"], "validation": ["val.jsonl"]}, "test.csv"),
    (["Train-00001.jsonl", "train_2.jsonl", "dev.jsonl", "test_b.jsonl"],
     {"train": ["Train-00001.jsonl", "train_2.jsonl"], "validation": ["dev.jsonl"]}, "test_b.jsonl"),
    (["train.csv", "valid.csv", "held-out.csv"],
     {"train": ["train.csv"], "validation": ["valid.csv"]}, "held-out.csv"),
    (["train.jsonl", "validation.jsonl", "test.jsonl", "README.md", ".git.csv", "LICENSE"],
     {"train": ["train.jsonl"], "validation": ["validation.jsonl"], "test": ["test.jsonl"]}, "")])
def test_files_are_read_by_their_names_and_the_rest_is_named(files, found, rest, tmp_path, capsys):
    place = write_names(tmp_path, *files)
    assert load_columns(place, ["text"]) == found
    assert capsys.readouterr().out == (f"not read of {place}: {rest}\n" if rest else "")


def test_no_row_is_read_from_another_folder_that_a_path_matches_as_a_pattern(tmp_path):
    write_names(tmp_path / "imdb1", "train.csv", "train.jsonl")
    own = write_names(tmp_path / "imdb[1]", "train_2.jsonl")
    assert load_columns(own, ["text"]) == {"train": ["train_2.jsonl"]}
    for name in ("imd[ab]", "imdb?", "*"):
        with pytest.raises(UserError, match="takes for a pattern"):
            load_columns(write_names(tmp_path / name, "train.csv"), ["text"])


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
    said = f"{train} rows for training, {validation} for validation, {test} for testing\n"
    assert capsys.readouterr().out == 2 * said
    drawn = data.validation if given else data.validation + data.test
    assert len(data.validation) == 15 and len(drawn) == (15 if given else 15 + 13)      # of 150, then of 135
    assert sorted(data.train + drawn * 2) == sorted(splits["train"]) and given in ({}, {"test": data.test})
    assert divided(settings(eval_queries=12), splits) == data               # however many are asked


def test_held_out_rows_that_are_trained_on_are_counted_in_one_line(capsys):
    splits = {"train": ROWS[:100], "validation": ROWS[:8], "test": [*ROWS[98:118], ROWS[0], ROWS[0]]}
    assert divided(settings(), splits)._asdict() == splits                  # used whole, as they are
    divided(settings(eval_split="validation"), splits)
    assert capsys.readouterr().out.splitlines()[1::2] == [
        f"{found} rows also occur in the training data" for found in ("4 of 22 test", "8 of 8 validation")]


@pytest.mark.parametrize("files, says", [
    ({"train.jsonl": GOOD * 2 + '{"text": "a'}, "cannot be read .*: line 3 column"),
    ({"train.jsonl": GOOD + '{"review": "a", "n": 1}\n'}, "row 2': needs texts in its text; it is {'review'"),
    ({"train.jsonl": GOOD + '{"text": " "}\n'}, "row 2': "),
    ({"train.csv": "text\n1\n2\n"}, "row 1': "),
    ({"Train.csv": "text\na\n", "Test.csv": "text\nb\n"}, "Test.csv would be read as train"),
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


def test_the_hub_is_asked_for_names_of_the_hub_alone(tmp_path, monkeypatch, capsys):
    """`datasets` takes the folder `data` of another project from its cache, where none is here."""
    (tmp_path / "build").mkdir()
    monkeypatch.chdir(tmp_path)
    on_hub = [(split, [{"text": split}]) for split in ("train", "val", "unsupervised")]
    monkeypatch.setattr("cory.tasks.data.read_with_datasets", lambda name: (on_hub, set()))
    for name in ("data", "build/data", "./data", "a/b/data", "bundled:data", "bundled:imdb/data"):
        with pytest.raises(UserError, match=f"dataset is '{name}': is not a file or folder here"):
            load_columns(name, ["text"])
    assert load_columns("owner/data", ["text"]) == {"train": ["train"], "validation": ["val"]}
    assert capsys.readouterr().out == "not read of owner/data: unsupervised\n"
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


def test_the_parts_of_a_reward_are_means_by_name():
    task = letters()
    terms = {"praise": [1.0, 2.0], "length": torch.tensor([0, 3])}
    task.reward_of = lambda queries, responses: ([1.0, 4.0], terms)
    reward, parts = task.judge(["a", "c"], ["b", "d"])
    assert reward.tolist() == [1, 4] and parts == {"praise": 1.5, "length": 1.5}
    assert torch.equal(task.reward(["a", "c"], ["b", "d"]), reward)
