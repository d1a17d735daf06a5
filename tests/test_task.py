"""Queries, prompts, rewards, the reading of data, and tasks of a user's own."""
import json
import random
import shutil

import numpy as np
import pytest
import torch
from toys import bigram, settings

import train_imdb
from cory.commands.flags import parse
from cory.config import IMDB_PRESETS, ImdbConfig
from cory.errors import UserError
from cory.ppo.loading import load_language_model
from cory.tasks.data import load_columns
from cory.tasks.imdb import Imdb, SentimentReward
from cory.tasks.task import Data, Task


def imdb(small, reward=None, **changes) -> Imdb:
    places = dict(model="lm", dataset="openings", reward_model="classifier")
    cfg = settings(**{**{name: str(small / place) for name, place in places.items()}, **changes})
    return Imdb(cfg, Imdb.load_data(cfg), load_language_model(cfg.model), reward)


def test_prompts_are_the_papers(small):
    task = imdb(small)
    assert task.pioneer_prompts(["This film"]) == ["This film"]
    prompt, = task.observer_prompts(["This film"], [" was bad."])
    assert prompt == 'I can make this sentence "This film was bad." more positive: This film'


# --- the stream of queries ----------------------------------------------------------------------------------
def test_queries_have_2_to_8_tokens_both_included_and_begin_the_review(small):
    task = imdb(small)
    lengths = {len(task.tokenizer(q)["input_ids"]) for i in range(1, 41) for q in task.batch(i).queries}
    assert lengths == set(range(2, 9))
    assert all(any(text.startswith(q) for text in task.train) for q in task.batch(3).queries)


def test_response_lengths_are_one_per_iteration_uniform_in_4_to_15(small):
    task = imdb(small)
    lengths = [task.batch(i).max_new_tokens for i in range(1, 601)]
    assert set(lengths) == set(range(4, 16))
    assert all(20 < lengths.count(n) < 90 for n in range(4, 16))        # 50 expected each


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
        queries = [q for i in range(first, first + 5) for q in task.batch(i).queries]
        assert sorted(queries) == sorted(text[:8] for text in seen)
    assert task.batch(1).queries != task.batch(6).queries               # each epoch in an order of its own


def test_the_stream_is_the_one_that_finished_runs_were_trained_on(small):
    """Training's of commit 10706cc: whoever changes the order of draws changes the run of every seed."""
    task = imdb(small)
    assert task.batch(1) == (["every ", "in his ", "and man", "in an", "in", "sce", "ev", "the was"], 15)
    assert task.batch(6) == (["bad", "in ", "ol", "and", "who o", "and e", "sc", "of "], 14)
    assert task.held_out_queries == ["WAS", "HIS", "MAN E", "THE", "IT W", "AND A TH", "IN DOG", "IN "]


@pytest.mark.parametrize("k", [2, 4, 8])
def test_each_query_stands_k_times_in_a_row_and_the_distinct_ones_follow_the_stream(small, k):
    """batch_size counts responses: 8 k of them at k per query are the 8 queries of an iteration at 1."""
    single, several = imdb(small), imdb(small, batch_size=8 * k, responses_per_query=k)
    for iteration in (1, 2, 7):
        queries, max_new_tokens = single.batch(iteration)
        assert several.batch(iteration) == ([q for q in queries for _ in range(k)], max_new_tokens)
    one = imdb(small, responses_per_query=8, min_query_length=8)        # 40 rows: one a time, none twice
    firsts = [set(one.batch(i).queries) for i in range(1, 41)]
    assert all(len(first) == 1 for first in firsts)
    assert sorted(q for first in firsts for q in first) == sorted(text[:8] for text in one.train)


def test_rows_are_needed_for_the_distinct_queries_alone(small):
    assert len(imdb(small, batch_size=80, responses_per_query=2).batch(1).queries) == 80        # of 40 rows
    with pytest.raises(UserError, match="batch_size is 82: .* leaves only 40 rows for its 41 queries"):
        imdb(small, batch_size=82, mini_batch_size=2, responses_per_query=2)


def write_splits(folder, **splits):
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": r}) + "\n" for r in rows))
    return str(folder)


def test_held_out_rows_are_divided_once_and_never_trained_on(small, tmp_path):
    rows = [f"{i:04d} is the number of a film" for i in range(60)]
    of_one = write_splits(tmp_path, train=rows)                 # one split only: its last rows are held out
    parts = {}
    for part in ("test", "validation"):
        for seed in (0, 1):
            task = imdb(small, dataset=of_one, eval_split=part, seed=seed, min_query_length=4)
            assert task.train == rows[:28] and len(task.held_out_queries) == 8
            parts.setdefault(part, []).append(task.held_out_queries)
    assert parts["test"][0] == parts["test"][1] and parts["validation"][0] == parts["validation"][1]
    first_words = {part: {query[:4] for query in queries[0]} for part, queries in parts.items()}
    assert first_words["test"] <= {row[:4] for row in rows[29::2]}
    assert first_words["validation"] <= {row[:4] for row in rows[28::2]}
    # a split that is there is taken as it is
    data = Imdb.load_data(settings(dataset=write_splits(tmp_path, validation=rows[40:50], test=rows[50:])))
    assert (data.validation, data.test) == (rows[40:50], rows[50:])
    # with one of them it is divided
    (tmp_path / "validation.jsonl").unlink()
    data = Imdb.load_data(settings(dataset=str(tmp_path), eval_queries=5))
    assert (data.validation, data.test) == (rows[50::2], rows[51::2])


def test_a_query_that_training_may_ask_is_not_held_out(small, tmp_path):
    train = ["the film was good", "the story was bad", "one man and his dog"] * 4
    test = ["the film of a man", "a film", "one MAN", "The film", "his dog", "dogs", "in it", "it was"] * 2
    task = imdb(small, dataset=write_splits(tmp_path, train=train, validation=test, test=test),
                eval_queries=5)
    assert not any(text.startswith(query) for query in task.held_out_queries for text in train)
    seen = [query for query in ("th", "the film", "one", "a", "The", "the film of")
            if task.is_seen_in_training(query)]
    assert seen == ["th", "the film", "one"]
    with pytest.raises(UserError, match="eval_queries is 16: .* test queries that training never asks"):
        imdb(small, dataset=str(tmp_path), eval_queries=16)


# --- rewards ------------------------------------------------------------------------------------------------
def test_reward_is_the_raw_positive_logit_of_query_and_response(small):
    reward = SentimentReward(str(small / "classifier"), torch.device("cpu"))
    queries, responses = ["the film", "one"], [" was good", " bad old dog of a story"]
    task = imdb(small)
    for q, r, got in zip(queries, responses, task.reward(queries, responses), strict=True):
        ids = reward.tokenizer(q + r, return_tensors="pt")["input_ids"]
        alone = reward.model(ids).logits[0, 1].item()
        assert alone == pytest.approx(got.item(), abs=1e-5)             # alone = in a padded batch
    assert task.reward(queries, responses).std() > 1e-3


def test_any_callable_is_a_reward(small):
    task = imdb(small, reward=lambda texts: [float(len(t)) for t in texts])
    assert task.reward(["ab"], ["cde"]).tolist() == [5.0]


@pytest.mark.parametrize("values", [
    [0.5, -2], (0.5, -2), iter([0.5, -2]), [torch.tensor(0.5), np.float32(-2)], torch.tensor([0.5, -2.0]),
    torch.tensor([0.5, -2.0], dtype=torch.float64), torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
    torch.tensor([0.5, -2.0], requires_grad=True), np.array([0.5, -2.0]), np.array([0.5, -2.0], np.float16)],
    ids=range(10))
def test_lists_tensors_and_arrays_are_rewards(values, small):
    reward = imdb(small, reward=lambda texts: values).reward(["a", "c"], ["b", "d"])
    assert reward.tolist() == [0.5, -2] and reward.dtype == torch.float32 and not reward.requires_grad


def test_rewards_lie_on_the_models_device(small):
    """So that a length penalty, made of a rollout's lengths, can be added to them."""
    task = imdb(small, reward=lambda texts: torch.ones(len(texts)))
    assert task.reward(["a"], ["b"]).device == task.device == torch.device("cpu")
    task.device = torch.device("meta")                          # stands for a GPU, which a test may not have
    assert task.reward(["a"], ["b"]).device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: a reward on a GPU was not checked")
def test_a_tensor_on_a_gpu_is_a_reward():
    class OnGpu(Letters):
        def reward_of(self, queries, responses):
            return torch.ones(len(responses), device="cuda")

    model = bigram()
    task = OnGpu(settings(), Data(["a"] * 8, [], ["b"] * 8), model)
    assert task.reward(["a"], ["b"]).device.type == "cpu"
    task.device = torch.device("cuda")
    assert task.reward(["a"], ["b"]).device.type == "cuda"


@pytest.mark.parametrize("values, says", [
    ([1.0], "1 values.*for 2 responses"), (torch.ones(3), "3 values.*for 2 responses"),
    ([1.0, float("nan")], "reward is nan: sample 1 \\('cd'\\)"),
    ([float("inf"), 0.0], "reward is inf: sample 0"),
    (torch.tensor([0.0, torch.nan]), "reward is nan: sample 1 \\('cd'\\)"),
    (torch.ones(2, 1), "reward is \\[1.0\\]: sample 0"), (torch.tensor(1.0), "reward is 1.0: is no list"),
    ([None, 0.0], "reward is None: sample 0"), (["good", 0.0], "reward is 'good'"),
    (["1.5", 0.0], "sample 0"), ([1e300, 0.0], "sample 0"), ([10**400, 0.0], "sample 0"),
    (np.array([1e300, 0.0]), "sample 0"), (None, "reward is None: is no list")])
def test_rewards_that_are_no_numbers_are_refused(values, says, small):
    task = imdb(small, reward=lambda texts: values)
    with pytest.raises(UserError, match=says):
        task.reward(["a", "c"], ["b", "d"])


def test_responses_that_are_not_one_to_a_query_are_refused_before_they_are_scored(small):
    task = imdb(small, reward=lambda texts: [0.0] * len(texts))
    for score in (task.reward, task.checked):           # of all processes, of one
        with pytest.raises(UserError, match="2 responses.*for 3 queries"):
            score(["a", "b", "c"], ["d", "e"])


def test_a_nan_reward_in_a_run_changes_no_parameter(small_flags, tmp_path, monkeypatch):
    from cory.experiment.run import Run
    from cory.train import train_cory
    run = Run(parse(ImdbConfig, IMDB_PRESETS, [*small_flags, "--run_dir", str(tmp_path / "r")]))
    before = [[p.clone() for p in agent.policy.parameters()] for agent in run.agents]
    calls, good = [], run.task.reward_model

    def third_is_nan(texts):                                            # 1: base; 2: pioneer; 3: observer
        calls.append(texts)
        return [float("nan")] * len(texts) if len(calls) == 3 else good(texts)

    monkeypatch.setattr(run.task, "reward_model", third_is_nan)
    with pytest.raises(UserError, match="reward is nan: sample 0"):
        train_cory(run)
    for old, agent in zip(before, run.agents, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(old, agent.policy.parameters(), strict=True))
    run.close()


@pytest.mark.parametrize("changes, says", [
    ({"id2label": {"0": "toxic", "1": "fine"}, "label2id": {"toxic": 0, "fine": 1}},
     "labels found: toxic, fine"),
    ({"n_layers": 2}, "its weights lack 16 tensors")])
def test_classifiers_that_cannot_judge_are_refused(changes, says, small, small_flags, tmp_path, capsys):
    shutil.copytree(small / "classifier", tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps(config | changes))
    flags = ["--reward_model", str(tmp_path / "c"), "--run_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([*small_flags, *flags])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "reward_model is" in err and says in err and err.count("\n") == 1, err


# --- a task of a user's own ---------------------------------------------------------------------------------
class Letters(Task):
    """As little as a task can be."""
    columns = ["word"]

    def observer_prompts(self, queries, responses):
        return [response + query for query, response in zip(queries, responses, strict=True)]

    def reward_of(self, queries, responses):
        return [response.count("a") for response in responses]


class Pairs(Letters):
    """Rows of two columns, and an attribute of its own, as a task with gold answers has."""
    columns = ["word", "answer"]

    def __init__(self, cfg, data, model):
        super().__init__(cfg, data, model)
        self.gold = dict([*data.train, *data.validation, *data.test])

    def query(self, row, rng):
        return row[0]

    def metrics(self, queries, responses):
        right = [self.gold[query] == r for query, r in zip(queries, responses, strict=True)]
        return {"right": sum(right) / len(right)}


@pytest.fixture
def words(tmp_path):
    """12 words over the toy model's letters, each with an answer; the last 3 are for testing."""
    rows = [{"word": "abcdef"[i % 6] * (1 + i // 6), "answer": "abcdef"[i % 5]} for i in range(12)]
    for name, part in (("train", rows[:9]), ("validation", rows[9:10]), ("test", rows[9:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return settings(dataset=str(tmp_path), eval_queries=3)


def test_a_task_needs_a_column_an_observer_prompt_and_a_reward(words):
    task = Letters(words, Letters.load_data(words), bigram())
    assert task.train == ["a", "b", "c", "d", "e", "f", "aa", "bb", "cc"]
    assert sorted(task.held_out_queries) == ["dd", "ee", "ff"]
    queries, max_new_tokens = task.batch(1)
    assert len(set(queries)) == 8 and set(queries) < set(task.train) and 4 <= max_new_tokens <= 15
    assert task.pioneer_prompts(queries) == queries and task.observer_prompts(["a"], ["bc"]) == ["bca"]
    assert task.reward(["a", "b"], ["aba", "c"]).tolist() == [2, 0] and task.metrics(["a"], ["b"]) == {}


def test_a_task_over_several_columns_makes_queries_of_tuples(words):
    task = Pairs(words, Pairs.load_data(words), bigram())
    assert task.train[:2] == [("a", "a"), ("b", "b")]
    assert set(task.batch(1).queries) < {word for word, _ in task.train}
    assert task.metrics(["a", "f"], ["a", "b"]) == {"right": 0.5}       # f's answer is a


def without(name):
    return type("Unfinished", (Task,), {n: f for n, f in vars(Letters).items() if n != name})


class WithoutQuery(Letters):
    columns = ["word", "answer"]


class WithoutModel(Letters):
    def __init__(self, cfg, data):
        super().__init__(cfg, data)


@pytest.mark.parametrize("task_class, says", [
    (without("reward_of"), r"task is 'Unfinished': defines no reward_of\(self, queries, responses\)"),
    (without("observer_prompts"),
     r"task is 'Unfinished': defines no observer_prompts\(self, queries, responses\)"),
    (WithoutQuery, "task is 'WithoutQuery': has rows that are no plain text; define query"),
    (WithoutModel, r"task is 'WithoutModel': needs __init__\(self, cfg, data, model\)"),
    (without("columns"), "has no column 'text'; columns found: word, answer")], ids=range(5))
def test_what_a_task_lacks_is_said_in_one_line(task_class, says, words):
    with pytest.raises(UserError, match=says) as error:
        task_class(words, task_class.load_data(words), bigram())
    assert "\n" not in str(error.value)


# --- data ---------------------------------------------------------------------------------------------------
def test_real_reviews_load_by_the_same_flag(imdb_data):
    loaded = load_columns(str(imdb_data), ["text"])
    splits = {name: [text for (text,) in rows] for name, rows in loaded.items()}
    assert {name: len(texts) for name, texts in splits.items()} == {"train": 25_000, "test": 25_000}
    assert splits["train"][0].startswith("Story of a man who has unnatural feelings")


GOOD = b'{"text": "a good film of one man"}\n'
BAD_DATA = {
    "missing path": (None, "no such file or folder"),
    "empty file": ({"train.jsonl": b""}, "has no rows"),
    "broken JSON": ({"train.jsonl": GOOD + b'{"text": "a\n'}, "train.jsonl:2': is not JSON"),
    "no object": ({"train.jsonl": b"[1]\n"}, "train.jsonl:1'"),
    "missing column": ({"train.jsonl": b'{"review": "a", "label": 1}\n'},
                       "no column 'text'; columns found: review, label"),
    "empty prompt": ({"train.jsonl": GOOD * 2 + b'{"text": "  "}\n'}, "row 3': its 'text' is empty"),
    "undecodable": ({"train.jsonl": GOOD + b'{"text": "\xff"}\n'}, "train.jsonl:2': is not UTF-8"),
    "no text": ({"train.jsonl": b'{"text": 5}\n'}, "row 1': its 'text' is 5, not text"),
    "too few rows": ({"train.jsonl": GOOD * 5, "test.jsonl": GOOD * 16}, "batch_size is 8: "),
    "nothing left to train on": ({"train.jsonl": GOOD * 32}, "leaves only 0 rows for it"),
    "all seen in training": ({"train.jsonl": GOOD * 9, "test.jsonl": GOOD * 16}, "that training never asks"),
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
    places = ["--dataset", str(tmp_path / "data"), "--run_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([*small_flags, *places])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and says in err, err
    assert not (tmp_path / "run").exists()


def test_data_is_checked_before_any_model_is_loaded(small_flags, tmp_path, capsys):
    places = ["--dataset", str(tmp_path / "none"), "--run_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        train_imdb.main([*small_flags, "--model", "nobody/nothing", *places])
    assert "dataset is" in capsys.readouterr().err


def test_bfloat16_on_a_gpu_without_it_is_refused(monkeypatch):
    from cory.system.machine import choose_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    with pytest.raises(UserError, match="dtype is 'bfloat16': Old GPU has no such arithmetic"):
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
    full = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("cory.experiment.checkpoint.shutil.disk_usage", lambda path: full)
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([*small_flags, "--run_dir", str(tmp_path / "run")])
    assert stop.value.code == 2 and "0.00 GB free" in capsys.readouterr().err
