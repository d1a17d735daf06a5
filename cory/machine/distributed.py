"""torchrun's processes, which train as one: they compute what one process does, except for rounding; where
rounding changes a sampled token, texts differ from there on.

Each generates its rows of every batch. The rollouts are gathered, so that all have the advantages of the
whole batch. Each then adds the gradient of its rows, and the gradients are summed.
"""
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

launches = count()              # a process that trains twice uses other keys of torchrun's store


@dataclass(frozen=True)
class Processes:
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0           # it alone writes, prints and talks to W&B

    def local_rows(self, n: int) -> slice:
        """Which of n rows are this process's: n / size of them, or one more."""
        start = self.rank * n // self.size
        stop = (self.rank + 1) * n // self.size
        return slice(start, stop)

    def all_gather(self, items: list) -> list:
        if self.size == 1:
            return items
        gathered = [None] * self.size
        dist.all_gather_object(gathered, items)
        return sum(gathered, [])

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size > 1:
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x)
        return x

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Each gradient becomes the sum over the processes. One that no process has stays None."""
        present = [p.grad is not None for p in parameters]
        present = torch.tensor(present, dtype=torch.int, device=parameters[0].device)
        for p, holders in zip(parameters, self.all_reduce(present).tolist(), strict=True):
            if holders == 0:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad = self.all_reduce(p.grad)


def processes() -> Processes:
    """All of torchrun's processes inside a `process_group` block; otherwise this process alone."""
    if not dist.is_initialized():
        return Processes()
    return Processes(dist.get_rank(), dist.get_world_size())


@contextmanager
def process_group(device: str):
    """A block in which torchrun's processes, if any, form a process group. device: auto, cpu or cuda."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(dist.rendezvous("env://"))
    backend = "nccl" if on_gpu else "gloo"
    store = dist.PrefixStore(f"launch {next(launches)}", store)
    dist.init_process_group(backend, timeout=timedelta(minutes=30), rank=rank, world_size=size, store=store)
    if rank > 0:
        sys.stdout = open(os.devnull, "w")
    yield
    dist.destroy_process_group()
