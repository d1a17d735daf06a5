"""python -m cory benchmark: what it reports, and its floor against operations counted by PyTorch."""

import json
import subprocess
from contextlib import redirect_stdout
from io import StringIO

import pytest
from torch.utils.flop_counter import FlopCounterMode

from cory.commands import benchmark
from cory.config import ImdbConfig


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    monkeypatch.setattr(benchmark, "measured_rates", lambda device: ({"float32": 1e9, "bfloat16": 2e9}, 1e12))


def flags(small, *more):
    return [
        str(small / "lm"),
        "--dataset",
        str(small / "openings"),
        "--batch",
        "4",
        "--minibatch",
        "2",
        "--response",
        "3",
        "--iterations",
        "2",
        "--device",
        "cpu",
        *more,
    ]


@pytest.mark.parametrize(
    "more", [[], ["--method", "ppo", "--kl", "full"], ["--lora"], ["--dtype", "bfloat16"], ["--generate"]]
)
def test_reports_phases_memory_and_floor(small, capsys, more):
    benchmark.main(flags(small, *more))
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert len(lines) == 4  # the machine, each iteration, and the result
    phases = {name: result["seconds"][name] for name in ("sample", "score", "reward", "update")}
    assert (
        all(seconds > 0 for seconds in phases.values())
        and sum(phases.values()) <= result["seconds"]["total"] * 1.001
    )
    assert (
        result["response_tokens"] <= (1 if "ppo" in more else 2) * 4 * 3 and 0.1 < result["peak_rss_gib"] < 5
    )
    assert result["floor"]["total"] == pytest.approx(
        sum(result["floor"][phase] for phase in ("sample", "score", "update"))
    )
    for phase in ("sample", "score", "update", "total"):
        assert result["share_of_floor"][phase] == pytest.approx(
            result["floor"][phase] / result["seconds"][phase]
        )
    assert 0 < result["base_and_moments_gib"] < result["state_gib"]
    assert ("sampling" in result) == ("--generate" in more)


def test_floor_counts_the_operations_of_a_forward_pass(small):
    cfg = ImdbConfig(
        model=str(small / "lm"),
        dataset=str(small / "openings"),
        method="ppo",
        batch_size=1,
        mini_batch_size=1,
        min_response_length=6,
        max_response_length=6,
        iterations=2,
        eval_queries=1,
        device="cpu",
        num_ppo_epochs=4,
    )
    bench = benchmark.Bench(cfg)
    bench.run()
    turn = bench.turns[0].rollout
    with FlopCounterMode(display=False) as counter:
        hidden = bench.reference.response_hidden(turn.prompt_BP, turn.prompt_mask_BP, turn.response_BT)
        bench.reference.logits(hidden[turn.mask_BT.bool()])
    seen = turn.prompt_BP.shape[1] + turn.mask_BT.shape[1] - 1
    forward = (
        counter.get_total_flops() + 4 * 2 * 32 * seen * (seen + 1) / 2
    )  # PyTorch does not count attention on a CPU
    least = benchmark.floor(bench, rate=1.0, copy=float("inf"))
    assert least == pytest.approx(
        {"sample": forward, "score": 2 * forward, "update": 12 * forward, "total": 15 * forward}, rel=1e-6
    )
    weights, T = 4 * (2 * 12 * 32**2 + 257 * 32), turn.mask_BT.sum().item()  # bytes
    trained = sum(p.numel() for p in bench.roles[0].policy.parameters())
    moved = benchmark.floor(bench, rate=float("inf"), copy=1.0)
    assert moved == pytest.approx(
        {
            "sample": T * weights,
            "score": 2 * weights,
            "update": 4 * (3 * weights + 28 * trained),
            "total": (T + 2 + 12) * weights + 4 * 28 * trained,
        }
    )


def test_a_sweep_measures_each_size(small, capsys, monkeypatch):
    def in_this_process(command, **kwargs):  # a new one takes six seconds to import everything
        with redirect_stdout(StringIO()) as out:
            benchmark.main(command[4:])
        return subprocess.CompletedProcess(command, 0, out.getvalue())

    monkeypatch.setattr(subprocess, "run", in_this_process)
    benchmark.main([*flags(small), "--batch", "2", "4", "--response", "2", "5"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["sweep"]
    assert [(row["batch"], row["response"]) for row in rows] == [(2, 2), (2, 5), (4, 2), (4, 5)]
    assert rows[3]["response_tokens"] > rows[0]["response_tokens"]


def test_a_sweep_ends_with_its_first_fault(small, monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 2, "")
    )
    with pytest.raises(SystemExit) as end:
        benchmark.main(flags(small, "--batch", "2", "4"))
    assert end.value.code == 2


def test_one_iteration_is_too_few(small):
    with pytest.raises(SystemExit) as end:
        benchmark.main(flags(small, "--iterations", "1"))
    assert end.value.code == 2
