"""State on disk, so that a killed run continues bit for bit (on CPU; some CUDA kernels add in varying order);
and the final models, for plain transformers.

A checkpoint is one safetensors file, `checkpoints/iteration_000012-CHECKSUM.safetensors`:

    llm1/weights/NAME               a weight that llm1 trains
    llm1/moments/NAME/exp_avg       what Adam keeps of it
    llm1/random, random/cpu         states of random generators
    "state" in the file's header    all else, as JSON (`json_state`)

CHECKSUM begins the file's SHA-256. The file is written under another name, flushed and renamed. So each is
whole, or is found damaged before any of it is used. Two are kept. Nothing is ever unpickled.

To save more of a run: add a tensor to `save_checkpoint` or a value to `json_state`, and put it back in
`load_checkpoint`.
"""
import functools
import json
import os
import platform
import random
import re
import shutil
import struct
import subprocess
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cory.config import Config
from cory.errors import Diverged, UserError
from cory.ppo.agent import Agent
from cory.ppo.lora import activate
from cory.ppo.model import PolicyWithValue
from cory.system.distributed import broadcast, is_main
from cory.system.files import checksum, own_folder, put_in_place, readable, remove, replaced, writable
from cory.system.sharding import full_tensor, is_sharded, shard_like

KEPT = 2                                                    # checkpoints
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
          torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}    # in safetensors


# --- save ---
def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], roles: list[Agent],
                    wandb_id: str) -> None:
    """`agents` are all of them; `roles` the same ones in the order of their roles in the next iteration.
    Raises `UserError`, and leaves the older checkpoints, for weights that are not finite or a full disk.
    """
    require_finite(agents)
    tensors = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    for agent in agents:
        tensors |= tensors_of(agent)
    state = json_state(iteration, agents, roles, wandb_id)

    folder = run_dir / "checkpoints"
    temporary = folder / "writing"
    with writable(temporary):
        if is_main():
            own_folder(folder)
            remove(temporary)
        write_tensors(temporary, tensors, state=json.dumps(state))
        broadcast(lambda: complete(run_dir, iteration, temporary))      # all wait: one that ends, ends all


def complete(run_dir: Path, iteration: int, temporary: Path) -> None:
    """Puts a written checkpoint in its place, and removes what is older than those kept."""
    with writable(temporary):
        name = f"iteration_{iteration:06d}-{checksum(temporary)}.safetensors"
        put_in_place(temporary, temporary.with_name(name))
        for old in checkpoints_of(run_dir)[KEPT:]:
            remove(old)


def tensors_of(agent: Agent) -> dict[str, Tensor]:
    """An agent's weights, Adam's state and random generator."""
    tensors = {f"{agent.name}/random": agent.generator.get_state()}
    for name, parameter in agent.policy.trained().items():
        tensors[f"{agent.name}/weights/{name}"] = parameter.detach()
        for moment, x in agent.optimizer.state[parameter].items():
            tensors[f"{agent.name}/moments/{name}/{moment}"] = torch.as_tensor(x)
    return tensors


def json_state(iteration: int, agents: list[Agent], roles: list[Agent], wandb_id: str) -> dict:
    kind, keys, *position = np.random.get_state()
    return {"iteration": iteration, "roles": [agent.name for agent in roles],
            "kl_coef": {agent.name: agent.kl_coef for agent in agents}, "wandb_id": wandb_id,
            "versions": versions(),
            "python_random": random.getstate(), "numpy_random": [kind, keys.tolist(), *position]}


@functools.cache
def versions() -> dict[str, str]:
    """What this process computes with: packages, and the commit of this code where it lies in a clone."""
    of_packages = {module.__name__: module.__version__ for module in (torch, transformers, np)}
    commit = ""
    with suppress(OSError):
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        git = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = git.stdout.strip()
    return {"commit": commit or "unknown", "python": platform.python_version()} | of_packages


def require_finite(agents: list[Agent]) -> None:
    """No weight is NaN or infinite. Raises `Diverged`: what was saved before stays."""
    for agent in agents:
        for name, parameter in agent.policy.trained().items():
            if not full_tensor(parameter.detach().isfinite().all()):
                way_out = ("these weights are not finite and not saved, older checkpoints stay. Start a new "
                           "run with a lower --learning_rate")
                raise Diverged("weights", name, agent.name, way_out)


def write_tensors(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """A safetensors file, as `save_file` makes it, one tensor at a time: that puts together what is sharded,
    so that all processes must take part. The main process writes.
    """
    # wide types first, so that each tensor begins at a multiple of its elements' size
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header, end = {"__metadata__": {"format": "pt", **metadata}}, 0
    for name, x in tensors.items():
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path if is_main() else os.devnull, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            content = full_tensor(x).cpu().contiguous()
            file.write(content.view(-1).view(torch.uint8).numpy())


# --- load ---
def checkpoints_of(run_dir: Path) -> list[Path]:
    """The run's checkpoints, newest first."""
    folder = run_dir / "checkpoints"
    if not folder.exists():
        return []
    own_folder(folder)                                      # no link
    is_checkpoint = re.compile(r"iteration_([0-9]{6,9})-[0-9a-f]{16}\.safetensors").fullmatch
    numbers = {path: int(match[1]) for path in folder.iterdir() if (match := is_checkpoint(path.name))}
    return sorted(numbers, key=numbers.get, reverse=True)


def is_whole(checkpoint: Path) -> bool:
    """Whether it is as it was written. Raises `UserError` for what is no plain file."""
    return checkpoint.stem.endswith(f"-{checksum(checkpoint)}")


def require_whole(newest: Path, *older: Path) -> None:
    """Raises `UserError` where the newest checkpoint is damaged, and offers an older one that is not."""
    if is_whole(newest):
        return
    way_out = "put back a copy of it, or start a new run"
    for checkpoint in filter(is_whole, older):
        way_out = f"delete it to go on from {checkpoint.name}, which is whole"
    raise UserError("checkpoint", str(newest), f"is damaged (its checksum is another); {way_out}")


def read_state(checkpoint: Path) -> dict:
    """The JSON part of a checkpoint. Raises `UserError`."""
    with readable(checkpoint), safe_open(checkpoint, "pt") as file:
        return json.loads(file.metadata()["state"])


def load_checkpoint(run_dir: Path, agents: list[Agent]) -> dict | None:
    """Puts back the newest checkpoint. Returns its JSON part; None where there is none.

    Raises `UserError`, before anything is changed, for one that is damaged or of other agents.
    """
    checkpoints = checkpoints_of(run_dir)
    if not checkpoints:
        return None
    newest = checkpoints[0]
    broadcast(lambda: require_whole(*checkpoints))
    state = read_state(newest)
    with readable(newest), safe_open(newest, "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys() if "/weights/" in key}
        require_shapes(newest, shapes, agents)
        require_state(state, agents)
        version, inner, gauss = state["python_random"]
        random.setstate((version, tuple(inner), gauss))
        np.random.set_state(state["numpy_random"])
        torch.set_rng_state(file.get_tensor("random/cpu"))
        if torch.cuda.is_available() and "random/cuda" in file.keys():
            torch.cuda.set_rng_state(file.get_tensor("random/cuda"))
        for agent in agents:
            agent.kl_coef = state["kl_coef"][agent.name]
            put_back(file, agent)
    return state


def require_shapes(checkpoint: Path, shapes: dict[str, tuple], agents: list[Agent]) -> None:
    """The weights in a checkpoint are these agents', by name and shape. Raises `UserError`."""
    wanted = {f"{agent.name}/weights/{name}": tuple(parameter.shape)
              for agent in agents for name, parameter in agent.policy.trained().items()}
    for key in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(key) != wanted.get(key):
            why = f"it holds {key} of shape {shapes.get(key)}, and this run has {wanted.get(key)}"
            raise UserError("checkpoint", str(checkpoint), f"is of other agents ({why}); put back this run's")


def require_state(state: dict, agents: list[Agent]) -> None:
    """Raises `ValueError` for what `json_state` does not write of these agents."""
    names, roles = {agent.name for agent in agents}, state["roles"]
    if {*roles} != names or len(roles) != len(names) > 1 or type(state["iteration"]) is not int:
        raise ValueError(f"it holds iteration {state['iteration']} with roles {roles}")
    if not (isinstance(state["versions"], dict) and isinstance(state["wandb_id"], str)):
        raise ValueError("its versions or wandb_id are of another kind")


def put_back(file: safe_open, agent: Agent) -> None:
    """The inverse of `tensors_of`; each process reads one tensor at a time, and keeps its part."""
    agent.generator.set_state(file.get_tensor(f"{agent.name}/random"))
    trained, moments = agent.policy.trained(), f"{agent.name}/moments/"
    for name, parameter in trained.items():
        saved = file.get_tensor(f"{agent.name}/weights/{name}")
        parameter.data.copy_(shard_like(saved, parameter))
    for key in file.keys():
        if key.startswith(moments):
            name, _, moment = key.removeprefix(moments).rpartition("/")
            parameter, saved = trained[name], file.get_tensor(key).clone()          # not a view of the file
            agent.optimizer.state[parameter][moment] = shard_like(saved.to(parameter.device), parameter)


# --- final models ---
def save_final(run_dir: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(run_dir/final/llm1)` loads the policy; its critic lies beside it.
    With LoRA the folder holds the adapter alone, and names the base that it belongs to.
    """
    require_finite(agents)
    if is_main():
        own_folder(run_dir / "final")
    for agent in agents:
        policy, final = agent.policy, run_dir / "final" / agent.name
        activate(policy.lm, policy.adapter)
        with replaced(final) if is_main() else nullcontext(final) as folder:
            save_model(policy, folder)
            if is_main():
                policy.tokenizer.save_pretrained(folder)
            if is_main() and policy.value_head is not None:
                save_file(policy.value_head.state_dict(), folder / "value_head.safetensors")


def save_model(policy: PolicyWithValue, folder: Path) -> None:
    """What `from_pretrained` loads."""
    lm = policy.lm
    if is_sharded(lm) and not policy.adapter:
        if is_main():
            lm.config.save_pretrained(folder)
            if lm.generation_config:
                lm.generation_config.save_pretrained(folder)
        write_tensors(folder / "model.safetensors", saved_tensors(lm))
    elif is_main():
        lm.save_pretrained(folder)


def saved_tensors(lm: nn.Module) -> dict[str, Tensor]:
    """A model's parameters, those that are tied once, and the buffers that belong to its weights."""
    belong = lm.state_dict().keys()
    buffers = {name: x for name, x in lm.named_buffers() if name in belong}
    return {name: parameter.detach() for name, parameter in lm.named_parameters()} | buffers


def require_disk(cfg: Config, run_dir: Path, agents: list[Agent]) -> None:
    """Room for final models and three checkpoints, two kept and one being written, of weights with two
    moments each. Raises `UserError`.
    """
    weights = sum(p.numel() * p.element_size() for agent in agents for p in agent.policy.trained().values())
    written = sum(p.lstat().st_size for p in run_dir.rglob("*") if p.is_file())
    need, free = (10 if cfg.save_every else 1) * weights - written, shutil.disk_usage(run_dir).free
    if free < need:
        raise UserError("run_dir", str(run_dir), f"its disk has {free / 1e9:.2f} GB free and this run needs "
                        f"{need / 1e9:.2f} GB; use another folder, or --save_every 0 for final models only")
