"""torchrun's processes, which train as one. A process on its own gets back what it gives.

    torchrun --nproc_per_node 2 train_imdb.py --method cory

Each process answers its rows of every batch. The rollouts are gathered, so that all processes compute the
same scores, advantages, shuffles and metrics, those of the whole batch. Then each adds the gradient of its
rows, and the gradients are summed. N processes so compute what one computes, but for the rounding of sums.
"""
import os
import sys
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import count
from typing import Callable, ContextManager, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cory import errors
from cory.errors import UserError

RUNS = count()                  # of these processes: each run has keys of its own in torchrun's store
WAIT = timedelta(minutes=30)    # for a silent process


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is the process that writes, prints and talks to W&B."""
    return rank() == 0


def local_rows(n: int, equal: bool = True) -> slice:
    """Which of n rows this process takes. Raises `UserError` if they should be, and are not, equally many."""
    if equal and n % world_size():
        raise UserError("rows", n, f"cannot be divided among {world_size()} processes; make them a multiple")
    first, end = (-(-i * n // world_size()) for i in (rank(), rank() + 1))
    return slice(first, end)


def all_gather(items: list) -> list:
    """The items of all processes, in the order of their ranks."""
    if world_size() == 1:
        return items
    gathered = [None] * world_size()
    dist.all_gather_object(gathered, items)
    return [item for items in gathered for item in items]


def all_gather_rows(x: Tensor) -> Tensor:
    """x of all processes, joined along its first dimension, in which it may differ."""
    return x if world_size() == 1 else torch.cat(all_gather([x.cpu()])).to(x.device)


def all_gather_parts(n: int, compute: Callable[[slice], list]) -> list:
    """What `compute` returns for n items: each process calls `compute(rows)` for its rows, if it has any. A
    `UserError` of one is raised by all.
    """
    if world_size() == 1:
        return compute(slice(n))
    rows, items, faults = local_rows(n, equal=False), [], []
    try:
        if rows.start < rows.stop:
            items = compute(rows)
    except UserError as error:
        faults = [str(error)]
    for line in all_gather(faults)[:1]:
        raise UserError.of(line)
    return all_gather(items)


def broadcast(compute: Callable):
    """What `compute()` returns in the main process, which alone calls it."""
    return all_gather_parts(1, lambda _: [compute()])[0]


@contextmanager
def held_by_main(claim: Callable[..., ContextManager], *arguments) -> Iterator:
    """A block inside `claim(*arguments)`, which the main process enters; all are given what it yields."""
    with ExitStack() as stack:
        yield broadcast(lambda: stack.enter_context(claim(*arguments)))


def all_reduce(x: Tensor) -> Tensor:
    """The sum of x over the processes."""
    if world_size() > 1:
        dist.all_reduce(x := x.clone())
    return x


def all_reduce_max(n: int) -> int:
    return max(all_gather([n]))


def all_reduce_gradients(parameters: list[nn.Parameter]) -> None:
    """Each gradient becomes the sum over the processes; one that a process lacks is 0 there."""
    if world_size() == 1:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    sums = all_reduce(flat).split([p.numel() for p in parameters])
    for p, gradient in zip(parameters, sums, strict=True):
        p.grad = gradient.view_as(p)


def started_as(script: str) -> str:
    """How this program was started, for a line that says how to go on."""
    if world_size() == 1:
        return f"python {script}"
    nodes, processes = os.environ["GROUP_WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
    return f"torchrun --nnodes {nodes} --nproc_per_node {processes} {script}"


@contextmanager
def launched(settings: dict) -> Iterator[None]:
    """Joins the processes that `torchrun` has started, if it has, until the block ends. The first that fails
    says why, and torchrun stops all. Raises `UserError` where their settings differ.
    """
    under_torchrun, shard = "TORCHELASTIC_RUN_ID" in os.environ, settings.get("shard", False)
    if shard and not under_torchrun:
        raise UserError("shard", True, "divides the models among processes, and torchrun starts those; put "
                        "`torchrun --nproc_per_node N` in place of `python`, or give --shard false")
    if not under_torchrun or os.environ["WORLD_SIZE"] == "1" and not shard:
        yield
        return
    store = join(on_gpu=torch.cuda.is_available() and settings["device"] != "cpu")
    try:
        require_same(settings)
        yield
        dist.destroy_process_group()
    except Exception as error:
        time.sleep(rank() and 0.5)                          # of the same fault, let the main process speak
        errors.speaks = store.add("failed", 1) == 1
        lost = isinstance(error, dist.DistError) or type(error) is RuntimeError and "onnection" in str(error)
        if errors.speaks and not lost:
            raise
        way_out = f"one is lost ({str(error)[:99]}), see torchrun below"
        raise UserError("processes", world_size(), way_out) from error


def join(on_gpu: bool) -> dist.Store:
    """Makes the process group. Returns its store."""
    if on_gpu:
        if (gpus := torch.cuda.device_count()) < int(os.environ["LOCAL_WORLD_SIZE"]):
            raise UserError("nproc_per_node", os.environ["LOCAL_WORLD_SIZE"], f"there are {gpus} GPUs here")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"run {next(RUNS)}", store)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size,
                            timeout=WAIT)
    if rank:
        sys.stdout = open(os.devnull, "w")
    return store


def require_same(settings: dict) -> None:
    for other, theirs in enumerate(all_gather([settings])):
        for name in (name for name in settings if settings[name] != theirs.get(name)):
            way_out = f"is {theirs.get(name)!r} in process {other}; give all the same flags"
            raise UserError(name, settings[name], way_out)
