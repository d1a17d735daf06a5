"""python -m cory and its benchmark: what it reports, and its floor against operations counted by PyTorch."""
import json
import sys

import pytest
from torch.utils.flop_counter import FlopCounterMode
from toys import error_line

from cory.__main__ import COMMANDS
from cory.__main__ import main as command
from cory.commands import benchmark
from cory.config import ImdbConfig


@pytest.fixture(autouse=True)
def known_rate(monkeypatch):
    monkeypatch.setattr(benchmark.Bench, "rate", lambda bench: 1e9)


@pytest.fixture
def flags(small) -> list[str]:
    sizes = "--batch_size 4 --mini_batch_size 2 --max_response_length 3 --iterations 2 --device cpu"
    return ["--model", str(small / "lm"), "--dataset", str(small / "openings"), "--eval_queries", "1",
            *sizes.split()]


@pytest.mark.parametrize("more", ["--method ppo --kl_penalty full --dtype bfloat16", "--lora"])
def test_reports_phases_memory_and_floor(flags, more, capsys):
    benchmark.main([*flags, *more.split()])
    machine, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    seconds, floor = result["seconds"], result["floor"]
    assert ", 1 thread, " in machine and 0.1 < result["peak_gib"] < 5
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
        bench.reference.logprobs(hidden[turn.mask_BT.bool()])
    seen = turn.prompt_BP.shape[1] + turn.mask_BT.shape[1] - 1
    attention = 4 * 2 * 32 * seen * (seen + 1) / 2              # which PyTorch does not count on a CPU
    forward = counter.get_total_flops() + attention
    expected = {"sample": forward, "score": 2 * forward, "update": 12 * forward, "total": 15 * forward}
    assert bench.floor(rate=1.0) == pytest.approx(expected, rel=1e-6)


def test_one_iteration_is_too_few(flags, capsys):
    assert "the first is left out" in error_line(benchmark.main, [*flags, "--iterations", "1"], capsys)


@pytest.mark.parametrize("words, status, says", [
    ([], 2, "python -m cory report"),
    (["nothing"], 2, f"error: command is 'nothing': choose from {', '.join(COMMANDS)}"),
    (["plan", "--help"], 0, "usage: python -m cory plan")])
def test_commands_are_found_by_name(words, status, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cory", *words])
    with pytest.raises(SystemExit) as end:
        command()
    assert end.value.code == status and says in "".join(capsys.readouterr())
