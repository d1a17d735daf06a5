"""State on disk, so that a killed run continues bit for bit (on a CPU; some CUDA kernels add in varying
order), and the final models, for plain transformers.

A checkpoint is one file of `torch.save`, `checkpoints/iteration_000012.pt`, loaded with `weights_only`, so
that no code in it can run:

    {"iteration": 12, "roles": ..., "memory": `run.state`, "agents": {"llm1": what `agent_state` returns}}

The file is written under another name, read once, and renamed.
"""
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors.torch import save_file
from torch import Tensor

from cory.errors import UserError
from cory.ppo.agent import Agent
from cory.ppo.lora import activate
from cory.system.distributed import processes
from cory.system.files import put_in_place
from cory.system.sharding import full_tensor, is_sharded, shard_like


# --- save ---
def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], memory: dict, about: dict) -> None:
    """`memory` is `run.state`, and `about` whatever else a run needs. The previous checkpoint is kept."""
    state = about | {"iteration": iteration, "memory": memory,
                     "agents": {agent.name: agent_state(agent) for agent in agents}}
    processes().broadcast(lambda: write(run_dir, state))


def agent_state(agent: Agent) -> dict:
    """Its numbers, its tensors by name, and what Adam keeps for each weight."""
    adam = {name: gathered(agent.optimizer.state[parameter])
            for name, parameter in agent.policy.trainable_parameters().items()}
    return {"numbers": agent.numbers(), "tensors": gathered(agent.tensors()), "adam": adam}


def write(run_dir: Path, state: dict) -> None:
    """Raises `UserError` for a file that could not be read again, before it takes the place of another."""
    folder = run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    for old in checkpoints_of(run_dir)[1:]:                 # first: the disk never holds three
        old.unlink()
    temporary = folder / "writing"
    torch.save(state, temporary)
    try:
        torch.load(temporary, weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise UserError("run.state", [*state["memory"]], "has a value that cannot be restored; keep numbers, "
                        "text, tensors, lists, tuples and dictionaries of these") from error
    put_in_place(temporary, folder / f"iteration_{state['iteration']:06d}.pt")


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in CPU memory, in the main process alone; all processes assemble what is sharded."""
    whole = {name: full_tensor(x.detach()) for name, x in tensors.items()}
    return {name: x.cpu().contiguous() for name, x in whole.items()} if processes().is_main else {}


# --- load ---
def checkpoints_of(run_dir: Path) -> list[Path]:
    """The run's checkpoints, newest first."""
    return sorted((run_dir / "checkpoints").glob("iteration_*.pt"), reverse=True)


def load_checkpoint(run_dir: Path, agents: list[Agent]) -> dict | None:
    """Restores the agents from the newest checkpoint, and returns it; None if there is none.

    Raises `UserError`, before anything is restored, for one that is damaged or of other agents.
    """
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
    for agent in agents:
        if any(name.startswith("reference.") for name in saved.get(agent.name, {"tensors": {}})["tensors"]):
            agent.move_reference()
    require_same_agents(newest, saved, agents)
    for agent in agents:
        put_back(agent, **saved[agent.name])
    return state


def require_same_agents(checkpoint: Path, saved: dict[str, dict], agents: list[Agent]) -> None:
    """Raises `UserError` unless the agents' tensors have the names and shapes of those in a checkpoint."""
    old = {(f"{agent}/{name}", x.shape) for agent in saved for name, x in saved[agent]["tensors"].items()}
    new = {(f"{agent.name}/{name}", x.shape) for agent in agents for name, x in agent.tensors().items()}
    if old != new:
        name, shape = min(old ^ new)
        raise UserError("checkpoint", str(checkpoint), f"is of other agents, which differ in {name} of shape "
                        f"{tuple(shape)}; undo that edit, or start a new run")


def put_back(agent: Agent, numbers: dict, tensors: dict[str, Tensor], adam: dict[str, dict]) -> None:
    """Restores numbers, weights (in place) and Adam's state."""
    for name, number in numbers.items():
        setattr(agent, name, number)
    for name, x in agent.tensors().items():
        x.data.copy_(shard_like(tensors[name], x))
    for name, parameter in agent.policy.trainable_parameters().items():
        agent.optimizer.state[parameter] = {moment: shard_like(x.clone().to(parameter.device), parameter)
                                            for moment, x in adam[name].items()}


# --- final models ---
def save_final(run_dir: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(run_dir/final/llm1)` loads the policy. With LoRA the folder holds
    only the adapter, and names its base, which generates by its authors' settings until it is given the
    folder's generation_config.json. The critic is saved alongside.
    """
    for agent in agents:
        policy, whole = agent.policy, None
        activate(policy.lm, policy.adapter)
        if is_sharded(policy.lm) and not policy.adapter:
            persistent = policy.lm.state_dict().keys()
            buffers = {name: x for name, x in policy.lm.named_buffers() if name in persistent}
            whole = gathered(dict(policy.lm.named_parameters()) | buffers)
        if not processes().is_main:
            continue
        temporary = run_dir / f"final-{agent.name}.writing"
        policy.lm.save_pretrained(temporary, state_dict=whole)
        policy.tokenizer.save_pretrained(temporary)
        if policy.value_head is not None:
            save_file(policy.value_head.state_dict(), temporary / "value_head.safetensors")
        (run_dir / "final").mkdir(exist_ok=True)
        put_in_place(temporary, run_dir / "final" / agent.name)
