"""Agents that differ in base and settings, and a loop's memory."""
import json
import random
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from conftest import save_llama
from toys import error_line, read, require_same_runs, rows, stopped

import cory.train as loop
import train_imdb
from cory.config import IMDB_PRESETS, ImdbConfig
from cory.errors import UserError
from cory.experiment import checkpoint, run
from cory.experiment.flags import parse
from cory.experiment.run import Turn
from cory.ppo.rollout import collect_rollout
from cory.ppo.update import ppo_update


def parsed(*words) -> ImdbConfig:
    return parse(ImdbConfig, IMDB_PRESETS, [*words])


# --- flags ---
def test_settings_of_one_agent_are_typed_and_fall_back_on_the_runs():
    cfg = parsed("--lora", "--llm2", "learning_rate=3e-5", "num_ppo_epochs=8", "--seed", "4",
                 "--judge", "lam=0")
    assert cfg.lora and cfg.seed == 4
    assert cfg.agent_settings == {"llm2": {"learning_rate": 3e-5, "num_ppo_epochs": 8}, "judge": {"lam": 0.0}}
    second = cfg.of_agent("llm2")
    assert (second.learning_rate, second.num_ppo_epochs, second.seed) == (3e-5, 8, 4)
    assert cfg.of_agent("llm1") is cfg and ImdbConfig(**asdict(cfg)) == cfg


@pytest.mark.parametrize("words, says", [
    (["--llm2", "seed=3"], "setting is 'seed=3': is none of a single agent; choose from"),
    (["--llm2", "learning_rate=0"], "learning_rate is 0.0: must be above 0"),
    (["--llm2", "learning_rate=x"], "invalid float value"),
    (["--llm2", "mini_batch_size=7"], "batch_size is 128: must be a multiple"),
    (["--llm2", "--seed", "3"], "flag is '--llm2': unknown"),
    (["model=x"], "flag is 'model=x': unknown")])
def test_settings_that_no_agent_can_have_are_one_line(words, says, capsys):
    assert says in error_line(train_imdb.main, words, capsys)


def test_agents_of_equal_bases_share_a_column():
    cfg = parsed("--llm2", "model=b", "--llm3", "model=b", "--llm4", "learning_rate=1")
    columns = cfg.base_columns(["llm1", "llm2", "llm3", "llm4"])
    assert columns == {"llm1": "base", "llm2": "base_llm2", "llm3": "base_llm2", "llm4": "base"}
    assert parsed("--llm1", "model=b").base_columns(["llm1", "llm2"]) == {"llm1": "base", "llm2": "base_llm2"}


# --- two families ---
@pytest.fixture(scope="module")
def mixed_flags(small_flags, small, tmp_path_factory) -> list[str]:
    """llm1 is GPT-2-shaped, llm2 Llama-shaped with a rate and an eta of its own."""
    llama = tmp_path_factory.mktemp("mixed") / "llama"
    save_llama(llama)
    return [*small_flags, "--eval_every", "1", "--save_every", "1", "--llm2", f"model={llama}",
            "learning_rate=0.02", "init_kl_coef=0.7"]


def test_two_families_train_together_and_resume_bit_for_bit(mixed_flags, tmp_path, monkeypatch):
    loaded, load = [], run.load_language_model
    monkeypatch.setattr(run, "load_language_model", lambda *args: loaded.append(args) or load(*args))
    whole = tmp_path / "whole"
    train_imdb.main([*mixed_flags, "--iterations", "2", "--run_dir", str(whole)])
    assert len(loaded) == 2
    train_imdb.main(["--resume", "--run_dir", str(stopped(whole, tmp_path / "part"))])
    require_same_runs(whole, tmp_path / "part")
    first, *_, last = rows(whole)
    assert first["eval/base/base_perplexity"] != first["eval/base_llm2/base_perplexity"]
    for agent, eta in (("llm1", 0.15), ("llm2", 0.7)):
        reward, kl = last[f"eval/{agent}/task_reward"], last[f"eval/{agent}/kl"]
        assert last[f"eval/{agent}/combined_reward"] == pytest.approx(reward - eta * kl)
    assert last["llm2/learning_rate"] == 0.02 != last["llm1/learning_rate"]
    sample = rows(whole, "samples.jsonl")[-1]
    assert sample["base"] != sample["base_llm2"]
    assert {"base", "base_llm2", "llm1", "llm2"} <= read(whole / "eval.json").keys()


def test_a_second_base_that_has_changed_is_refused(mixed_flags, tmp_path, capsys):
    other = tmp_path / "other"
    path = next(word for word in mixed_flags if word.startswith("model=")).removeprefix("model=")
    shutil.copytree(path, other)
    flags = [word.replace(path, str(other)) for word in mixed_flags]
    train_imdb.main([*flags, "--iterations", "1", "--run_dir", str(tmp_path / "r")])
    shutil.rmtree(other)
    save_llama(other, initializer_range=0.21)
    resume = ["--resume", "--iterations", "2", "--run_dir", str(tmp_path / "r")]
    line = error_line(train_imdb.main, resume, capsys)
    assert f"model is {str(other)!r}" in line and "base_llm2 of this run was another" in line
    train_imdb.main([*resume, "--llm2", f"model={path}"])               # elsewhere, and the same
    line = error_line(train_imdb.main, [*resume, "--llm2", "learning_rate=0.1"], capsys)
    assert "has other settings: agent_settings was" in line


def test_an_agent_that_the_loop_has_not_is_refused(small_flags, tmp_path, capsys):
    flags = [*small_flags, "--method", "ppo", "--role_exchange_every", "5", "--llm2", "learning_rate=1",
             "--run_dir", str(tmp_path / "r")]
    line = error_line(train_imdb.main, flags, capsys)
    assert "flag is '--llm2': names no agent of this run; it has llm1" in line


# --- what a loop remembers ---
@loop.trains("llm1")
def train_with_memory(run):
    """PPO whose score is the change since the last iteration's mean, which it remembers."""
    (agent,) = run.roles
    memory = run.state
    memory.setdefault("means", [])
    memory.setdefault("tensors", {"sum": torch.zeros(2)})
    for iteration in run.iterations():
        queries, max_new_tokens = run.task.batch(iteration)
        a = collect_rollout(agent, run.task.pioneer_prompts(queries), max_new_tokens)
        r = run.task.reward(queries, a.text)
        memory["means"].append(r.mean().item())
        memory["tensors"]["sum"] += r[:2]
        memory["twice"] = [memory["tensors"]["sum"], memory["tensors"]["sum"][:1]]      # of one memory
        drawn = random.random() + np.random.rand() + torch.rand(1).item()
        update = ppo_update(agent, a, r - sum(memory["means"]) / len(memory["means"]), iteration)
        turns = [Turn("pioneer", agent, a, r, update)]
        run.finish_iteration(iteration, queries, max_new_tokens, turns, [agent],
                             {"remembered": memory["tensors"]["sum"].sum(), "drawn": drawn})


def test_a_memory_and_a_loops_own_random_numbers_are_there_after_a_resume(small_flags, tmp_path):
    flags = [*small_flags, "--method", "test_agents:train_with_memory", "--save_every", "1",
             "--eval_every", "1"]
    whole = tmp_path / "whole"
    train_imdb.main([*flags, "--iterations", "3", "--run_dir", str(whole)])
    assert len({row["remembered"] for row in rows(whole)[1:]}) == 3
    train_imdb.main(["--resume", "--run_dir", str(stopped(whole, tmp_path / "part"))])
    require_same_runs(whole, tmp_path / "part")
    train_imdb.main([*flags, "--iterations", "1", "--run_dir", str(tmp_path / "again")])
    assert rows(tmp_path / "again") == rows(whole)[:2]      # the seed's, not the clock's


def test_what_is_remembered_comes_back_as_it_was(tmp_path):
    memory = {"n": 3, "text": "é", "none": None, "yes": True, "nested": {"list": [1.5, torch.arange(3)]}}
    tensors = {}
    text = json.dumps(checkpoint.packed("state", memory, tensors))
    assert [*tensors] == ["state/nested/list/1"]
    checkpoint.save_file(tensors, tmp_path / "x")
    with checkpoint.safe_open(tmp_path / "x", "pt") as file:
        back = checkpoint.unpacked(json.loads(text), file, torch.device("cpu"))
    assert torch.equal(back["nested"]["list"].pop(), memory["nested"]["list"].pop()) and back == memory


@pytest.mark.parametrize("value", [(1, 2), {1, 2}, {1: 2}, object(), [ImdbConfig]])
def test_what_would_not_come_back_is_refused_at_once(value):
    with pytest.raises(UserError, match="run.state/x.* keep numbers, text, lists, tensors and dictionaries"):
        checkpoint.packed("state", {"x": value}, {})
