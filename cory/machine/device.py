"""The device of a run, its precision and its memory."""
import ctypes
from contextlib import suppress
from dataclasses import replace

import torch

from cory.config import Config


def choose_device(cfg: Config) -> tuple[Config, torch.device]:
    """The settings with `auto` replaced by what this machine has, and the device."""
    has_gpu = torch.cuda.is_available()
    cfg.require("device", has_gpu or cfg.device != "cuda", "PyTorch finds no CUDA GPU here; use cpu")
    on_gpu = has_gpu and cfg.device != "cpu"
    if cfg.dtype == "auto":
        has_bfloat16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if has_bfloat16 else "float32"
        cfg = replace(cfg, dtype=dtype)
    if not on_gpu:
        return cfg, torch.device("cpu")
    return cfg, torch.device("cuda", torch.cuda.current_device())


def scaled_to_memory(limits: dict[str, int], device: torch.device) -> int:
    """A limit on what is computed at once: on a GPU of less than 64 GiB, a share of it."""
    if device.type == "cpu":
        return limits["cpu"]
    memory = torch.cuda.get_device_properties(device).total_memory
    return limits["cuda"] * min(memory, 2**36) // 2**36


def prepare_device(cfg: Config, device: torch.device) -> None:
    """Sets precision, attention kernels and memory of this process."""
    if device.type == "cuda":
        # under bfloat16 the head multiplies in TF32, which has three more bits of precision
        torch.backends.cuda.matmul.fp32_precision = "ieee" if cfg.dtype == "float32" else "tf32"
        # cuDNN's backward pass gives NaN for left padding (pytorch issue 196678), and new shapes are slow
        torch.backends.cuda.enable_cudnn_sdp(False)
        return
    # make glibc keep freed blocks; otherwise the kernel zeroes the pages of every new (N, V) tensor
    with suppress(OSError):                     # another libc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)                     # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)             # M_TRIM_THRESHOLD
