"""A run that is killed, stopped, damaged, or continued under other conditions."""
import json
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
    """Its scores are rewards less the mean so far, plus a random number. Each agent sums its scores."""

    def scores(self, rollouts, rewards):
        means = self.memory.setdefault("means", [0.0])
        means.append(rewards[0].mean().item())
        drawn = random.random() + np.random.rand()
        drawn += torch.rand(1).item()
        return [reward_B - fmean(means) + drawn for reward_B in rewards]

    def update(self, role, agent, rollout, score):
        agent.memory.setdefault("sum", 0.0)
        agent.memory["sum"] += score.mean().item()
        return super().update(role, agent, rollout, score) | agent.memory

    def team_metrics(self, rollouts, rewards):
        return {"remembered": len(self.memory.get("means", []))}


class Harder(Imdb):
    """It subtracts from each reward what has been earned so far, and a random number."""

    @property
    def earned(self):
        return self.memory.get("earned", 0.0)

    def on_iteration_end(self, rollouts, rewards):
        self.memory["earned"] = self.earned + rewards[0].mean().item()

    def metrics(self, queries, responses):
        return {"earned": self.earned}

    def compute_rewards(self, queries, responses):
        less = self.earned + random.random()
        return [reward - less for reward in super().compute_rewards(queries, responses)]


RUNS = {
    "cory-lora": ["--lora_rank", "2", "--learning_rate", "0.02"],
    "custom": ["--method", "test_resume:Remembering", "--task", "test_resume:Harder"]}


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
    tensors = saved_tensors(checkpoints_of(whole)[0])
    assert same_tensors(tensors, saved_tensors(checkpoints_of(part)[0]))
    assert any("/adam/" in key for key in tensors)
    if name == "custom":
        first, second, _ = training(whole)
        assert first["train/earned/llm1"] == 0                  # it learns after the iteration
        assert second["train/earned/llm1"] == pytest.approx(first["train/task_reward/llm1"])
        held_out = read(whole / "eval.json")
        earned = held_out["llm1"]["earned"]
        assert earned != 0
        assert held_out["base"]["earned"] == earned             # the base is measured by the same reward
        evaluated = evaluations(whole)
        assert [row["eval/remembered/team"] for row in evaluated] == [0, 2, 3, 4]


def test_a_finished_run_can_be_finished_again_but_not_lengthened(copy, capsys):
    """It continues its W&B run, and saves at its end, whatever `--save_every`."""
    held_out = read(copy / "eval.json")
    whole = rows(copy)
    newest, older = checkpoints_of(copy)
    newest.unlink()
    torch.save(torch.load(older, weights_only=True) | {"wandb_id": "same"}, older)
    resume(copy, "--save_every", 4)
    assert torch.load(newest, weights_only=True)["wandb_id"] == "same"
    resume(copy)
    assert read(copy / "eval.json") == held_out
    assert rows(copy) == whole
    assert "iterations is 3: the run has 2" in refusal(["--resume"], copy, capsys, "--iterations", 3)


def test_a_resumed_run_counts_as_unfinished_until_it_ends_again(copy, monkeypatch):
    def killed(*_):
        raise SystemExit

    monkeypatch.setattr(Ppo, "train", killed)
    with pytest.raises(SystemExit):
        resume(copy)
    assert (copy / "final").exists()
    assert not (copy / "eval.json").exists()


def test_without_a_checkpoint_a_run_begins_anew_unless_it_is_finished(copy, capsys):
    whole = rows(copy)
    shutil.rmtree(copy / "checkpoints")
    assert "holds a run without a checkpoint" in refusal(["--resume"], copy, capsys)
    (copy / "eval.json").unlink()
    config = read(copy / "config.json")
    (copy / "config.json").write_text(json.dumps(config | {"save_every": 0}))
    assert "holds a run without a checkpoint" in refusal(["--resume"], copy, capsys, "--save_every", 2)
    (copy / "config.json").write_text(json.dumps(config))
    resume(copy)
    assert rows(copy) == whole


def test_checkpoints_restore_memory_of_plain_values_and_refuse_other_objects(tmp_path):
    """A refused checkpoint replaces no earlier one."""
    agent = agent_of(bigram())
    agent.critic.register_buffer("count", torch.tensor(5.0))
    agent.memory = {"tensor": torch.ones(2)}
    memory = {"x": [(1, 2.5), {"a"}, {1: torch.ones(3)}, None]}
    method = SimpleNamespace(memory=memory, task=SimpleNamespace(memory={}))
    for iteration in (1, 2, 3):
        save_checkpoint(tmp_path, iteration, [agent], method, "id")
    resumed_agent = agent_of(bigram(seed=1))
    resumed_agent.critic.register_buffer("count", torch.tensor(0.0))
    resumed = SimpleNamespace(task=SimpleNamespace())
    assert load_checkpoint(tmp_path, [resumed_agent], resumed) == (3, "id")
    assert str(resumed.memory) == str(memory)
    assert same_tensors(resumed_agent.memory, agent.memory)
    assert same_tensors(resumed_agent.tensors(), agent.tensors())
    assert resumed_agent.critic.count == 5
    method.memory = {"x": [Path()]}
    with pytest.raises(UnpicklingError, match="GLOBAL pathlib"):
        save_checkpoint(tmp_path, 4, [], method, "id")
    assert [path.stem for path in checkpoints_of(tmp_path)] == ["iteration_000003"]


def test_a_folder_that_holds_a_run_is_refused(copy, small_flags, capsys):
    assert "holds a run; go on with --resume" in refusal(small_flags, copy, capsys)


def test_a_folder_in_use_is_refused_until_its_run_ends(copy, capsys):
    """Another process holds the lock, and is then killed. Its child would not hold it."""
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
    with locked(copy):
        child = fork.Process(target=time.sleep, args=[100])
        child.start()
    ready.clear()
    other = fork.Process(target=hold)               # the block that just ended has freed its lock
    other.start()
    assert ready.wait(60)
    other.kill()
    child.kill()


@pytest.mark.parametrize("save_every", [0, 2])
def test_ctrl_c_prints_how_to_resume_a_run(save_every, small_flags, tmp_path, monkeypatch, capsys):
    """Without checkpoints it does not, since a resumed run would only empty the logs."""
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Ppo, "scores", interrupted)
    with pytest.raises(SystemExit) as stop:
        finished(small_flags, tmp_path / "run", *PPO, "--save_every", save_every)
    assert stop.value.code == 130
    advice = capsys.readouterr().out.endswith(f" --resume --run_dir {tmp_path / 'run'}\n")
    assert advice == bool(save_every)
