"""The log of a run: its files, the progress bar's text, Weights & Biases, and what a resumed run logs."""
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import wandb
from toys import settings

from cory.errors import UserError
from cory.run.log import Logger, read_jsonl

TRAINING = {"llm1": {"task_reward": 1.0, "kl": 2.5}, "llm2": {"kl": 3.0}, "team": {"copies": 0.5}}
TRAINING_ROW = {"seconds": 4.0, "train/task_reward/llm1": 1.0, "train/kl/llm1": 2.5, "train/kl/llm2": 3.0,
                "train/copies/team": 0.5}
HELD_OUT = {"llm1": {"kl": 0.1}, "llm2": {"kl": 0.3}, "mean": {"kl": 0.2}}
HELD_OUT_ROW = {"eval/kl/llm1": 0.1, "eval/kl/llm2": 0.3, "eval/kl/mean": 0.2}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A run's folder, in an environment without a key and without settings of W&B."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    folder = tmp_path / "a run"
    folder.mkdir()
    return folder


def new_log(folder: Path, done: int = 0, wandb_id: str = "", dtype: str = "auto") -> Logger:
    cfg = settings(wandb="auto", method="chain:Chain", wandb_project="ours", dtype=dtype)
    configs = {"llm1": cfg, "llm2": replace(cfg, lam=0.5)}
    return Logger(cfg, configs, folder, done, wandb_id)


def add(logger: Logger, *iterations: int) -> None:
    """Iteration 0 is an evaluation of the bases alone."""
    for i in iterations:
        if i == 0:
            logger.log_evaluation(0, {"base": {"kl": 0.0}, "base_team": {"x": 0.5}})
            continue
        logger.log_training(i, TRAINING, 4.0, [{"iteration": i, "query": "q"}])
        logger.log_evaluation(i, HELD_OUT)


def test_a_log_writes_its_files_and_goes_to_wandb(folder, monkeypatch):
    logged = defaultdict(dict)                      # what W&B gets, by step
    wandb_log = wandb.Run.log

    def log(run, row, step):
        logged[step].update(row)
        wandb_log(run, row, step=step)

    monkeypatch.setattr(wandb.Run, "log", log)
    with new_log(folder) as first:
        add(first, 0, 1, 2, 3, 4)
        assert first.bar.desc.startswith("chain:Chain")
        assert first.bar.postfix == "reward=1.00 / nan, KL=2.50 / 3.00"
    expected = [{"iteration": 0, "eval/kl/base": 0.0, "eval/x/base_team": 0.5}]
    for i in (1, 2, 3, 4):
        expected.append({"iteration": i} | TRAINING_ROW)
        expected.append({"iteration": i} | HELD_OUT_ROW)
    assert read_jsonl(folder / "metrics.jsonl") == expected

    def iterations_of_samples(step):
        table = logged[step].pop("samples")
        return [iteration for iteration, _ in table.data]

    assert iterations_of_samples(2) == [1, 2]
    assert "samples" not in logged[0]
    assert iterations_of_samples(4) == [1, 2, 3, 4]
    assert logged[2] == {"iteration": 2} | TRAINING_ROW | HELD_OUT_ROW
    run = first.wandb
    assert (run.project, run.group, run.name) == ("ours", "", "a run")
    assert run.offline
    assert run.config["method"] == "chain:Chain"
    assert run.config["llm2/lam"] == 0.5
    logged.clear()
    with new_log(folder, 2, first.wandb_id) as resumed:
        assert logged[1] == {"iteration": 1} | TRAINING_ROW | HELD_OUT_ROW      # once more, to be uploaded
        assert resumed.bar.n == 2
        assert resumed.wandb.id == run.id
        add(resumed, 3)
    metrics = read_jsonl(folder / "metrics.jsonl")
    samples = read_jsonl(folder / "samples.jsonl")
    assert [row["iteration"] for row in metrics] == [0, 1, 1, 2, 2, 3, 3]
    assert [row["iteration"] for row in samples] == [1, 2, 3]


def test_without_a_network_a_run_is_offline_and_wandbs_variables_apply(folder, monkeypatch, capsys):
    """A W&B run of the user's that is active stays active."""
    monkeypatch.setenv("WANDB_RUN_GROUP", "seeds")
    monkeypatch.setenv("WANDB_NAME", "named")
    wandb.teardown()                                        # it reads them once
    users_run = wandb.init(mode="offline", dir=folder)
    init = wandb.init
    modes = []

    def without_network(mode, **named):
        modes.append(mode)
        if mode == "online":
            raise wandb.errors.CommError("no network")
        return init(mode=mode, **named)

    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.init", without_network)
    with new_log(folder) as log:
        assert (log.wandb.group, log.wandb.name) == ("seeds", "named")
    assert modes == ["online", "offline"]
    assert capsys.readouterr().out.startswith("W&B: offline, since no network\nW&B: wandb sync '")
    assert wandb.run is users_run
    users_run.finish()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with new_log(folder) as log:
        assert log.wandb is None


def test_an_iteration_is_logged_once(folder):
    """As by `super().train` called twice."""
    with new_log(folder) as log, pytest.raises(UserError, match="iteration 2 is logged already"):
        for i in (1, 2, 2):
            log.log_training(i, TRAINING, 4.0, [])


@pytest.mark.parametrize("dtype, warnings", [("float32", 1), ("bfloat16", 0)])
def test_a_sampling_gap_beyond_rounding_is_printed_once(dtype, warnings, folder, capsys):
    with new_log(folder, dtype=dtype) as log:
        for i, gap in enumerate([1e-4, 0.01, 0.02], start=1):
            metrics = {"llm2": {"sampling_gap": gap}, "team": {"copies": 0.5}}
            log.log_training(i, metrics, 1.0, [])
    assert capsys.readouterr().out.count("sampling_gap exceeds rounding") == warnings
