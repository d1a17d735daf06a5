"""A run that is killed, stopped, damaged, or continued under other conditions."""
import os
import pty
import random
import shlex
import shutil
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from conftest import save_small
from toys import (
    agent_of,
    bigram,
    error_line,
    read,
    require_same_runs,
    rows,
    same_tensors,
    saved_tensors,
    settings,
)

import train_imdb
from cory.errors import UserError
from cory.ppo.rollout import collect_rollout
from cory.ppo.update import ppo_update
from cory.run import checkpoint
from cory.run.checkpoint import checkpoints_of, load_checkpoint, save_checkpoint
from cory.run.run import Turn, new_folder
from cory.system import signals
from cory.train import Ppo

QUICK = ("--batch_size 4 --mini_batch_size 2 --num_ppo_epochs 1 --max_response_length 6 --eval_queries 4 "
         "--kl_target 0.1 --kl_horizon 20").split()
PPO = ["--method", "ppo", "--role_exchange_every", "5"]
fork = get_context("fork").Process


@pytest.fixture(scope="module")
def flags(small_flags) -> list[str]:
    return [*small_flags, *QUICK]


@pytest.fixture(scope="module")
def saved(flags, tmp_path_factory) -> Path:
    """A finished run of PPO with the checkpoints of its two iterations."""
    path = tmp_path_factory.mktemp("saved") / "run"
    train_imdb.main([*flags, *PPO, "--iterations", "2", "--run_dir", str(path)])
    return path


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def resume(run_dir: Path, *more) -> None:
    train_imdb.main(["--resume", "--run_dir", str(run_dir), *map(str, more)])


def refused(capsys, run_dir: Path, *more) -> str:
    """The one line of a resume that is refused, and changes nothing."""
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    line = error_line(train_imdb.main, ["--resume", "--run_dir", run_dir, *more], capsys)
    assert before == {path: path.read_bytes() for path in before}
    return line


def exit_code(child) -> int:
    child.start()
    child.join(60)
    return child.exitcode


# --- the same bits ---
class Iterative(Ppo):
    """Iterative KL against the policy of iteration 1, on rewards less their mean so far; it draws, too."""

    def train(self, run):
        (agent,), memory = run.roles, run.state
        memory.setdefault("means", [])
        memory.setdefault("sums", {"of two": torch.zeros(2)})
        for iteration in run.iterations():
            if iteration == 2:
                agent.move_reference()
            queries, max_new_tokens = run.task.batch(iteration)
            a = collect_rollout(agent, run.task.pioneer_prompts(queries), max_new_tokens)
            r = run.task.reward(queries, a.text)
            memory["means"].append(r.mean().item())
            memory["sums"]["of two"] += r[:2]
            update = ppo_update(agent, a, r - fmean(memory["means"]))
            drawn = random.random() + np.random.rand() + torch.rand(1).item()
            own = {"drawn": drawn, "sum": memory["sums"]["of two"].sum()}
            run.finish_iteration(iteration, queries, [Turn("pioneer", agent, a, r, update)], [agent], own)


def train_until_killed(words: list[str]) -> None:
    """SIGKILL while the third checkpoint is written."""
    put_in_place = checkpoint.put_in_place

    def put(temporary, path):
        if path.name.startswith("iteration_000003"):
            os.kill(os.getpid(), signal.SIGKILL)
        put_in_place(temporary, path)

    checkpoint.put_in_place = put
    train_imdb.main(words)


LORA = ["--lora_rank", "2", "--learning_rate", "0.02"]
ITERATIVE = ["--method", "test_resume:Iterative"]
RUNS = {"ppo": PPO, "cory-lora": LORA, "iterative": ITERATIVE, "iterative-lora": [*ITERATIVE, *LORA]}


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_resumes_to_the_same_bits(name, flags, tmp_path, monkeypatch):
    """CORY exchanges roles after iteration 2, the last one that is saved."""
    words = [*flags, *RUNS[name], "--iterations", "3", "--lr_schedule", "linear", "--run_dir"]
    whole, part, most = tmp_path / "whole", tmp_path / "part", []

    def put(temporary, path):
        most.append(len([*(whole / "checkpoints").iterdir()]))
        put_in_place(temporary, path)

    put_in_place = checkpoint.put_in_place
    monkeypatch.setattr(checkpoint, "put_in_place", put)
    train_imdb.main([*words, str(whole)])
    assert max(most) == 2                                   # files on disk, also while one of them is written
    assert exit_code(fork(target=train_until_killed, args=([*words, str(part)],))) == -signal.SIGKILL
    assert [row["iteration"] for row in rows(part)] == [0, 1, 2, 3]         # more than is saved
    resume(part)
    require_same_runs(whole, part)
    ends = [saved_tensors(checkpoints_of(run_dir)[0]) for run_dir in (whole, part)]
    assert same_tensors(*ends) and any("/adam/" in key for key in ends[0])
    if name == "iterative":
        after, later = (row["pioneer/kl"] for row in rows(whole)[2:])
        assert after == pytest.approx(0, abs=1e-5) and later != 0


def test_a_finished_run_is_lengthened_or_finished_again(flags, tmp_path, capsys):
    two, three = tmp_path / "two", tmp_path / "three"
    flags = [*flags, "--eval_every", "0", "--run_dir"]
    train_imdb.main([*flags, str(two), "--iterations", "2"])
    train_imdb.main([*flags, str(three), "--iterations", "3"])
    before = read(two / "eval.json")
    (two / "eval.json").unlink()
    resume(two)
    assert read(two / "eval.json") == before
    resume(two, "--iterations", "3")
    assert [row["iteration"] for row in rows(two)] == [0, 1, 2, 3]
    assert read(two / "eval.json") == read(three / "eval.json")
    assert "iterations is 1: the run has done 3" in refused(capsys, two, "--iterations", "1")
    checkpoints_of(three)[0].unlink()                       # at iteration 2 nothing was held out
    assert "iterations is 2: the run has done 2; ask for more" in refused(capsys, three, "--iterations", "2")


def test_without_a_checkpoint_a_run_begins_anew_unless_it_is_finished(copy, flags, capsys):
    whole = rows(copy)
    line = error_line(train_imdb.main, [*flags, "--run_dir", copy], capsys)
    assert "is not empty; continue a run with --resume" in line
    shutil.rmtree(copy / "checkpoints")
    assert "the run is finished" in refused(capsys, copy)
    shutil.rmtree(copy / "final")
    resume(copy)
    assert rows(copy) == whole


@pytest.mark.parametrize("value", [[Path()], fmean, random.Random(0)])
def test_what_would_not_come_back_is_refused_when_it_is_saved(value, tmp_path):
    save_checkpoint(tmp_path, 1, [], {"x": [(1, 2.5), {"a", None}, {1: torch.ones(2)}, True]}, {})
    with pytest.raises(UserError, match=r"run.state is \['x'\]: has a value that cannot be restored"):
        save_checkpoint(tmp_path, 2, [], {"x": value}, {})
    assert [path.name for path in checkpoints_of(tmp_path)] == ["iteration_000001.pt"]


def test_an_agent_has_no_attribute_that_a_checkpoint_would_not_keep():
    with pytest.raises(AttributeError):
        agent_of(bigram()).running_mean = 1.0


# --- damage ---
def test_a_damaged_checkpoint_is_one_line_and_the_previous_one_goes_on(copy, capsys):
    newest, older = checkpoints_of(copy)
    whole = newest.read_bytes()
    for damaged in (b"", whole[:1000], whole[:-1000], b"PK" + bytes(len(whole))):
        newest.write_bytes(damaged)
        line = refused(capsys, copy)
        assert "is damaged" in line and f"delete it to go on from {older.name}" in line
    newest.unlink()
    resume(copy)
    assert checkpoints_of(copy) == [newest, older] and newest.read_bytes() == whole
    with pytest.raises(UserError, match="is of other agents"):
        load_checkpoint(copy, [agent_of(bigram())])


# --- other conditions ---
@pytest.mark.parametrize("words, says", [
    (["--seed", "5"], "seed was 0, now 5"),
    (["--llm1", "learning_rate=0.1"], "agent_settings was {}")])
def test_other_settings_are_refused(words, says, copy, capsys):
    assert says in refused(capsys, copy, *words)


def test_models_and_data_may_have_moved(flags, tmp_path):
    there, here = save_small(tmp_path / "there"), tmp_path / "here"
    places = {"--model": "lm", "--dataset": "openings", "--reward_model": "classifier"}
    words = [word for flag, name in places.items() for word in (flag, str(there / name))]
    train_imdb.main([*flags, *PPO, *words, "--iterations", "1", "--run_dir", str(tmp_path / "run")])
    there.rename(here)
    resume(tmp_path / "run", "--iterations", 2, *(word.replace(str(there), str(here)) for word in words))


def test_two_runs_that_start_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    names = [new_folder(settings(seed=3)) for _ in range(3)]
    assert names == [f"runs/imdb-cory-defaults-seed3-now{again}" for again in ("", "-2", "-3")]
    assert all(Path(name).is_dir() for name in names)


def test_a_file_is_no_run_folder(flags, tmp_path, capsys):
    (tmp_path / "notes").write_text("mine")
    line = error_line(train_imdb.main, [*flags, "--run_dir", tmp_path / "notes"], capsys)
    assert "notes': is a file; name a folder" in line and (tmp_path / "notes").read_text() == "mine"


# --- signals, and two processes ---
def at_terminal(ours: int, theirs: int, words: list[str]) -> None:
    os.close(ours)
    os.login_tty(theirs)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")
    train_imdb.main(words)


def drained(terminal: int) -> str:
    said = b""
    with suppress(OSError):                                 # nothing more
        while True:
            said += os.read(terminal, 4096)
    return said.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_run_after_its_iteration(number, flags, tmp_path, capsys):
    """Ctrl-C is typed; SIGHUP comes of a terminal that closes. Meanwhile the folder is no other process's."""
    run_dir, (ours, theirs) = tmp_path / "mine; first", pty.openpty()
    words = [*flags, *PPO, "--iterations", "100000", "--save_every", "5000", "--run_dir", str(run_dir)]
    child, log = fork(target=at_terminal, args=(ours, theirs, words), daemon=True), run_dir / "metrics.jsonl"
    child.start()
    os.close(theirs)
    os.set_blocking(ours, False)
    while child.is_alive() and not (log.exists() and log.read_text().count("\n") > 2):
        drained(ours)
        time.sleep(0.02)
    line = error_line(train_imdb.main, ["--resume", "--run_dir", run_dir], capsys)
    assert "is in use by another process" in line
    if number == signal.SIGINT:
        os.write(ours, b"\x03")
    elif number == signal.SIGTERM:
        child.terminate()
    else:
        os.close(ours)
    child.join(60)
    assert child.exitcode == 128 + number
    if number != signal.SIGHUP:                             # the last line is a command for a shell
        words = shlex.split(drained(ours).splitlines()[-1])
        assert words[-3:] == ["--resume", "--run_dir", str(run_dir)]
    done = rows(run_dir)[-1]["iteration"]
    assert [path.name[:16] for path in checkpoints_of(run_dir)] == [f"iteration_{done:06d}"]
    resume(run_dir, "--iterations", done + 1)


def two_signals() -> None:
    with signals.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_a_second_signal_ends_at_once():
    assert exit_code(fork(target=two_signals)) == -signal.SIGTERM


def test_a_process_that_a_reward_starts_ends_by_a_signal():
    ours, theirs = os.pipe()
    with signals.noted():
        child = fork(target=lambda: os.write(theirs, b"started") and time.sleep(20))
        child.start()
        os.read(ours, 7)
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM and not signals.received


def test_outside_a_run_signals_are_as_they_were():
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with signals.noted():
        assert signal.getsignal(signal.SIGTERM).func == signals.handle
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN            # as nohup asks
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    signal.signal(signal.SIGHUP, kept)
