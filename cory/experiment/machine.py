"""The machine a run is on: device, memory, and what makes its CPU multiply fast."""
import ctypes
import resource
import sys
import warnings

import torch
from torch import Tensor, nn
from torch.library import Library

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


def tune_cpu() -> None:
    """Settings of this process that make a CPU faster and change no formula (README, Speed)."""
    keep_freed_memory()
    multiply_by_onednn()


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks for the next step, instead of handing them back to a kernel that must then zero every page
    of each (N, V) tensor anew. No effect on other C libraries."""
    m_trim_threshold, m_mmap_max = -1, -4                           # names of the two settings in malloc.h
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_max, 0), libc.mallopt(m_trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):
        pass


def multiply_by_onednn() -> None:
    """Hands PyTorch's float32 matrix products on an x86 CPU to oneDNN, which every x86 build of PyTorch contains beside MKL.

    MKL keeps its AVX-512 kernels for Intel's processors: a product of two 2048 x 2048 matrices ran at 180 GFLOP/s by MKL and at 410 by
    oneDNN on two cores of an AMD EPYC (Zen 5). But oneDNN compiles a kernel for each new shape, about 2 ms and 0.7 MiB that it never
    gives back. So that a run's ever new numbers of tokens do not fill the memory, `mm` and `addmm` round them to `grid`; bfloat16, which
    PyTorch itself hands to oneDNN where the processor has it, takes the same way.
    """
    if overrides or not torch.backends.cpu.get_cpu_capability().startswith("AVX") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    overrides.append(Library("aten", "IMPL"))
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        onednn_dtypes.add(torch.bfloat16)
    with warnings.catch_warnings(action="ignore"):                  # that these replace PyTorch's own is the purpose
        overrides[0].impl("mm", mm, "CPU")
        overrides[0].impl("addmm", addmm, "CPU")
        if not torch.cpu._is_amx_tile_supported():
            overrides[0].impl("scaled_dot_product_attention", attention_in_float32, "AutocastCPU")


overrides: list[Library] = []                                       # a Library's kernels live as long as it does
onednn_dtypes = {torch.float32}


def mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a b`. A first operand stored by columns is the transpose of a layer's gradient by tokens, and the product its weight's gradient."""
    if not for_onednn(a_MK, b_KN):
        return torch.mm(a_MK, b_KN, out=a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]))
    if a_MK.stride(0) != 1:
        return linear(a_MK, b_KN.t())
    K = grid(a_MK.shape[1], down=True)
    a, b = a_MK[:, :K], b_KN[:K]
    y_MN = onednn_linear(b.t(), a).t() if a.numel() > b.numel() else onednn_linear(a, b.t())    # it copies the first: be it the smaller
    return y_MN if K == a_MK.shape[1] else y_MN.addmm_(a_MK[:, K:], b_KN[K:])


def addmm(bias: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta=1, alpha=1) -> Tensor:
    """`beta bias + alpha a b`."""
    if bias.shape == b_KN.shape[1:] and beta == alpha == 1 and for_onednn(a_MK, b_KN) and a_MK.stride(0) != 1:
        return linear(a_MK, b_KN.t(), bias)
    return torch.addmm(bias, a_MK, b_KN, beta=beta, alpha=alpha, out=a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]))


def attention_in_float32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0, is_causal: bool = False,
                         **kwargs) -> Tensor:
    """Under autocast on a CPU without AMX, where its backward pass in bfloat16 takes four times as long as in float32 (AMD EPYC). A single
    query of sampling stays in bfloat16, as its cache does."""
    dtype = torch.get_autocast_dtype("cpu") if query.shape[-2] == 1 else torch.float32
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    with torch.autocast("cpu", enabled=False):
        return nn.functional.scaled_dot_product_attention(query.to(dtype), key.to(dtype), value.to(dtype), mask, dropout, is_causal, **kwargs)


def for_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether oneDNN can take the product and wins by it: below 16 tokens its calls cost more than they save."""
    tokens = a_MK.shape[1 if a_MK.stride(0) == 1 else 0]
    return (a_MK.dtype == b_KN.dtype and a_MK.dtype in onednn_dtypes and tokens >= 16
            and a_MK.shape[1] == b_KN.shape[0] > 0 and b_KN.shape[1] > 0)


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`x weight^T + bias`, with rows of zeros under x up to the grid."""
    M, rows = len(x_MK), grid(len(x_MK))
    if rows > M:
        padded = x_MK.new_empty(rows, x_MK.shape[1])
        padded[:M], padded[M:] = x_MK, 0.0
        x_MK = padded
    return onednn_linear(x_MK, weight_NK, bias_N)[:M]


def grid(n: int, down: bool = False) -> int:
    """The nearest number at or above (below) n of eight steps between powers of two: ..., 32, 36, 40, ..., 60, 64, 72, ..."""
    step = 2 ** max(0, n.bit_length() - 4)
    return n // step * step if down else -(-n // step) * step


def onednn_linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
