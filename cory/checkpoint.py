"""Checkpoints, from which a killed run continues bit for bit (on a CPU; some CUDA kernels add in varying
order).
"""
from pathlib import Path
from pickle import UnpicklingError

import torch

from cory.distributed import processes
from cory.errors import UserError
from cory.ppo.agent import Agent
from cory.sharding import shard_like, whole_on_cpu


def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], about: dict) -> None:
    """Keeps the previous checkpoint. `about` is whatever else a run needs."""
    state = about | {"iteration": iteration, "agents": {}}
    for agent in agents:
        parameters = agent.trainable_parameters()
        state["agents"][agent.name] = {
            "kl_coef": agent.kl_coef, "draws": agent.draws, "memory": agent.memory,
            "tensors": whole_on_cpu(parameters),
            "adam": {name: whole_on_cpu(agent.optimizer.state[p]) for name, p in parameters.items()}}
    if not processes().is_main:
        return
    folder = run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    for old in checkpoints_of(run_dir)[1:]:                 # first: the disk never holds three
        old.unlink()
    temporary = folder / "writing"
    torch.save(state, temporary)
    try:
        torch.load(temporary, weights_only=True, mmap=True)         # `weights_only` runs no code in it
    except UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2][:100]
        raise UserError("what method, task or agents remember cannot be restored; keep Python's numbers, "
                        f"text, tensors, lists and dictionaries of these ({reason})") from error
    temporary.replace(folder / f"iteration_{iteration:06d}.pt")


def checkpoints_of(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("iteration_*.pt"), reverse=True)


def load_checkpoint(run_dir: Path, agents: list[Agent]) -> dict | None:
    """Restores the agents from the newest checkpoint, and returns it; None if there is none."""
    paths = checkpoints_of(run_dir)
    if not paths:
        return None
    newest, here = paths[0], str(agents[0].policy.device)
    try:
        # mapped: each process reads one tensor at a time and keeps its part
        state = torch.load(newest, weights_only=True, mmap=True, map_location={"cuda:0": here})
    except (RuntimeError, EOFError, UnpicklingError) as error:
        hint = f"delete it to go on from {paths[1].name}" if paths[1:] else "start a new run"
        raise UserError("checkpoint", str(newest), f"is damaged ({str(error)[:100]}); {hint}") from error
    saved, parameters = state["agents"], {agent.name: agent.trainable_parameters() for agent in agents}
    old = {(agent, name, x.shape) for agent in saved for name, x in saved[agent]["tensors"].items()}
    new = {(agent, name, x.shape) for agent in parameters for name, x in parameters[agent].items()}
    if old != new:
        raise UserError("checkpoint", str(newest), f"is of other agents: {min(old ^ new)} is only in one of "
                        "them; undo that edit, or start a new run")
    for agent in agents:
        of_agent = saved[agent.name]
        agent.kl_coef, agent.draws, agent.memory = (of_agent[name] for name in ("kl_coef", "draws", "memory"))
        for name, p in parameters[agent.name].items():
            p.data.copy_(shard_like(of_agent["tensors"][name], p))
            agent.optimizer.state[p] = {moment: shard_like(x.clone().to(p.device), p)
                                        for moment, x in of_agent["adam"][name].items()}
    return state
