"""Queries, prompts, rewards and the reading of data."""
import json
import random
import shutil

import pytest
import torch
import train_imdb
from toys import settings

from cory.config import IMDB_PRESETS, ImdbConfig, parse
from cory.tasks.data import load_columns
from cory.errors import UserError
from cory.tasks.imdb import Imdb, SentimentReward
from cory.ppo.model import load_language_model


def imdb(small, reward=None, **changes) -> Imdb:
    cfg = settings(**{**dict(model=str(small / "lm"), dataset=str(small / "openings"), reward_model=str(small / "classifier")), **changes})
    return Imdb(cfg, Imdb.load_data(cfg), load_language_model(cfg.model), reward)


def test_prompts_are_the_papers(small):
    task = imdb(small)
    assert task.pioneer_prompts(["This film"]) == ["This film"]
    assert task.observer_prompts(["This film"], [" was bad."]) == ['I can make this sentence "This film was bad." more positive: This film']


def test_queries_have_2_to_8_tokens_both_included_and_begin_the_review(small):
    task = imdb(small)
    lengths = {len(task.tokenizer(q)["input_ids"]) for i in range(1, 41) for q in task.batch(i)[0]}
    assert lengths == set(range(2, 9))
    assert all(any(text.startswith(q) for text in task.train) for q in task.batch(3)[0])


def test_response_lengths_are_one_per_iteration_uniform_in_4_to_15(small):
    task = imdb(small)
    lengths = [task.batch(i)[1] for i in range(1, 601)]
    assert set(lengths) == set(range(4, 16)) and all(20 < lengths.count(n) < 90 for n in range(4, 16))      # 50 expected each


def test_stream_depends_on_seed_and_iteration_alone(small):
    one, two, other = imdb(small, method="ppo"), imdb(small, method="cory"), imdb(small, seed=1)
    random.seed(5)
    later = two.batch(7)
    assert one.batch(7) == later != other.batch(7) and one.batch(7) != one.batch(8)
    assert one.held_out_queries == other.held_out_queries               # one yardstick for all seeds


def test_an_epoch_visits_every_row_once_before_the_next_begins(small):
    task = imdb(small, min_query_length=8)                              # 40 rows: 5 batches of 8
    for first in (1, 6):
        seen = [task.train[i] for i in range(40)]
        queries = [q for i in range(first, first + 5) for q in task.batch(i)[0]]
        assert sorted(queries) == sorted(text[:8] for text in seen)
    assert task.batch(1)[0] != task.batch(6)[0]                         # each epoch in an order of its own


def test_held_out_queries_are_never_trained_on(small, tmp_path):
    rows = [f"review number {i:04d} of a film" for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": r}) + "\n" for r in rows))
    task = imdb(small, dataset=str(tmp_path))                           # one split only: its last rows are held out
    assert len(task.train) == 52 and not set(task.train) & set(rows[52:]) and len(task.held_out_queries) == 8


def test_reward_is_the_raw_positive_logit_of_query_and_response(small):
    reward = SentimentReward(str(small / "classifier"), torch.device("cpu"))
    queries, responses = ["the film", "one"], [" was good", " bad old dog of a story"]
    task = imdb(small)
    for q, r, got in zip(queries, responses, task.reward(queries, responses)):
        ids = reward.tokenizer(q + r, return_tensors="pt")["input_ids"]
        assert reward.model(ids).logits[0, 1].item() == pytest.approx(got.item(), abs=1e-5)     # alone = in a padded batch
    assert task.reward(queries, responses).std() > 1e-3


def test_any_callable_is_a_reward(small):
    task = imdb(small, reward=lambda texts: [float(len(t)) for t in texts])
    assert task.reward(["ab"], ["cde"]).tolist() == [5.0]


@pytest.mark.parametrize("values, says", [
    ([1.0], "1 values.*for 2 responses"), ([1.0, float("nan")], "reward is nan: sample 1 \\('cd'\\)"), ([float("inf"), 0.0], "reward is inf: sample 0"),
    ([None, 0.0], "reward is None: sample 0"), (["good", 0.0], "reward is 'good'"), (["1.5", 0.0], "sample 0"), ([1e300, 0.0], "sample 0"), ([10**400, 0.0], "sample 0"), (None, "reward is None: is no list")])
def test_rewards_that_are_no_numbers_are_refused(values, says, small):
    task = imdb(small, reward=lambda texts: values)
    with pytest.raises(UserError, match=says):
        task.reward(["a", "c"], ["b", "d"])


def test_a_nan_reward_in_a_run_changes_no_parameter(small_flags, tmp_path, monkeypatch):
    from cory.experiment.run import Run
    from cory.train import train_cory
    cfg = parse(ImdbConfig, IMDB_PRESETS, [*small_flags, "--run_dir", str(tmp_path / "r")])
    run = Run(cfg, Imdb)
    before = [[p.clone() for p in a.policy.parameters()] for a in run.agents]
    calls = []
    good = run.task.reward_model
    monkeypatch.setattr(run.task, "reward_model", lambda texts: calls.append(1) or ([float("nan")] * len(texts) if len(calls) == 3 else good(texts)))
    with pytest.raises(UserError, match="reward is nan: sample 0"):
        train_cory(run)                                                 # call 1: base; 2: pioneer; 3: observer
    assert all(torch.equal(p, q) for old, a in zip(before, run.agents) for p, q in zip(old, a.policy.parameters()))
    run.log.bar.close()


@pytest.mark.parametrize("changes, says", [
    ({"id2label": {"0": "toxic", "1": "fine"}, "label2id": {"toxic": 0, "fine": 1}}, "labels found: toxic, fine"),
    ({"n_layers": 2}, "its weights lack 16 tensors")])
def test_classifiers_that_cannot_judge_are_refused(changes, says, small, small_flags, tmp_path, capsys):
    shutil.copytree(small / "classifier", tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([*small_flags, "--reward_model", str(tmp_path / "c"), "--run_dir", str(tmp_path / "run")])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "reward_model is" in err and says in err and err.count("\n") == 1, err


def test_real_reviews_load_by_the_same_flag(imdb_data):
    splits = {name: [text for text, in rows] for name, rows in load_columns(str(imdb_data), ["text"]).items()}
    assert {name: len(texts) for name, texts in splits.items()} == {"train": 25_000, "test": 25_000}
    assert splits["train"][0].startswith("Story of a man who has unnatural feelings")


GOOD = b'{"text": "a good film of one man"}\n'
BAD_DATA = {
    "missing path": (None, "no such file or folder"),
    "empty file": ({"train.jsonl": b""}, "has no rows"),
    "broken JSON": ({"train.jsonl": GOOD + b'{"text": "a\n'}, "train.jsonl:2': is not JSON"),
    "no object": ({"train.jsonl": b"[1]\n"}, "train.jsonl:1'"),
    "missing column": ({"train.jsonl": b'{"review": "a", "label": 1}\n'}, "no column 'text'; columns found: review, label"),
    "empty prompt": ({"train.jsonl": GOOD * 2 + b'{"text": "  "}\n'}, "row 3': its 'text' is empty"),
    "undecodable": ({"train.jsonl": GOOD + b'{"text": "\xff"}\n'}, "train.jsonl:2': is not UTF-8"),
    "no text": ({"train.jsonl": b'{"text": 5}\n'}, "row 1': its 'text' is 5, not text"),
    "too few rows": ({"train.jsonl": GOOD * 5, "test.jsonl": GOOD * 9}, "batch_size is 8: "),
    "nothing left to train on": ({"train.jsonl": GOOD * 8}, "leaves only 0 rows for it"),
    "no split to train on": ({"test.jsonl": GOOD * 20}, "has no split named train; splits found: test"),
    "too few held out": ({"train.jsonl": GOOD * 9, "test.jsonl": GOOD * 5}, "eval_queries is 8: "),
    "csv without the column": ({"train.csv": b"review\nx\n"}, "columns found: review"),
    "broken parquet": ({"train.parquet": b"PAR1 not really"}, "could not be read"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_exits_2_with_one_line_and_writes_nothing(case, small_flags, tmp_path, capsys):
    files, says = BAD_DATA[case]
    if files:
        (tmp_path / "data").mkdir()
        for name, content in files.items():
            (tmp_path / "data" / name).write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([*small_flags, "--dataset", str(tmp_path / "data"), "--run_dir", str(tmp_path / "run")])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and says in err, err
    assert not (tmp_path / "run").exists()


def test_data_is_checked_before_any_model_is_loaded(small_flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train_imdb.main([*small_flags, "--model", "nobody/nothing", "--dataset", str(tmp_path / "none"), "--run_dir", str(tmp_path / "run")])
    assert "dataset is" in capsys.readouterr().err


def test_bfloat16_on_a_gpu_without_it_is_refused(monkeypatch):
    from cory.experiment.machine import choose_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    with pytest.raises(UserError, match="dtype is 'bfloat16': Old GPU has no bfloat16"):
        choose_device(settings(dtype="bfloat16"))


BAD_RUNS = {
    "context": (["--max_response_length", "60"], "max_response_length is 60"),
    "cuda": (["--device", "cuda"], "device is 'cuda'"),
    "hub model": (["--model", "nobody/nothing"], "hf download nobody/nothing"),
    "hub reward model": (["--reward_model", "nobody/nothing"], "reward_model is 'nobody/nothing'"),
    "hub data": (["--dataset", "nobody/nothing"], "hf download nobody/nothing --repo-type dataset"),
    "run_dir is a file": (["--run_dir", __file__], "is a file"),
    "unwritable": (["--run_dir", "/proc/runs"], "run_dir is '/proc/runs'"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_machines_and_models_exit_2_with_one_line(case, small_flags, tmp_path, capsys):
    flags, says = BAD_RUNS[case]
    if case == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA: the refusal of --device cuda was not checked")
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([*small_flags, "--run_dir", str(tmp_path / "run"), *flags])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and says in err, err


def test_too_little_disk_is_said_before_training(small_flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cory.experiment.checkpoint.shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([*small_flags, "--run_dir", str(tmp_path / "run")])
    assert stop.value.code == 2 and "0.00 GB free" in capsys.readouterr().err
