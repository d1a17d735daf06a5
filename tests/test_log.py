"""The log of a run: its files, the bar's text, Weights & Biases, its resumption."""
import subprocess
import sys

from matplotlib.figure import Figure
from toys import settings

from cory.run.log import RunLog, bar_text
from cory.system.files import read_jsonl


def test_a_resumed_log_goes_on_in_its_files_and_in_wandb_whose_printed_command_runs(
        tmp_path, capsys, monkeypatch):
    import wandb
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("wandb.login", lambda **_: False)               # there is no key
    logged, log = [], wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, row, **at: logged.append(row) or log(run, row, **at))
    folder, cfg = tmp_path / "a run", settings(wandb="auto", method="chain:Chain")
    folder.mkdir()
    Figure().savefig(folder / "curves.png")
    first = RunLog(cfg, ["llm1", "llm2"], folder, 0, "")
    values = {"llm1/task_reward": 1.0, "llm1/kl": 2.5, "llm2/kl": 3.0, "eval/llm1/kl": 0.1}
    for i in range(4):
        first.iteration(i, values, [{"iteration": i, "query": "q"}], {"first": "llm1"})
    assert first.bar.desc.startswith("Chain") and first.bar.postfix == "reward 1.00 / -, KL 2.50 / 3.00"
    gaps = {"llm1/sampling_gap": 0.01, "llm2/sampling_gap": 0.31}
    assert "KL - / -, SAMPLING GAP 0.31: responses" in bar_text(gaps, ["llm1", "llm2"])
    first.plot(3, folder / "curves.png")
    first.close()
    rows = read_jsonl(folder / "metrics.jsonl")
    assert rows == [{"iteration": i, "roles": {"first": "llm1"}, **values} for i in range(4)]
    assert [len(row.pop("samples").data) for row in logged[1:4]] == [2, 3, 4]
    assert logged[:4] == rows and logged[4].keys() == {"iteration", "curves"}

    again = RunLog(cfg, ["llm1", "llm2"], folder, 2, first.wandb_id)
    again.close()
    assert again.wandb_id == first.wandb_id
    for name in ("metrics.jsonl", "samples.jsonl"):                     # what no checkpoint knows is dropped
        assert [row["iteration"] for row in read_jsonl(folder / name)] == [0, 1, 2]
    command = capsys.readouterr().out.splitlines()[-1].partition("later with: ")[2]
    command = command.replace("wandb sync", f"{sys.executable} -m wandb sync --dry-run")
    shown = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert shown.returncode == 0 and "sync 2 run(s)" in shown.stdout + shown.stderr, shown
