"""What a run computes on and in which precision; and that a GPU trains as a CPU does."""
from types import SimpleNamespace

import pytest
import torch
from toys import finished, rows, settings

from cory.machine.device import choose_device, scaled_to_memory

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 3)          # the fourth of several


@pytest.mark.parametrize("capability, device, dtype, expected_device, expected_dtype", [
    (9.0, "auto", "auto", CUDA, "bfloat16"),
    (7.5, "auto", "auto", CUDA, "float32"),
    (8.0, "cuda", "tf32", CUDA, "tf32"),
    (9.0, "cpu", "auto", CPU, "float32"),
    (0, "auto", "auto", CPU, "float32"),
    (0, "cpu", "bfloat16", CPU, "bfloat16")])
def test_auto_is_the_best_that_the_machine_has(
        capability, device, dtype, expected_device, expected_dtype, monkeypatch):
    """A GPU of that capability, if any; PyTorch imitates bfloat16 on those that lack it."""
    def is_bf16_supported(including_emulation=True):
        return including_emulation or capability >= 8

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CUDA.index)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    cfg, place = choose_device(settings(device=device, dtype=dtype))
    assert place == expected_device
    assert cfg.dtype == expected_dtype


@pytest.mark.parametrize("gib, tokens", [(24, 1536), (48, 3072), (141, 4096)])
def test_on_a_smaller_gpu_less_is_computed_at_once(gib, tokens, monkeypatch):
    card = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: card)
    assert scaled_to_memory({"cpu": 100, "cuda": 4096}, CUDA) == tokens
    assert scaled_to_memory({"cpu": 100, "cuda": 4096}, CPU) == 100


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or no TEST_GPU=1: it was not checked")
def test_a_gpu_trains_as_a_cpu_does(small_flags, tmp_path):
    for name in ("cpu", "cuda"):
        finished(small_flags, tmp_path / name, "--device", name, "--dtype", "float32", "--iterations", 2)
    for row, expected in zip(rows(tmp_path / "cuda"), rows(tmp_path / "cpu"), strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-3)
