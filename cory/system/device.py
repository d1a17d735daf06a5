"""The device of a run, its precision, its memory and its time."""
import ctypes
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Iterator

import torch

from cory.config import Config

seconds: dict[str, float] = {}          # by phase, since `Run` cleared it: see `timed`


def resolve_auto(cfg: Config) -> tuple[Config, torch.device]:
    """The settings with `auto` replaced by what this machine has, and the device. Raises `UserError`."""
    available = torch.cuda.is_available()
    cfg.require("device", available or cfg.device != "cuda",
                "PyTorch sees no CUDA GPU here; use --device auto or cpu")
    on_gpu = available and cfg.device != "cpu"
    has_bfloat16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if cfg.dtype == "auto":
        cfg = replace(cfg, dtype="bfloat16" if has_bfloat16 else "float32")
    supported = ["float32", "bfloat16"] if not on_gpu else ["float32", "tf32"] + ["bfloat16"] * has_bfloat16
    cfg.require("dtype", cfg.dtype in supported, "this device does not support this precision; use --dtype "
                "float32")
    return cfg, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def prepare_device(cfg: Config, device: torch.device) -> None:
    """Sets PyTorch's precision, attention kernels and memory for this process."""
    if device.type == "cuda":
        # under bfloat16 the head, whose logits need float32's range of digits, multiplies in TF32
        torch.backends.cuda.matmul.fp32_precision = "ieee" if cfg.dtype == "float32" else "tf32"
        # cuDNN's backward pass gives NaN for rows that see no key, as left padding has them (pytorch issue
        # 196678), and plans anew for each new shape, which sampling meets at every token.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks: the kernel would zero each page of the next (N, V) tensor anew."""
    m_trim_threshold, m_mmap_max = -1, -4                           # names of the two settings in malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def described(cfg: Config, device: torch.device) -> str:
    """Where and how a run computes, for a person."""
    cpu = f"CPU, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else cpu}, {cfg.dtype}"


def peak_memory(device: torch.device) -> float | None:
    """GiB: of the process, or of PyTorch on a GPU, at most so far. None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    with suppress(ImportError):
        import resource
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return None


@contextmanager
def timed(phase: str, device: torch.device) -> Iterator[None]:
    """Adds the block's seconds to `seconds[phase]`, with all work that the GPU has been given by then."""
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
