"""The log of a run: its files, the bar's text, Weights & Biases, its resumption."""
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import wandb
from matplotlib.figure import Figure
from toys import settings

from cory.log import Logger, read_jsonl

VALUES = {"task_reward/llm1": 1.0, "kl_k1/llm1": 2.5, "kl_k1/llm2": 3.0}
HELD_OUT = {"eval_kl/llm1": 0.1, "eval_kl/llm2": 0.3}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Of a run whose environment has no key and no settings of W&B."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "a run").mkdir()
    return tmp_path / "a run"


def a_log(folder: Path, done: int = 0, wandb_id: str = "") -> Logger:
    return Logger(settings(wandb="auto", method="chain:Chain"), ["llm1", "llm2"], folder, done, wandb_id)


def add(to: Logger, *iterations: int) -> None:
    """Iteration 0 is an evaluation of the base alone."""
    for i in iterations:
        if i == 0:
            to.evaluation(0, {"eval_kl/base": 0.0})
        else:
            to.iteration(i, VALUES, [{"iteration": i, "query": "q"}])
            to.evaluation(i, HELD_OUT)


@pytest.fixture
def sent(monkeypatch) -> dict[int, dict]:
    """What W&B is sent of each iteration."""
    rows, log = {}, wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, row, step: (
        rows.setdefault(step, {}).update(row), log(run, row, step=step)))
    return rows


def test_a_log_has_its_files_and_at_wandb_means_and_the_base_beside_the_agents(folder, sent):
    Figure().savefig(folder / "curves.png")
    with a_log(folder) as first:
        add(first, 0, 1, 2, 3)
        assert first.bar.desc.startswith("Chain") and first.bar.postfix == "reward=1.00 / nan, KL=2.50 / 3.00"
        first.send(3, lambda wandb: {"curves": wandb.Image(str(folder / "curves.png"))})
    rows = read_jsonl(folder / "metrics.jsonl")
    assert rows == [{"iteration": 0, "eval_kl/base": 0.0}] + [
        {"iteration": i} | row for i in (1, 2, 3) for row in (VALUES, HELD_OUT)]
    assert [len(sent[i].pop("samples").data) for i in (1, 2, 3)] == [1, 2, 3]
    means = {"task_reward/mean": 1.0, "kl_k1/mean": 2.75, "eval_kl/mean": 0.2, "eval_kl/base": 0.0}
    assert sent[2] == {"iteration": 2} | VALUES | HELD_OUT | means and "curves" in sent[3]
    assert (first.wandb.group, first.wandb.tags) == ("imdb-Chain-defaults", ("imdb", "Chain", "defaults"))
    with a_log(folder, 2):
        pass
    for name, kept in (("metrics.jsonl", [0, 1, 1, 2, 2]), ("samples.jsonl", [1, 2])):      # what is saved
        assert [row["iteration"] for row in read_jsonl(folder / name)] == kept


@pytest.mark.parametrize("dtype, shown", [("float32", True), ("bfloat16", False)])
def test_a_gap_between_sampling_and_training_larger_than_rounding_is_said_once(dtype, shown, folder, capsys):
    with Logger(settings(wandb="disabled", dtype=dtype), ["llm1", "llm2"], folder, 0, "") as log:
        for iteration in (1, 2):
            log.iteration(iteration, {"sampling_gap/llm2": 0.01}, [])
    assert capsys.readouterr().out.count("responses are not the trained policy's") == shown


def test_a_resumed_run_sends_all_again_and_says_how_to_upload_it(folder, sent, capsys):
    """A process that is killed loses what W&B has not stored. A run that fails is marked as failed."""
    with a_log(folder) as killed:
        add(killed, 0, 1, 2, 3)
    sent.clear()
    capsys.readouterr()
    with patch.object(wandb.Run, "finish", autospec=True, side_effect=wandb.Run.finish) as finish:
        with pytest.raises(ValueError), a_log(folder, 2, "same") as again:
            add(again, 3, 4)
            raise ValueError
    assert [*sent] == [0, 1, 2, 3, 4] and again.wandb_id == "same"
    finish.assert_called_once_with(again.wandb, exit_code=1)
    command = shlex.split(capsys.readouterr().out.partition("later with: ")[2])
    done = subprocess.run([sys.executable, "-m", *command, "--dry-run"], cwd=folder, capture_output=True,
                          text=True)
    assert done.returncode == 0 and "sync 1 run(s)" in done.stdout + done.stderr, done


def test_without_a_network_a_run_is_offline(folder, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")          # nothing listens there
    monkeypatch.setenv("WANDB_DIR", str(folder.parent / "elsewhere"))
    wandb.teardown()                                                    # W&B reads its environment once
    with a_log(folder) as offline:
        pass
    wandb.teardown()
    said = capsys.readouterr().out
    assert said.count("\n") == 2 and "W&B is offline" in said and "connection refused" in said
    assert f"wandb sync '{folder.parent}/elsewhere/a run/wandb/latest-run'" in said
    assert offline.wandb.offline


def test_what_fails_at_wandb_is_said_once_and_ends_no_run(folder, sent, capsys, monkeypatch):
    def fail(*_, **__):
        raise wandb.errors.AuthenticationError("no\nnetwork")

    with a_log(folder) as whole:
        monkeypatch.setattr("wandb.Table", fail)
        add(whole, 0, 1, 2)
        monkeypatch.setattr(wandb.Run, "log", fail)
        add(whole, 3)
    said = capsys.readouterr().out
    assert said.count("W&B: no network; the run goes on; upload later with: wandb sync") == 1
    assert [*sent] == [0, 1, 2]                                         # without a table
    monkeypatch.setattr("wandb.init", fail)
    add(a_log(folder, 3), 4)
    assert "W&B: no network; the run goes on\n" in capsys.readouterr().out
    assert len(read_jsonl(folder / "metrics.jsonl")) == 9
