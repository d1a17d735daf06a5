"""The machine a run is on: device, memory."""
import ctypes
import resource
import sys

import torch

from cory.config import Config
from cory.errors import UserError


def choose_device(cfg: Config) -> torch.device:
    available = torch.cuda.is_available()
    if cfg.device == "cuda" and not available:
        raise UserError("device", cfg.device, "this machine shows PyTorch no CUDA GPU; use --device auto or cpu")
    device = torch.device("cuda" if available and cfg.device != "cpu" else "cpu")
    if cfg.dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("dtype", cfg.dtype, f"{torch.cuda.get_device_name()} has no bfloat16 arithmetic; use --dtype float32")
    return device


def peak_memory(device: torch.device) -> float:
    """GiB: the largest the process has been, or on a GPU what PyTorch has allocated there at most."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks for the next step, instead of handing them back to a kernel that must then zero every page
    of each (N, V) tensor anew: about a quarter of an iteration's time on a CPU (README, Speed). No effect on other C libraries."""
    m_trim_threshold, m_mmap_max = -1, -4                           # names of the two settings in malloc.h
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_max, 0), libc.mallopt(m_trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):
        pass
