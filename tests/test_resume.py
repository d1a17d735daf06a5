"""A run that is killed, stopped, damaged, or continued under other conditions."""
import os
import random
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from toys import (
    agent_of,
    bigram,
    error_line,
    finished,
    read,
    require_same_runs,
    rows,
    same_tensors,
    saved_tensors,
    stopped,
)

import train_imdb
from cory.checkpoint import SIGNALS, checkpoints_of, load_checkpoint, save_checkpoint, signals_noted
from cory.config import ASSETS
from cory.errors import UserError
from cory.tasks.imdb import Imdb
from cory.train import Cory, Ppo

PPO = ["--method", "ppo"]


@pytest.fixture(scope="module")
def saved(small_flags, tmp_path_factory) -> Path:
    """A finished run of PPO with the checkpoints of its two iterations."""
    return finished(small_flags, tmp_path_factory.mktemp("saved") / "run", *PPO, "--iterations", 2)


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


class Remembering(Cory):
    """Trained on rewards less their mean so far; it draws, too. An evaluation leaves what it remembers."""

    def scores(self, queries, rollouts, rewards):
        means = self.memory.setdefault("means", [])
        means.append(rewards[0].mean().item())
        drawn = random.random() + np.random.rand() + torch.rand(1).item()
        return [reward_B - fmean(means) + drawn for reward_B in rewards]

    def metrics(self, queries, rollouts, rewards):
        return {"remembered": len(self.memory["means"])}


class Harder(Imdb):
    """It draws, and subtracts from each reward what has been earned so far."""

    def learn(self, queries, rewards):
        self.memory["earned"] = self.memory.get("earned", 0.0) + rewards[0].mean().item()

    def metrics(self, queries, responses):
        return {"earned": self.memory.get("earned", 0.0), "asked": self.memory["asked"]}

    def reward_of(self, queries, responses):
        self.memory["asked"] = self.memory.get("asked", 0) + 1
        less = self.memory.get("earned", 0.0) + random.random()
        return [reward - less for reward in super().reward_of(queries, responses)]


LORA = ["--lora_rank", "2", "--learning_rate", "0.02"]
OWN = ["--method", "test_resume:Remembering", "--task", "test_resume:Harder"]
RUNS = {"cory-lora": LORA, "own": OWN}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_while_it_saves_resumes_to_the_same_bits(name, small_flags, tmp_path):
    """CORY exchanges roles after iteration 2, the last one that is saved."""
    whole = finished(small_flags, tmp_path / "whole", *RUNS[name], "--iterations", 3, "--eval_every", 1,
                "--lr_schedule", "linear")
    part = stopped(whole, tmp_path / "part")
    (part / "checkpoints" / "writing").write_bytes(b"PK")
    resume(part)
    require_same_runs(whole, part)
    ends = [saved_tensors(checkpoints_of(run_dir)[0]) for run_dir in (whole, part)]
    assert same_tensors(*ends) and any("/adam/" in key for key in ends[0])
    if name == "own":
        trained = [row for row in rows(whole) if "role/llm1" in row]
        assert trained[0]["earned/llm1"] == 0           # it learns after the iteration
        assert trained[1]["earned/llm1"] == pytest.approx(trained[0]["task_reward/llm1"])
        assert [row["asked/llm1"] for row in trained] == [2, 4, 6]
        evaluated = [row for row in rows(whole) if "role/llm1" not in row]
        for name, expected in (("eval_remembered/team", [1, 2, 3, 4]), ("eval_asked/llm1", [1, 3, 5, 7]),
                               ("eval_asked/llm2", [1, 3, 5, 7])):          # each with its own alone
            assert [row[name] for row in evaluated] == expected


def test_a_finished_run_is_lengthened_or_finished_again(copy, small_flags, tmp_path, capsys):
    three = finished(small_flags, tmp_path / "three", *PPO, "--iterations", 3)
    before = read(copy / "eval.json")
    (copy / "eval.json").unlink()
    resume(copy)
    assert read(copy / "eval.json") == before
    resume(copy, "--iterations", "3")
    assert [row["iteration"] for row in rows(copy)] == [0, 1, 2, 2, 3, 3]
    assert read(copy / "eval.json") == read(three / "eval.json")
    assert "iterations is 1: the run has done 3" in refused(capsys, copy, "--iterations", "1")
    checkpoints_of(three)[0].unlink()                       # at iteration 2 nothing was held out
    assert "iterations is 2: the run has done 2; ask for more" in refused(capsys, three, "--iterations", "2")


def test_a_run_that_goes_on_is_unfinished_until_it_ends_again(copy, monkeypatch):
    def killed(*_):
        raise SystemExit

    monkeypatch.setattr(Ppo, "train", killed)
    with pytest.raises(SystemExit):
        resume(copy, "--iterations", 9)
    assert (copy / "final").exists() and not (copy / "eval.json").exists()


def test_without_a_checkpoint_a_run_begins_anew_unless_it_is_finished(copy, capsys):
    whole = rows(copy)
    shutil.rmtree(copy / "checkpoints")
    assert "the run is finished" in refused(capsys, copy)
    (copy / "eval.json").unlink()
    resume(copy)
    assert rows(copy) == whole


def test_what_comes_back_is_saved_and_all_else_is_refused(tmp_path):
    """An attribute of an agent's, too. What is refused takes no other checkpoint's place."""
    agent, other = agent_of(bigram()), agent_of(bigram(seed=1))
    agent.sums, kept = {"of two": torch.ones(2)}, [(1, 2.5), {"a"}, {1: torch.ones(2)}, None]
    for iteration in (1, 2, 3):
        save_checkpoint(tmp_path, iteration, [agent], {"x": kept})
    assert str(load_checkpoint(tmp_path, [other])["x"]) == str(kept)
    assert same_tensors(other.sums, agent.sums)
    assert same_tensors(other.trainable_parameters(), agent.trainable_parameters())
    with pytest.raises(UserError, match="what method, .* cannot be restored; .*GLOBAL pathlib"):
        save_checkpoint(tmp_path, 4, [], {"x": [Path()]})
    assert [path.stem for path in checkpoints_of(tmp_path)] == ["iteration_000003"]


@pytest.mark.parametrize("edit", [
    lambda agent: setattr(agent, "cfg", replace(agent.cfg, lam=0.5)),
    lambda agent: setattr(agent, "base", agent.policy.like_this(agent.policy.lm))])
def test_a_replaced_setting_or_reference_which_no_resume_would_restore_is_refused(
        edit, small_flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Ppo, "update", lambda self, role, agent, *_: edit(agent) or {})
    line = error_line(train_imdb.main, [*small_flags, "--run_dir", tmp_path / "run"], capsys)
    assert "agent is 'llm1': has another cfg or base than at the start" in line


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


def test_models_and_data_may_move(copy, small, tmp_path):
    model = shutil.copytree(small, tmp_path / "lm")
    resume(copy, "--iterations", 3, "--model", model, "--dataset", ASSETS / "imdb/openings",
           "--reward_model", ASSETS / "imdb/classifier")


def test_a_folder_that_holds_a_run_is_refused(copy, small_flags, capsys):
    assert "is not empty; continue a run with --resume" in error_line(
        train_imdb.main, [*small_flags, "--run_dir", copy], capsys)


class Signalled(Ppo):
    """In iteration 2 comes a signal; meanwhile the run's folder is no other process's."""
    number = signal.SIGTERM

    def scores(self, queries, rollouts, rewards):
        self.memory["done"] = self.memory.get("done", 0) + 1
        if self.memory["done"] == 2:
            os.kill(os.getpid(), self.number)
            with pytest.raises(UserError, match="is in use by another process"):
                train_imdb.main.__wrapped__(["--resume", "--run_dir", self.cfg.run_dir])
        return rewards


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_run_after_its_iteration(number, small_flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Signalled, "number", number)
    before, run_dir = [signal.getsignal(each) for each in SIGNALS], tmp_path / "mine; first"
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([*small_flags, "--method", "test_resume:Signalled", "--save_every", "5000",
                         "--run_dir", str(run_dir)])
    assert stop.value.code == 128 + number
    assert before == [signal.getsignal(each) for each in SIGNALS]
    assert before[0] is signal.default_int_handler
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])           # a command for a shell
    assert words[-3:] == ["--resume", "--run_dir", str(run_dir)]
    assert [path.stem for path in checkpoints_of(run_dir)] == ["iteration_000002", "iteration_000001"]
    resume(run_dir)
    assert rows(run_dir)[-1]["iteration"] == 5


def test_a_second_signal_ends_at_once():
    with pytest.raises(KeyboardInterrupt), signals_noted(received := []):
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
