"""A run that is killed, stopped, damaged, or continued under other conditions."""
import io
import multiprocessing
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
from safetensors.torch import load_file, save_file
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
from cory.__main__ import main
from cory.checkpoint import checkpoints_of, load_checkpoint, save_checkpoint
from cory.config import ASSETS
from cory.errors import UserError
from cory.final import save_models
from cory.run_folder import SIGNALS, signals_noted
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

    def scores(self, rollouts, rewards):
        means = self.memory.setdefault("means", [])
        means.append(rewards[0].mean().item())
        drawn = random.random() + np.random.rand() + torch.rand(1).item()
        return [reward_B - fmean(means) + drawn for reward_B in rewards]

    def metrics(self, rollouts, rewards):
        return {"remembered": len(self.memory["means"])}


class Harder(Imdb):
    """It draws, and subtracts from each reward what has been earned so far."""

    def learn(self, rollouts, rewards):
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
    newest = checkpoints_of(copy)[0]
    torch.save(torch.load(newest, weights_only=True) | {"wandb_id": "same"}, newest)
    resume(copy, "--iterations", "3")
    assert [row["iteration"] for row in rows(copy)] == [0, 1, 2, 2, 3, 3]
    assert read(copy / "eval.json") == read(three / "eval.json")
    assert "iterations is 1: the run has done 3" in refused(capsys, copy, "--iterations", "1")
    resume(copy, "--iterations", 5, "--save_every", 4)      # at the end, too
    newest, older = checkpoints_of(copy)
    assert (newest.stem[-1], older.stem[-1]) == ("5", "4")
    assert torch.load(newest, weights_only=True)["wandb_id"] == "same"
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
    agent.memory, kept = {"of two": torch.ones(2)}, [(1, 2.5), {"a"}, {1: torch.ones(2)}, None]
    for iteration in (1, 2, 3):
        save_checkpoint(tmp_path, iteration, [agent], {"x": kept})
    assert str(load_checkpoint(tmp_path, [other])["x"]) == str(kept)
    assert same_tensors(other.memory, agent.memory)
    assert same_tensors(other.trainable_parameters(), agent.trainable_parameters())
    with pytest.raises(AttributeError):                     # it would be lost
        agent.sums = 1
    with pytest.raises(UserError, match="what method, .* cannot be restored; .*GLOBAL pathlib"):
        save_checkpoint(tmp_path, 4, [], {"x": [Path()]})
    assert [path.stem for path in checkpoints_of(tmp_path)] == ["iteration_000003"]


def follow(agent) -> None:
    """An average over the policies as reference, in place."""
    for p, own in zip(agent.base.parameters(), agent.policy.parameters()):
        p.data.lerp_(own.data, 0.1)


OTHER = "agent is 'llm1': has another cfg or base than at the start"
FOLLOWED = "frozen weights have changed: KL has another reference"


@pytest.mark.parametrize("edit, flags, says", [
    (lambda agent: setattr(agent, "cfg", replace(agent.cfg, lam=0.5)), [], OTHER),
    (lambda agent: setattr(agent, "base", agent.policy.like_this(agent.policy.lm)), [], OTHER),
    (follow, [], FOLLOWED), (follow, ["--save_every", 0, "--eval_every", 0], FOLLOWED)])
def test_a_setting_or_reference_that_no_resume_would_restore_is_refused(
        edit, flags, says, small_flags, tmp_path, capsys, monkeypatch):
    update = Ppo.update
    monkeypatch.setattr(Ppo, "update", lambda self, role, agent, *rest: (
        update(self, role, agent, *rest), edit(agent))[0])
    words = [*small_flags, *flags, "--run_dir", tmp_path / "run"]
    assert says in error_line(train_imdb.main, words, capsys)
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [0, 1]
    assert not checkpoints_of(tmp_path / "run")


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


def test_models_and_data_may_move_but_not_change(copy, small, tmp_path, capsys):
    model = shutil.copytree(small, tmp_path / "lm")
    data = shutil.copytree(ASSETS / "imdb/openings", tmp_path / "data")
    classifier = shutil.copytree(ASSETS / "imdb/classifier", tmp_path / "classifier")
    moved = ["--model", model, "--dataset", data, "--reward_model", classifier]
    resume(copy, "--iterations", 3, *moved)
    for folder, name in ((model, "model"), (classifier, "reward_model")):
        path = folder / "model.safetensors"
        before = load_file(path)
        first = min(before)
        save_file(before | {first: before[first] + 0.01}, path, {"format": "pt"})
        assert f"{name} is '{folder}': is not what the run began with" in refused(
            capsys, copy, "--iterations", 4, *moved)
        save_file(before, path, {"format": "pt"})
    path = model / "generation_config.json"
    before = path.read_text()
    path.write_text('{"eos_token_id": [0, 5]}')
    assert f"model is '{model}': is not what" in refused(capsys, copy, "--iterations", 4, *moved)
    path.write_text(before)
    with (data / "train.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert f"dataset is '{data}': is not what" in refused(capsys, copy, "--iterations", 4, *moved)
    assert "is not what the run was trained with" in error_line(main, ["evaluate", copy], capsys)


OWN = {"llm2": 0.01}                # learning rates


class Differ(Cory):
    @staticmethod
    def agent_config(cfg, name):
        return replace(cfg, learning_rate=OWN.get(name, cfg.learning_rate))


def test_a_run_goes_on_with_each_agents_own_settings_and_says_by_which_code(
        small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cory.config.commit", lambda: "first")
    run = finished(small_flags, tmp_path / "run", "--method", "test_resume:Differ", "--iterations", 1)
    assert read(run / "config.json")["agent_settings"] == {"llm2": {"learning_rate": 0.01}}
    shared = read(run / "config.json")["learning_rate"]
    for agent, rate, old in (("llm2", 0.02, 0.01), ("llm2", shared, 0.01), ("llm1", 0.02, shared)):
        with monkeypatch.context() as edit:
            edit.setitem(OWN, agent, rate)
            assert f"the {agent} of the run has {old}" in refused(capsys, run, "--iterations", 2)
    for commit in ("second", "second"):
        monkeypatch.setattr("cory.config.commit", lambda: commit)
        resume(run)
    assert read(run / "config.json")["commit"] == "first, second"


def test_whoever_may_read_the_settings_may_read_the_final_model(saved):
    modes = {(saved / name).stat().st_mode for name in ("config.json", "final/llm1/model.safetensors")}
    assert len(modes) == 1


class Scaled(Ppo):
    """A policy that computes what no file says: its hidden states are scaled by a hook."""

    def update(self, role, agent, rollout, score):
        def scale(module, args, out):
            out.last_hidden_state = 1.5 * out.last_hidden_state

        if self.iteration == 1:
            agent.policy.lm.base_model.register_forward_hook(scale)
        return super().update(role, agent, rollout, score)


def test_a_policy_that_no_final_model_would_restore_is_refused_after_the_first_iteration(
        small_flags, tmp_path, capsys):
    words = [*small_flags, "--method", "test_resume:Scaled", "--run_dir", tmp_path / "run"]
    assert "agent is 'llm1': is not what its final model is" in error_line(train_imdb.main, words, capsys)
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [0, 1]
    unsaved = ["--run_dir", tmp_path / "unsaved", "--save_every", 0, "--iterations", 1]
    train_imdb.main([*map(str, [*words, *unsaved])])


def test_the_best_models_so_far_are_kept(small_flags, tmp_path, monkeypatch):
    """With their metrics, of any kind of number; the best is found again by a run that is resumed."""
    def save_models_alone(folder, agents):
        assert not (folder / "eval.json").exists()              # of the models that are replaced
        save_models(folder, agents)

    monkeypatch.setattr("cory.record.save_models", save_models_alone)
    monkeypatch.setattr(Imdb, "metrics", lambda self, queries, responses: {"half": np.float32(0.5)})
    run = finished(small_flags, tmp_path / "run", "--save_best", "--eval_split", "validation",
                   "--eval_every", 1, "--learning_rate", 0.02)
    agents = ("llm1", "llm2")
    at = {row["iteration"]: [row[f"eval_combined_reward/{agent}"] for agent in agents] for row in rows(run)
          if row["iteration"] and "eval_kl/llm1" in row}
    best = max(at, key=lambda iteration: fmean(at[iteration]))
    about = read(run / "best/eval.json")
    assert (about["iteration"], about["combined_reward"]) == (best, fmean(at[best]))
    assert [about[agent]["combined_reward"] for agent in agents] == at[best]
    assert all((run / f"best/{agent}/model.safetensors").exists() for agent in agents)
    part = stopped(run, tmp_path / "part")
    shutil.rmtree(part / "best")
    resume(part)
    assert (part / "best").exists() == (best == 5)


def test_what_was_evaluated_before_a_run_goes_on_is_removed_and_says_of_which_iteration_it_is(copy):
    main(["evaluate", str(copy), "--samples", "1", "--device", "cpu"])
    assert read(copy / "evaluation/results.json")["iteration"] == 2
    resume(copy, "--iterations", 3)
    assert not (copy / "evaluation").exists()
    main(["evaluate", str(copy), "--samples", "1", "--device", "cpu"])
    assert read(copy / "evaluation/results.json")["iteration"] == 3
    resume(copy)                                            # already at its end
    assert (copy / "evaluation").exists()


def test_a_folder_that_holds_a_run_is_refused(copy, small_flags, capsys):
    assert "is not empty; continue a run with --resume" in error_line(
        train_imdb.main, [*small_flags, "--run_dir", copy], capsys)


class Signalled(Ppo):
    """In iteration 2 comes a signal; meanwhile the run's folder is no other process's."""
    number = signal.SIGTERM

    def scores(self, rollouts, rewards):
        self.memory["done"] = self.memory.get("done", 0) + 1
        if self.memory["done"] == 2:
            os.kill(os.getpid(), self.number)
            with pytest.raises(UserError, match="is in use by another process"):
                train_imdb.main.__wrapped__(["--resume", "--run_dir", self.cfg.run_dir])
        return rewards


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_run_after_its_iteration(number, small_flags, tmp_path, monkeypatch):
    """The last line says how to go on: it comes after the bar's, as the result of the whole run does."""
    screen = io.StringIO()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(Signalled, "number", number)
    before, run_dir = [signal.getsignal(each) for each in SIGNALS], tmp_path / "mine; first"
    with pytest.raises(SystemExit) as stop:
        train_imdb.main([*small_flags, "--method", "test_resume:Signalled", "--save_every", "5000",
                         "--run_dir", str(run_dir)])
    assert stop.value.code == 128 + number
    assert before == [signal.getsignal(each) for each in SIGNALS]
    assert before[0] is signal.default_int_handler
    words = shlex.split(screen.getvalue().splitlines()[-1])                  # a command for a shell
    assert words[-3:] == ["--resume", "--run_dir", str(run_dir)]
    assert [path.stem for path in checkpoints_of(run_dir)] == ["iteration_000002", "iteration_000001"]
    resume(run_dir)
    assert rows(run_dir)[-1]["iteration"] == 5
    assert screen.getvalue().splitlines()[-1].startswith("written to ")


class Pooled(Ppo):
    """Asks forked workers, of which the first time one sends Ctrl-C to all, as a terminal does."""

    def scores(self, rollouts, rewards):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            if self.memory.setdefault("asked", 0) == 0:
                for pid in [os.getpid(), *(worker.pid for worker in pool._pool)]:
                    os.kill(pid, signal.SIGINT)
            self.memory["asked"] += 1
            return [torch.tensor([*map(float, pool.map(len, rollouts[0].text))])]


def test_a_pool_of_forked_workers_ends_and_survives_ctrl_c(small_flags, tmp_path):
    run = ["--method", "test_resume:Pooled", "--iterations", "2", "--run_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        train_imdb.main([*small_flags, *run])
    resume(tmp_path / "run")
    assert [row["score/llm1"] for row in rows(tmp_path / "run") if "score/llm1" in row][1] > 0


def test_signals_act_on_forked_workers_without_python_which_may_wait_in_c():
    with signals_noted([]), multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.map(signal.getsignal, [signal.SIGINT, signal.SIGTERM])
    assert found == [signal.SIG_IGN, signal.SIG_DFL]


def test_a_signal_ends_a_worker_also_while_it_is_being_forked():
    armed = [True]
    os.register_at_fork(after_in_child=lambda: armed and os.kill(os.getpid(), signal.SIGTERM))
    with signals_noted([]):                                 # whose own hook in the child comes after that one
        worker = multiprocessing.get_context("fork").Process(target=len, args=("",))
        worker.start()
        worker.join()
    armed.clear()
    assert worker.exitcode == -signal.SIGTERM


def test_a_closed_terminal_is_a_signal_unless_it_is_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_noted(received := []):
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert received == [] and signal.SIGHUP in SIGNALS


def test_a_second_signal_ends_at_once():
    with pytest.raises(KeyboardInterrupt), signals_noted(received := []):
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
