"""A run's folder: one process at a time; checkpoints, from which a killed run continues bit for bit (on a
CPU; some CUDA kernels add in varying order); and the final models, for plain transformers.

A checkpoint is one file of `torch.save`, written under another name, read once, and renamed. It is loaded
with `weights_only`, so that no code in it can run.
"""
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Iterator

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from cory.distributed import full_tensor, is_sharded, processes, shard_like
from cory.errors import UserError
from cory.ppo.agent import Agent


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[Path]:
    """The run's folder, its own alone until the block ends; it is removed if it is still empty then."""
    if not processes().is_main:
        yield folder
        return
    if folder.exists() and not folder.is_dir():
        raise UserError("run_dir", str(folder), "is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)            # it dies with the process
    except Timeout:
        raise UserError("run_dir", str(folder), "is in use by another process; wait, or stop it") from None
    with lock:
        if not resume and [*folder.iterdir()] != [folder / ".lock"]:
            raise UserError("run_dir", str(folder), "is not empty; continue a run with --resume, or name "
                            "another folder")
        try:
            yield folder
        finally:
            if [*folder.iterdir()] == [folder / ".lock"]:
                shutil.rmtree(folder)


def put_in_place(temporary: Path, path: Path) -> None:
    """Renames a finished file or folder; a folder of that name is removed first."""
    if temporary.is_dir() and path.exists():
        shutil.rmtree(path)
    os.replace(temporary, path)


def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], about: dict) -> None:
    """`about` is whatever else a run needs. The previous checkpoint is kept."""
    state = about | {"iteration": iteration, "agents": {agent.name: agent_state(agent) for agent in agents}}
    if not processes().is_main:
        return
    folder = run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    for old in checkpoints_of(run_dir)[1:]:                 # first: the disk never holds three
        old.unlink()
    temporary = folder / "writing"
    torch.save(state, temporary)
    try:
        torch.load(temporary, weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise UserError("what method, task or agents remember cannot be restored; keep numbers, text, "
                        f"tensors, lists and dictionaries of these ({str(error)[:150]})") from error
    put_in_place(temporary, folder / f"iteration_{iteration:06d}.pt")


def agent_state(agent: Agent) -> dict:
    """Its attributes, its tensors by name, and what Adam keeps for each weight."""
    attributes = {name: x for name, x in vars(agent).items() if name not in Agent.REBUILT}
    adam = {name: gathered(agent.optimizer.state[parameter])
            for name, parameter in agent.trainable_parameters().items()}
    return {"attributes": attributes, "tensors": gathered(agent.trainable_parameters()), "adam": adam}


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in CPU memory, in the main process alone; all processes assemble what is sharded."""
    whole = {name: full_tensor(x.detach()) for name, x in tensors.items()}
    return {name: x.cpu().contiguous() for name, x in whole.items()} if processes().is_main else {}


def checkpoints_of(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("iteration_*.pt"), reverse=True)


def load_checkpoint(run_dir: Path, agents: list[Agent]) -> dict | None:
    """Restores the agents from the newest checkpoint, and returns it; None if there is none."""
    paths = checkpoints_of(run_dir)
    if not paths:
        return None
    newest = paths[0]
    try:
        # mapped: each process reads one tensor at a time and keeps its part
        state = torch.load(newest, weights_only=True, mmap=True, map_location=lambda storage, place:
                           storage if place == "cpu" else storage.to(device=agents[0].policy.device))
    except (RuntimeError, EOFError, UnpicklingError) as error:
        hint = f"delete it to go on from {paths[1].name}" if paths[1:] else "start a new run"
        raise UserError("checkpoint", str(newest), f"is damaged ({str(error)[:100]}); {hint}") from error
    saved = state["agents"]
    old = {(f"{agent}/{name}", x.shape) for agent in saved for name, x in saved[agent]["tensors"].items()}
    new = {(f"{agent.name}/{name}", x.shape) for agent in agents
           for name, x in agent.trainable_parameters().items()}
    if old != new:
        name, shape = min(old ^ new)
        raise UserError("checkpoint", str(newest), f"is of other agents, which differ in {name} of shape "
                        f"{tuple(shape)}; undo that edit, or start a new run")
    for agent in agents:
        put_back(agent, **saved[agent.name])
    return state


def put_back(agent: Agent, attributes: dict, tensors: dict[str, Tensor], adam: dict[str, dict]) -> None:
    vars(agent).update(attributes)
    for name, parameter in agent.trainable_parameters().items():
        parameter.data.copy_(shard_like(tensors[name], parameter))
        agent.optimizer.state[parameter] = {moment: shard_like(x.clone().to(parameter.device), parameter)
                                            for moment, x in adam[name].items()}


def save_final(run_dir: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(run_dir/final/llm1)` loads the policy. With LoRA the folder holds
    only the adapter, and names its base, whose own generation settings hold until they are replaced by the
    folder's generation_config.json. The critic is saved alongside.
    """
    for agent in agents:
        policy, whole = agent.policy, None
        if is_sharded(policy.lm) and not policy.adapter:
            persistent = policy.lm.state_dict().keys()
            buffers = {name: x for name, x in policy.lm.named_buffers() if name in persistent}
            whole = gathered(dict(policy.lm.named_parameters()) | buffers)
        if not processes().is_main:
            continue
        temporary = run_dir / f"final-{agent.name}.writing"
        if policy.adapter:
            policy.adapter.save(temporary)
        else:
            policy.lm.save_pretrained(temporary, state_dict=whole)
        policy.tokenizer.save_pretrained(temporary)
        if agent.critic:
            agent.critic.save(temporary)
        (run_dir / "final").mkdir(exist_ok=True)
        put_in_place(temporary, run_dir / "final" / agent.name)
