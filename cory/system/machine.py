"""The machine a run is on: what it is, what it decides of a run's settings, and its memory."""
import ctypes
import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from cory.config import Config
from cory.errors import UserError
from cory.system import onednn

GPU = Path("/dev/nvidia0")          # Linux shows it there, whatever the driver can do


class Processor(NamedTuple):
    name: str
    is_amd: bool
    has: list[str]          # of AVX-512 and bfloat16 (products of it), what it has and PyTorch can use


def processor() -> Processor:
    """The CPU, from Linux's own list or what Python knows of it elsewhere."""
    identity = platform.processor() or platform.machine()
    names = [identity]
    with suppress(OSError):
        identity = Path("/proc/cpuinfo").read_text()
        names = re.findall(r"model name\s*: (.*)", identity) or names
    has = ["AVX-512"] if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else []
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        has.append("bfloat16")
    return Processor(names[0], "AuthenticAMD" in identity, has)


def precisions(on_gpu: bool) -> list[str]:
    """What is computed in hardware beside float32. PyTorch imitates bfloat16 on any card or CPU."""
    if not on_gpu:
        return [precision for precision in processor().has if precision == "bfloat16"]
    has = ["bfloat16"] if torch.cuda.is_bf16_supported(including_emulation=False) else []
    return ["tf32", *has] if torch.cuda.get_device_capability() >= (8, 0) else has


def choose_device(cfg: Config) -> torch.device:
    """Raises `UserError` if it is not there, or cannot compute as asked."""
    available = torch.cuda.is_available()
    cfg.require("device", available or cfg.device != "cuda",
                "PyTorch sees no CUDA GPU here; use --device auto or cpu")
    on_gpu = available and cfg.device != "cpu"
    known = ["auto", "float32", *precisions(on_gpu)]
    imitated = [] if on_gpu else ["bfloat16"]                   # slow, and right
    who = "the GPU" if on_gpu else "this processor"
    for name, can in (("dtype", known + imitated), ("head_precision", known)):
        cfg.require(name, getattr(cfg, name) in can, f"{who} has no such arithmetic; start with --{name} "
                    "float32, or go on where the run was started")
    return torch.device("cuda" if on_gpu else "cpu")


def settled(cfg: Config) -> Config:
    """The settings with each `auto` that is the machine's to decide replaced by its choice. It depends on
    what the machine is, never on a timing, and stands in config.json: a resumed run computes as it began.

        dtype           bfloat16 on a GPU that has it, else float32
        head_precision  float32 if that is the dtype; else tf32 (more exact, nearly as fast) or bfloat16,
                        where the machine has it
        cpu_matmul      onednn on an AMD processor with AVX-512, whom MKL serves badly; else pytorch
    """
    on_gpu, cpu = choose_device(cfg).type == "cuda", processor()
    has = precisions(on_gpu)
    if cfg.dtype == "auto":
        cfg = replace(cfg, dtype="bfloat16" if on_gpu and "bfloat16" in has else "float32")
    if cfg.head_precision == "auto":
        cfg = replace(cfg, head_precision=[*has, "float32"][0] if cfg.dtype != "float32" else "float32")
    if cfg.cpu_matmul == "auto":
        mkl_is_slow = not on_gpu and cpu.is_amd and "AVX-512" in cpu.has
        cfg = replace(cfg, cpu_matmul="onednn" if mkl_is_slow else "pytorch")
    return cfg


def settled_anew(cfg: Config) -> Config:
    """For evaluating, on `cfg.device`, a run that was trained elsewhere: as it was trained where this machine
    can, else as this machine would choose; by this machine's own library.
    """
    cfg = replace(cfg, cpu_matmul="auto")
    try:
        return settled(cfg)
    except UserError:
        return settled(replace(cfg, dtype="auto", head_precision="auto"))


def prepare_device(cfg: Config) -> torch.device:
    """The device of settled settings, made ready for this process. Raises `UserError` if it is not there."""
    device = choose_device(cfg)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if cfg.dtype == "tf32" else "highest")
        # Its backward pass gives NaN for rows that see no key, as left padding does (pytorch issue 196678),
        # and it plans for tens of milliseconds at each new shape, which sampling meets at every token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if cfg.device == "auto" and torch.version.cuda and GPU.exists() and not hidden:
        print(f"warning: this PyTorch (CUDA {torch.version.cuda}) cannot use the GPU; is its driver too old? "
              "Update it, install PyTorch for an older CUDA, or say --device cpu", file=sys.stderr)
    keep_freed_memory()
    onednn.install() if cfg.cpu_matmul == "onednn" else onednn.remove()
    return device


def described(cfg: Config, device: torch.device) -> str:
    """Where and how settled settings are computed, for a person: one line."""
    precision = f"{cfg.dtype}, head in {cfg.head_precision}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {precision}"
    cpu, library, threads = processor(), "oneDNN" if onednn.overrides else "PyTorch", torch.get_num_threads()
    return (f"{cpu.name} ({', '.join(cpu.has) or 'no AVX-512'}), {threads} thread{'s' * (threads > 1)}, "
            f"{precision}, products by {library}")


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks: the kernel would zero each page of the next (N, V) tensor anew."""
    m_trim_threshold, m_mmap_max = -1, -4                           # names of the two settings in malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def peak_memory(device: torch.device) -> float | None:
    """GiB: of the process, or of PyTorch on a GPU, at most so far. None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    with suppress(ImportError):
        import resource
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return None
