"""Held-out evaluation of the agents as a team."""
from types import SimpleNamespace

import pytest
import torch
from toys import read, rows

import cory.train as loop
from cory.config import IMDB_PRESETS, ImdbConfig
from cory.errors import UserError
from cory.experiment.evaluation import answers
from cory.experiment.flags import parse

REWARD = {"bad": 0.0, "good": 1.0, " good": 1.0, "best": 3.0}


class Words:
    """A task of four queries, whose prompts name the role and what was read."""
    held_out_queries = ["q1", "q2", "q3", "q4"]

    def pioneer_prompts(self, queries):
        return [f"{query}:" for query in queries]

    def observer_prompts(self, queries, responses):
        return [f"{query} after {response}:" for query, response in zip(queries, responses, strict=True)]

    def cut(self, response):
        return response

    def reward(self, queries, responses):
        return torch.tensor([REWARD[text] for text in responses])


def transfer(monkeypatch, said, knowledge_transfer=True):
    """`evaluate_transfer` of two agents that say what `said` has for each prompt."""
    asked = []

    def answers_of(model, prompts, cfg, seed):
        asked.append((model, seed))
        return [said[prompt] for prompt in prompts]

    monkeypatch.setattr(loop, "answers", answers_of)
    run = SimpleNamespace(task=Words(), cfg=SimpleNamespace(knowledge_transfer=knowledge_transfer))
    roles = [SimpleNamespace(policy=role) for role in ("pioneer", "observer")]
    metrics = loop.evaluate_transfer(run, roles)
    assert asked == [("pioneer", 0), ("observer", 1)]           # of independent random numbers
    return metrics


def test_transfer_is_measured_by_hand(monkeypatch):
    said = {"q1:": "bad", "q2:": "good", "q3:": "good", "q4:": "bad",
            "q1 after bad:": "best", "q2 after good:": " good", "q3 after good:": "bad",
            "q4 after bad:": "good"}
    assert transfer(monkeypatch, said) == {
        "observer_copies": 0.25, "observer_after_better": 0.5, "observer_after_worse": 2.0}


def test_without_transfer_the_observer_reads_the_query_and_equal_rewards_have_no_sides(monkeypatch):
    metrics = transfer(monkeypatch, {f"q{i}:": "good" for i in range(1, 5)}, knowledge_transfer=False)
    assert metrics == {"observer_copies": 1.0}


def test_a_loop_measures_its_team_in_the_roles_of_the_iteration(small_flags, tmp_path, monkeypatch):
    seen = []

    def evaluate(run, roles):
        seen.append([agent.name for agent in roles])
        same = [answers(roles[0].policy, ["I think", "The film"], run.cfg, seed=5) for _ in range(2)]
        assert same[0] == same[1] != answers(roles[0].policy, ["I think", "The film"], run.cfg, seed=6)
        return {"pairs": torch.tensor(len(seen))}

    monkeypatch.setattr(loop.train_cory, "evaluate", evaluate)
    flags = [*small_flags, "--iterations", "2", "--eval_every", "1", "--role_exchange_every", "1",
             "--run_dir", str(tmp_path / "r")]
    loop.train(parse(ImdbConfig, IMDB_PRESETS, flags))
    assert seen == [["llm1", "llm2"], ["llm1", "llm2"], ["llm2", "llm1"]]      # the base's, then of 1 and 2
    assert [row["eval/team/pairs"] for row in rows(tmp_path / "r")] == [1, 2, 3]
    assert read(tmp_path / "r/eval.json")["team"] == {"pairs": 3}


def test_what_is_no_metric_of_a_team_is_refused(small_flags, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.train_cory, "evaluate", lambda run, roles: None)
    flags = [*small_flags, "--iterations", "1", "--run_dir", str(tmp_path / "r")]
    with pytest.raises(UserError, match="metrics"):
        loop.train(parse(ImdbConfig, IMDB_PRESETS, flags))
