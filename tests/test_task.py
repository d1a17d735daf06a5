"""Queries, prompts, rewards, the reading of data, and tasks of a user's own."""
import json
import random

import numpy as np
import pytest
import torch
from toys import bigram, error_line, settings

import train_imdb
from cory.config import IMDB_PRESETS, ImdbConfig
from cory.errors import UserError
from cory.experiment.flags import parse
from cory.experiment.run import Run
from cory.ppo.loading import load_language_model
from cory.tasks.data import load_columns
from cory.tasks.imdb import Imdb, SentimentReward
from cory.tasks.task import Task
from cory.train import train_cory


def imdb(small, reward=None, **changes) -> Imdb:
    places = dict(model="lm", dataset="openings", reward_model="classifier")
    cfg = settings(**({name: str(small / place) for name, place in places.items()} | changes))
    return Imdb(cfg, Imdb.load_data(cfg), load_language_model(cfg.model), reward)


def write_splits(folder, **splits: list[dict]) -> str:
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def of_text(rows: list[str]) -> list[dict]:
    return [{"text": row} for row in rows]


def test_prompts_are_the_papers(small):
    task = imdb(small)
    assert task.pioneer_prompts(["This film"]) == ["This film"]
    prompt, = task.observer_prompts(["This film"], [" was bad."])
    assert prompt == 'I can make this sentence "This film was bad." more positive: This film'


# --- the stream of queries ----------------------------------------------------------------------------------
def test_queries_have_2_to_8_tokens_and_responses_4_to_15_both_included(small):
    task = imdb(small)
    batches = [task.batch(i) for i in range(1, 301)]
    lengths = {len(task.tokenizer(query)["input_ids"]) for batch in batches[:40] for query in batch.queries}
    assert lengths == set(range(2, 9))
    assert all(any(text.startswith(query) for text in task.train) for query in batches[3].queries)
    limits = [batch.max_new_tokens for batch in batches]                # one for all rows of an iteration
    assert set(limits) == set(range(4, 16))
    assert all(8 < limits.count(n) < 50 for n in range(4, 16))          # 25 expected each


def test_stream_depends_on_seed_and_iteration_alone(small):
    one, two, other = imdb(small, method="ppo"), imdb(small, method="cory"), imdb(small, seed=1)
    random.seed(5)
    later = two.batch(7)
    assert one.batch(7) == later != other.batch(7) and one.batch(7) != one.batch(8)
    assert one.held_out_queries == other.held_out_queries               # one yardstick for all seeds


def test_an_epoch_visits_every_row_once_before_the_next_begins(small):
    task = imdb(small, min_query_length=8)                              # 40 rows: 5 batches of 8
    for first in (1, 6):
        queries = [q for i in range(first, first + 5) for q in task.batch(i).queries]
        assert sorted(queries) == sorted(text[:8] for text in task.train)
    assert task.batch(1).queries != task.batch(6).queries               # each epoch in an order of its own


@pytest.mark.parametrize("k", [2, 8])
def test_each_query_stands_k_times_in_a_row_and_the_distinct_ones_follow_the_stream(small, k):
    """batch_size counts responses: 8 k of them at k per query are the 8 queries of an iteration at 1. Rows
    are needed for the distinct queries alone.
    """
    single, several = imdb(small), imdb(small, batch_size=8 * k, responses_per_query=k)
    for iteration in (1, 2, 7):
        queries, max_new_tokens = single.batch(iteration)
        assert several.batch(iteration) == ([q for q in queries for _ in range(k)], max_new_tokens)
    with pytest.raises(UserError, match="batch_size is .* leaves only 40 rows for its 41 queries"):
        imdb(small, batch_size=41 * k, mini_batch_size=k, responses_per_query=k)


# --- held-out queries ---------------------------------------------------------------------------------------
def test_held_out_rows_are_divided_once_and_never_trained_on(small, tmp_path):
    rows = [f"{i:04d} is the number of a film" for i in range(60)]
    one_split = write_splits(tmp_path, train=of_text(rows))     # its last rows are held out
    for split, held_out in (("test", rows[29::2]), ("validation", rows[28::2])):
        tasks = [imdb(small, dataset=one_split, eval_split=split, seed=seed, min_query_length=4)
                 for seed in (0, 1)]
        queries = tasks[0].held_out_queries
        assert queries == tasks[1].held_out_queries and len(queries) == 8 and tasks[0].train == rows[:28]
        assert {query[:4] for query in queries} <= {row[:4] for row in held_out}
    # splits that are there are taken as they are, and one of them alone is divided
    of_three = write_splits(tmp_path, validation=of_text(rows[40:50]), test=of_text(rows[50:]))
    data = Imdb.load_data(settings(dataset=of_three))
    assert (data.validation, data.test) == (rows[40:50], rows[50:])
    (tmp_path / "validation.jsonl").unlink()
    data = Imdb.load_data(settings(dataset=of_three, eval_queries=5))
    assert (data.validation, data.test) == (rows[50::2], rows[51::2])


def test_a_query_that_training_may_ask_is_not_held_out(small, tmp_path):
    train = ["the film was good", "the story was bad", "one man and his dog"] * 4
    test = ["the film of a man", "a film", "one MAN", "The film", "his dog", "dogs", "in it", "it was"] * 2
    dataset = write_splits(tmp_path, train=of_text(train), validation=of_text(test), test=of_text(test))
    task = imdb(small, dataset=dataset, eval_queries=5)
    assert not any(text.startswith(query) for query in task.held_out_queries for text in train)
    seen = [query for query in ("th", "the film", "one", "a", "The", "the film of")
            if task.is_seen_in_training(query)]
    assert seen == ["th", "the film", "one"]
    with pytest.raises(UserError, match="eval_queries is 16: .* test queries that training never asks"):
        imdb(small, dataset=dataset, eval_queries=16)


# --- rewards ------------------------------------------------------------------------------------------------
def test_reward_is_the_raw_positive_logit_of_query_and_response(small):
    classifier = SentimentReward(str(small / "classifier"), torch.device("cpu"))
    queries, responses = ["the film", "one"], [" was good", " bad old dog of a story"]
    rewards = imdb(small).reward(queries, responses)
    for query, response, reward in zip(queries, responses, rewards.tolist(), strict=True):
        ids = classifier.tokenizer(query + response, return_tensors="pt")["input_ids"]
        alone = classifier.model(ids).logits[0, 1].item()
        assert alone == pytest.approx(reward, abs=1e-5)                 # alone = in a padded batch
    assert rewards.std() > 1e-3


@pytest.mark.parametrize("values", [
    [torch.tensor(0.5), np.float32(-2)], torch.tensor([0.5, -2.0], dtype=torch.bfloat16, requires_grad=True),
    np.array([0.5, -2.0])], ids=range(3))
def test_lists_tensors_and_arrays_are_rewards(values, small):
    texts = []
    task = imdb(small, reward=lambda asked: texts.extend(asked) or values)
    reward = task.reward(["a", "c"], ["b", "d"])
    assert texts == ["ab", "cd"] and reward.tolist() == [0.5, -2]
    assert reward.dtype == torch.float32 and not reward.requires_grad and reward.device == task.device


@pytest.mark.parametrize("values, says", [
    ([1.0], "shape \\(1,\\).*for 2 responses"), (torch.ones(2, 1), "shape \\(2, 1\\).*for 2 responses"),
    (torch.tensor(1.0), "shape \\(\\).*for 2"), ([1.0, float("nan")], "reward is nan: sample 1 \\('cd'\\)"),
    ([1e300, 0.0], "reward is inf: sample 0"), (["1.5", 0.0], "is no list of numbers"),
    ([10**400, 0.0], "is no list of numbers"), (None, "is no list of numbers")])
def test_rewards_that_are_no_numbers_are_refused(values, says, small):
    task = imdb(small, reward=lambda texts: values)
    with pytest.raises(UserError, match=says):
        task.reward(["a", "c"], ["b", "d"])


def test_responses_that_are_not_one_to_a_query_are_refused_before_they_are_scored(small):
    task = imdb(small, reward=lambda texts: [0.0] * len(texts))
    for score in (task.reward, task.checked):           # of all processes, of one
        for queries, responses in (("abc", "de"), ("ab", "cde")):
            with pytest.raises(UserError, match=f"{len(responses)} responses.*for {len(queries)} queries"):
                score([*queries], [*responses])


def test_a_nan_reward_in_a_run_changes_no_parameter(small_flags, tmp_path, monkeypatch):
    run = Run(parse(ImdbConfig, IMDB_PRESETS, [*small_flags, "--run_dir", str(tmp_path / "r")]))
    before = [[p.clone() for p in agent.policy.parameters()] for agent in run.agents]
    calls, good = [], run.task.reward_model

    def third_is_nan(texts):                                            # 1: base; 2: pioneer; 3: observer
        calls.append(texts)
        return [float("nan")] * len(texts) if len(calls) == 3 else good(texts)

    monkeypatch.setattr(run.task, "reward_model", third_is_nan)
    with pytest.raises(UserError, match="reward is nan: sample 0"):
        train_cory(run)
    for parameters, agent in zip(before, run.agents, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(parameters, agent.policy.parameters(), strict=True))
    run.close()


# --- a task of a user's own ---------------------------------------------------------------------------------
class Letters(Task):
    """As little as a task can be."""
    columns = ["word"]

    def observer_prompts(self, queries, responses):
        return [response + query for query, response in zip(queries, responses, strict=True)]

    def reward_of(self, queries, responses):
        return [response.count("a") for response in responses]


@pytest.fixture
def words(tmp_path):
    """12 words over the toy model's letters, each with an answer; the last 3 are for testing."""
    rows = [{"word": "abcdef"[i % 6] * (1 + i // 6), "answer": "abcdef"[i % 5]} for i in range(12)]
    dataset = write_splits(tmp_path, train=rows[:9], validation=rows[9:10], test=rows[9:])
    return settings(dataset=dataset, eval_queries=3)


def test_a_task_needs_a_column_an_observer_prompt_and_a_reward(words):
    task = Letters(words, Letters.load_data(words), bigram())
    assert task.train == ["a", "b", "c", "d", "e", "f", "aa", "bb", "cc"]
    assert sorted(task.held_out_queries) == ["dd", "ee", "ff"]
    queries, max_new_tokens = task.batch(1)
    assert len(set(queries)) == 8 and set(queries) < set(task.train) and 4 <= max_new_tokens <= 15
    assert task.pioneer_prompts(queries) == queries and task.observer_prompts(["a"], ["bc"]) == ["bca"]
    assert task.reward(["a", "b"], ["aba", "c"]).tolist() == [2, 0] and task.metrics(["a"], ["b"]) == {}


def without(name):
    return type("Unfinished", (Task,), {n: f for n, f in vars(Letters).items() if n != name})


class WithoutQuery(Letters):
    columns = ["word", "answer"]


@pytest.mark.parametrize("task_class, says", [
    (without("reward_of"), r"task is 'Unfinished': defines no reward_of\(self, queries, responses\)"),
    (without("observer_prompts"), r"defines no observer_prompts\(self, queries, responses\)"),
    (WithoutQuery, "task is 'WithoutQuery': has rows that are no plain text; define query"),
    (without("columns"), "has no column 'text'; columns found: word, answer")], ids=range(4))
def test_what_a_task_lacks_is_said_in_one_line(task_class, says, words):
    with pytest.raises(UserError, match=says) as error:
        task_class(words, task_class.load_data(words), bigram())
    assert "\n" not in str(error.value)


# --- bad input ----------------------------------------------------------------------------------------------
def test_real_reviews_load_by_the_same_flag(imdb_data):
    splits = load_columns(str(imdb_data), ["text"])
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 25_000, "test": 25_000}
    assert splits["train"][0][0].startswith("Story of a man who has unnatural feelings")


GOOD = b'{"text": "a good film of one man"}\n'
BAD_DATA = {
    "too few rows": ({"train.jsonl": GOOD * 5, "test.jsonl": GOOD * 16}, "batch_size is 8: "),
    "nothing left to train on": ({"train.jsonl": GOOD * 32}, "leaves only 0 rows for it"),
    "all seen in training": ({"train.jsonl": GOOD * 9, "test.jsonl": GOOD * 16}, "that training never asks"),
    "no split to train on": ({"test.jsonl": GOOD * 20}, "has no split named train; splits found: test"),
    "too few held out": ({"train.jsonl": GOOD * 9, "test.jsonl": GOOD * 5}, "eval_queries is 8: "),
}
BAD_FLAGS = {
    "data before models": (["--dataset", "/no/data", "--model", "nobody/nothing"], "dataset is '/no/data'"),
    "context": (["--max_response_length", "60"], "max_response_length is 60"),
    "run_dir is a file": (["--run_dir", __file__], "is a file"),
    "unwritable": (["--run_dir", "/proc/runs"], "run_dir is '/proc/runs'"),
}


@pytest.mark.parametrize("case", [*BAD_DATA, *BAD_FLAGS])
def test_bad_input_exits_2_with_one_line_and_writes_nothing(case, small_flags, tmp_path, capsys):
    files, says = BAD_DATA.get(case, ({}, ""))
    flags, says = BAD_FLAGS.get(case, (["--dataset", str(tmp_path / "data")], says))
    (tmp_path / "data").mkdir()
    for name, content in files.items():
        (tmp_path / "data" / name).write_bytes(content)
    flags = [*small_flags, "--run_dir", tmp_path / "run", *flags]
    assert says in error_line(train_imdb.main, flags, capsys)
    assert not (tmp_path / "run").exists()
