"""The methods: PPO, CORY, and custom ones."""
import random
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import BYTES, byte_tokenizer, save_model
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
from cory.run.turn import Turn, sample_rows
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
    """Without knowledge transfer, shared reward and exchange, LLM1 is trained as by PPO, bit for bit."""
    without = "--knowledge_transfer false --partner_reward 0 --role_exchange_every 0".split()
    bare = finished(small_flags, tmp_path / "bare", *without, "--iterations", 3)
    ppo = finished(small_flags, tmp_path / "ppo", "--method", "ppo", "--iterations", 3)
    for cory_row, ppo_row in zip(rows(bare), rows(ppo), strict=True):
        for key, x in ppo_row.items():
            if not key.endswith("/mean"):
                assert cory_row[key] == x, key
    # untrained observers: one was shown the bare query, the other a response, too
    without_transfer = training(bare)[0]["train/task_reward/llm2"]
    assert without_transfer != training(whole)[0]["train/task_reward/llm2"]
    assert without_transfer != training(bare)[0]["train/task_reward/llm1"]


class ObserverMetric(Cory):
    """Only the observer's update has this metric."""

    def update(self, role, agent, rollout, score_B):
        metrics = super().update(role, agent, rollout, score_B)
        if role == "observer":
            metrics["only_observer"] = 2.0
        return metrics


def parities(texts):
    """The ids' remainders modulo 2: token 0 is !, 1 is ", ..."""
    letters = [letter for letter in "".join(texts) if "!" <= letter <= "~"]
    return {(ord(letter) - ord("!")) % 2 for letter in letters}


@pytest.mark.parametrize("edited, rank", [(LanguageModel, 0), (Policy, 0), (Policy, 2)])
def test_tokens_masked_by_an_override_of_logits_are_never_sampled(
        edited, rank, small_flags, tmp_path, monkeypatch):
    """Even ids are masked, in all models or in policies alone. Policies, loaded ones too, get the mask when
    `new_policy` makes them.
    """
    even_ids = torch.arange(0, 256, 2)
    logits = LanguageModel.logits
    make_policy = LanguageModel.new_policy

    def masked_logits(self, hidden):
        return logits(self, hidden).index_fill(1, self.masked, -1e9)

    def new_policy(self, *args):
        policy = make_policy(self, *args)
        policy.masked = even_ids
        return policy

    expected = {"base": {0, 1}, "llm1": {1}, "llm2": {1}}
    if edited is LanguageModel:
        expected["base"] = {1}
        monkeypatch.setattr(LanguageModel, "masked", even_ids, raising=False)
    monkeypatch.setattr(LanguageModel, "new_policy", new_policy)
    monkeypatch.setattr(edited, "logits", masked_logits)
    folder = finished(small_flags, tmp_path / "run", "--iterations", 1, "--lora_rank", rank)
    samples = rows(folder, "samples.jsonl")
    for role in Cory.roles:
        assert parities([sample[role] for sample in samples]) == {1}
    for row in rows(folder):
        assert all(map(isfinite, row.values()))
    main(["evaluate", str(folder), "--samples", "4"])
    for who in expected:
        texts = []
        for row in rows(folder, f"evaluation/{who}.jsonl"):
            texts += [*row["sampled"], row["greedy"]]
        assert parities(texts) == expected[who]


def test_one_model_can_play_both_roles(small_flags, tmp_path):
    """Its second update is on responses from before the first, so that its first ratio is not 1."""
    words = ["--share_weights", "--method", "test_methods:ObserverMetric", "--iterations", 2]
    folder = finished(small_flags, tmp_path / "r", *words)
    first, second = training(folder)
    assert first["train/only_observer/llm1"] == 2
    assert first["train/approx_kl/llm1"] > 1e-5
    rewards = []
    for row in rows(folder, "samples.jsonl")[:4]:
        rewards += [row["pioneer_reward"], row["observer_reward"]]
    assert first["train/task_reward/llm1"] == pytest.approx(np.mean(rewards), abs=1e-6)
    # KL is 0: an update on 4 responses changes eta from 0.15 to 0.15 (1 - 0.2 * 4 / 20) = 0.144. Logged is
    # the mean of eta in both updates, (0.15 + 0.144) / 2.
    assert first["train/kl_coef/llm1"] == pytest.approx(0.147)
    assert second["train/kl_coef/llm1"] < 0.147


class TrainsOne(Cory):
    """llm2 is never trained, whichever role it plays."""

    def update(self, role, agent, rollout, score):
        if agent.name == "llm2":
            return {}
        return super().update(role, agent, rollout, score)


def test_an_agent_that_is_never_trained_keeps_its_eta_and_is_in_no_mean(small_flags, tmp_path):
    """Before training, the mean is over all agents; `evaluate` knows who was trained."""
    folder = finished(small_flags, tmp_path / "run", "--iterations", 2, "--method", "test_methods:TrainsOne")
    held_out = read(folder / "eval.json")
    assert held_out["mean"] == held_out["llm1"]
    assert held_out["mean"] != held_out["llm2"]
    agents = torch.load(checkpoints_of(folder)[0], weights_only=True)["agents"]
    assert agents["llm2"]["kl_coef"] == 0.15
    assert agents["llm1"]["kl_coef"] != 0.15
    main(["evaluate", str(folder), "--samples", "1"])
    results = read(folder / "evaluation/results.json")
    assert results["mean"]["kl"] == results["llm1"]["kl"] > 0


def test_samples_pair_the_responses_that_were_read_together():
    """Five queries, of which four are shown, with three responses each. The observer has read the pioneer's
    row 2 in all rows of q1, and its row 4 in those of q2.
    """
    turns = []
    policy = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: f"prompt {ids[0]}"))
    agent = SimpleNamespace(name="llm1", policy=policy, cfg=settings(batch_size=24, responses_per_query=3))
    seen_B = torch.tensor([2, 2, 2, 4, 4, 4, *range(6, 15)])
    for role, read_B in (("pioneer", None), ("observer", seen_B)):
        rollout = SimpleNamespace(
            query=[f"q{i // 3 + 1}" for i in range(15)], text=[f"{role} {i}" for i in range(15)],
            read_B=read_B, prompt_BP=torch.arange(15)[:, None], prompt_mask_BP=torch.ones(15, 1))
        turns.append(Turn(role, agent, rollout, torch.arange(15.0), {}))
    first, second, _, _ = sample_rows(7, turns)
    assert (first["query"], first["pioneer"], first["observer"]) == ("q1", "pioneer 2", "observer 0")
    assert (first["pioneer_reward"], first["pioneer_prompt"]) == (2, "prompt 2")
    assert (second["query"], second["pioneer"], second["observer"]) == ("q2", "pioneer 4", "observer 3")


class NeedsRloo(Cory):
    needs = {"advantage": "rloo"}


def test_a_setting_other_than_a_method_needs_is_refused(small_flags, tmp_path, capsys):
    line = refusal(small_flags, tmp_path / "r", capsys, "--method", "test_methods:NeedsRloo")
    assert "advantage is 'gae': test_methods:NeedsRloo needs rloo" in line


@pytest.mark.parametrize("example", ["fresh:Fresh", "population:Population", "distill:Distill"])
def test_examples_for_two_agents_refuse_shared_weights(example, small_flags, tmp_path, capsys):
    method = f"examples.methods.{example}"
    line = refusal(small_flags, tmp_path / "r", capsys, "--share_weights", "--method", method)
    assert f"share_weights is True: {method} needs False" in line


class Careless(Cory):
    """It draws roles, changes rewards in place, and may let the observer respond to other queries."""
    mixes_queries_in = ""

    def assign_roles(self, agents, iteration):
        return random.sample(agents, 2)

    def respond(self, players, queries, sample):
        rollouts = super().respond(players, queries, sample)
        phase = "training" if self.training else "evaluation"
        if self.mixes_queries_in == phase:
            other = queries[::-1]
            rollouts[1] = sample(players[1], other, other)
        return rollouts

    def team_metrics(self, rollouts, rewards):
        rewards[0] += 100
        return {}


CARELESS = ["--method", "test_methods:Careless", "--iterations", 8, "--eval_every", 0]


@pytest.mark.parametrize("phase, message", [
    ("training", "or roles have different ones"), ("evaluation", "other queries than it was given")])
def test_responses_to_other_queries_are_refused(phase, message, small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Careless, "mixes_queries_in", phase)
    assert message in refusal(small_flags, tmp_path / "r", capsys, *CARELESS)


def test_a_method_may_draw_roles_and_change_rewards_in_place(small_flags, tmp_path):
    folder = finished(small_flags, tmp_path / "r", *CARELESS)
    pioneers = {sample["iteration"]: sample["pioneer_agent"] for sample in rows(folder, "samples.jsonl")}
    assert {*pioneers.values()} == {"llm1", "llm2"}
    for row in training(folder):
        assert row["train/task_reward/llm1"] < 50
        assert row["train/role/llm1"] == (pioneers[row["iteration"]] == "llm2")


def doubled(agent, kl_N):
    return 2 * agent.kl_coef


LLM2 = dict(learning_rate=0.02, lr_schedule="linear", init_kl_coef=0.7, advantage="reinforce",
            kl_controller="test_methods:doubled")


class CustomMethod(Cory):
    """llm1 is a GPT-2; llm2 is a Llama with its tokenizer and with other settings, which are in LLM2. The
    observer reads two responses of the pioneer, and each role has another score.
    """
    queries = []                                # of each call of `respond`

    @staticmethod
    def agent_config(cfg, name):
        return replace(cfg, **LLM2) if name == "llm2" else cfg

    def respond(self, players, queries, sample):
        pioneer, observer = players
        self.queries.append(queries)
        policy = getattr(pioneer, "policy", pioneer)            # held out, players are policies
        self.pioneer_is_llm2 = policy.lm.config.model_type == "llama"
        prompts = self.task.pioneer_prompts(queries)
        first = sample(pioneer, prompts, queries)
        second = sample(pioneer, prompts, queries)
        both = [f"{a}|{b}" for a, b in zip(first.text, second.text)]
        return [first, sample(observer, self.task.observer_prompts(queries, both), queries)]

    def scores(self, rollouts, rewards):
        return [rewards[0], rewards[1] + 1]

    def team_metrics(self, rollouts, rewards):
        metrics = super().team_metrics(rollouts, rewards)
        return metrics | {"pioneer_is_llm2": torch.tensor(int(self.pioneer_is_llm2))}


def require_combined_reward(row, split, agent):
    """It is the task reward - eta KL, with the first eta."""
    eta = {"llm1": 0.15, "llm2": 0.7}[agent]
    reward = row[f"{split}/task_reward/{agent}"]
    kl = row[f"{split}/kl/{agent}"]
    assert row[f"{split}/combined_reward/{agent}"] == pytest.approx(reward - eta * kl)


def test_a_custom_method_is_trained_evaluated_and_resumed(small_flags, tmp_path):
    """Roles are exchanged after each of two iterations."""
    LLM2["model"] = str(save_model("llama", tmp_path / "llama", byte_tokenizer(BYTES[::-1])))
    whole = finished(small_flags, tmp_path / "whole", "--method", "test_methods:CustomMethod",
                     "--iterations", 2, "--eval_every", 1, "--role_exchange_every", 1)
    # each of three evaluations has the team of bases and the team; two iterations are between them
    held_out = [queries == CustomMethod.queries[0] for queries in CustomMethod.queries]
    assert held_out == [True, True, False, True, True, False, True, True]
    part = stopped(whole, tmp_path / "part")
    resume(part)
    require_same_runs(whole, part)
    for row in rows(whole, "samples.jsonl"):
        assert row["query"] == row["pioneer_prompt"]
        assert f"{row['pioneer']}|" in row["observer_prompt"]
    for iteration, row in enumerate(training(whole), start=1):
        for agent in ("llm1", "llm2"):
            score = row[f"train/task_reward/{agent}"] + row[f"train/role/{agent}"]
            assert row[f"train/score/{agent}"] == pytest.approx(score)
            require_combined_reward(row, "train", agent)
        assert "train/value_loss/llm1" in row
        assert "train/value_loss/llm2" not in row
        assert row["train/learning_rate/llm1"] == 1e-3
        assert row["train/learning_rate/llm2"] == 0.02 / iteration          # (1 - 0/2) and (1 - 1/2) of 0.02
        assert row["train/kl_coef/llm1"] < 0.2
        assert row["train/kl_coef/llm2"] == 0.7 * iteration                 # 0.7, then doubled
    evaluated = evaluations(whole)
    assert [row["eval/pioneer_is_llm2/team"] for row in evaluated] == [0, 0, 1]     # in the roles played
    first, *_, last = evaluated
    for who in ("base", "base_llm2", "llm1", "llm2"):           # before training, each is its base
        assert first[f"eval/kl/{who}"] == pytest.approx(0, abs=1e-6)
    for metric in ("observer_task_reward", "observer_kl"):
        base_team = first[f"eval/{metric}/base_team"]
        assert first[f"eval/{metric}/team"] == pytest.approx(base_team, abs=1e-5)
    assert first["eval/base_perplexity/base"] != first["eval/base_perplexity/base_llm2"]
    for agent in ("llm1", "llm2"):
        require_combined_reward(last, "eval", agent)
    config = read(whole / "config.json")
    assert {name: config[f"llm2/{name}"] for name in LLM2} == LLM2


@pytest.mark.parametrize("setting", ["advantage", "critic", "loss", "lr_schedule", "kl_controller"])
def test_a_module_that_does_not_exist_is_refused_before_a_model_is_loaded(
        setting, small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cory.run.experiment.load_language_model", None)
    line = refusal(small_flags, tmp_path / "r", capsys, f"--{setting}", "nowhere:x")
    assert "nowhere:x: No module named 'nowhere'" in line


@pytest.mark.parametrize("name, value", [
    ("agent_names", ["llm1", "llm1"]),
    ("agent_names", ["llm1", "base"]),
    ("roles", ["pioneer", "observer", "pioneer"])])
def test_repeated_names_are_refused(
        name, value, small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Cory, name, value)
    said = refusal(small_flags, tmp_path / "r", capsys)
    assert "give each agent and each role another name" in said
    assert str(value)[1:-1] in said


@pytest.mark.parametrize("owner, hook, name", [
    (Imdb, "metrics", "length"), (Cory, "update", "role")])
def test_a_custom_metric_with_the_name_of_another_is_an_error(
        owner, hook, name, small_flags, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, hook, lambda *_: {name: 2.0})
    monkeypatch.setattr(Cory, "evaluate", lambda *_: {})
    with pytest.raises(TypeError, match=name):
        finished(small_flags, tmp_path / "run", "--iterations", 1)


class Three(Cory):
    agent_names = ("llm1", "llm2", "llm3")
    roles = ("pioneer", "observer", "last")


def test_two_agents_alternate_in_three_roles():
    method = Three(settings(role_exchange_every=1), None)
    assert method.assign_roles([1, 2], 1) == [1, 2, 1]
    assert method.assign_roles([1, 2], 2) == [2, 1, 2]
    assert method.assign_roles([1, 2], 3) == [1, 2, 1]


REWARD = {"bad": 0.0, "good": 1.0, "best": 3.0}
TASK = SimpleNamespace(
    held_out_queries=["q1", "q2", "q3"],
    pioneer_prompts=lambda queries: [f"{query}:" for query in queries],
    observer_prompts=lambda queries, texts: [f"{query} {text}:" for query, text in zip(queries, texts)],
    metrics=lambda queries, texts: {},
    reward=lambda queries, texts: torch.tensor([REWARD[text] for text in texts]))
# the response to each prompt
BY_TWO = {
    "q1:": "bad", "q2:": "good", "q3:": "good",
    "q1 bad:": "best", "q2 good:": "good", "q3 good:": "bad"}
# the last reads the second
BY_THREE = {
    "q1:": "good", "q2:": "good", "q3:": "good",
    "q1 good:": "bad", "q2 good:": "bad", "q3 good:": "bad",
    "q1 bad:": "best", "q2 bad:": "good", "q3 bad:": "good"}


@pytest.mark.parametrize("method_class, responses, rewards", [
    # the observer's rewards are 3, 1, 0
    (Cory, BY_TWO, {"pioneer": 2 / 3, "observer": 4 / 3}),
    # the last role's are 3, 1, 1
    (Three, BY_THREE, {"pioneer": 1, "observer": 0, "last": 5 / 3})])
def test_team_metrics_by_hand(method_class, responses, rewards, monkeypatch):
    """Role i has i nats of KL, and eta is i / 10. Each has another seed: with one seed, equal agents would
    respond alike.
    """
    seeds = []

    def sample_responses(model, prompts, queries, length, seed, reference):
        seeds.append(seed)
        assert reference == f"base of {model}"
        nats = 1.0 + method_class.roles.index(model)
        return SimpleNamespace(
            query=queries, text=[responses[prompt] for prompt in prompts], kl_B=torch.full((3,), nats),
            mask_BT=torch.ones(3, 2), truncated_B=torch.zeros(3), sampling_gap=0.0)

    monkeypatch.setattr(evaluate, "sample_responses", sample_responses)
    players = []
    expected = {}
    for i, role in enumerate(method_class.roles, start=1):
        cfg = settings(init_kl_coef=i / 10)
        players.append(evaluate.EvaluatedAgent(f"llm{i}", role, f"base of {role}", cfg))
        expected[f"{role}_task_reward"] = rewards[role]
        expected[f"{role}_kl"] = i
        expected[f"{role}_combined_reward"] = rewards[role] - i / 10 * i
    metrics = evaluate.evaluate_team(method_class(settings(), TASK), players)
    assert metrics == pytest.approx(expected)
    assert seeds == [*range(1, len(players) + 1)]
