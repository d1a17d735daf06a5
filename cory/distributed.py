"""Several processes that train as one: what `torchrun` starts.

    torchrun --nproc_per_node 2 train_imdb.py --method cory

Every process answers its part of each batch of queries. The parts are put together, so that each process
computes the same scores, advantages, shuffles and metrics, those of the global batch; then each adds the
gradient of its rows, and the gradients are summed. So N processes compute what one computes, but for the
rounding of these sums. With --shard each keeps a part of the weights only. Single runs import none of this.
"""
import os
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Callable, Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils.rnn import pad_sequence

from cory import errors
from cory.config import Config
from cory.errors import UserError
from cory.ppo import world
from cory.ppo.rollout import Rollout

RUNS = count()                  # of these processes: each has keys of its own
WAIT = timedelta(minutes=30)    # for a silent process


class Processes(world.World):
    """This one and its peers."""

    def __init__(self, device: str):
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.sharded = False

    def part(self, n: int) -> slice:
        if n % self.size:
            raise UserError("rows", n, f"cannot be divided among {self.size} processes; make them a multiple")
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def whole(self, rollout: Rollout, pad_id: int) -> Rollout:
        own = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in vars(rollout).items()}
        parts = self.gathered([own])

        def joined(name: str):
            values = [part[name] for part in parts]
            if not isinstance(values[0], Tensor):           # texts; else the same in every part
                return sum(values, []) if isinstance(values[0], list) else values[0]
            rows, side = [row for x in values for row in x], "left" if name.endswith("BP") else "right"
            filler = pad_id if name in ("prompt_BP", "response_BT") else 0
            return pad_sequence(rows, True, filler, padding_side=side).to(self.device)

        return replace(rollout, **{name: joined(name) for name in parts[0]})

    def gathered(self, items: list) -> list:
        found = [None] * self.size
        dist.all_gather_object(found, items)
        return [item for part in found for item in part]

    def agreed(self, compute: Callable[[], list]) -> list:
        """The items that each process computes, of all. A `UserError` of one is raised by all."""
        found, fault = [], []
        try:
            found = compute()
        except UserError as error:
            fault = [str(error)]
        for line in self.gathered(fault)[:1]:
            raise UserError.of(line)
        return self.gathered(found)

    def shared(self, n: int, compute: Callable[[slice], list]) -> list:
        part = slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)
        return self.agreed(lambda: compute(part) if part.start < part.stop else [])

    def leader(self, compute: Callable):
        return self.agreed(lambda: [compute()] if self.leads else [])[0]

    @contextmanager
    def holding(self, claim: Callable, *arguments) -> Iterator:
        with ExitStack() as stack:
            yield self.leader(lambda: stack.enter_context(claim(*arguments)))

    def merged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = self.gathered([{name: x.cpu() for name, x in tensors.items()}])
        return {name: torch.cat([part[name] for part in parts if name in part]).to(self.device)
                for name in dict.fromkeys(name for part in parts for name in part)}

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x := x.clone())
        return x

    def most(self, n: int) -> int:
        return max(self.gathered([n]))

    def sum_gradients(self, parameters: Collection[nn.Parameter]) -> None:
        own = [p for p in parameters if not isinstance(p, DTensor)]     # FSDP has summed the others
        there = self.sum(torch.tensor([p.grad is not None for p in own], device=self.device).float())
        own = [p for p, n in zip(own, there.tolist(), strict=True) if n]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in own])
        for p, part in zip(own, self.sum(flat).split([p.numel() for p in own]), strict=True):
            p.grad = part.view_as(p)

    def shard(self, lm: nn.Module, cfg: Config) -> None:
        """FSDP2, a group of matrices for each layer; all else stays whole, as autocast takes it."""
        base, self.sharded = lm.base_model, True
        lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
        cfg.require("shard", lists, "finds no list of transformer layers in this model; leave it out")
        layers = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
        divided = {p for name, p in layers.named_parameters() if p.dim() > 1 and ".lora_" not in name}
        low = torch.bfloat16 if cfg.dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(low, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh, whole = init_device_mesh(self.device, (self.size,)), {*base.parameters()} - divided
        for module in (*layers, base):
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole)
            module.set_gradient_divide_factor(1.0)          # a sum, not a mean
            module.set_force_sum_reduction_for_comms(True)

    def is_sharded(self, lm: nn.Module) -> bool:
        return isinstance(lm.base_model, FSDPModule)

    @contextmanager
    def gathered_weights(self, *models) -> Iterator[None]:
        lms = dict.fromkeys(model.lm for model in models)       # in one order in all processes
        groups = [module for lm in lms for module in lm.modules() if isinstance(module, FSDPModule)]
        for group in groups:
            group.set_reshard_after_forward(False, recurse=False)
            group.unshard()
        try:
            yield
        finally:
            for group in groups:
                group.reshard()
                group.set_reshard_after_forward(True, recurse=False)

    def kinds(self, parameters: Collection[nn.Parameter]) -> list[list[nn.Parameter]]:
        kinds = [[p for p in parameters if isinstance(p, DTensor) == divided] for divided in (False, True)]
        return [kind for kind in kinds if kind]

    def gradient_norm(self, parameters: Collection[nn.Parameter]) -> Tensor:
        norms = [nn.utils.get_total_norm([p.grad for p in kind]) for kind in self.kinds(parameters)]
        return torch.stack([self.full(norm) for norm in norms]).norm()

    def alike(self, groups: list[Tensor]) -> list[Tensor]:
        most = self.most(len(groups)) if self.sharded else 0
        while len(groups) < most:
            longest = max(range(len(groups)), key=lambda i: len(groups[i]))
            groups = [*groups[:longest], *groups[longest].tensor_split(2), *groups[longest + 1:]]
        return groups

    def full(self, x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def put(self, x: Tensor, like: nn.Parameter) -> Tensor:
        if isinstance(like, DTensor) and x.shape == like.shape:
            x = distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        return x


@contextmanager
def joined(settings: dict) -> Iterator[None]:
    """Several processes as one until the block ends. The first that fails says why, and torchrun stops all.
    Raises `UserError` where their settings differ.
    """
    on_gpu = torch.cuda.is_available() and settings["device"] != "cpu"
    if on_gpu:
        if (gpus := torch.cuda.device_count()) < int(os.environ["LOCAL_WORLD_SIZE"]):
            raise UserError("nproc_per_node", os.environ["LOCAL_WORLD_SIZE"], f"there are {gpus} GPUs here")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"run {next(RUNS)}", store)            # torchrun's
    backend, device = ("nccl", "cuda") if on_gpu else ("gloo", "cpu")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=WAIT)
    world.current = Processes(device)
    if rank:
        sys.stdout = open(os.devnull, "w")
    try:
        for other, theirs in enumerate(world.current.gathered([settings])):
            for name in (name for name in settings if settings[name] != theirs.get(name)):
                way_out = f"is {theirs.get(name)!r} in process {other}; give all the same flags"
                raise UserError(name, settings[name], way_out)
        yield
        dist.destroy_process_group()
    except Exception as error:
        time.sleep(rank and 0.5)                            # of the same fault, let the leader speak
        errors.speaks = store.add("failed", 1) == 1
        print(end="\n" if errors.speaks and rank else "", file=sys.stderr)     # ends the line of its bar
        lost = isinstance(error, dist.DistError) or type(error) is RuntimeError and "onnection" in str(error)
        if errors.speaks and not lost:
            raise
        raise UserError("processes", size, f"one is lost ({str(error)[:99]}), see torchrun below") from error
    finally:
        world.current = world.World()
