"""Held-out metrics by hand, and evaluation of finished runs: pass@k, best of n, what is refused."""
from dataclasses import replace
from itertools import combinations
from math import log
from types import SimpleNamespace

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
        best = [max(subset) for row in rewards for subset in combinations(row, n)]
        assert evaluate.best_of_n(rewards, n) == pytest.approx(np.mean(best))


# A task of eight queries whose reward counts letters.
LETTERS = SimpleNamespace(
    held_out_queries=["a"] * 8, greedy=False, cfg=settings(max_response_length=5), pioneer_prompts=list,
    reward_and_terms=lambda queries, texts: (torch.tensor([float(len(text)) for text in texts]), {"part": 1}),
    metrics=lambda queries, responses: {"longest": max(map(len, responses))})


def test_held_out_metrics_by_hand(tmp_path):
    """A model that surely says "bcbcb" after "a", against a base that is uniform over 7 tokens."""
    assert evaluate.distinct([[1, 1, 2], [1, 2]], 2) == 2 / 3                 # (1,1), (1,2), (1,2)
    logits_UV = torch.full((7, 7), -99.0)
    logits_UV[[0, 1, 2], [1, 2, 1]] = 99.0
    cfg = settings(max_response_length=5, init_kl_coef=0.5, eval_samples=2)
    player = evaluate.EvaluatedAgent("llm1", bigram(logits_UV), bigram(torch.zeros(7, 7)), cfg)
    got = evaluate.evaluate(player, LETTERS)
    expected = {"task_reward": 5.0, "kl": 5 * log(7), "combined_reward": 5 - 0.5 * 5 * log(7), "length": 5.0,
                "truncated": 1, "part": 1, "longest": 5,
                "distinct_1": 2 / 80, "distinct_2": 2 / 64,                         # of 16 responses
                "repeated_tokens": 0.6, "base_perplexity": 7.0, "sampling_gap": 0}  # 3 of 5 repeat
    assert got == pytest.approx(expected, rel=1e-4)
    logits_UV[1, [2, 6]] = torch.tensor([-99.0, 99])        # "b.", which a limit of two tokens does not cut
    cfg, zeros = replace(cfg, max_response_length=2), lambda queries, texts: torch.zeros(len(texts))
    task = SimpleNamespace(**vars(LETTERS) | {"reward_and_terms": lambda *given: (zeros(*given), {})})
    player = evaluate.EvaluatedAgent("llm1", bigram(logits_UV), bigram(), cfg)
    got = evaluate.evaluate(player, task, tmp_path / "b.jsonl")
    assert got["truncated"] == 0 and got["pass@2"] == 0                     # a reward of 0 is no solution


class TwoBases(train.Cory):
    @staticmethod
    def agent_config(cfg, name):
        return replace(cfg, model=f"{cfg.model}_of_llm2") if name == "llm2" else cfg


@pytest.mark.filterwarnings("error")            # whoever runs it sees none
@pytest.mark.parametrize("method, rank", [("cory", 0), ("test_evaluate:TwoBases", 2)])
def test_runs_are_measured_against_their_bases_and_again(method, rank, small_flags, tmp_path, capsys):
    """Full copies and adapters. `evaluate` draws the same responses again."""
    save_model("gpt2", tmp_path / "lm")
    save_model("gpt2", tmp_path / "lm_of_llm2", num_hidden_layers=1)
    own = f"--model {tmp_path}/lm --method {method} --lora_rank {rank} --learning_rate 0.1 --iterations 1"
    run = finished(small_flags, tmp_path / "run", *own.split(), "--eval_samples", 8)
    held_out = read(run / "eval.json")
    assert held_out["llm1"]["kl"] > 0.01
    main(["evaluate", str(run), "--samples", "8"])
    assert "\npass@8 " in (said := capsys.readouterr().out) and "\nobserver_reward " in said
    results = read(run / "evaluation" / "results.json")
    for team in ("base_team", "team"):                      # in the roles played, by the same random numbers
        assert results[team] == pytest.approx(held_out[team], rel=1e-4)
    names = {"base", "llm1", "llm2", *["base_llm2"] * (rank > 0)}
    assert {path.stem for path in run.glob("evaluation/*.jsonl")} == names < {*held_out}
    for name in names:
        said, of_run = read_jsonl(run / "evaluation" / f"{name}.jsonl"), results[name]
        rewards = np.array([row["rewards"] for row in said])
        assert rewards.mean() == pytest.approx(held_out[name]["task_reward"], rel=1e-4)
        assert of_run["best_of_8"] == pytest.approx(rewards.max(1).mean())
        assert of_run["pass@8"] == (rewards.max(1) > 0).mean() and of_run["pass@1"] == (rewards > 0).mean()
        assert of_run["greedy_task_reward"] == pytest.approx(np.mean([row["greedy_reward"] for row in said]))
    main(["evaluate", str(run), "--samples", "1", "--queries", "20"])
    assert read(run / "evaluation" / "results.json")["queries"] == 20


class TwoTemperatures(train.Cory):
    """And, with LoRA, two ranks."""
    @staticmethod
    def agent_config(cfg, name):
        if name == "llm1":
            return replace(cfg, temperature=0.7)
        return replace(cfg, temperature=1.2, lora_rank=2 * cfg.lora_rank)


@pytest.mark.parametrize("rank", [0, 2])
def test_agents_of_one_model_have_temperatures_of_their_own(rank, small_flags, tmp_path):
    """Each starts as the base at its own temperature, is measured against that, and is saved with it."""
    own = f"--method test_evaluate:TwoTemperatures --lora_rank {rank} --iterations 2 --learning_rate 0.02"
    run = finished(small_flags, tmp_path / "run", *own.split(), "--num_ppo_epochs", 1, "--batch_size", 4,
                   "--mini_batch_size", 4, "--gradient_accumulation_steps", 1, "--role_exchange_every", 0)
    before, first, *_ = rows(run)
    assert before["eval/base_perplexity/base"] < before["eval/base_perplexity/base_llm2"]
    for agent, base, temperature in (("llm1", "base", 0.7), ("llm2", "base_llm2", 1.2)):
        for name in ("task_reward", "kl", "base_perplexity", "distinct_1"):
            assert before[f"eval/{name}/{agent}"] == pytest.approx(before[f"eval/{name}/{base}"], abs=1e-5)
        for name in ("kl", "approx_kl", "sampling_gap"):
            assert first[f"train/{name}/{agent}"] == pytest.approx(0, abs=1e-6), name
        assert read(run / "final" / agent / "generation_config.json")["temperature"] == temperature
        if rank:
            assert read(run / "final" / agent / "adapter_config.json")["r"] == (2 if agent == "llm1" else 4)
    held_out = read(run / "eval.json")
    assert min(held_out[agent]["kl"] for agent in ("llm1", "llm2")) > 0.01
    main(["evaluate", str(run), "--samples", "1"])
    results = read(run / "evaluation" / "results.json")
    for agent in ("llm1", "llm2"):
        assert {name: results[agent][name] for name in held_out[agent]} == pytest.approx(
            held_out[agent], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("changes, says", [
    (dict(seed=1), "seed is 1: agents share it"), (dict(lora_rank=2), "lora_rank is 2: must be 0 for all")])
def test_what_agents_must_share_is_refused(changes, says, small_flags, tmp_path, capsys, monkeypatch):
    own = lambda cfg, name: replace(cfg, **changes) if name == "llm2" else cfg
    monkeypatch.setattr(train.Cory, "agent_config", staticmethod(own))
    assert says in refusal(small_flags, tmp_path / "run", capsys)
