"""The folder of a run and its checkpoints, from which a killed run continues bit for bit on a CPU (some CUDA
kernels add in varying order).
"""
import fcntl
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch

from cory.config import Config, read_config
from cory.errors import UserError
from cory.machine.distributed import processes
from cory.machine.sharding import shard_like, whole_on_cpu
from cory.ppo.agent import Agent


def run_folder(cfg: Config) -> Path:
    """`cfg.run_dir`, or a new folder under runs/. It must hold no run, unless that is to be resumed."""
    what = f"{cfg.task}-{cfg.method}-{cfg.preset}-seed{cfg.seed}".replace(":", "-").lower()
    new = f"runs/{what}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = processes().all_gather([cfg.run_dir or new])
    folder = Path(names[0])                                     # the same in all processes
    if cfg.resume:
        # one that was killed before its first checkpoint
        may_restart = read_config(folder)["save_every"] and not (folder / "eval.json").exists()
        cfg.require("run_dir", checkpoints_of(folder) or may_restart, "holds a run without a checkpoint")
    elif (folder / "config.json").exists():
        raise UserError("run_dir", str(folder), "holds a run; go on with --resume, or name another folder")
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A block in which no other run may use the folder. The lock ends with the main process, however that
    ends, and its own child processes do not hold it.
    """
    if not processes().is_main:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("run_dir", str(folder), "is in use by another run") from None
        except OSError:
            pass                                        # a file system that locks no files
        yield


def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], method, wandb_id: str) -> None:
    """Saves all that a resumed run needs, and keeps the previous checkpoint."""
    memory = {"method": method.memory, "task": method.task.memory}
    state = {"iteration": iteration, "wandb_id": wandb_id, "memory": memory, "agents": {}}
    for agent in agents:
        parameters = agent.trainable_parameters()
        moments = agent.optimizer.state
        adam = {name: whole_on_cpu(moments[p]) for name, p in parameters.items()}
        state["agents"][agent.name] = {
            "kl_coef": agent.kl_coef, "rng_count": agent.rng_count, "memory": agent.memory,
            "tensors": whole_on_cpu(agent.tensors()), "adam": adam}
    if processes().is_main:
        folder = run_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        for old in checkpoints_of(run_dir)[1:]:                 # first: the disk never holds three
            old.unlink()
        temporary = folder / "writing"
        torch.save(state, temporary)
        torch.load(temporary, weights_only=True, mmap=True)     # fails now if a resume could not read it
        temporary.replace(folder / f"iteration_{iteration:06d}.pt")


def checkpoints_of(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("iteration_*.pt"), reverse=True)


def load_checkpoint(run_dir: Path, agents: list[Agent], method) -> tuple[int, str]:
    """Restores agents, method and task from the newest checkpoint, if any: (iterations done, id at W&B)."""
    paths = checkpoints_of(run_dir)
    if not paths:
        return 0, ""
    # mmap: each process reads one tensor at a time, and keeps its part
    state = torch.load(paths[0], weights_only=True, mmap=True,
                       map_location={"cuda:0": str(agents[0].policy.device)})
    for agent in agents:
        saved = state["agents"][agent.name]
        agent.kl_coef = saved["kl_coef"]
        agent.rng_count = saved["rng_count"]
        agent.memory = saved["memory"]
        for name, x in agent.tensors().items():
            x.data.copy_(shard_like(saved["tensors"][name], x))
        for name, p in agent.trainable_parameters().items():
            adam = {}
            for moment, x in saved["adam"][name].items():
                adam[moment] = shard_like(x.clone().to(p.device), p)
            agent.optimizer.state[p] = adam
    method.memory = state["memory"]["method"]
    method.task.memory = state["memory"]["task"]
    return state["iteration"], state["wandb_id"]
