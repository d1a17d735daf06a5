"""The log of a run: its files, the bar's text, Weights & Biases."""
import os
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure
from toys import settings

from cory.run.log import RunLog
from cory.system.files import read_jsonl

ROLES = {"first": "llm1", "second": "llm2"}


def test_the_bar_has_a_number_for_each_agent_that_played(tmp_path):
    log = RunLog(settings(wandb="disabled", method="chain:Chain"), ["llm1", "llm2"], tmp_path, 0, "")
    log.iteration(1, {f"llm{i}/{name}": i + 0.5 for i in (1, 2) for name in ("task_reward", "kl")}, [], ROLES)
    assert log.bar.desc.startswith("Chain") and log.bar.postfix == "reward 1.50 / 2.50, KL 1.50 / 2.50"
    log.iteration(2, {"llm1/task_reward": 1.0, "llm1/kl": 2.0}, [], {"first": "llm1"})
    assert log.bar.postfix == "reward 1.00 / -, KL 2.00 / -"


def test_a_resumed_log_goes_on_in_its_files_and_in_wandb_whose_printed_command_runs(
        tmp_path, capsys, monkeypatch):
    import wandb
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("wandb.login", lambda **_: False)               # there is no key
    logged, log = [], wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, row, **at: logged.append(row) or log(run, row, **at))
    folder, cfg = tmp_path / "a run", settings(wandb="auto")
    folder.mkdir()
    Figure().savefig(folder / "curves.png")
    first = RunLog(cfg, ["llm1", "llm2"], folder, 0, "")
    for i in range(4):
        first.iteration(i, {"eval/llm1/kl": float(i)}, [{"iteration": i, "query": "q"}], ROLES)
    first.plot(3, folder / "curves.png")
    first.close()
    rows = read_jsonl(folder / "metrics.jsonl")
    assert rows == [{"iteration": i, "roles": ROLES, "eval/llm1/kl": float(i)} for i in range(4)]
    assert [len(row.pop("samples").data) for row in logged[1:4]] == [2, 3, 4]
    assert logged[:4] == rows and logged[4].keys() == {"iteration", "curves"}

    again = RunLog(cfg, ["llm1", "llm2"], folder, 2, first.wandb_id)
    again.close()
    assert again.wandb_id == first.wandb_id
    for name in ("metrics.jsonl", "samples.jsonl"):                     # what no checkpoint knows is dropped
        assert [row["iteration"] for row in read_jsonl(folder / name)] == [0, 1, 2]
    command = capsys.readouterr().out.splitlines()[-1].partition("later with: ")[2]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(command.replace("wandb sync", "wandb sync --dry-run"), shell=True,
                           env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert shown.returncode == 0 and "sync 2 run(s)" in shown.stdout + shown.stderr, shown
