"""The log of a run: its files, the bar's text, Weights & Biases, its resumption."""
import os
from dataclasses import replace
from pathlib import Path

import pytest
import wandb
from toys import settings

from cory.run.log import Logger, read_jsonl

TRAINING = {"llm1": {"task_reward": 1.0, "kl": 2.5}, "llm2": {"kl": 3.0}, "team": {"copies": 0.5}}
HELD_OUT = {"llm1": {"kl": 0.1}, "llm2": {"kl": 0.3}, "mean": {"kl": 0.2}}
TRAINING_ROW = {"seconds": 4.0, "train/task_reward/llm1": 1.0, "train/kl/llm1": 2.5, "train/kl/llm2": 3.0,
                "train/copies/team": 0.5}
HELD_OUT_ROW = {"eval/kl/llm1": 0.1, "eval/kl/llm2": 0.3, "eval/kl/mean": 0.2}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Of a run whose environment has no key and no settings of W&B."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "a run").mkdir()
    return tmp_path / "a run"


def a_log(folder: Path, done: int = 0, wandb_id: str = "") -> Logger:
    cfg = settings(wandb="auto", method="chain:Chain", wandb_project="ours")
    return Logger(cfg, {"llm1": cfg, "llm2": replace(cfg, lam=0.5)}, folder, done, wandb_id)


def add(logger: Logger, *iterations: int) -> None:
    """Iteration 0 is an evaluation of the bases alone; iteration 4 has as many texts as W&B is sent."""
    for i in iterations:
        if i == 0:
            logger.log_evaluation(0, {"base": {"kl": 0.0}, "base_team": {"x": 0.5}})
        else:
            samples = [{"iteration": i, "query": "q"}] * (200 if i == 4 else 1)
            logger.log_training(i, TRAINING, 4.0, samples)
            logger.log_evaluation(i, HELD_OUT)


def test_a_log_has_its_files_and_goes_to_wandb(folder, monkeypatch):
    logged, write = {}, wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, row, step: (
        logged.setdefault(step, {}).update(row), write(run, row, step=step)))
    with a_log(folder) as first:
        add(first, 0, 1, 2, 3, 4)
        assert first.bar.desc.startswith("chain:Chain")
        assert first.bar.postfix == "reward=1.00 / nan, KL=2.50 / 3.00"
    rows = read_jsonl(folder / "metrics.jsonl")
    expected = [{"iteration": 0, "eval/kl/base": 0.0, "eval/x/base_team": 0.5}]
    for i in (1, 2, 3, 4):
        expected.append({"iteration": i} | TRAINING_ROW)
        expected.append({"iteration": i} | HELD_OUT_ROW)
    assert rows == expected
    tables = [[iteration for iteration, _ in logged[i].pop("samples").data] for i in (1, 2, 3, 4)]
    assert tables == [[1], [1, 2], [1, 2, 3], [4] * 200]
    assert logged[2] == {"iteration": 2} | TRAINING_ROW | HELD_OUT_ROW
    of_run = first.wandb
    assert (of_run.project, of_run.group, of_run.name) == ("ours", "", "a run") and of_run.offline
    assert (of_run.config["method"], of_run.config["llm2/lam"]) == ("chain:Chain", 0.5)
    with a_log(folder, 2, first.wandb_id) as again:
        assert again.bar.n == 2 and again.wandb.id == of_run.id
        add(again, 3)
    for name, kept in (("metrics.jsonl", [0, 1, 1, 2, 2, 3, 3]), ("samples.jsonl", [1, 2, 3])):
        assert [row["iteration"] for row in read_jsonl(folder / name)] == kept


def test_without_a_network_a_run_is_offline_and_wandbs_variables_hold(folder, monkeypatch, capsys):
    """A run of the user's that is active stays so."""
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    monkeypatch.setenv("WANDB_NAME", "named")
    wandb.teardown()                                        # it reads them once
    of_user, init, modes = wandb.init(mode="offline", dir=folder), wandb.init, []

    def without_network(mode, **named):
        modes.append(mode)
        if mode == "online":
            raise wandb.errors.CommError("no network")
        return init(mode=mode, **named)

    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.init", without_network)
    with a_log(folder) as log:
        assert (log.wandb.group, log.wandb.name, modes) == ("mine", "named", ["online", "offline"])
    assert capsys.readouterr().out.startswith("W&B: offline, since no network\nW&B: wandb sync '")
    assert wandb.run is of_user
    of_user.finish()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with a_log(folder) as log:
        assert log.wandb is None


def test_a_policy_that_is_not_the_one_sampled_from_is_named_once(folder, capsys):
    with a_log(folder) as log:
        for i in (1, 2, 3):
            log.log_training(i, {"llm2": {"sampling_gap": 0.1 * (i > 1)}}, 1.0, [])
    said = capsys.readouterr().out
    assert said.count("sampling_gap exceeds rounding") == 1
