"""What a machine decides of a run, on one without a GPU, too; and on a GPU that it computes as a CPU does."""
from types import SimpleNamespace

import pytest
import torch
from toys import rows, settings

import train_imdb
from cory import loading
from cory.errors import UserError
from cory.loading import load_language_model
from cory.run import evaluation
from cory.system.device import prepare_device, resolve_auto

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)         # the fourth of several


def resolved(monkeypatch, capability, **flags):
    """Beside a GPU of that capability, if any; PyTorch imitates bfloat16 on those that lack it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CUDA.index)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: including_emulation or capability >= 8)
    return resolve_auto(settings(**flags))


@pytest.mark.parametrize("capability, device, dtype, place, expected", [
    (9.0, "auto", "auto", CUDA, "bfloat16"), (7.5, "auto", "auto", CUDA, "float32"),
    (8.0, "cuda", "tf32", CUDA, "tf32"), (0, "auto", "auto", CPU, "float32"),
    (9.0, "cpu", "auto", CPU, "float32"), (0, "cpu", "bfloat16", CPU, "bfloat16")])
def test_auto_takes_what_the_machine_has(monkeypatch, capability, device, dtype, place, expected):
    cfg, chosen = resolved(monkeypatch, capability, device=device, dtype=dtype)
    assert (chosen, cfg.dtype) == (place, expected)


@pytest.mark.parametrize("capability, flags, line", [
    (0, {"device": "cuda"}, "device is 'cuda': PyTorch sees no CUDA GPU here"),
    (7.5, {"dtype": "bfloat16"}, "dtype is 'bfloat16': this device does not support this precision"),
    (0, {"dtype": "tf32"}, "dtype is 'tf32': this device does not support this precision")])
def test_what_a_machine_lacks_is_refused(monkeypatch, capability, flags, line):
    with pytest.raises(UserError, match=line):
        resolved(monkeypatch, capability, **flags)


@pytest.mark.parametrize("dtype, precision", [("float32", "ieee"), ("tf32", "tf32"), ("bfloat16", "tf32")])
def test_a_gpu_is_prepared(monkeypatch, dtype, precision):
    """By PyTorch's new setting of float32 products alone: beside the older one, reads of either raise. And
    cuDNN's attention, whose backward pass gives NaN for left padding on some cards, is off.
    """
    matmul, off = SimpleNamespace(), []
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", off.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", None)
    prepare_device(settings(dtype=dtype), CUDA)
    assert vars(matmul) == {"fp32_precision": precision} and off == [False]


class Stop(BaseException):
    """Ends a test once it has seen what it asks for."""


def test_a_model_is_loaded_onto_the_processs_own_gpu(monkeypatch):
    """By its index: eight processes would otherwise fill the host's memory first, and then GPU 0."""
    def read(auto_class, name, device_map, **kwargs):
        assert device_map == {"": torch.device("cuda:3")}
        raise Stop

    monkeypatch.setattr(loading, "load_pretrained", read)
    with pytest.raises(Stop):
        load_language_model("m", settings(dtype="float32"), CUDA)


@pytest.mark.parametrize("kind, at_once", [("cuda", 128), ("cpu", 8192 // 256)])
def test_a_gpu_evaluates_128_rows_at_once(monkeypatch, kind, at_once):
    """Of responses of 256 tokens; a CPU takes as many as make 8,192 tokens."""
    def encode(model, prompts, length):
        assert len(prompts) == at_once
        raise Stop

    monkeypatch.setattr(evaluation, "encode_prompts", encode)
    model = SimpleNamespace(device=SimpleNamespace(type=kind), lm=torch.zeros(0))
    with pytest.raises(Stop):
        evaluation.sample_responses(model, ["query"] * 300, 256, seed=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: a run on a GPU was not checked")
def test_a_gpu_trains_as_a_cpu_does(small_flags, tmp_path):
    for name in ("cpu", "cuda"):
        train_imdb.main([*small_flags, "--device", name, "--dtype", "float32", "--iterations", "2",
                         "--num_ppo_epochs", "1", "--run_dir", str(tmp_path / name)])
    for row, expected in zip(rows(tmp_path / "cuda"), rows(tmp_path / "cpu")):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-3)
