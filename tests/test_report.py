"""Logs, Weights & Biases, evaluation figures and the comparison of runs."""
import json
import sys

import pytest
import torch
import train_imdb
from toys import bigram, settings
from test_sampling import path_model

from cory import report
from cory.evaluate import distinct, evaluate


def test_distinct_by_hand():
    assert distinct([[1, 1, 2], [1, 2]], 1) == 2 / 5                    # tokens 1 and 2 among five
    assert distinct([[1, 1, 2], [1, 2]], 2) == 2 / 3                    # (1,1), (1,2), (1,2)
    assert distinct([[1]], 2) == 0.0


class Letters:
    """A task of one query; the reward counts letters."""
    held_out_queries = ["a"] * 8
    pioneer_prompts = staticmethod(lambda queries: queries)
    reward = staticmethod(lambda queries, responses: torch.tensor([float(len(r)) for r in responses]))
    figures, greedy = staticmethod(lambda queries, responses: {"longest": max(map(len, responses))}), False


def test_evaluation_figures_by_hand():
    """A model that surely says "bcbcb" against a base that is uniform over 7 tokens."""
    logits = path_model(*"abcb")
    model, base = bigram(logits), bigram(torch.zeros(7, 7))
    got = evaluate(model, base, Letters, settings(max_response_length=5, init_kl_coef=0.5))
    log7 = torch.tensor(7.0).log().item()
    # each token costs log 7 nats: KL 5 log 7; 2 kinds among 40 tokens, (b,c) and (c,b) among 32 pairs; 3 of 5 repeat; perplexity 7
    assert got == pytest.approx({"task_reward": 5.0, "kl": 5 * log7, "combined_reward": 5 - 0.5 * 5 * log7, "length": 5.0,
                                 "distinct_1": 2 / 40, "distinct_2": 2 / 32, "repeated_tokens": 0.6, "base_perplexity": 7.0, "longest": 5}, rel=1e-4)


def test_evaluation_leaves_every_random_stream_and_repeats_itself(small):
    from cory.ppo.model import load_language_model
    model = load_language_model(str(small / "lm"))
    state = torch.get_rng_state()
    first, second = (evaluate(model, model, Letters, settings(mini_batch_size=m)) for m in (8, 8))
    assert first == second and torch.equal(state, torch.get_rng_state()) and first["kl"] == 0


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"iteration": 0}\n{"iteration": 1}\n{"itera')
    assert report.read_jsonl(tmp_path / "m.jsonl") == [{"iteration": 0}, {"iteration": 1}]


@pytest.mark.parametrize("environment, netrc, expected", [
    ({"WANDB_API_KEY": "x" * 40}, None, True), ({}, None, False),
    ({}, "machine api.wandb.ai login user password secret\n", True), ({}, "machine example.org login user password secret\n", False),
    ({"WANDB_BASE_URL": "https://wandb.example.org"}, "machine wandb.example.org login user password secret\n", True)])
def test_auto_goes_online_only_with_a_key(environment, netrc, expected, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text(netrc or "")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert report.has_wandb_key() is expected


@pytest.mark.parametrize("asked, environment, key, expected", [
    ("auto", None, True, "online"), ("auto", None, False, "offline"), ("online", None, False, "offline"), ("offline", None, True, "offline"),
    ("disabled", None, True, None), ("auto", "disabled", True, None), ("auto", "offline", True, "offline"), ("auto", None, "refused", "offline")])
def test_wandb_mode(asked, environment, key, expected, tmp_path, capsys, monkeypatch):
    import wandb
    modes = []

    def init(mode, **options):
        if key == "refused" and mode == "online":
            raise wandb.errors.CommError("no such server")
        modes.append(mode)
        return options

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(report, "has_wandb_key", lambda: bool(key))
    monkeypatch.setenv("WANDB_MODE", environment) if environment else monkeypatch.delenv("WANDB_MODE", raising=False)
    started = report.start_wandb(settings(wandb=asked), tmp_path, "abc")
    assert modes == ([expected] if expected else []) and (started is None or started["id"] == "abc")
    assert ("wandb sync --append" in capsys.readouterr().out) == (expected == "offline")


def test_wandb_offline_receives_every_figure_and_the_table(small_flags, tmp_path, capsys, monkeypatch):
    import wandb
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logged, kept = [], wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", lambda self, data, step=None: logged.append((step, data)) or kept(self, data, step=step))
    folder = tmp_path / "run"
    train_imdb.main([*small_flags, "--run_dir", str(folder), "--iterations", "3", "--wandb", "auto"])
    assert f"wandb sync {folder}/wandb/offline-run-" in capsys.readouterr().out
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    first_id = json.loads(next(folder.glob("checkpoints/*/state.json")).read_text())["wandb_id"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [step for step, _ in logged] == [0, 1, 2, 3]
    for row, (_, data) in zip(rows, logged):
        assert {k: v for k, v in data.items() if k != "samples"} == {k: v for k, v in row.items() if k != "iteration"}
    table = logged[-1][1]["samples"]
    assert {"query", "pioneer", "observer", "base", "pioneer_reward", "observer_reward", "base_reward"} <= set(table.columns) and len(table.data) == 12
    train_imdb.main(["--resume", "--run_dir", str(folder), "--iterations", "4"])
    assert json.loads(next(folder.glob("checkpoints/*/state.json")).read_text())["wandb_id"] == first_id and first_id
    assert len(logged[-1][1]["samples"].data) == 16                     # rows of before the stop included


def test_comparison_of_runs_draws_and_tabulates_mean_and_std(small_flags, tmp_path, capsys, monkeypatch):
    folders = []
    for method in ("ppo", "cory"):
        for seed in ("0", "1"):
            folders.append(str(tmp_path / f"{method}{seed}"))
            train_imdb.main([*small_flags, "--run_dir", folders[-1], "--method", method, "--seed", seed, "--iterations", "2"])
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["report", *folders, "--out", str(tmp_path / "c.png")])
    report.main()
    out = capsys.readouterr().out
    held = [json.load(open(f"{f}/eval.json"))["llm1"]["kl"] for f in folders[:2]]
    mean, std = sum(held) / 2, abs(held[0] - held[1]) / 2**0.5          # sample std of two values
    assert f"{mean:.1f} ± {std:.1f}" in out and "PPO LLM1" in out and "CORY LLM2" in out
    assert (tmp_path / "c.png").stat().st_size > 20_000
    train_imdb.main([*small_flags, "--run_dir", str(tmp_path / "other"), "--iterations", "2", "--gamma", "0.9"])
    monkeypatch.setattr(sys, "argv", ["report", *folders, str(tmp_path / "other")])
    with pytest.raises(SystemExit):
        report.main()
    assert "differs from" in (err := capsys.readouterr().err) and "gamma" in err
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        report.main()
    assert stop.value.code == 2
