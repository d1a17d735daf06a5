"""torchrun's processes, which train as one: N compute what one computes, up to rounding of sums.

Each generates its rows of every batch. The rollouts are gathered, so that all have the advantages of the
whole batch. Each then adds the gradient of its rows, and the gradients are summed. With `--shard true` each
also keeps only a part of every layer's matrices, and of Adam's moments (FSDP2).
"""
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cory.config import Config
from cory.errors import UserError

launches = count()              # each has keys of its own in torchrun's store


@dataclass(frozen=True)
class Processes:
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0           # it alone writes, prints and talks to W&B

    def rows(self, n: int) -> slice:
        """Which of n rows are this process's: n / size of them, or one more."""
        first, end = (-(-i * n // self.size) for i in (self.rank, self.rank + 1))
        return slice(first, end)

    def gather(self, items: list) -> list:
        if self.size == 1:
            return items
        gathered = [None] * self.size
        dist.all_gather_object(gathered, items)
        return [item for items in gathered for item in items]

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x)
        return x

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Each gradient becomes the sum over the processes. One that no process has stays None."""
        whole = [p for p in parameters if not is_sharded(p)]            # FSDP has summed the others
        present = torch.tensor([p.grad is not None for p in whole], dtype=torch.int, device=whole[0].device)
        for p, anywhere in zip(whole, self.sum(present).tolist(), strict=True):
            if anywhere:
                p.grad = self.sum(torch.zeros_like(p) if p.grad is None else p.grad)


def processes() -> Processes:
    """All of torchrun's processes inside a `launched` block; otherwise this process alone."""
    if not dist.is_initialized():
        return Processes()
    return Processes(dist.get_rank(), dist.get_world_size())


@contextmanager
def launched(settings: dict) -> Iterator[None]:
    """Joins torchrun's processes, if any, until the block ends. Raises `UserError` where settings differ."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        if settings.get("shard"):
            raise UserError("shard", True, "needs `torchrun --nproc_per_node N` in place of `python`")
        yield
        return
    on_gpu = torch.cuda.is_available() and settings["device"] != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=30), rank=rank,
                            world_size=size, store=dist.PrefixStore(f"launch {next(launches)}", store))
    if rank > 0:
        sys.stdout = open(os.devnull, "w", errors="replace")
    for other, theirs in enumerate(processes().gather([settings])):
        for name, value in settings.items():
            if value != theirs[name]:
                raise UserError(name, value, f"is {theirs[name]!r} in process {other}; give the same flags")
    yield
    dist.destroy_process_group()


# --- FSDP2 ---
def shard(model, cfg: Config, whole: Collection[nn.Parameter] = ()) -> None:
    """From here on each process holds a part of the matrices of each layer, except of those in `whole`, which
    an optimizer may hold already. All else stays whole.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    base, layers = model.lm.base_model, model.layers
    matrices = {p for p in layers.parameters() if p.dim() > 1}.difference(whole)
    policy = MixedPrecisionPolicy(torch.bfloat16 if cfg.dtype == "bfloat16" else None,
                                  reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh, rest = init_device_mesh(model.device.type, (processes().size,)), {*base.parameters()} - matrices
    for module in (*layers, base):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=rest)
        module.set_gradient_divide_factor(1.0)          # a sum, not a mean
        module.set_force_sum_reduction_for_comms(True)


def is_sharded(x: nn.Module | Tensor) -> bool:
    """Whether x is a model that `shard` has divided, or a tensor of one, a DTensor."""
    return hasattr(x.base_model, "unshard") if isinstance(x, nn.Module) else hasattr(x, "full_tensor")


def full_tensor(x: Tensor) -> Tensor:
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
    """A block in which all weights are whole: a forward pass in it needs no other process."""
    lms = dict.fromkeys(model.lm for model in models if is_sharded(model.lm))   # in the same order everywhere
    groups = [module for lm in lms for module in lm.modules() if hasattr(module, "unshard")]
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


def as_many_as_others(groups: list[Tensor]) -> list[Tensor]:
    """The same rows in as many groups as the process with the most: each pass of a sharded model needs all
    processes.
    """
    most = max(processes().gather([len(groups)]))
    while len(groups) < most:
        *shorter, longest = sorted(groups, key=len)
        groups = [*shorter, *longest.tensor_split(2)]
    return groups
