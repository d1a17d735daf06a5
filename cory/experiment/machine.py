"""The machine a run is on: its device and its memory."""
import resource
import sys

import torch

from cory.config import Config
from cory.errors import UserError
from cory.experiment import fast_cpu


def prepare_device(cfg: Config) -> torch.device:
    """The device that a run asks for, set up. Raises `UserError` if it is not there."""
    device = choose_device(cfg)
    if device.type == "cpu":
        fast_cpu.tune()                 # without this line everything runs on PyTorch's own products
    return device


def choose_device(cfg: Config) -> torch.device:
    available = torch.cuda.is_available()
    if cfg.device == "cuda" and not available:
        raise UserError("device", "cuda", "PyTorch sees no CUDA GPU here; use --device auto or cpu")
    device = torch.device("cuda" if available and cfg.device != "cpu" else "cpu")
    if cfg.dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name()
        raise UserError("dtype", cfg.dtype, f"{name} has no bfloat16 arithmetic; use --dtype float32")
    return device


def peak_memory(device: torch.device) -> float:
    """GiB: the largest the process has been, or on a GPU what PyTorch has allocated there at most."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
