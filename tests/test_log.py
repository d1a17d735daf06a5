"""The log of a run: its files, the bar's text, Weights & Biases, its resumption."""
import os
import shlex
import signal
import struct
import subprocess
import sys
from math import isnan, nan
from multiprocessing import get_context
from pathlib import Path

import pytest
import wandb
from toys import settings
from tqdm import tqdm
from wandb.proto.wandb_internal_pb2 import Record

from cory.log import Logger, read_jsonl

VALUES = {"task_reward/llm1": 1.0, "kl/llm1": 2.5, "kl/llm2": 3.0, "seconds": 4.0, "copies": 0.5}
HELD_OUT = {"eval_kl/llm1": 0.1, "eval_kl/llm2": 0.3}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Of a run whose environment has no key and no settings of W&B."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "a run").mkdir()
    return tmp_path / "a run"


def a_log(folder: Path, done: int = 0, wandb_id: str = "", **changes) -> Logger:
    own = dict(wandb="auto", method="chain:Chain", wandb_group="mine", wandb_project="ours")
    cfg = settings(**own | changes)
    return Logger(cfg, ["llm1", "llm2"], folder, done, wandb_id)


def add(to: Logger, *iterations: int) -> None:
    """Iteration 0 is an evaluation of the bases alone."""
    for i in iterations:
        if i == 0:
            to.evaluation(0, {"eval_kl/base": 0.0, "eval_x/base_team": 0.5})
        else:
            to.iteration(i, VALUES, [{"iteration": i, "query": "q"}])
            to.evaluation(i, HELD_OUT)


def records(run_dir: Path) -> list[Record]:
    """What a run of W&B has stored: records in pieces (1: a whole one, 4: its last) in blocks of 32 KiB."""
    wandb.teardown()                                        # waits for what is still being written
    data, at, found, whole = next(run_dir.glob("*.wandb")).read_bytes(), 7, [], b""
    while at + 7 < len(data):
        if at % 32768 > 32768 - 7:
            at += -at % 32768
        length, piece = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7:at + 7 + length]
        at += 7 + length
        if piece in (1, 4):
            found.append(Record.FromString(whole))
            whole = b""
    return found


def steps(run_dir: Path) -> list[int]:
    return [record.history.step.num for record in records(run_dir) if record.HasField("history")]


def test_a_log_has_its_files_and_at_wandb_means_and_the_base_beside_the_agents(folder, monkeypatch):
    logged, write = {}, wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, row, step: (
        logged.setdefault(step, {}).update(row), write(run, row, step=step)))
    with a_log(folder) as first:
        add(first, 0, 1, 2, 3)
        assert first.bar.desc.startswith("Chain") and first.bar.postfix == "reward=1.00 / nan, KL=2.50 / 3.00"
    rows = read_jsonl(folder / "metrics.jsonl")
    assert rows == [{"iteration": 0, "eval_kl/base": 0.0, "eval_x/base_team": 0.5}] + [
        {"iteration": i} | row for i in (1, 2, 3) for row in (VALUES, HELD_OUT)]
    assert [len(logged[i].pop("samples").data) for i in (1, 2, 3)] == [1, 2, 3]
    assert logged[2] == {
        "iteration": 2, "train/task_reward/llm1": 1.0, "train/kl/llm1": 2.5, "train/kl/llm2": 3.0,
        "train/copies": 0.5, "time/seconds": 4.0, "eval/kl/llm1": 0.1, "eval/kl/llm2": 0.3,
        "eval/kl/mean": 0.2, "eval/kl/base": 0.0, "eval/x/base_team": 0.5}
    of_run = first.wandb.run
    assert (of_run.project, of_run.group, of_run.name) == ("ours", "mine", "a run")
    assert of_run.tags == ("imdb", "Chain", "custom")
    assert of_run.config["method"] == "chain:Chain"
    logged.clear()
    with a_log(folder, 2, first.wandb.id) as again:
        assert again.bar.n == 2 and again.wandb.run.id == of_run.id
        assert [*logged] == [0, 1, 2] and len(logged[2]["samples"].data) == 2
        again.iteration(3, VALUES, 200 * [{"iteration": 3}])
        again.evaluation(3, HELD_OUT)
    assert [row[0] for row in logged[3]["samples"].data] == 200 * [3]       # the last texts
    for name, kept in (("metrics.jsonl", [0, 1, 1, 2, 2, 3, 3]), ("samples.jsonl", [1, 2, *200 * [3]])):
        assert [row["iteration"] for row in read_jsonl(folder / name)] == kept


@pytest.mark.parametrize("dtype, shown", [("float32", True), ("bfloat16", False)])
def test_a_gap_between_sampling_and_training_larger_than_rounding_is_said_once(dtype, shown, folder, capsys):
    with a_log(folder, wandb="disabled", dtype=dtype) as log:
        for iteration in (1, 2):
            log.iteration(iteration, {"sampling_gap/llm2": 0.01}, [])
    assert capsys.readouterr().out.count("the policy sampled is not the one trained") == shown


def test_a_metric_that_is_not_finite_is_said_once_and_has_no_mean(folder, capsys, monkeypatch):
    sent = []
    with a_log(folder, wandb="disabled") as log:
        monkeypatch.setattr(log.wandb, "send", lambda _, values: sent.append(values(wandb)))
        for iteration in (1, 2):
            log.evaluation(iteration, {"eval_x/llm1": nan, "eval_x/llm2": 1.0, "eval_y/llm1": 2.0,
                                       "eval_y/llm2": 3.0})
    said = capsys.readouterr().out
    assert said == "eval_x/llm1 is not finite in some iterations, which its curve leaves out\n"
    rows = [row for row in sent if "samples" not in row]
    assert [row["eval/y/mean"] for row in rows] == [2.5, 2.5] and isnan(rows[0]["eval/x/mean"])


def test_an_agent_that_is_never_trained_is_not_in_the_mean(folder, monkeypatch):
    sent = []
    with a_log(folder, wandb="disabled") as log:
        monkeypatch.setattr(log.wandb, "send", lambda _, values: sent.append(values(wandb)))
        log.iteration(1, {"grad_norm/llm2": 1.0}, [{"iteration": 1}])
        log.evaluation(1, HELD_OUT)
    assert sent[1]["eval/kl/mean"] == 0.3


def test_the_numbers_of_the_bar_fit_80_columns(folder):
    """After 100 of 100 iterations and an hour and a half, with rewards below 0 and two digits of KL."""
    with a_log(folder, wandb="disabled", method="cory") as log:
        log.iteration(1, {"task_reward/llm1": -1.5, "task_reward/llm2": -1.25, "kl/llm1": 16.0,
                          "kl/llm2": 17.5}, [])
        line = tqdm.format_meter(**log.bar.format_dict | {"n": 100, "elapsed": 5400.0, "ncols": 80})
    assert line.endswith("100/100 [1:30:00<00:00, reward=-1.50 / -1.25, KL=16.00 / 17.50]")
    assert len(line) <= 80


def test_ones_own_run_of_wandb_stays_active_beside_a_run_of_long_names(folder):
    """W&B allows tags of 64 characters, and groups of 128."""
    with wandb.init(mode="offline", dir=folder.parent) as own:
        with a_log(folder, method=f"my:{70 * 'M'}", model=90 * "m", wandb_group="") as log:
            add(log, 0, 1)
        assert wandb.run is own and log.wandb.run.tags == ("imdb", 64 * "M", "custom")
        group = log.wandb.run.group
        assert len(group) == 128 and group.startswith(f"imdb-{70 * 'M'}-custom-model_mm")
        own.log({"mine": 1})
    assert steps(folder / "wandb/latest-run") == [0, 1]


def log_until_killed(folder: Path) -> None:
    add(a_log(folder, wandb_id="same"), *range(60))
    os.kill(os.getpid(), signal.SIGKILL)


def test_after_a_kill_the_printed_command_uploads_each_iteration_once(folder, capsys):
    child = get_context("fork").Process(target=log_until_killed, args=(folder,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(ValueError), a_log(folder, 40, "same") as again:
        add(again, 41, 42)
        raise ValueError
    assert again.wandb.id == "same"
    command = shlex.split(capsys.readouterr().out.partition("upload with: ")[2])
    assert steps(Path(command[2])) == [*range(43)]
    assert [record.exit.exit_code for record in records(Path(command[2])) if record.HasField("exit")] == [1]
    done = subprocess.run([sys.executable, "-m", *command, "--dry-run"], cwd=folder, capture_output=True,
                          text=True)
    assert done.returncode == 0 and "sync 1 run(s)" in done.stdout + done.stderr, done


@pytest.mark.parametrize("key, says", [("a" * 40, "connection refused"), ("short", "API key must have 40+")])
def test_without_a_network_or_a_whole_key_a_run_is_offline(key, says, folder, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")          # nothing listens there
    monkeypatch.setenv("WANDB_DIR", str(folder.parent / "elsewhere"))
    wandb.teardown()                                                    # W&B reads its environment once
    with a_log(folder) as offline:
        pass
    wandb.teardown()
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and says in said and ", so offline; upload with: " in said
    assert f"wandb sync '{folder.parent}/elsewhere/a run/wandb/latest-run'" in said
    assert offline.wandb.run.offline


def test_what_fails_at_wandb_is_said_once_and_ends_no_run(folder, capsys, monkeypatch):
    def fail(*_, **__):
        raise wandb.errors.AuthenticationError("no\nnetwork")

    with a_log(folder) as whole:
        monkeypatch.setattr("wandb.Table", fail)
        add(whole, 0, 1, 2)
        monkeypatch.setattr(wandb.Run, "log", fail)
        add(whole, 3)
    said = capsys.readouterr().out
    assert said.startswith("W&B: no key (`wandb login`), so offline; upload with: wandb sync '")
    assert said.count("W&B: no network; the run goes on; upload with: wandb sync") == 1
    assert steps(Path(shlex.split(said)[-1])) == [0, 1, 2]              # without a table
    for spoil in (lambda: monkeypatch.setattr("wandb.init", fail),
                  lambda: monkeypatch.setenv("WANDB_MODE", "ofline")):
        spoil()
        add(a_log(folder, 3), 4)
    said = capsys.readouterr().out
    assert said == ("W&B: no network; the run goes on without it\nW&B: WANDB_MODE is 'ofline', not online, "
                    "offline or disabled; the run goes on without it\n")
    assert len(read_jsonl(folder / "metrics.jsonl")) == 9


def test_the_project_of_the_environment_is_the_default():
    code = "from cory.config import Config; print(Config.wandb_project)"
    environment = os.environ | {"WANDB_PROJECT": "mine"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "mine\n"
