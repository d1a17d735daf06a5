"""Checkpoints: a killed run continues bit for bit on a CPU (some CUDA kernels add in varying order)."""
from pathlib import Path

import torch

from cory.machine.distributed import processes
from cory.machine.sharding import shard_like, whole_on_cpu
from cory.ppo.agent import Agent


def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], about: dict) -> None:
    """Keeps the previous checkpoint. `about` is whatever else a run needs."""
    state = about | {"iteration": iteration, "agents": {}}
    for agent in agents:
        parameters = agent.trainable_parameters()
        state["agents"][agent.name] = {
            "kl_coef": agent.kl_coef, "draws": agent.draws, "memory": agent.memory,
            "tensors": whole_on_cpu(parameters),
            "adam": {name: whole_on_cpu(agent.optimizer.state[p]) for name, p in parameters.items()}}
    if processes().is_main:
        folder = run_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        for old in checkpoints_of(run_dir)[1:]:                 # first: the disk never holds three
            old.unlink()
        temporary = folder / "writing"
        torch.save(state, temporary)
        torch.load(temporary, weights_only=True, mmap=True)     # what no resume could read is found now
        temporary.replace(folder / f"iteration_{iteration:06d}.pt")


def checkpoints_of(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("iteration_*.pt"), reverse=True)


def load_checkpoint(run_dir: Path, agents: list[Agent]) -> dict | None:
    """Restores the agents from the newest checkpoint, and returns it; None if there is none."""
    paths = checkpoints_of(run_dir)
    if not paths:
        return None
    # mapped: each process reads one tensor at a time and keeps its part; `weights_only` runs no code in it
    state = torch.load(paths[0], weights_only=True, mmap=True,
                       map_location={"cuda:0": str(agents[0].policy.device)})
    for agent in agents:
        saved = state["agents"][agent.name]
        agent.kl_coef, agent.draws, agent.memory = saved["kl_coef"], saved["draws"], saved["memory"]
        for name, p in agent.trainable_parameters().items():
            p.data.copy_(shard_like(saved["tensors"][name], p))
            agent.optimizer.state[p] = {moment: shard_like(x.clone().to(p.device), p)
                                        for moment, x in saved["adam"][name].items()}
    return state
