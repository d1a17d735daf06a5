"""The processes that train together. Here: one, for which nothing below does anything.

`cory/distributed.py` puts several in its place: each computes its part of a batch, and all know the whole.
"""
import os
from contextlib import contextmanager, nullcontext
from typing import Callable, Collection, ContextManager, Iterator

from torch import Tensor, nn

from cory.errors import UserError


class World:
    """One process."""
    rank, size = 0, 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes, prints and talks to W&B."""
        return self.rank == 0

    # --- a batch, of which each process has a part ---
    def part(self, n: int) -> slice:
        """Which of n rows are this process's. Raises `UserError` where n cannot be divided."""
        return slice(0, n)

    def whole(self, rollout, pad_id: int):
        """The rollout of all rows, from each process's part of it; token ids are padded with `pad_id`."""
        return rollout

    def shared(self, n: int, compute: Callable[[slice], list]) -> list:
        """What `compute` returns for n items, made by parts: `compute(part)` for this process's, if it has
        any. A `UserError` of one process is raised by all.
        """
        return compute(slice(0, n))

    def merged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each along its first dimension, in the order of the processes."""
        return tensors

    def sum(self, x: Tensor) -> Tensor:
        return x

    def most(self, n: int) -> int:
        """The largest n of any process."""
        return n

    def sum_gradients(self, parameters: Collection[nn.Parameter]) -> None:
        """Each gradient becomes the sum over the processes; one that a process lacks is 0 there."""

    # --- what one process does for all ---
    def leader(self, compute: Callable):
        """What `compute()` returns in the process that leads."""
        return compute()

    def holding(self, claim: Callable[..., ContextManager], *arguments) -> ContextManager:
        """`claim(*arguments)`, entered by the process that leads; all are given what it yields."""
        return claim(*arguments)

    def command(self, script: str) -> str:
        """How this program was started, for a line that says how to go on."""
        if self.size == 1:
            return f"python {script}"
        nodes = int(os.environ["GROUP_WORLD_SIZE"])
        several = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint HOST:PORT " if nodes > 1 else ""
        return f"torchrun {several}--nproc_per_node {os.environ['LOCAL_WORLD_SIZE']} {script}"

    # --- a model of which each process has a part (--shard) ---
    def shard(self, lm: nn.Module, cfg) -> None:
        """From here on each process holds a part of every layer's weights."""

    def is_sharded(self, lm: nn.Module) -> bool:
        return False

    def gathered_weights(self, *models) -> ContextManager:
        """A block in which all weights are whole: a forward pass in it asks nothing of other processes."""
        return nullcontext()

    def kinds(self, parameters: Collection[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Parameters that one operation can take together."""
        return [list(parameters)] if parameters else []

    def gradient_norm(self, parameters: Collection[nn.Parameter]) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in parameters])

    def alike(self, groups: list[Tensor]) -> list[Tensor]:
        """As many groups of rows as the other processes have, where all take part in each one's pass."""
        return groups

    def full(self, x: Tensor) -> Tensor:
        """The whole of a tensor of which each process may hold a part."""
        return x

    def put(self, x: Tensor, like: nn.Parameter) -> Tensor:
        """The part of a whole tensor that this process holds of `like`."""
        return x


current = World()


def world() -> World:
    return current


@contextmanager
def together(settings: dict) -> Iterator[None]:
    """Joins the processes that `torchrun` has started, if it has, until the block ends: all with the same
    settings, of which `device` and `shard` matter here. Raises `UserError`.
    """
    under_torchrun, shard = "TORCHELASTIC_RUN_ID" in os.environ, settings.get("shard", False)
    if shard and not under_torchrun:
        raise UserError("shard", True, "divides the models among processes, and torchrun starts those; put "
                        "`torchrun --nproc_per_node N` in place of `python`, or give --shard false")
    if not under_torchrun or os.environ["WORLD_SIZE"] == "1" and not shard:
        yield
        return
    from cory import distributed
    with distributed.joined(settings):
        yield
