"""The machine a run is on: what it is, what it decides of a run's settings, and its memory."""
import ctypes
import platform
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from cory.config import Config
from cory.errors import UserError
from cory.system import onednn


class Processor(NamedTuple):
    name: str
    is_amd: bool
    has: list[str]          # of AVX-512, bfloat16 (products of it) and AMX, what it has and PyTorch can use


def processor() -> Processor:
    """The CPU, from Linux's own list or what Python knows of it elsewhere."""
    name = identity = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        identity = Path("/proc/cpuinfo").read_text()
        name = next(x for x in identity.splitlines() if x.startswith("model name")).partition(": ")[2]
    has = {"AVX-512": torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
           "bfloat16": torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
           "AMX": torch.cpu._is_amx_tile_supported()}
    return Processor(name, "AuthenticAMD" in identity, [feature for feature in has if has[feature]])


def gpu_has() -> list[str]:
    """Of bfloat16 and tf32, what the GPU has in hardware: PyTorch imitates bfloat16 on any card."""
    has = {"bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
           "tf32": torch.cuda.get_device_capability() >= (8, 0)}
    return [precision for precision in has if has[precision]]


def choose_device(cfg: Config) -> torch.device:
    """Raises `UserError` if it is not there, or cannot compute as asked."""
    available = torch.cuda.is_available()
    if cfg.device == "cuda" and not available:
        raise UserError("device", "cuda", "PyTorch sees no CUDA GPU here; use --device auto or cpu")
    on_gpu = available and cfg.device != "cpu"
    name, has = (torch.cuda.get_device_name(), gpu_has()) if on_gpu else ("this processor", processor().has)
    body_has = has if on_gpu else [*has, "bfloat16"]            # on any CPU: slow where imitated, and right
    for setting, can in (("dtype", body_has), ("head_precision", has)):
        value = getattr(cfg, setting)
        if value not in ("auto", "float32", *can):
            raise UserError(setting, value, f"{name} has no such arithmetic; start with --{setting} float32, "
                            "or go on where the run was started")
    return torch.device("cuda" if on_gpu else "cpu")


def settled(cfg: Config) -> Config:
    """The settings with each `auto` that is the machine's to decide replaced by its choice. It depends on
    what the machine is, never on a timing, and stands in config.json: a resumed run computes as it began.

        dtype           bfloat16 on a GPU that has it, else float32
        head_precision  under bfloat16: tf32 on a GPU, where it is more exact and nearly as fast, bfloat16
                        on a CPU that has it; else as dtype on a GPU, float32 on a CPU
        cpu_matmul      onednn on an AMD processor with AVX-512, whom MKL serves badly; else pytorch
    """
    on_gpu, cpu = choose_device(cfg).type == "cuda", processor()
    dtype, head_precision, cpu_matmul = cfg.dtype, cfg.head_precision, cfg.cpu_matmul
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu and "bfloat16" in gpu_has() else "float32"
    if head_precision == "auto":
        low = "tf32" if on_gpu else "bfloat16" if "bfloat16" in cpu.has else "float32"
        head_precision = low if dtype != "float32" else "float32"
    if cpu_matmul == "auto":
        mkl_is_slow = not on_gpu and cpu.is_amd and "AVX-512" in cpu.has
        cpu_matmul = "onednn" if mkl_is_slow else "pytorch"
    return replace(cfg, dtype=dtype, head_precision=head_precision, cpu_matmul=cpu_matmul)


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
        return device
    keep_freed_memory()
    onednn.install() if cfg.cpu_matmul == "onednn" else onednn.remove()
    return device


def described(cfg: Config, device: torch.device) -> str:
    """Where and how settled settings are computed, for a person: one line."""
    precision = f"{cfg.dtype}, head in {cfg.head_precision}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {precision}"
    cpu, library = processor(), "oneDNN" if onednn.overrides else "PyTorch"
    return (f"{cpu.name} ({', '.join(cpu.has) or 'no AVX-512'}), {torch.get_num_threads()} threads, "
            f"{precision}, products by {library}")


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks, instead of handing them back to a kernel that must then zero every page
    of each (N, V) tensor anew. No effect on other C libraries.
    """
    m_trim_threshold, m_mmap_max = -1, -4                           # names of the two settings in malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def peak_memory(device: torch.device) -> float | None:
    """GiB: the largest the process has been, or on a GPU what PyTorch has allocated there at most. None where
    the system does not tell (Windows).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    with suppress(ImportError):
        import resource
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return None
