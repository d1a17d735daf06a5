"""Matrix products of the head: float32 in, float32 out, inputs rounded or not on the way.

    float32     as they are: 24 bits of mantissa (IEEE)
    tf32        to 11 bits, on a GPU
    bfloat16    to 8 bits, on a GPU and on CPUs that multiply bfloat16

Sums and results are in float32: GPT-2's logits lie near -100, where bfloat16 numbers are 0.5 apart. To
add a precision: an entry in `PYTORCH_NAMES`, a word of `head_precision` in `Config`, and the machines that
have it in `precisions` of cory/system/machine.py.
"""
import torch
from torch import Tensor

PYTORCH_NAMES = {"float32": "ieee", "tf32": "tf32", "bfloat16": "bf16"}


def multiply(a_MK: Tensor, b_KN: Tensor, precision: str) -> Tensor:
    """`a b`, (M, N), of float32 matrices (M, K) and (K, N), in float32.

    Never backpropagate through it: autograd would multiply in PyTorch's global precision. `LogpAndEntropy`
    calls `multiply` in its own backward pass.
    """
    device = a_MK.device
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    with torch.autocast(device.type, enabled=False):
        if device.type == "cuda" and precision == "bfloat16":
            return torch.mm(a_MK.bfloat16(), b_KN.bfloat16(), out_dtype=torch.float32)
        backend.fp32_precision = PYTORCH_NAMES[precision]           # for this product alone
        try:
            return a_MK @ b_KN
        finally:
            backend.fp32_precision = before
