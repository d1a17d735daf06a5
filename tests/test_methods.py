"""The methods: PPO, CORY, and those of one's own."""
import random
import re
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, save_model
from toys import (
    evaluations,
    finished,
    read,
    refusal,
    require_same_runs,
    resume,
    rows,
    settings,
    stopped,
    training,
)

from cory.__main__ import main
from cory.ppo.model import LanguageModel, Policy
from cory.run import evaluate
from cory.run.checkpoint import checkpoints_of
from cory.tasks.imdb import Imdb
from cory.train import Cory

pytestmark = pytest.mark.usefixtures("read_once")


@pytest.fixture(scope="module")
def whole(small_flags, tmp_path_factory) -> Path:
    """A finished CORY run, for several tests."""
    return finished(small_flags, tmp_path_factory.mktemp("whole") / "cory")


def test_evaluations_are_before_training_every_third_iteration_and_at_the_end(whole):
    evaluated = evaluations(whole)
    assert [row["iteration"] for row in evaluated] == [0, 3, 5]
    for row in evaluated:
        who = {key.split("/")[2] for key in row if key != "iteration"}
        assert who == {"base", "llm1", "llm2", "mean", "team", "base_team"}


def test_cory_without_its_three_ideas_is_ppo(whole, small_flags, tmp_path):
    """No knowledge transfer, no shared reward, no exchange: LLM1 is then trained as by PPO, bit for bit."""
    without = "--knowledge_transfer false --partner_reward 0 --role_exchange_every 0".split()
    bare = finished(small_flags, tmp_path / "bare", *without, "--iterations", 3)
    ppo = finished(small_flags, tmp_path / "ppo", "--method", "ppo", "--iterations", 3)
    for a, b in zip(rows(bare), rows(ppo), strict=True):
        assert a | {key: x for key, x in b.items() if not key.endswith("/mean")} == a
    first, seeing = training(bare)[0], training(whole)[0]     # by untouched models
    assert first["train/task_reward/llm1"] != first["train/task_reward/llm2"] != seeing["train/task_reward/llm2"]


class Noted(Cory):
    """One metric of the observer's update alone."""

    def update(self, role, agent, rollout, score_B):
        metrics = super().update(role, agent, rollout, score_B)
        return metrics | {"noted": 2.0} if role == "observer" else metrics


def parities(texts: list[str]) -> set[int]:
    """Token 0 is !, 1 is ", ..."""
    return {(ord(letter) - ord("!")) % 2 for letter in "".join(texts) if "!" <= letter <= "~"}


@pytest.mark.parametrize("edited, of_base, rank", [
    (LanguageModel, {1}, 0), (Policy, {0, 1}, 0), (Policy, {0, 1}, 2)])
def test_tokens_that_are_masked_in_the_logits_are_never_sampled(
        edited, of_base, rank, small_flags, tmp_path, monkeypatch):
    """By an edit of `logits`, also of saved models, which get their tokens from `new_policy`, too."""
    logits, make = LanguageModel.logits, LanguageModel.new_policy
    every = 2 if edited is LanguageModel else 1
    monkeypatch.setattr(LanguageModel, "masked", torch.arange(0, 256, every), raising=False)

    def new_policy(self, *given):
        policy = make(self, *given)
        policy.masked = torch.arange(0, 256, 2)
        return policy

    monkeypatch.setattr(LanguageModel, "new_policy", new_policy)
    monkeypatch.setattr(edited, "logits",
                        lambda self, hidden: logits(self, hidden).index_fill(1, self.masked, -1e9))
    folder = finished(small_flags, tmp_path / "run", "--iterations", 1, "--lora_rank", rank)
    assert parities(row[role] for row in rows(folder, "samples.jsonl") for role in Cory.roles) == {1}
    assert all(isfinite(x) for row in rows(folder) for x in row.values())
    main(["evaluate", str(folder), "--samples", "4"])
    for who, expected in (("base", of_base), ("llm1", {1}), ("llm2", {1})):
        said = rows(folder, f"evaluation/{who}.jsonl")
        assert parities(text for row in said for text in [*row["sampled"], row["greedy"]]) == expected


def test_one_model_can_play_both_roles(small_flags, tmp_path):
    """Its second update is on responses from before the first, so that its first ratio is not 1."""
    words = ["--share_weights", "--method", "test_methods:Noted", "--iterations", 2]
    folder = finished(small_flags, tmp_path / "r", *words)
    first, second = training(folder)
    assert first["train/noted/llm1"] == 2
    assert first["train/approx_kl/llm1"] > 1e-5
    rewards = [row[f"{role}_reward"] for row in rows(folder, "samples.jsonl")[:4]
               for role in ("pioneer", "observer")]
    assert first["train/task_reward/llm1"] == pytest.approx(np.mean(rewards), abs=1e-6)
    # eta takes a step of 4 responses in each update, down where KL is 0; its mean over both is logged
    assert first["train/kl_coef/llm1"] == pytest.approx(0.15 * (1 + (1 - 0.2 * 4 / 20)) / 2)
    assert second["train/kl_coef/llm1"] < first["train/kl_coef/llm1"]


class Frozen(Cory):
    frozen = ("llm2",)


def test_an_agent_that_is_not_trained_keeps_its_eta(small_flags, tmp_path, capsys):
    folder = finished(small_flags, tmp_path / "run", "--iterations", 2, "--method", "test_methods:Frozen")
    held_out = read(folder / "eval.json")
    assert held_out["mean"] == held_out["llm1"] != held_out["llm2"]
    agents = torch.load(checkpoints_of(folder)[0], weights_only=True)["agents"]
    assert agents["llm2"]["kl_coef"] == 0.15 != agents["llm1"]["kl_coef"]
    (said,) = re.findall("([0-9,]+) trainable parameters", capsys.readouterr().out)
    assert int(said.replace(",", "")) == sum(p.numel() for p in agents["llm1"]["tensors"].values())


class Slips(Cory):
    """Roles respond to different queries, in training or in held-out evaluation; or they are drawn."""
    slip = ""

    def respond(self, players, queries, sample):
        rollouts = super().respond(players, queries, sample)
        if self.slip == ("training" if self.training else "held out"):
            rollouts[1] = sample(players[1], queries[::-1], queries[::-1])
        return rollouts

    def assign_roles(self, agents, iteration):
        return [*agents][::-1 if self.slip == "roles" and random.random() < 0.5 else 1]

    def team_metrics(self, rollouts, rewards):
        rewards[0] += 100
        return {}


@pytest.mark.parametrize("slip, says", [
    ("training", "respond gave roles different queries"), ("held out", "others than it got"),
    ("roles", ""), ("", "")])
def test_slips_of_a_method_are_refused_or_harmless(slip, says, small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Slips, "slip", slip)
    more = ["--method", "test_methods:Slips", "--iterations", 8, "--eval_every", 0]
    if says:
        assert says in refusal(small_flags, tmp_path / "r", capsys, *more)
    else:
        assert training(finished(small_flags, tmp_path / "r", *more))[0]["train/task_reward/llm1"] < 50


doubled = lambda agent, kl_N: 2 * agent.kl_coef


class Own(Cory):
    """llm1 is a GPT-2, llm2 a Llama with a tokenizer, a rate, an eta, its controller and an advantage of its
    own. The observer reads two responses of the pioneer, and each role has a score of its own.
    """
    of_llm2 = dict(learning_rate=0.02, lr_schedule="linear", init_kl_coef=0.7, advantage="reinforce",
                   kl_controller="test_methods:doubled")
    asked = []

    @staticmethod
    def agent_config(cfg, name):
        return replace(cfg, **Own.of_llm2) if name == "llm2" else cfg

    def respond(self, players, queries, sample):
        a1, second = (sample(players[0], self.task.pioneer_prompts(queries), queries) for _ in range(2))
        shown = [f"{first}|{other}" for first, other in zip(a1.text, second.text)]
        self.asked.append(queries)
        self.pioneer = int(getattr(players[0], "policy", players[0]).lm.config.model_type == "llama")
        return [a1, sample(players[1], self.task.observer_prompts(queries, shown), queries)]

    def scores(self, rollouts, rewards):
        return [rewards[0], rewards[1] + 1]

    def team_metrics(self, rollouts, rewards):
        return super().team_metrics(rollouts, rewards) | {"pioneer": torch.tensor(self.pioneer)}


def test_a_method_of_ones_own_is_what_is_trained_evaluated_and_resumed(small_flags, tmp_path, capsys):
    """Iteration 0 and the two others are evaluated; roles are exchanged after both."""
    Own.of_llm2["model"] = str(save_model("llama", tmp_path / "llama", byte_tokenizer(-1)))
    whole = finished(small_flags, tmp_path / "whole", "--method", "test_methods:Own", "--iterations", 2,
                "--eval_every", 1, "--role_exchange_every", 1)
    *at_first, first, again, same, second, _, end = Own.asked       # held out, by bases and by agents
    assert at_first == [end] * 2 == [again, same] and end not in (first, second)
    part = stopped(whole, tmp_path / "part")
    resume(part)
    require_same_runs(whole, part)
    for row in rows(whole, "samples.jsonl"):
        assert row["query"] == row["pioneer_prompt"] and f"{row['pioneer']}|" in row["observer_prompt"]
    for row in training(whole):
        for agent, eta in (("llm1", 0.15), ("llm2", 0.7)):
            reward, kl = row[f"train/task_reward/{agent}"], row[f"train/kl/{agent}"]
            assert row[f"train/score/{agent}"] == pytest.approx(reward + row[f"train/role/{agent}"])
            assert row[f"train/combined_reward/{agent}"] == pytest.approx(reward - eta * kl)
        assert "train/value_loss/llm1" in row and "train/value_loss/llm2" not in row
        assert (row["train/learning_rate/llm1"], row["train/learning_rate/llm2"]) == (1e-3, 0.02 / row["iteration"])
        assert row["train/kl_coef/llm1"] < 0.2 and row["train/kl_coef/llm2"] == 0.7 * row["iteration"]      # in two
    evaluated = evaluations(whole)
    assert [row["eval/pioneer/team"] for row in evaluated] == [0, 0, 1]     # in the roles played
    first, *_, last = evaluated
    for who in ("base", "base_llm2", "llm1", "llm2"):                       # none has left its own base yet
        assert first[f"eval/kl/{who}"] == pytest.approx(0, abs=1e-6)
    team, bases = (first[f"eval/observer_reward/{who}"] for who in ("team", "base_team"))
    assert team == pytest.approx(bases, abs=1e-5)
    assert first["eval/base_perplexity/base"] != first["eval/base_perplexity/base_llm2"]
    for agent, eta in (("llm1", 0.15), ("llm2", 0.7)):
        reward, kl = last[f"eval/task_reward/{agent}"], last[f"eval/kl/{agent}"]
        assert last[f"eval/combined_reward/{agent}"] == pytest.approx(reward - eta * kl)
    config = read(whole / "config.json")
    assert {name: config[f"llm2/{name}"] for name in Own.of_llm2} == Own.of_llm2
    parts = read(whole / "eval.json")
    assert {"base", "base_llm2", "llm1", "llm2", "base_team", "team"} <= parts.keys()
    assert parts["team"]["pioneer"] == 1


@pytest.mark.parametrize("setting", ["advantage", "critic", "loss", "lr_schedule", "kl_controller"])
def test_a_name_of_no_code_is_refused_before_a_model_is_loaded(
        setting, small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cory.run.experiment.load_language_model", None)
    line = refusal(small_flags, tmp_path / "r", capsys, f"--{setting}", "nowhere:x")
    assert "nowhere:x: No module named 'nowhere'" in line


@pytest.mark.parametrize("name, value", [
    ("agent_names", ("llm1", "llm1")), ("agent_names", ("llm1", "base")), ("frozen", ("observer",)),
    ("roles", ("pioneer", "observer", "pioneer"))])
def test_names_that_would_hide_another_and_a_frozen_agent_that_there_is_not_are_refused(
        name, value, small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Cory, name, value)
    assert f"{value}" in refusal(small_flags, tmp_path / "r", capsys)


@pytest.mark.parametrize("of, gives, name", [
    (Imdb, "metrics", "length"), (Cory, "update", "role")])
def test_a_metric_that_hides_another_is_an_error(of, gives, name, small_flags, tmp_path, monkeypatch):
    monkeypatch.setattr(of, gives, lambda *_: {name: 2.0})
    monkeypatch.setattr(Cory, "evaluate", lambda *_: {})
    with pytest.raises(TypeError, match=name):
        finished(small_flags, tmp_path / "run", "--iterations", 1)


REWARD = {"bad": 0.0, "good": 1.0, " good": 1.0, "best": 3.0}
TASK = SimpleNamespace(
    held_out_queries=["q1", "q2", "q3", "q4"],
    pioneer_prompts=lambda queries: [f"{query}:" for query in queries],
    observer_prompts=lambda queries, texts: [f"{query} {text}:" for query, text in zip(queries, texts)],
    reward=lambda queries, texts: torch.tensor([REWARD[text] for text in texts]))


class Three(Cory):
    agent_names, roles = ("llm1", "llm2", "llm3"), ("pioneer", "observer", "last")


def test_two_agents_alternate_in_three_roles():
    method = Three(settings(role_exchange_every=1), None)
    roles = [method.assign_roles([1, 2], iteration) for iteration in (1, 2, 3)]
    assert roles == [[1, 2, 1], [2, 1, 2], [1, 2, 1]]


SAID = {"q1:": "bad", "q2:": "good", "q3:": "good", "q4:": "bad",
        "q1 bad:": "best", "q2 good:": " good", "q3 good:": "bad", "q4 bad:": "good"}


@pytest.mark.parametrize("method, said, expected", [
    # copies: q2 alone
    (Cory, SAID, {"observer_copies": 0.25, "pioneer_reward": 0.5, "observer_reward": 1.25}),
    # the last reads the second alone, and is compared with it
    (Three, {f"q{i}{shown}:": text for i in range(1, 5)
             for shown, text in (("", "good"), (" good", "bad"), (" bad", "good"))},
     {"pioneer_reward": 1, "observer_reward": 0, "last_reward": 1, "last_copies": 0})])
def test_the_team_is_measured_by_hand(method, said, expected, monkeypatch):
    asked = []

    def responses(model, prompts, queries, length, seed):
        asked.append((model, seed))
        return SimpleNamespace(query=queries, text=[said[prompt] for prompt in prompts])

    monkeypatch.setattr(evaluate, "sample_responses", responses)
    TASK.cfg = settings()
    assert evaluate.evaluate_team(method(TASK.cfg, TASK), method.roles) == pytest.approx(expected)
    # with one seed, like agents would agree by chance
    assert asked == [(role, seed) for seed, role in enumerate(method.roles, start=1)]
