"""Held-out metrics by hand, and the evaluation of finished runs: pass@k and the best of n."""
import json
from dataclasses import replace
from itertools import combinations
from math import log

import numpy as np
import pytest
import torch
from conftest import save_model
from toys import bigram, finished, read, refusal, rows, settings

from cory import train
from cory.__main__ import main
from cory.run import evaluate
from cory.run.log import read_jsonl

pytestmark = pytest.mark.usefixtures("read_once")


def test_best_of_n_is_the_mean_over_all_subsets():
    """pass@k is the best of k marks 0 or 1."""
    rewards = np.array([[4.0, 1, 2, 3, 1], [0, 1, 0, 1, 0]])
    for n in range(1, 6):
        best = []
        for row in rewards:
            best += [max(subset) for subset in combinations(row, n)]
        assert evaluate.best_of_n(rewards, n) == pytest.approx(np.mean(best))


def test_distinct_pairs_by_hand():
    assert evaluate.distinct_2([[1, 1, 2], [1, 2]]) == 2 / 3        # (1, 1), (1, 2), (1, 2)
    assert evaluate.distinct_2([[1]]) == 0


class CountLetters:
    """A task of eight queries; each letter of a response earns 2."""
    held_out_queries = ["a"] * 8
    greedy = False

    def pioneer_prompts(self, queries):
        return queries

    def reward_and_terms(self, queries, texts):
        rewards = [2.0 * len(text) for text in texts]
        return torch.tensor(rewards), {"part": 3}

    def metrics(self, queries, responses):
        return {"responses": len(responses)}


class NoReward(CountLetters):
    def reward_and_terms(self, queries, texts):
        return torch.zeros(len(texts)), {}


def evaluated_agent(logits_UV, length):
    """Its base is uniform over 7 tokens."""
    cfg = settings(max_response_length=length, init_kl_coef=0.5, eval_samples=2)
    base = bigram(torch.zeros(7, 7))
    return evaluate.EvaluatedAgent("llm1", bigram(logits_UV), base, cfg)


def test_held_out_metrics_by_hand(tmp_path):
    """After "a" the first model surely says "bcbcb", the second "b" and EOS."""
    logits_UV = torch.full((7, 7), -99.0)
    logits_UV[[0, 1, 2], [1, 2, 1]] = 99.0
    metrics = evaluate.evaluate(evaluated_agent(logits_UV, 5), CountLetters())
    kl = 5 * log(7)
    assert metrics == pytest.approx({
        "task_reward": 10.0, "kl": kl, "combined_reward": 10 - 0.5 * kl, "length": 5.0, "truncated": 1,
        "part": 3, "responses": 16,
        "distinct_2": 2 / 64,                   # (b, c) and (c, b), of 4 pairs in each of 16 responses
        "repeated_tokens": 0.6,                                 # 3 of 5
        "base_perplexity": 7.0, "sampling_gap": 0}, rel=1e-4)
    logits_UV[1, [2, 6]] = torch.tensor([-99.0, 99])
    metrics = evaluate.evaluate(evaluated_agent(logits_UV, 2), NoReward(), tmp_path)
    assert metrics["truncated"] == 0                            # two tokens are the limit, but EOS is one
    assert metrics["pass@2"] == 0                               # a reward of 0 is no solution


class TwoBases(train.Cory):
    @staticmethod
    def agent_config(cfg, name):
        return replace(cfg, model=f"{cfg.model}_of_llm2") if name == "llm2" else cfg


@pytest.mark.filterwarnings("error")            # users see no warning
def test_evaluate_repeats_held_out_metrics_and_adds_best_of_n(small_flags, tmp_path, capsys):
    """Of adapters on two bases."""
    save_model("gpt2", tmp_path / "lm")
    save_model("gpt2", tmp_path / "lm_of_llm2", num_hidden_layers=1)
    flags = "--method test_evaluate:TwoBases --lora_rank 2 --learning_rate 0.1 --iterations 1"
    flags = f"{flags} --eval_samples 8 --model {tmp_path}/lm"
    run = finished(small_flags, tmp_path / "run", *flags.split())
    held_out = read(run / "eval.json")
    assert held_out["llm1"]["kl"] > 0.01
    trained_on_gpu = read(run / "config.json") | {"device": "cuda"}
    (run / "config.json").write_text(json.dumps(trained_on_gpu))
    main(["evaluate", str(run), "--samples", "8"])          # also without a GPU
    printed = capsys.readouterr().out
    assert "\npass@8 " in printed
    assert "\nobserver_task_reward " in printed
    results = read(run / "evaluation" / "results.json")
    for team in ("base_team", "team"):                      # in the roles played, by the same random numbers
        assert results[team] == pytest.approx(held_out[team], rel=1e-4)
    names = {"base", "base_llm2", "llm1", "llm2"}
    assert names < held_out.keys()
    assert {path.stem for path in run.glob("evaluation/*.jsonl")} == names
    for name in names:
        responses = read_jsonl(run / "evaluation" / f"{name}.jsonl")
        metrics = results[name]
        rewards = np.array([row["rewards"] for row in responses])
        assert rewards.mean() == pytest.approx(held_out[name]["task_reward"], rel=1e-4)
        best = rewards.max(1)
        assert metrics["best_of_8"] == pytest.approx(best.mean())
        assert metrics["pass@8"] == (best > 0).mean()
        assert metrics["pass@1"] == (rewards > 0).mean()
        greedy = np.mean([row["greedy_reward"] for row in responses])
        assert metrics["greedy_task_reward"] == pytest.approx(greedy)
    main(["evaluate", str(run), "--samples", "1", "--queries", "20"])
    assert read(run / "evaluation" / "results.json")["queries"] == 20


class TwoTemperatures(train.Cory):
    """With LoRA, agents also have two ranks."""
    @staticmethod
    def agent_config(cfg, name):
        if name == "llm1":
            return replace(cfg, temperature=0.7)
        return replace(cfg, temperature=1.2, lora_rank=2 * cfg.lora_rank)


@pytest.mark.parametrize("rank", [0, 2])
def test_agents_of_one_model_can_have_different_temperatures(rank, small_flags, tmp_path):
    """Each starts as the base at its temperature, is measured against that, and is saved with it."""
    flags = f"--method test_evaluate:TwoTemperatures --lora_rank {rank} --iterations 2 --learning_rate 0.02"
    run = finished(small_flags, tmp_path / "run", *flags.split())
    before, first, *_ = rows(run)
    assert before["eval/base_perplexity/base"] < before["eval/base_perplexity/base_llm2"]
    held_out = read(run / "eval.json")
    main(["evaluate", str(run), "--samples", "1"])
    results = read(run / "evaluation" / "results.json")
    for agent, base, temperature, agent_rank in (
            ("llm1", "base", 0.7, rank), ("llm2", "base_llm2", 1.2, 2 * rank)):
        for name in ("task_reward", "kl", "base_perplexity", "distinct_2"):
            assert before[f"eval/{name}/{agent}"] == pytest.approx(before[f"eval/{name}/{base}"], abs=1e-5)
        for name in ("kl", "approx_kl", "sampling_gap"):
            assert first[f"train/{name}/{agent}"] == pytest.approx(0, abs=1e-6), name
        final = run / "final" / agent
        assert read(final / "generation_config.json")["temperature"] == temperature
        if rank:
            assert read(final / "adapter_config.json")["r"] == agent_rank
        assert held_out[agent]["kl"] > 0.01
        again = {name: results[agent][name] for name in held_out[agent]}
        assert again == pytest.approx(held_out[agent], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("changes, message", [
    (dict(seed=1), "seed is 1: agents share it"), (dict(lora_rank=2), "lora_rank is 2: must be 0 for all")])
def test_settings_that_agents_must_share_are_refused(
        changes, message, small_flags, tmp_path, capsys, monkeypatch):
    def agent_config(cfg, name):
        return replace(cfg, **changes) if name == "llm2" else cfg

    monkeypatch.setattr(train.Cory, "agent_config", staticmethod(agent_config))
    assert message in refusal(small_flags, tmp_path / "run", capsys)
