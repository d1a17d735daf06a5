"""The two loops over whole runs: role exchange, ablations, logs, and resuming bit for bit."""
import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import error_line, mend_checksum, read, require_same_runs, same_tensors, settings
from toys import rows as metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

import cory.train as loop
import train_imdb
from cory.config import IMDB_PRESETS, ImdbConfig
from cory.experiment import checkpoint
from cory.experiment.checkpoint import checkpoints_of, gathered, saved_tensors
from cory.experiment.evaluation import evaluate
from cory.experiment.flags import parse
from cory.experiment.run import Run
from cory.experiment.saved_config import load_config
from cory.ppo.agent import Agent
from cory.ppo.loading import load_language_model
from cory.tasks.imdb import Imdb

ROOT = Path(__file__).parents[1]


def run(flags, folder, *changes) -> Path:
    train_imdb.main([*flags, "--run_dir", str(folder), *changes])
    return Path(folder)


def resume(folder, *changes) -> None:
    train_imdb.main(["--resume", "--run_dir", str(folder), *changes])


def refusal(capsys, folder, *changes) -> str:
    return error_line(train_imdb.main, ["--resume", "--run_dir", folder, *changes], capsys)


def prepared(flags, folder, *changes) -> Run:
    return Run(parse(ImdbConfig, IMDB_PRESETS, [*flags, "--run_dir", str(folder), *changes]))


def weights(folder, agent="llm1") -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "final" / agent / "model.safetensors")


@pytest.fixture(scope="module")
def whole(small_flags, tmp_path_factory) -> Path:
    """An undisturbed CORY run, for several tests."""
    return run(small_flags, tmp_path_factory.mktemp("whole") / "cory", "--method", "cory")


def test_roles_follow_the_exchange_and_figures_stand_under_role_and_identity(whole):
    rows = metrics(whole)
    assert [row["iteration"] for row in rows] == list(range(6))
    for row in rows[1:]:                                    # exchanged after iterations 2 and 4
        exchanged = (row["iteration"] - 1) // 2 % 2
        played = {"pioneer": "llm2" if exchanged else "llm1", "observer": "llm1" if exchanged else "llm2"}
        assert row["roles"] == played
        for role, agent in played.items():
            for key in ("task_reward", "kl", "combined_reward", "entropy", "kl_coef"):
                assert row[f"{role}/{key}"] == row[f"{agent}/{key}"]
        assert row["llm1/kl"] != row["llm2/kl"] or row["iteration"] == 1
    for agent in ("llm1", "llm2"):
        assert [row["iteration"] for row in rows if f"eval/{agent}/kl" in row] == [3, 5]
    samples = metrics(whole, "samples.jsonl")
    assert len(samples) == 5 * 4 and samples[-5]["pioneer_agent"] == "llm2"
    for row in samples:                         # what each has read
        assert row["pioneer_prompt"] == row["query"]
        assert row["query"] in row["observer_prompt"] and row["pioneer"] in row["observer_prompt"]
    assert {"pioneer_reward", "observer_reward"} <= samples[0].keys()
    with_base = {row["iteration"] for row in samples if {"base", "base_reward"} <= row.keys()}
    assert with_base == {3, 5}                  # at evaluations


def test_two_exchanges_are_the_identity_bit_for_bit(small_flags, tmp_path, monkeypatch):
    """The loop with exchanges, its rollouts and updates taken out: all state stays with its agent."""
    the_run = prepared(small_flags, tmp_path / "r", "--role_exchange_every", "1", "--iterations", "2")
    for agent, kl_coef in zip(the_run.agents, (0.11, 0.22)):
        sum(p.sum() for p in agent.policy.parameters()).backward()      # gives Adam moments to lose
        agent.optimizer.step()
        agent.optimizer.zero_grad()
        agent.kl_coef = kl_coef

    def state(agent):
        moments = [t for of_one in agent.optimizer.state_dict()["state"].values() for t in of_one.values()]
        tensors = [*agent.policy.state_dict().values(), agent.generator.get_state(), *moments]
        return agent.name, agent.kl_coef, [t.clone() for t in tensors]

    before, queued = [state(agent) for agent in the_run.agents], []
    monkeypatch.setattr(loop, "collect_rollout", lambda *a: type("T", (), {"text": ["x"] * 8}))
    monkeypatch.setattr(loop, "ppo_update", lambda *a: {})
    monkeypatch.setattr(the_run, "finish_iteration",
                        lambda *a, roles: queued.append([agent.name for agent in roles]))
    loop.train_cory(the_run)
    assert queued == [["llm2", "llm1"], ["llm1", "llm2"]]
    for (*numbers, tensors), agent in zip(before, the_run.agents):
        *now, tensors_now = state(agent)
        assert numbers == now and all(map(torch.equal, tensors, tensors_now))
    the_run.close()


def test_cory_without_its_three_ideas_is_ppo(whole, small_flags, tmp_path):
    """No knowledge transfer, no shared reward, no exchange: LLM1 is then trained exactly as by PPO."""
    without = "--method cory --knowledge_transfer false --partner_reward 0 --role_exchange_every 0".split()
    bare = run(small_flags, tmp_path / "bare", *without, "--iterations", "3")
    alone = "--method ppo --role_exchange_every 5".split()
    ppo = run(small_flags, tmp_path / "ppo", *alone, "--iterations", "3")
    assert same_tensors(weights(bare), weights(ppo))
    for a, b in zip(metrics(bare), metrics(ppo)):
        assert all(a[k] == v for k, v in b.items() if k != "roles")
    assert not same_tensors(weights(bare), weights(bare, "llm2"))  # the agents draw from streams of their own
    first, seeing = metrics(bare)[1], metrics(whole)[1]     # by untouched models, from other prompts
    assert first["observer/task_reward"] != seeing["observer/task_reward"]


def test_partner_reward_weighs_the_other_agents_task_reward(small_flags, tmp_path, monkeypatch):
    the_run = prepared(small_flags, tmp_path / "r", "--partner_reward", "-0.5", "--iterations", "1")
    trained_on, turns = {}, []
    monkeypatch.setattr(loop, "ppo_update",
                        lambda agent, rollout, score, *_: trained_on.update({agent.name: score}) or {})
    monkeypatch.setattr(the_run, "finish_iteration", lambda i, q, limit, t, roles: turns.extend(t))
    loop.train_cory(the_run)
    r1, r2 = (turn.reward_B for turn in turns)
    assert torch.equal(trained_on["llm1"], r1 - 0.5 * r2) and torch.equal(trained_on["llm2"], r2 - 0.5 * r1)
    the_run.close()


def test_reset_on_exchange_forgets_moments_coefficient_and_stream(small):
    agent = Agent("llm2", load_language_model(str(small / "lm")), settings(), 1)
    start = agent.generator.get_state()
    sum(p.sum() for p in agent.policy.parameters()).backward()
    agent.optimizer.step()
    torch.rand(3, generator=agent.generator)
    agent.kl_coef, moved = 9.0, [p.clone() for p in agent.policy.parameters()]
    agent.reset()
    assert agent.optimizer.state_dict()["state"] == {} and agent.kl_coef == 0.3
    assert torch.equal(agent.generator.get_state(), start)
    assert all(torch.equal(p, q) for p, q in zip(moved, agent.policy.parameters()))


def test_an_exchange_with_reset_resets_both_agents(small_flags, tmp_path, monkeypatch):
    run(small_flags, tmp_path / "r", "--reset_on_exchange", "true", "--iterations", "1")
    reset, kept = [], Agent.reset
    monkeypatch.setattr(Agent, "reset", lambda agent: reset.append(agent.name) or kept(agent))
    resume(tmp_path / "r", "--iterations", "2")
    assert reset == ["llm1", "llm2", "llm2", "llm1"]        # when made; at the exchange of iteration 2


KILLER = """
import os, signal, cory.experiment.run as r
kept = r.save_checkpoint
def save(run_dir, iteration, *rest):
    if iteration == 4: os.kill(os.getpid(), signal.SIGKILL)
    kept(run_dir, iteration, *rest)
r.save_checkpoint = save
import train_imdb
train_imdb.main()
"""


def test_a_killed_run_resumes_to_the_same_bits(whole, small_flags, tmp_path):
    """Killed by SIGKILL before the checkpoint of iteration 4, inside a period, its log line written."""
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", KILLER, *small_flags, "--method", "cory", "--run_dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [row["iteration"] for row in metrics(folder)] == [0, 1, 2, 3, 4]
    resume(folder)
    require_same_runs(folder, whole)
    ends = [load_file(checkpoints_of(d)[0]) for d in (folder, whole)]
    assert same_tensors(*({key: x for key, x in end.items() if key.startswith("llm")} for end in ends))


def test_a_kill_while_writing_leaves_the_previous_checkpoint(small_flags, tmp_path, monkeypatch):
    folder = run(small_flags, tmp_path / "r", "--iterations", "2")

    def dies(*paths):
        raise KeyboardInterrupt

    def saved():
        return sorted(p.name[:16] for p in (folder / "checkpoints").iterdir())

    assert saved() == ["iteration_000001", "iteration_000002"]      # the last two are kept
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(checkpoint, "put_in_place", dies)
        resume(folder, "--iterations", "3")
    assert stop.value.code == 130 and saved() == ["iteration_000001", "iteration_000002", "writing"]
    resume(folder, "--iterations", "3")
    assert [row["iteration"] for row in metrics(folder)] == [0, 1, 2, 3]
    assert saved() == ["iteration_000002", "iteration_000003"]


def test_the_logged_combined_reward_is_charged_by_the_first_kl_coefficient(small_flags, tmp_path):
    """The controller moves the coefficient; the metric stays comparable over a run."""
    adaptive = ["--adap_kl_ctrl", "true", "--kl_target", "0.001", "--kl_horizon", "10", "--iterations", "3"]
    folder = run(small_flags, tmp_path / "r", "--learning_rate", "1e-2", *adaptive)
    row = metrics(folder)[3]
    charged = row["pioneer/task_reward"] - 0.15 * row["pioneer/kl"]
    assert abs(row["pioneer/kl_coef"] - 0.15) > 0.003 and row["pioneer/kl"] > 0.1
    assert row["pioneer/combined_reward"] == pytest.approx(charged, rel=1e-5)


def test_nothing_in_a_checkpoint_is_unpickled(small_flags, tmp_path, capsys):
    """A file that would run code when unpickled is refused, its checksum mended or not."""
    folder = run(small_flags, tmp_path / "r", "--iterations", "1")
    newest = checkpoints_of(folder)[0]
    torch.save({"random/cpu": Trap()}, newest)
    for line in ("its checksum is another", "is damaged (SafetensorError"):
        assert line in refusal(capsys, folder, "--iterations", "2")
        newest = mend_checksum(newest)
    assert not Trap.sprung


class Trap:
    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


def test_a_run_starts_over_where_no_checkpoint_was_to_be_made_yet(whole, small_flags, tmp_path, capsys):
    folder = run(small_flags, tmp_path / "r", "--save_every", "5", "--iterations", "2")
    shutil.rmtree(folder / "checkpoints")                   # as if killed after iteration 2
    config, before = read(folder / "config.json"), metrics(folder)
    (folder / "config.json").write_text(json.dumps(config | {"save_every": 1}))
    assert "has done 2 iterations and has no checkpoint" in refusal(capsys, folder, "--iterations", "3")
    assert metrics(folder) == before
    (folder / "config.json").write_text(json.dumps(config))
    resume(folder, "--iterations", "3", "--save_every", "1")
    assert metrics(folder) == metrics(whole)[:4]


def test_checkpoints_hold_the_kl_coefficients_and_every_random_generator(small, tmp_path):
    base = load_language_model(str(small / "lm"))
    agents = [Agent(name, base, settings(), i) for i, name in enumerate(("llm1", "llm2"))]
    agents[0].kl_coef, agents[1].kl_coef = 0.125, 0.375
    checkpoint.save_checkpoint(tmp_path, 3, agents, agents[::-1], {}, {"wandb_id": "abc"})

    def draw():
        own = torch.rand(1, generator=agents[1].generator).item()
        return random.random(), np.random.rand(), torch.rand(1).item(), own

    expected = draw()
    agents[0].kl_coef = agents[1].kl_coef = 9.0
    state = checkpoint.load_checkpoint(tmp_path, agents)
    assert draw() == expected and [a.kl_coef for a in agents] == [0.125, 0.375]
    assert state["roles"] == ["llm2", "llm1"] and state["iteration"] == 3 and state["wandb_id"] == "abc"


def test_numbers_that_an_optimizer_keeps_come_back_as_numbers(small, tmp_path):
    agent = Agent("llm1", load_language_model(str(small / "lm")), settings(), 0)
    parameter = next(iter(agent.policy.trained().values()))
    kept = {"count": 3, "rate": 0.1, "flag": True, "exp_avg": torch.full_like(parameter, 2)}
    agent.optimizer.state[parameter] = dict(kept)
    checkpoint.save_checkpoint(tmp_path, 1, [agent], [agent], {}, {})
    agent.reset()
    checkpoint.load_checkpoint(tmp_path, [agent])
    back = agent.optimizer.state[parameter]
    assert torch.equal(back.pop("exp_avg"), kept.pop("exp_avg"))
    assert back == kept and all(type(back[name]) is type(x) for name, x in kept.items())


def test_a_finished_run_can_be_resumed_at_its_end_or_lengthened_but_not_shortened(
        small_flags, tmp_path, capsys):
    flags = [*small_flags, "--eval_every", "0"]             # ends at an exchange
    folder = run(flags, tmp_path / "r", "--iterations", "2")
    before = (folder / "eval.json").read_text()
    resume(folder)
    assert (folder / "eval.json").read_text() == before
    assert "its 2 iterations are done: results are written again" in capsys.readouterr().out
    longer = run(flags, tmp_path / "longer", "--iterations", "3")
    checkpoints_of(longer)[0].unlink()
    resume(longer, "--iterations", "2")         # an end that was none before has not been evaluated
    assert (longer / "eval.json").read_text() == before
    assert "iterations is 1: the run" in refusal(capsys, folder, "--iterations", "1")


def test_other_settings_and_another_run_are_refused_and_the_folder_is_not_touched(whole, small_flags, capsys):
    before = (whole / "metrics.jsonl").read_bytes()
    # what is right for the run no preset judges: it has none for this batch size
    assert "seed was 0, now 5" in refusal(capsys, whole, "--batch_size", "8", "--seed", "5")
    line = error_line(train_imdb.main, [*small_flags, "--run_dir", whole], capsys)
    assert "holds another run; continue it with --resume" in line
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_stopped_run_prints_a_command_that_a_shell_reads_as_it_is_meant(capsys):
    stopped = SimpleNamespace(close=lambda: None, cfg=settings(), run_dir=Path("runs/mine; first"))
    with pytest.raises(SystemExit) as ended:
        Run.stop(stopped, 3, signal.SIGINT)
    assert ended.value.code == 130
    assert shlex.split(capsys.readouterr().out)[-3:] == ["--resume", "--run_dir", "runs/mine; first"]


def test_final_models_load_in_plain_transformers(whole):
    final = whole / "final" / "llm2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    asked = tokenizer("the film", return_tensors="pt")
    assert model.generate(**asked, max_new_tokens=4, pad_token_id=tokenizer.eos_token_id).shape[1] > 8
    saved, name = load_file(checkpoints_of(whole)[0]), "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(model.get_parameter(name), saved[f"llm2/weights/lm.{name}"])
    assert load_file(final / "value_head.safetensors")["weight"].shape == (1, 32)


def test_held_out_figures_are_of_each_agents_final_model(whole):
    cfg, held_out = load_config(whole), read(whole / "eval.json")
    base = load_language_model(cfg.model)
    task = Imdb(cfg, Imdb.load_data(cfg), base)
    for agent in ("llm1", "llm2"):
        final = load_language_model(str(whole / "final" / agent))
        expected = {name: pytest.approx(x, rel=1e-5) for name, x in evaluate(final, base, task, cfg).items()}
        assert held_out[agent] == held_out[agent] | expected
    assert held_out["llm1"]["kl"] != held_out["llm2"]["kl"]


def test_what_is_saved_of_a_divided_model_is_what_transformers_saves(small, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(small / "lm")                 # with tied weights
    lm.transformer.register_buffer("kept", torch.ones(3))
    lm.transformer.register_buffer("made_anew", torch.ones(3), persistent=False)
    lm.save_pretrained(tmp_path)
    lm.save_pretrained(tmp_path / "ours", state_dict=gathered(saved_tensors(lm)))
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "ours"))
    assert "transformer.kept" in ours and theirs.keys() == ours.keys()
    assert all(theirs[name].equal(ours[name]) for name in ours)


