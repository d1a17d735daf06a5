"""FSDP2 (`--shard true`): each process keeps a part of every layer's matrices, and of Adam's moments.

Without it nothing is divided, and nothing here speaks to other processes.
"""
from contextlib import contextmanager
from typing import Collection, Iterator

import torch
from torch import Tensor, nn

from cory.config import Config
from cory.system.distributed import processes


def shard(lm: nn.Module, cfg: Config, whole: Collection[nn.Parameter] = ()) -> None:
    """From here on each process holds a part of the matrices of each layer, except of those in `whole`, which
    an optimizer may hold already. All else stays whole. Raises `UserError`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    base, device = lm.base_model, lm.device.type
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    cfg.require("shard", lists, "finds no list of transformer layers in this model; leave it out")
    layers = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
    matrices = {p for p in layers.parameters() if p.dim() > 1}.difference(whole)
    low = torch.bfloat16 if cfg.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh, replicated = init_device_mesh(device, (processes().size,)), {*base.parameters()} - matrices
    for module in (*layers, base):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=replicated)
        module.set_gradient_divide_factor(1.0)          # a sum, not a mean
        module.set_force_sum_reduction_for_comms(True)


def is_sharded(x: nn.Module | Tensor) -> bool:
    """Whether x is a model that `shard` has divided, or a tensor of one, a DTensor."""
    return hasattr(x.base_model, "unshard") if isinstance(x, nn.Module) else hasattr(x, "full_tensor")


def full_tensor(x: Tensor) -> Tensor:
    """The whole of a tensor of which each process may hold a part."""
    return x.full_tensor() if is_sharded(x) else x


def shard_like(x: Tensor, parameter: nn.Parameter) -> Tensor:
    """The part of a whole tensor that this process holds of `parameter`."""
    if not is_sharded(parameter) or x.shape != parameter.shape:
        return x
    from torch.distributed.tensor import distribute_tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(x.to(parameter.device), mesh, placements, src_data_rank=None)


@contextmanager
def unsharded(*models) -> Iterator[None]:
    """A block in which all weights are whole: a forward pass in it asks nothing of other processes."""
    lms = dict.fromkeys(model.lm for model in models if is_sharded(model.lm))   # in one order everywhere
    groups = [module for lm in lms for module in lm.modules() if hasattr(module, "unshard")]
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()
            group.set_reshard_after_forward(True, recurse=False)


def by_placement(parameters: Collection[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The replicated parameters and the sharded ones, which no operation takes together; no empty list."""
    replicated = [p for p in parameters if not is_sharded(p)]
    sharded = [p for p in parameters if is_sharded(p)]
    return [group for group in (replicated, sharded) if group]


def sum_gradients(parameters: list[nn.Parameter]) -> None:
    """Sums gradients over the processes; FSDP has done so for those that are sharded."""
    processes().sum_gradients([p for p in parameters if not is_sharded(p)])


def gradient_norm(parameters: Collection[nn.Parameter]) -> Tensor:
    """The norm of all gradients together, a scalar."""
    groups = [[p for p in group if p.grad is not None] for group in by_placement(parameters)]
    norms = [full_tensor(nn.utils.get_total_norm([p.grad for p in group])) for group in groups if group]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def clip_gradients(parameters: Collection[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales all gradients, whose norm together is `norm`, by `min(1, max_norm / norm)`."""
    for group in by_placement(parameters):
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)


def as_many_as_others(groups: list[Tensor]) -> list[Tensor]:
    """The same rows in as many groups as the process with most has: the longest are halved, no row repeats.

    Each pass through a sharded model needs all processes.
    """
    most = max(processes().gather([len(groups)]))
    while len(groups) < most:
        longest = max(range(len(groups)), key=lambda i: len(groups[i]))
        groups = [*groups[:longest], *groups[longest].tensor_split(2), *groups[longest + 1:]]
    return groups
