"""Held-out metrics by hand, and evaluation of finished runs: pass@k, best of n, what is refused."""
from itertools import combinations
from math import log
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import bigram, error_line, read, settings

import cory.train
import train_imdb
from cory.ppo.formulas import pass_at_k
from cory.run import evaluate, evaluation
from cory.system.files import read_jsonl


def test_pass_at_k_and_best_of_n_are_means_over_all_subsets():
    """Rewards 4, 1, 2, 3: the best of their 6 pairs is 2 once, 3 twice, 4 three times, in the mean 20 / 6. Of
    0, 6, 0, 0 it is 6 in three pairs, in the mean 3. KL <= log 2 - 1/2.
    """
    for n, c in combinations(range(7), 2):
        for k in range(1, c + 1):
            solved = [any(subset) for subset in combinations([True] * n + [False] * (c - n), k)]
            assert pass_at_k(c, n, k) == pytest.approx(sum(solved) / len(solved))
    reward_Qm = np.array([[4.0, 1, 2, 3], [0, 6, 0, 0]])
    assert evaluation.best_of_n(reward_Qm, 2) == pytest.approx((log(2) - 0.5, (20 / 6 + 3) / 2))


# A task of eight queries whose reward counts letters.
LETTERS = SimpleNamespace(
    held_out_queries=["a"] * 8, greedy=False, cfg=settings(max_response_length=5), pioneer_prompts=list,
    reward=lambda queries, responses: torch.tensor([float(len(text)) for text in responses]),
    metrics=lambda queries, responses: {"longest": max(map(len, responses))})


def test_held_out_metrics_by_hand():
    """A model that surely says "bcbcb" after "a", against a base that is uniform over 7 tokens."""
    assert evaluation.distinct([[1, 1, 2], [1, 2]], 2) == 2 / 3                 # (1,1), (1,2), (1,2)
    logits_UV = torch.full((7, 7), -99.0)
    logits_UV[[0, 1, 2], [1, 2, 1]] = 99.0
    cfg = settings(max_response_length=5, init_kl_coef=0.5, eval_samples=2)
    got = evaluation.evaluate(bigram(logits_UV), bigram(torch.zeros(7, 7)), LETTERS, cfg)
    expected = {"task_reward": 5.0, "kl": 5 * log(7), "combined_reward": 5 - 0.5 * 5 * log(7), "length": 5.0,
                "longest": 5, "distinct_1": 2 / 80, "distinct_2": 2 / 64,       # of 16 responses
                "repeated_tokens": 0.6, "base_perplexity": 7.0}                 # 3 of 5 repeat
    assert got == pytest.approx(expected, rel=1e-4)


def test_solved_metrics_by_hand(tmp_path, monkeypatch):
    """Greedy responses score 1 and 0; of the two samples of each query one of the first's is right: pass@1 is
    (1/2 + 0) / 2, pass@2 (1 + 0) / 2.
    """
    texts, task = {None: ["x", ""], 0: ["", "xx", "", ""]}, SimpleNamespace(**vars(LETTERS))
    monkeypatch.setattr(evaluate, "sample_responses", lambda *args: SimpleNamespace(text=texts[args[-1]]))
    task.held_out_queries = ["a", "b"]
    metrics, reward_Qm = evaluate.solved_metrics(None, task, 2, [1, 2], tmp_path / "base.jsonl")
    assert metrics == {"greedy_task_reward": 0.5, "greedy_solved": 0.5, "greedy_longest": 1, "pass@1": 0.25,
                       "pass@2": 0.5}
    assert reward_Qm.tolist() == [[0, 2], [0, 0]]
    assert [row["sampled"] for row in read_jsonl(tmp_path / "base.jsonl")] == [["", "xx"], ["", ""]]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_is_measured_against_its_base_whatever_its_references_have_become(
        rank, small_flags, tmp_path, capsys, monkeypatch):
    """Full copies and adapters, by the run itself and by `evaluate`."""
    def update_and_move(agent, rollout, score_B, update=cory.train.ppo_update):
        metrics = update(agent, rollout, score_B)
        agent.move_reference()
        return metrics

    monkeypatch.setattr(cory.train, "ppo_update", update_and_move)
    run, small = tmp_path / "run", "--num_ppo_epochs 1 --eval_queries 4 --learning_rate 0.1 --iterations 1"
    train_imdb.main([*small_flags, *small.split(), "--lora_rank", str(rank), "--run_dir", str(run)])
    assert read(run / "eval.json")["llm1"]["kl"] > 0.01
    flags = [str(run), "--k", "1", "2", "--samples", "8", "--device", "cpu"]
    evaluate.main(flags)
    assert "| CORY LLM1 | CORY LLM2 |" in capsys.readouterr().out
    results = read(run / "evaluation" / "results.json")
    assert (results["queries"], results["samples"], [*results["best_of_n"]]) == (4, 8, ["4"])
    texts = [[row["sampled"] for row in read_jsonl(run / "evaluation" / f"{name}.jsonl")]
             for name in ("base", "llm1", "llm2")]
    assert texts[0] != texts[1] != texts[2] and [len(of_query) for of_query in texts[0]] == [8] * 4
    for name, value in (("k", "0"), ("k", "9"), ("queries", "99")):
        assert f"{name} is " in error_line(evaluate.main, [*flags, f"--{name}", value], capsys)
