"""torchrun's processes, which train as one: N compute what one computes, but for the rounding of sums.

    torchrun --nproc_per_node 2 train_imdb.py --method cory

Each process samples and scores its rows of every batch. The rollouts are gathered, so that all processes have
the same rewards, advantages and shuffles, those of the whole batch. Then each adds the gradient of its rows,
and the gradients are summed.
"""
import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cory.errors import UserError

TIMEOUT = timedelta(minutes=30)         # for a silent process


class Processes:
    """A single process: all rows are its own, and a sum over processes is what it has."""
    rank, size, launcher = 0, 1, "python"

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes, prints and talks to W&B."""
        return self.rank == 0

    def rows(self, n: int) -> slice:
        """Which of n rows are this process's: n / size of them, or one more."""
        first, end = (-(-i * n // self.size) for i in (self.rank, self.rank + 1))
        return slice(first, end)

    def gather(self, items: list) -> list:
        """The items of all processes, in the order of their ranks."""
        return items

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the processes."""
        return x

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Each gradient becomes the sum over the processes. One that no process has stays None."""

    def gather_parts(self, n: int, compute: Callable[[slice], list]) -> list:
        """What `compute` returns for n items: each process calls `compute(rows)` for its rows, if it has any.
        A `UserError` of one is raised by all.
        """
        return compute(slice(n))

    def broadcast(self, compute: Callable):
        """What `compute()` returns in the main process, which alone calls it."""
        return self.gather_parts(1, lambda _: [compute()])[0]


class ProcessGroup(Processes):
    """The processes of torch.distributed."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.launcher = f"torchrun --nproc_per_node {os.environ['LOCAL_WORLD_SIZE']}"

    def gather(self, items: list) -> list:
        gathered = [None] * self.size
        dist.all_gather_object(gathered, items)
        return [item for items in gathered for item in items]

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x := x.clone())
        return x

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        whole = [p for p in parameters if not hasattr(p, "full_tensor")]        # FSDP has summed the others
        has_gradient = torch.tensor([p.grad is not None for p in whole], device=whole[0].device)
        anywhere = self.sum(has_gradient.int()).tolist()
        present = [p for p, n in zip(whole, anywhere, strict=True) if n]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in present]
        flat = torch.cat([whole[0].new_zeros(0), *(x.flatten() for x in gradients)])
        dist.all_reduce(flat)
        for p, gradient in zip(present, flat.split([p.numel() for p in present]), strict=True):
            p.grad = gradient.view_as(p)

    def gather_parts(self, n: int, compute: Callable[[slice], list]) -> list:
        rows, items, errors = self.rows(n), [], []
        try:
            if rows.start < rows.stop:
                items = compute(rows)
        except UserError as error:
            errors = [error]
        parts = self.gather([(items, errors)])
        for error in [error for _, errors in parts for error in errors]:
            raise error
        return [item for items, _ in parts for item in items]


joined = [Processes()]          # last: the group that `launched` has joined, while its block runs
launches = count()              # each has keys of its own in torchrun's store


def processes() -> Processes:
    """The processes that train together."""
    return joined[-1]


@contextmanager
def launched(settings: dict) -> Iterator[None]:
    """Joins the processes that `torchrun` has started, if it has, until the block ends. Raises `UserError`
    where their settings differ.
    """
    under_torchrun, shard = "TORCHELASTIC_RUN_ID" in os.environ, settings.get("shard", False)
    if shard and not under_torchrun:
        raise UserError("shard", True, "divides the models among processes, and torchrun starts those; put "
                        "`torchrun --nproc_per_node N` in place of `python`, or give --shard false")
    if not under_torchrun or os.environ["WORLD_SIZE"] == "1" and not shard:
        yield
        return
    on_gpu = torch.cuda.is_available() and settings["device"] != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, rank=rank, world_size=size,
                            store=dist.PrefixStore(f"launch {next(launches)}", store))
    joined.append(ProcessGroup())
    if not processes().is_main:
        sys.stdout = open(os.devnull, "w")
    try:
        for other, theirs in enumerate(processes().gather([settings])):
            for name in (name for name in settings if settings[name] != theirs[name]):
                raise UserError(name, settings[name], f"is {theirs[name]!r} in process {other}; give all the "
                                "same flags")
        yield
    finally:
        joined.pop()
    dist.destroy_process_group()
