"""Fast matrix products on AMD processors with AVX-512 (docs/hardware.md): oneDNN's in place of MKL's.

PyTorch multiplies float32 matrices on a CPU by MKL, which keeps its AVX-512 kernels for Intel's processors.
On an AMD EPYC oneDNN, which is in the same PyTorch, is twice as fast. `install` makes oneDNN's products the
implementation of `aten::mm` and `aten::addmm`, by which every linear layer multiplies, forward and backward.

`--cpu_matmul` chooses (`machine.settled`). To be without this file, delete the call of `install` in
`machine.prepare_device`.
"""
import warnings

import torch
from torch import Tensor, nn
from torch.library import Library

overrides: list[Library] = []           # a Library's kernels live as long as it does
AVAILABLE = (torch.backends.cpu.get_cpu_capability().startswith("AVX")
             and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
AMX = torch.cpu._is_amx_tile_supported()        # where PyTorch's own bfloat16 is the faster one
DTYPES = {torch.float32}
if AVAILABLE and not AMX and torch.ops.mkldnn._is_mkldnn_bf16_supported():
    DTYPES.add(torch.bfloat16)


def install() -> None:
    """Replaces the products until `remove`. Nothing happens where PyTorch has no oneDNN for x86."""
    if overrides or not AVAILABLE:
        return
    overrides.append(Library("aten", "IMPL"))
    with warnings.catch_warnings(action="ignore"):                  # that it replaces PyTorch's own is meant
        overrides[0].impl("mm", mm, "CPU")
        overrides[0].impl("addmm", addmm, "CPU")
        if not AMX:
            overrides[0].impl("scaled_dot_product_attention", attention_in_float32, "AutocastCPU")


def remove() -> None:
    """PyTorch's own products again."""
    overrides.clear()


def mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a b`. With `a` stored by rows this is a layer's output, and M counts tokens. With `a` stored by
    columns it is the gradient of a layer's weight, `gradient^T input`, and K counts tokens.
    """
    if not for_onednn(a_MK, b_KN):
        return torch.mm(a_MK, b_KN, out=a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]))
    if a_MK.stride(0) != 1:
        return linear(a_MK, b_KN.t())
    K = grid(a_MK.shape[1], down=True)
    a, b = a_MK[:, :K], b_KN[:K]
    transposed = a.numel() > b.numel()                  # oneDNN copies its first matrix: be it the smaller
    y_MN = onednn_linear(b.t(), a).t() if transposed else onednn_linear(a, b.t())
    return y_MN if K == a_MK.shape[1] else y_MN.addmm_(a_MK[:, K:], b_KN[K:])


def addmm(bias: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta=1, alpha=1) -> Tensor:
    """`beta bias + alpha a b`."""
    plain = bias.shape == b_KN.shape[1:] and beta == alpha == 1
    if plain and for_onednn(a_MK, b_KN) and a_MK.stride(0) != 1:
        return linear(a_MK, b_KN.t(), bias)
    y_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    return torch.addmm(bias, a_MK, b_KN, beta=beta, alpha=alpha, out=y_MN)


def for_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether oneDNN can take the product and wins by it: below 16 tokens its calls cost more."""
    tokens = a_MK.shape[1 if a_MK.stride(0) == 1 else 0]
    return (a_MK.dtype == b_KN.dtype and a_MK.dtype in DTYPES and tokens >= 16
            and a_MK.shape[1] == b_KN.shape[0] > 0 and b_KN.shape[1] > 0)


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`x weight^T + bias`, with rows of zeros under x up to the grid."""
    M, rows = len(x_MK), grid(len(x_MK))
    if rows > M:
        x_MK = torch.cat([x_MK, x_MK.new_zeros(rows - M, x_MK.shape[1])])
    return onednn_linear(x_MK, weight_NK, bias_N)[:M]


def grid(n: int, down: bool = False) -> int:
    """The nearest of ..., 32, 36, 40, ..., 60, 64, 72, ..., eight to a doubling, at or above (below) n.

    oneDNN compiles a kernel for each new shape: 2 ms, and 0.7 MiB that it never gives back. Numbers of tokens
    are rounded to this grid, so that there are few shapes.
    """
    step = 2 ** max(0, n.bit_length() - 4)
    return n // step * step if down else -(-n // step) * step


def onednn_linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")


def attention_in_float32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *args,
                         **kwargs) -> Tensor:
    """Attention under bfloat16 autocast, without AMX: there bfloat16's backward pass takes four times as long
    as float32's (AMD EPYC). A single query, as sampling has it, stays in bfloat16, as its cache does.
    """
    dtype = torch.get_autocast_dtype("cpu") if query.shape[-2] == 1 else torch.float32
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    with torch.autocast("cpu", enabled=False):
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)
