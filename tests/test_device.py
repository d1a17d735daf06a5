"""What a machine decides of a run, on one without a GPU, too; and on a GPU that it computes as a CPU does."""
import pytest
import torch
from toys import finished, rows, settings

from cory.machine.device import choose_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)         # the fourth of several


@pytest.mark.parametrize("capability, device, dtype, expected", [
    (9.0, "auto", "auto", (CUDA, "bfloat16")), (7.5, "auto", "auto", (CUDA, "float32")),
    (8.0, "cuda", "tf32", (CUDA, "tf32")), (0, "auto", "auto", (CPU, "float32")),
    (9.0, "cpu", "auto", (CPU, "float32")), (0, "cpu", "bfloat16", (CPU, "bfloat16"))])
def test_auto_takes_what_there_is(capability, device, dtype, expected, monkeypatch):
    """A GPU of that capability, if any; PyTorch imitates bfloat16 on those that lack it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CUDA.index)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: including_emulation or capability >= 8)
    cfg, place = choose_device(settings(device=device, dtype=dtype))
    assert (place, cfg.dtype) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or no TEST_GPU=1: it was not checked")
def test_a_gpu_trains_as_a_cpu_does(small_flags, tmp_path):
    for name in ("cpu", "cuda"):
        finished(small_flags, tmp_path / name, "--device", name, "--dtype", "float32", "--iterations", 2)
    for row, expected in zip(rows(tmp_path / "cuda"), rows(tmp_path / "cpu")):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-3)
