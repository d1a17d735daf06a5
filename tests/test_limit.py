"""The yardstick: best of n and the tilt by hand, on a policy whose optimum is known, and in a run's files."""
import json
import math

import numpy as np
import pytest
from toys import read

import train_imdb
from cory.commands import limit as command
from cory.errors import UserError
from cory.experiment.limit import Limit, best_of, limit_of, tilted
from cory.tasks.imdb import Imdb


def test_best_of_by_hand():
    # pairs of 1 2 3 4: their maxima are 2, 3, 3, 4, 4, 4
    assert best_of(np.array([[3.0, 1.0, 4.0, 2.0]]), 2) == pytest.approx((math.log(2) - 1 / 2, 20 / 6))
    # one answer is the base itself; all of them are the maximum
    assert best_of(np.array([[3.0, 1.0], [0.0, 2.0]]), 1) == (0.0, 1.5)
    assert best_of(np.array([[3.0, 1.0], [0.0, 2.0]]), 2)[1] == 2.5


def test_the_tilt_by_hand():
    # weights 1/4 and 3/4 of the first query, 1/2 and 1/2 of the second
    kl, reward, ess = tilted(np.array([[0.0, math.log(3)], [5.0, 5.0]]), 1.0)
    assert reward == pytest.approx((0.75 * math.log(3) + 5) / 2)
    assert kl == pytest.approx((0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2)
    assert ess == pytest.approx((1 / (1 / 16 + 9 / 16) + 2) / 2)
    # a temperature of half the size squares the odds
    assert tilted(np.array([[0.0, math.log(3)]]), 0.5)[1] == pytest.approx(0.9 * math.log(3))


P = np.array([0.3, 0.2, 0.1, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.01])
R = np.array([0.0, -1.0, 0.5, 1.0, 0.2, 2.0, -2.0, 1.5, 2.5, 0.7, 3.0, -0.5])
ETA = 0.8
BEST = ETA * math.log((P * np.exp(R / ETA)).sum())          # max of E[r] - eta KL over all policies


def test_both_estimates_come_to_the_optimum_of_a_dozen_answers_from_below():
    optimum = P * np.exp(R / ETA) / (P * np.exp(R / ETA)).sum()
    kl = (optimum * np.log(optimum / P)).sum()
    assert BEST == pytest.approx((optimum * R).sum() - ETA * kl)
    rng, found = np.random.default_rng(0), {}
    for n in (16, 64, 1024):
        limit = Limit(rng.choice(R, p=P, size=(2**18 // n, n)).tolist(), ETA)
        found[n] = limit.metrics["tilt"]["combined_reward"]
        assert limit.metrics["base"]["task_reward"] == pytest.approx((P * R).sum(), abs=0.02)
        # KL is bounded from above, so that no best of n exceeds the optimum
        assert all(reward - ETA * kl < BEST for kl, reward in limit.best_of.values())
    assert found[16] < found[64] < found[1024] < BEST + 0.005
    assert found[1024] == pytest.approx(BEST, abs=0.01) and found[16] < BEST - 0.05
    # by best of n: the rewards of all subsets come to the maximum
    rewards = rng.choice(R, p=P, size=(512, 1024))
    climb = [best_of(rewards, m)[1] for m in (1, 4, 16, 64, 512)]
    assert climb == sorted(climb) and climb[-1] == pytest.approx(3.0, abs=0.05)


def test_the_limit_is_where_the_effective_samples_still_allow_it():
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=(64, 64)).tolist()
    limit = Limit(rewards, 0.05)
    assert tilted(np.array(rewards), 0.05)[2] < 8                   # so cold a tilt is not trusted
    base, tilt = limit.metrics["base"], limit.metrics["tilt"]
    kls, rewards_of_tilts = zip(*limit.tilts)
    assert limit.tilts[0] == (0.0, base["task_reward"]) and list(kls) == sorted(kls)
    assert tilt["combined_reward"] == rewards_of_tilts[-1] - 0.05 * kls[-1]
    # an optimum that lies nearer than that is not passed
    near = Limit(rewards, 5.0).metrics["tilt"]["combined_reward"]
    assert near == pytest.approx(base["task_reward"] + 1 / (2 * 5.0), abs=0.02)     # Var / (2 eta)
    shares = limit.with_shares({"iteration": 3, "base": base, "llm1": tilt}, ["base", "llm1"])
    assert shares["iteration"] == 3
    assert (shares["base"]["share_of_limit"], shares["llm1"]["share_of_limit"]) == (0, 1)
    alike = Limit([[2.0] * 16] * 3, 0.1)                            # nothing to gain, and no division by 0
    assert alike.with_shares({"llm1": {"combined_reward": 2.5}}, ["llm1"])["llm1"]["share_of_limit"] == 0


TINY = "--method ppo --iterations 1 --batch_size 8 --mini_batch_size 8 --eval_queries 16 "
TINY += "--eval_samples 1 --wandb disabled --sample_rows 0 --save_every 0"


def test_a_run_of_the_embedded_base_has_its_share_as_the_command_draws_it(tmp_path, capsys):
    train_imdb.main([*TINY.split(), "--run_dir", str(tmp_path)])
    known, held_out = (read(tmp_path / f"{name}.json") for name in ("limit", "eval"))
    assert np.array(known["rewards"]).shape == (16, 64) and len(known["examples"]) == 16
    ends = Limit(known["rewards"], 0.15).metrics
    base, tilt = (ends[name]["combined_reward"] for name in ("base", "tilt"))
    for name in ("base", "llm1"):
        share = (held_out[name]["combined_reward"] - base) / (tilt - base)
        assert held_out[name]["share_of_limit"] == pytest.approx(share)
    assert "| share of limit" in capsys.readouterr().out
    command.main([str(tmp_path)])
    drawn = read(tmp_path / "limit.json")
    assert drawn["made_with"] == known["made_with"]
    assert drawn["rewards"][0] == pytest.approx(known["rewards"][0], abs=2e-3)
    assert "best of 16" in capsys.readouterr().out


@pytest.mark.parametrize("flags, times", [("--max_response_length 14", 1), ("", 2)], ids=["length", "reward"])
def test_another_length_or_reward_has_no_limit_rather_than_a_wrong_one(flags, times, tmp_path, monkeypatch):
    reward_of = Imdb.reward_of
    monkeypatch.setattr(Imdb, "reward_of", lambda *args: [times * r for r in reward_of(*args)])
    train_imdb.main([*TINY.split(), *flags.split(), "--run_dir", str(tmp_path)])
    assert not (tmp_path / "limit.json").exists()
    assert "share_of_limit" not in read(tmp_path / "eval.json")["llm1"]


def test_the_command_gives_a_finished_run_its_limit(small_flags, tmp_path, capsys):
    train_imdb.main([*small_flags, "--iterations", "1", "--run_dir", str(tmp_path / "r")])
    assert "share of limit" not in capsys.readouterr().out
    command.main([str(tmp_path / "r")])
    assert "share of limit" in capsys.readouterr().out
    held_out = read(tmp_path / "r" / "eval.json")
    assert all("share_of_limit" in held_out[name] for name in ("base", "llm1", "llm2"))
    assert (tmp_path / "r" / "curves.png").exists()


@pytest.mark.parametrize("content", ["{}", '{"rewards": [[1.0], [1.0, 2.0]]}', "{"])
def test_a_damaged_file_is_one_line(content, tmp_path):
    config = {"config": "x", "run": "", "agents": ["llm1"], "fingerprints": {}, "init_kl_coef": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "limit.json").write_text(content)
    with pytest.raises(UserError, match="limit.json"):
        limit_of(tmp_path)
