"""A run that is killed, stopped, damaged, or continued under other conditions."""
import multiprocessing
import random
import shutil
import time
from pathlib import Path
from pickle import UnpicklingError
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import (
    agent_of,
    bigram,
    evaluations,
    finished,
    read,
    refusal,
    require_same_runs,
    resume,
    rows,
    same_tensors,
    saved_tensors,
    stopped,
    training,
)

from cory.run.checkpoint import checkpoints_of, load_checkpoint, locked, save_checkpoint
from cory.tasks.imdb import Imdb
from cory.train import Cory, Ppo

pytestmark = pytest.mark.usefixtures("read_once")
PPO = ["--method", "ppo"]


@pytest.fixture(scope="module")
def saved(small_flags, tmp_path_factory) -> Path:
    """A finished run of PPO with the checkpoints of its two iterations, the first and the last."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    return finished(small_flags, folder, *PPO, "--iterations", 2, "--save_every", 9)


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


class Remembering(Cory):
    """Trained on rewards less their mean so far; it draws, too. Each agent adds up its own scores."""

    def scores(self, rollouts, rewards):
        means = self.memory.setdefault("means", [0.0])
        means.append(rewards[0].mean().item())
        drawn = random.random() + np.random.rand() + torch.rand(1).item()
        return [reward_B - fmean(means) + drawn for reward_B in rewards]

    def update(self, role, agent, rollout, score):
        agent.memory["sum"] = agent.memory.get("sum", 0.0) + score.mean().item()
        return super().update(role, agent, rollout, score) | {"sum": agent.memory["sum"]}

    def team_metrics(self, rollouts, rewards):
        return {"remembered": len(self.memory.get("means", []))}


class Harder(Imdb):
    """It draws, and subtracts from each reward what has been earned so far."""

    def on_iteration_end(self, rollouts, rewards):
        self.memory["earned"] = self.memory.get("earned", 0.0) + rewards[0].mean().item()

    def metrics(self, queries, responses):
        return {"earned": self.memory.get("earned", 0.0)}

    def compute_rewards(self, queries, responses):
        less = self.memory.get("earned", 0.0) + random.random()
        return [reward - less for reward in super().compute_rewards(queries, responses)]


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
    for file in ("metrics.jsonl", "samples.jsonl"):
        with (part / file).open("a") as log:
            log.write('{"iteration": 3, "half of')
    resume(part)
    require_same_runs(whole, part)
    ends = [saved_tensors(checkpoints_of(run_dir)[0]) for run_dir in (whole, part)]
    assert same_tensors(*ends) and any("/adam/" in key for key in ends[0])
    if name == "own":
        first, second, _ = training(whole)
        assert first["train/earned/llm1"] == 0                # it learns after the iteration
        assert second["train/earned/llm1"] == pytest.approx(first["train/task_reward/llm1"])
        held_out = read(whole / "eval.json")        # the base, too, by the reward that was learned meanwhile
        assert held_out["base"]["earned"] == held_out["llm1"]["earned"] != 0
        evaluated = evaluations(whole)
        assert [row["eval/remembered/team"] for row in evaluated] == [0, 2, 3, 4]


def test_a_finished_run_is_finished_again_but_not_lengthened(copy, capsys):
    """It goes on with its W&B run, and saves at its end, whatever `--save_every`."""
    before, whole = read(copy / "eval.json"), rows(copy)
    newest, older = checkpoints_of(copy)
    newest.unlink()
    torch.save(torch.load(older, weights_only=True) | {"wandb_id": "same"}, older)
    resume(copy, "--save_every", 4)
    assert torch.load(newest, weights_only=True)["wandb_id"] == "same"
    resume(copy)
    assert read(copy / "eval.json") == before and rows(copy) == whole
    assert "iterations is 3: the run has 2" in refusal(["--resume"], copy, capsys, "--iterations", 3)


def test_a_run_that_goes_on_is_unfinished_until_it_ends_again(copy, monkeypatch):
    def killed(*_):
        raise SystemExit

    monkeypatch.setattr(Ppo, "train", killed)
    with pytest.raises(SystemExit):
        resume(copy)
    assert (copy / "final").exists() and not (copy / "eval.json").exists()


def test_without_a_checkpoint_a_run_begins_anew_unless_it_is_finished(copy, capsys):
    whole = rows(copy)
    shutil.rmtree(copy / "checkpoints")
    assert "holds a run that is finished and has no checkpoint" in refusal(["--resume"], copy, capsys)
    (copy / "eval.json").unlink()
    resume(copy)
    assert rows(copy) == whole


def test_what_comes_back_is_saved_and_all_else_is_refused(tmp_path):
    """What is refused takes no other checkpoint's place."""
    agent, other = agent_of(bigram()), agent_of(bigram(seed=1))
    agent.memory, kept = {"of two": torch.ones(2)}, {"x": [(1, 2.5), {"a"}, {1: torch.ones(2)}, None]}
    method, again = (SimpleNamespace(memory=x, task=SimpleNamespace(memory={})) for x in (kept, {}))
    for iteration in (1, 2, 3):
        save_checkpoint(tmp_path, iteration, [agent], method, "id")
    assert load_checkpoint(tmp_path, [other], again) == (3, "id") and str(again.memory) == str(kept)
    assert same_tensors(other.memory, agent.memory)
    assert same_tensors(other.trainable_parameters(), agent.trainable_parameters())
    with pytest.raises(UnpicklingError, match="GLOBAL pathlib"):
        method.memory = {"x": [Path()]}
        save_checkpoint(tmp_path, 4, [], method, "id")
    assert [path.stem for path in checkpoints_of(tmp_path)] == ["iteration_000003"]


def test_a_folder_that_holds_a_run_is_refused(copy, small_flags, capsys):
    assert "holds a run; go on with --resume" in refusal(small_flags, copy, capsys)


def test_a_folder_in_use_is_refused_until_its_run_ends(copy, capsys):
    """The lock is another process's, which is then killed; it leaves no file."""
    before = {path.name for path in copy.iterdir()}
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()

    def hold():
        with locked(copy):
            ready.set()
            time.sleep(100)

    other = fork.Process(target=hold)
    other.start()
    assert ready.wait(60)
    assert f"run_dir is '{copy}': is in use by another run" in refusal(["--resume"], copy, capsys)
    other.kill()
    other.join()
    assert {path.name for path in copy.iterdir()} == before
    resume(copy)
    resume(copy)                                    # a run that has ended in this process holds none


def test_ctrl_c_says_how_to_go_on(small_flags, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Ppo, "scores", interrupted)
    with pytest.raises(SystemExit) as stop:
        finished(small_flags, tmp_path / "run", *PPO)
    assert stop.value.code == 130
    assert capsys.readouterr().out.endswith(f" --resume --run_dir {tmp_path / 'run'}\n")
