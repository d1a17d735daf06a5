"""The algorithm's flags over whole runs: each resumes bit for bit, one model plays both roles, groups are
a query's own.
"""

import pytest
import torch
from safetensors.torch import load_file
from toys import agent_of, bigram, error_line, read, require_same_runs, rows, stopped

import cory.train
import train_imdb
from cory.experiment.checkpoint import checkpoints_of
from cory.ppo.agent import agent_seed
from cory.ppo.rollout import collect_rollout
from cory.ppo.update import make_experience

COMBINATIONS = {
    "rloo": "--advantage rloo --responses_per_query 4 --kl_in loss --ent_coef 0.01 --lr_schedule cosine "
    "--warmup_iterations 1",
    "share": "--advantage reinforce --share_weights true --role_exchange_every 5 --whiten_advantages false "
    "--lr_schedule linear --sampling_temperature 0.8 --top_p 0.9 --importance_cap 2"}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_stopped_run_resumes_to_the_same_bits_with_each_flag(name, small_flags, tmp_path):
    flags = [*small_flags, *COMBINATIONS[name].split(), "--iterations", "3", "--eval_every", "0"]
    whole = tmp_path / "whole"
    train_imdb.main([*flags, "--run_dir", str(whole)])
    train_imdb.main(["--resume", "--run_dir", str(stopped(whole, tmp_path / "stopped"))])
    require_same_runs(whole, tmp_path / "stopped")
    first = rows(whole)[1]
    assert {"llm1/task_reward", "llm1/entropy", "llm1/learning_rate"} <= first.keys()
    assert ("llm1/kl_loss" in first) == (name == "rloo")
    assert not any("value" in key or "explained" in key for key in first)                   # no critic
    assert not list(tmp_path.rglob("value_head*"))
    assert not any("value_head" in key for key in load_file(checkpoints_of(whole)[0]))
    assert read(whole / "config.json")["agents"] == (["llm1"] if name == "share" else ["llm1", "llm2"])


def test_raising_the_iterations_of_a_falling_rate_is_refused(small_flags, tmp_path, capsys):
    run_dir = ["--run_dir", str(tmp_path / "r")]
    train_imdb.main([*small_flags, "--lr_schedule", "linear", "--iterations", "2", *run_dir])
    assert [row["llm1/learning_rate"] for row in rows(tmp_path / "r")[1:]] == [1e-3, 0.5e-3]
    line = error_line(train_imdb.main, ["--resume", *run_dir, "--iterations", "4"], capsys)
    assert "iterations is 4: the run was started with 2" in line


def test_one_model_in_both_roles(small_flags, tmp_path, monkeypatch):
    """Both turns train it, the pioneer's first; it is saved once; its own metrics are the mean of its two
    turns.
    """
    flags = ["--share_weights", "true", "--role_exchange_every", "5", "--iterations", "2",
             "--run_dir", str(tmp_path / "r")]
    order, update = [], cory.train.ppo_update

    def watched(agent, rollout, *rest):
        prompts = rollout.prompt_mask_BP.sum(1).float().mean().item()
        order.append((agent.name, prompts > 30))                        # the observer's template is long
        return update(agent, rollout, *rest)

    monkeypatch.setattr(cory.train, "ppo_update", watched)
    train_imdb.main([*small_flags, *flags])
    assert order == [("llm1", False), ("llm1", True)] * 2
    last = rows(tmp_path / "r")[2]
    assert last["roles"] == {"pioneer": "llm1", "observer": "llm1"}
    for key in ("task_reward", "kl", "entropy", "approx_kl"):
        mean = (last[f"pioneer/{key}"] + last[f"observer/{key}"]) / 2
        assert last[f"llm1/{key}"] == pytest.approx(mean, rel=1e-12)
    held_out = {"iteration", "split", "queries", "samples", "base", "llm1", "team"}
    assert read(tmp_path / "r" / "eval.json").keys() == held_out
    assert [p.name for p in (tmp_path / "r" / "final").iterdir()] == ["llm1"]
    saved = load_file(checkpoints_of(tmp_path / "r")[0])
    assert {key.partition("/")[0] for key in saved} == {"llm1", "random"}


def test_no_two_agents_of_any_two_runs_share_a_seed():
    """Draws are compared, not seeds: PyTorch's CPU generator uses the low 32 bits of its seed alone."""
    seeds = [agent_seed(seed, index) for seed in (0, 1, 2, 2**31 - 1) for index in range(5)]
    draws = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(seeds)
    # what runs of two agents have always had
    assert [agent_seed(3, 0), agent_seed(3, 1)] == [6, 7]


def test_the_kl_is_charged_once_in_the_reward_or_in_the_loss():
    for kl_in, charged in (("reward", True), ("loss", False)):
        agent = agent_of(
            bigram(), kl_in=kl_in, kl_penalty="k1", advantage="reinforce", whiten_advantages="false")
        agent.policy.lm.head.weight.data += torch.randn(7, 7, generator=torch.Generator().manual_seed(3))
        rollout = collect_rollout(agent, ["a"] * 8, 3)
        advantage_BT = make_experience(rollout, torch.zeros(8), 0.5, agent.cfg).advantage_BT
        expected = -0.5 * rollout.kl_BT.flip(1).cumsum(1).flip(1) * rollout.mask_BT * charged
        torch.testing.assert_close(advantage_BT, expected, atol=1e-6, rtol=1e-5)
        assert rollout.kl_BT.abs().max() > 0.1
