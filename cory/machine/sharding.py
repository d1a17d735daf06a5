"""`--shard true`: each process keeps a part of every layer's matrices, and of Adam's moments (FSDP2)."""
from contextlib import contextmanager
from typing import Collection

import torch
from torch import Tensor, nn

from cory.config import Config
from cory.machine.distributed import processes


def shard(model, cfg: Config, whole: Collection[nn.Parameter] = ()) -> None:
    """From here on each process holds a part of the matrices of each layer, except of those in `whole`, which
    an optimizer may hold already. All else stays whole.
    """
    cfg.require("shard", torch.distributed.is_initialized(), "needs torchrun")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    base = model.lm.base_model
    layers = model.layers
    matrices = {p for p in layers.parameters() if p.dim() > 1}
    matrices -= {*whole}
    dtype = torch.bfloat16 if cfg.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(model.device.type, (processes().size,))
    rest = {*base.parameters()} - matrices
    for module in (*layers, base):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=rest)
        module.set_gradient_divide_factor(1.0)          # a sum, not a mean
        module.set_force_sum_reduction_for_comms(True)


def is_sharded(x: nn.Module | Tensor) -> bool:
    """Whether x is a model that `shard` has divided, or a tensor of one, a DTensor."""
    if isinstance(x, nn.Module):
        return hasattr(x.base_model, "unshard")
    return hasattr(x, "full_tensor")


def full_tensor(x: Tensor) -> Tensor:
    if not is_sharded(x):
        return x
    return x.full_tensor()


def whole_on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in CPU memory, in the main process alone; all processes assemble what is sharded."""
    whole = {name: full_tensor(x.detach()) for name, x in tensors.items()}
    if not processes().is_main:
        return {}
    return {name: x.cpu().contiguous() for name, x in whole.items()}


def shard_like(x: Tensor, parameter: nn.Parameter) -> Tensor:
    """The part of a whole tensor that this process holds of `parameter`."""
    if not is_sharded(parameter) or x.shape != parameter.shape:         # Adam's step is a number
        return x
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(x.to(parameter.device), parameter.device_mesh, parameter.placements,
                             src_data_rank=None)


@contextmanager
def unsharded(*models):
    """A block in which all weights are whole: a forward pass in it needs no other process."""
    lms = dict.fromkeys(model.lm for model in models if is_sharded(model.lm))   # in the same order everywhere
    groups = []
    for lm in lms:
        groups += [module for module in lm.modules() if hasattr(module, "unshard")]
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    yield
    for group in groups:
        group.reshard()
        group.set_reshard_after_forward(True, recurse=False)


def gradient_norm(parameters: Collection[nn.Parameter]) -> float:
    """The norm of all gradients together; each parameter has one."""
    norms = [full_tensor(torch.linalg.vector_norm(p.grad)) for p in parameters]
    return torch.linalg.vector_norm(torch.stack(norms)).item()


def split_to_equal_count(indices: list[Tensor]) -> list[Tensor]:
    """The rows' indices, in as many micro-batches as the process with the most has: each pass of a sharded
    model needs all processes.
    """
    most = max(processes().all_gather([len(indices)]))
    while len(indices) < most:
        *shorter, longest = sorted(indices, key=len)
        indices = [*shorter, *longest.tensor_split(2)]
    return indices
