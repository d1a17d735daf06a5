"""State on disk, so that a killed run continues bit for bit (on a CPU; some CUDA kernels add in varying
order), and the final models, for plain transformers.

A checkpoint is one safetensors file, `checkpoints/iteration_000012-CHECKSUM.safetensors`:

    llm1/tensors/NAME               what `Agent.tensors` returns: trained weights, a reference of its own
    llm1/adam/NAME/exp_avg          what Adam keeps for a weight
    state/NAME                      a tensor of `run.state`, what the method remembers
    "state" in the file's header    all else, as JSON

CHECKSUM is the start of the file's SHA-256. The file is written under another name and renamed. Nothing is
ever unpickled.
"""
import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cory.errors import UserError
from cory.ppo.agent import Agent
from cory.ppo.lora import activate
from cory.system.distributed import processes
from cory.system.files import put_in_place
from cory.system.sharding import full_tensor, is_sharded, shard_like

TENSOR = "tensor of the file"                               # stands for one in the JSON part


# --- save ---
def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], memory: dict, about: dict) -> None:
    """`memory` is `run.state`, and `about` other JSON values. The previous checkpoint is kept. Raises
    `UserError`, and leaves the older checkpoints, for weights that are not finite.
    """
    require_finite(agents)
    tensors = {}
    state = about | {"iteration": iteration, "memory": packed("state", memory, tensors),
                     "numbers": {agent.name: agent.numbers() for agent in agents}}
    for agent in agents:
        tensors |= {f"{agent.name}/tensors/{name}": x for name, x in agent.tensors().items()}
        for name, parameter in agent.policy.trainable_parameters().items():
            for moment, x in agent.optimizer.state[parameter].items():
                tensors[f"{agent.name}/adam/{name}/{moment}"] = torch.as_tensor(x)
    tensors = gathered(tensors)
    processes().broadcast(lambda: write(run_dir, tensors, state))


def write(run_dir: Path, tensors: dict[str, Tensor], state: dict) -> None:
    folder = run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    for old in checkpoints_of(run_dir)[1:]:                 # first: the disk never holds three
        old.unlink()
    temporary = folder / "writing"
    save_file(tensors, temporary, {"state": json.dumps(state)})
    name = f"iteration_{state['iteration']:06d}-{checksum(temporary)}.safetensors"
    put_in_place(temporary, folder / name)


def packed(name: str, value, tensors: dict[str, Tensor]):
    """`value` as JSON: a tensor in it goes to `tensors`, and leaves its name. Raises `UserError` for what
    would not come back as it is: tuples, sets, objects, keys that are not text.
    """
    if isinstance(value, Tensor):
        tensors[name] = value.detach().clone()
        return {TENSOR: name, "on_cpu": value.device.type == "cpu"}
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: packed(f"{name}/{key}", item, tensors) for key, item in value.items()}
    if type(value) is list:
        return [packed(f"{name}/{i}", item, tensors) for i, item in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UserError(f"run.{name}", value, f"is a {type(value).__name__}; keep numbers, text, lists, tensors "
                    "and dictionaries with text as keys there")


def unpacked(value, file: safe_open, device: torch.device):
    """The inverse of `packed`; `device` is for tensors that were on a GPU."""
    if isinstance(value, list):
        return [unpacked(item, file, device) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return file.get_tensor(value[TENSOR]).to("cpu" if value["on_cpu"] else device)
    return {key: unpacked(item, file, device) for key, item in value.items()}


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in CPU memory, in the main process alone; all processes assemble what is sharded."""
    whole = {name: full_tensor(x.detach()) for name, x in tensors.items()}
    return {name: x.cpu().contiguous() for name, x in whole.items()} if processes().is_main else {}


def require_finite(agents: list[Agent]) -> None:
    """Raises `UserError` for a trained weight that is NaN or infinite."""
    for agent in agents:
        for name, parameter in agent.policy.trainable_parameters().items():
            if not full_tensor(parameter.detach().isfinite().all()):
                hint = "has diverged; these are not saved, older checkpoints stay. Lower --learning_rate"
                raise UserError("weights", name, f"not finite: {agent.name} {hint}")


def checksum(path: Path) -> str:
    """The first 16 digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


# --- load ---
def checkpoints_of(run_dir: Path) -> list[Path]:
    """The run's checkpoints, newest first."""
    return sorted((run_dir / "checkpoints").glob("iteration_*-*.safetensors"), reverse=True)


def load_checkpoint(run_dir: Path, agents: list[Agent]) -> dict | None:
    """Restores the newest checkpoint. Returns its JSON part; None if there is none.

    Raises `UserError`, before anything is restored, for one that is damaged or of other agents.
    """
    paths = checkpoints_of(run_dir)
    if not paths:
        return None
    newest = paths[0]
    if not newest.stem.endswith(f"-{checksum(newest)}"):
        hint = f"delete it to go on from {paths[1].name}" if paths[1:] else "start a new run"
        raise UserError("checkpoint", str(newest), f"is damaged (its checksum does not match); {hint}")
    with safe_open(newest, "pt") as file:
        state = json.loads(file.metadata()["state"])
        keys = set(file.keys())
        for agent in agents:
            if any(key.startswith(f"{agent.name}/tensors/reference.") for key in keys):
                agent.move_reference()
        require_same_agents(newest, file, keys, agents)
        for agent in agents:
            put_back(file, keys, agent, state["numbers"][agent.name])
        state["memory"] = unpacked(state["memory"], file, agents[0].policy.device)
    return state


def require_same_agents(checkpoint: Path, file: safe_open, keys: set[str], agents: list[Agent]) -> None:
    """The tensors in a checkpoint are these agents', by name and shape. Raises `UserError`."""
    saved = {key: tuple(file.get_slice(key).get_shape()) for key in keys if "/tensors/" in key}
    wanted = {f"{agent.name}/tensors/{name}": tuple(x.shape)
              for agent in agents for name, x in agent.tensors().items()}
    if saved != wanted:
        name, shape = min(saved.items() ^ wanted.items())
        raise UserError("checkpoint", str(checkpoint), f"is of other agents, which differ in {name} of shape "
                        f"{shape}; undo that edit, or start a new run")


def put_back(file: safe_open, keys: set[str], agent: Agent, numbers: dict[str, float]) -> None:
    """Numbers, weights in place, Adam's state; each process reads one tensor at a time and keeps its part."""
    for name, number in numbers.items():
        setattr(agent, name, number)
    for name, x in agent.tensors().items():
        x.data.copy_(shard_like(file.get_tensor(f"{agent.name}/tensors/{name}"), x))
    for name, parameter in agent.policy.trainable_parameters().items():
        prefix = f"{agent.name}/adam/{name}/"
        for key in (key for key in keys if key.startswith(prefix)):
            saved = file.get_tensor(key).clone()                    # not a view of the file
            moment = shard_like(saved.to(parameter.device), parameter)
            agent.optimizer.state[parameter][key.removeprefix(prefix)] = moment


# --- final models ---
def save_final(run_dir: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(run_dir/final/llm1)` loads the policy. With LoRA the folder holds
    the adapter alone, and names the base that it belongs to. The critic is saved beside it.
    """
    require_finite(agents)
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
