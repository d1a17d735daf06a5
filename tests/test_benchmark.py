"""python -m cory and its benchmark: what it reports, and its floor against operations counted by PyTorch."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from cory.__main__ import COMMANDS
from cory.commands import benchmark, gpu_check
from cory.config import ImdbConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    monkeypatch.setattr(benchmark, "measured_rates", lambda device: ({"float32": 1e9, "bfloat16": 2e9}, 1e12))


@pytest.fixture
def flags(small) -> list[str]:
    sizes = "--batch_size 4 --mini_batch_size 2 --max_response_length 3 --iterations 2 --device cpu"
    return ["--model", str(small / "lm"), "--dataset", str(small / "openings"), "--eval_queries", "1",
            *sizes.split()]


@pytest.mark.parametrize("more", ["", "--method ppo --kl_penalty full", "--lora", "--dtype bfloat16"])
def test_reports_phases_memory_and_floor(flags, more, capsys):
    benchmark.main([*flags, *more.split()])
    machine, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    seconds, floor = result["seconds"], result["floor"]
    assert "1 threads" in machine and 0.1 < result["peak_gib"] < 5
    assert seconds.keys() == floor.keys() == result["share_of_floor"].keys()
    assert seconds["sample"] > 0 and seconds["sample"] + seconds["score"] + seconds["update"] > 0
    assert floor["total"] == pytest.approx(floor["sample"] + floor["score"] + floor["update"])
    for phase, share in result["share_of_floor"].items():
        assert share == pytest.approx(floor[phase] / seconds[phase])


def test_floor_counts_the_operations_of_a_forward_pass(small):
    bench = benchmark.Bench(ImdbConfig(
        model=str(small / "lm"), dataset=str(small / "openings"), method="ppo", iterations=2, batch_size=1,
        mini_batch_size=1, min_response_length=6, max_response_length=6, eval_queries=1, device="cpu"))
    bench.run()
    turn = bench.turns[0].rollout
    with FlopCounterMode(display=False) as counter:
        hidden = bench.reference.response_hidden(turn.prompt_BP, turn.prompt_mask_BP, turn.response_BT)
        bench.reference.logits(hidden[turn.mask_BT.bool()])
    seen = turn.prompt_BP.shape[1] + turn.mask_BT.shape[1] - 1
    attention = 4 * 2 * 32 * seen * (seen + 1) / 2              # which PyTorch does not count on a CPU
    forward = counter.get_total_flops() + attention
    operations = {"sample": forward, "score": 2 * forward, "update": 12 * forward, "total": 15 * forward}
    assert benchmark.floor(bench, rate=1.0, copy=float("inf")) == pytest.approx(operations, rel=1e-6)

    weights, T = 4 * (2 * 12 * 32**2 + 257 * 32), turn.mask_BT.sum().item()
    trained = sum(p.numel() for p in bench.roles[0].policy.parameters())
    moved = {"sample": T * weights, "score": 2 * weights, "update": 4 * (3 * weights + 28 * trained)}
    moved["total"] = sum(moved.values())
    assert benchmark.floor(bench, rate=float("inf"), copy=1.0) == pytest.approx(moved)


def test_one_iteration_is_too_few(flags, capsys):
    with pytest.raises(SystemExit) as end:
        benchmark.main([*flags, "--iterations", "1"])
    assert end.value.code == 2 and "the first is left out" in capsys.readouterr().err


def test_the_check_of_a_gpu_names_what_fails_and_goes_on(monkeypatch, capsys):
    seconds = {"total": 2, "sample": 0.5, "score": 0.5, "update": 1}
    result = json.dumps({"seconds": seconds, "peak_gib": 3.0, "share_of_floor": {"total": 0.6}})
    monkeypatch.setattr(gpu_check, "passes", lambda *words: result if "ppo" in words else "FAILED, status 1")
    gpu_check.main(["--device", "cpu"])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| ppo, auto | 2.00 | 0.50 | 0.50 | 1.00 | 3.0 | 60% |", "| cory, auto | FAILED, status 1 |"]


@pytest.mark.parametrize("words, status, says", [
    ([], 2, "python -m cory report"), (["--help"], 0, "python -m cory plan"),
    (["nothing"], 2, f"error: command is 'nothing': choose from {', '.join(COMMANDS)}"),
    (["plan", "--help"], 0, "usage: python -m cory plan"),
    (["benchmark", "--help"], 0, "usage: python -m cory benchmark")])
def test_commands_are_found_by_name(words, status, says):
    done = subprocess.run([sys.executable, "-m", "cory", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status and says in done.stdout + done.stderr and "Traceback" not in done.stderr
