"""State on disk, so that a killed run continues bit for bit (on CPU; some CUDA kernels add in varying order);
and the final models, for plain transformers.

A checkpoint is one safetensors file, `checkpoints/iteration_000012-CHECKSUM.safetensors`:

    llm1/weights/NAME               a weight that llm1 trains
    llm1/moments/NAME/exp_avg       what Adam keeps of it; numbers/NAME/... what is no tensor there
    llm1/random, random/cpu         states of random generators
    state/NAME                      a tensor of `run.state`, what the loop keeps
    "state" in the file's header    all else, as JSON (`json_state`)

CHECKSUM begins the file's SHA-256. The file is written under another name, flushed and renamed, so that it is
whole, or is found damaged before any of it is used. Nothing is ever unpickled.

To save more: add a tensor to `tensors_of` or a value to `json_state`, and use it in `load_checkpoint`.
"""
import functools
import hashlib
import json
import platform
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cory.config import Config
from cory.errors import Diverged, UserError
from cory.experiment.log import log_digest
from cory.ppo.agent import Agent
from cory.ppo.lora import activate
from cory.system.distributed import broadcast, is_main
from cory.system.files import checksum, own_folder, put_in_place, readable, remove, replaced, writable
from cory.system.sharding import full_tensor, is_sharded, shard_like

KEPT = 2                                                    # checkpoints
TENSOR = "tensor of the file"                               # stands for one in the JSON part


# --- save ---
def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], roles: list[Agent], memory: dict,
                    about: dict) -> None:
    """`agents` are all of them; `roles` the same ones in the order of their roles in the next iteration;
    `memory` is `run.state`, what the loop keeps; `about` are JSON values that tell whose checkpoint it is.
    Raises `UserError`, and leaves the older checkpoints, for weights that are not finite or a full disk.
    """
    require_finite(agents)
    tensors, state = tensors_of(agents), about | json_state(iteration, agents, roles)
    kept = {}
    state["memory"] = packed("state", memory, kept)
    tensors |= {name: x.clone() for name, x in kept.items()}        # two of one memory could not be saved
    tensors = gathered(tensors)
    broadcast(lambda: write(run_dir, tensors, state))           # all wait: one that ends, ends all


def write(run_dir: Path, tensors: dict[str, Tensor], state: dict) -> None:
    """Writes a checkpoint of the log as it stands, and removes what is older than those kept."""
    state["log"] = log_digest(run_dir, state["iteration"])
    folder = own_folder(run_dir / "checkpoints")
    temporary = folder / "writing"
    with writable(temporary):
        remove(temporary)
        save_file(tensors, temporary, {"state": json.dumps(state)})
        name = f"iteration_{state['iteration']:06d}-{checksum(temporary)}.safetensors"
        put_in_place(temporary, folder / name)
        for old in checkpoints_of(run_dir)[KEPT:]:
            remove(old)


def tensors_of(agents: list[Agent]) -> dict[str, Tensor]:
    """The agents' weights, Adam's state, and all of PyTorch's random generators."""
    tensors = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    for agent in agents:
        tensors[f"{agent.name}/random"] = agent.generator.get_state()
        for name, parameter in agent.policy.trained().items():
            tensors[f"{agent.name}/weights/{name}"] = parameter
            for moment, x in agent.optimizer.state[parameter].items():
                kind = "moments" if isinstance(x, Tensor) else "numbers"
                exact = x if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
                tensors[f"{agent.name}/{kind}/{name}/{moment}"] = exact
    return tensors


def packed(name: str, value, tensors: dict[str, Tensor]):
    """`value` as JSON: a tensor in it goes to `tensors`, and leaves its name. Raises `UserError` for what
    would not come back as it is: tuples, sets, objects, keys that are no text.
    """
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {TENSOR: name, "device": value.device.type}
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: packed(f"{name}/{key}", item, tensors) for key, item in value.items()}
    if type(value) is list:
        return [packed(f"{name}/{i}", item, tensors) for i, item in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UserError(f"run.{name}", value, f"is a {type(value).__name__}; keep numbers, text, lists, tensors "
                    "and dictionaries with text as keys there")


def unpacked(value, file: safe_open, device: torch.device):
    """The inverse of `packed`."""
    if isinstance(value, list):
        return [unpacked(item, file, device) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        x = file.get_tensor(value[TENSOR])
        return x.to(device) if value["device"] == device.type else x
    return {key: unpacked(item, file, device) for key, item in value.items()}


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in CPU memory, in the main process alone. What is there and whole is not copied; what is
    sharded is put together, so that all processes must take part.
    """
    whole = {}
    for name, x in tensors.items():
        x = full_tensor(x.detach())
        if is_main():
            whole[name] = x.cpu().contiguous()
    return whole


def json_state(iteration: int, agents: list[Agent], roles: list[Agent]) -> dict:
    kind, keys, *position = np.random.get_state()
    return {"iteration": iteration, "roles": [agent.name for agent in roles],
            "kl_coef": {agent.name: agent.kl_coef for agent in agents}, "optimizers": optimizers_of(agents),
            "versions": versions(),
            "python_random": random.getstate(), "numpy_random": [kind, keys.tolist(), *position]}


def optimizers_of(agents: list[Agent]) -> dict[str, str]:
    return {agent.name: type(agent.optimizer).__name__ for agent in agents}


@functools.cache
def versions() -> dict[str, str]:
    """What this process computes with: packages, and the commit of this code where it lies in a clone."""
    packages = {module.__name__: module.__version__ for module in (torch, transformers, np)}
    commit = ""
    with suppress(OSError):
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        git = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = git.stdout.strip()
    return {"commit": commit or "unknown", "python": platform.python_version()} | packages


def sources() -> dict[str, str]:
    """{file: SHA-256} of this package's code by its place in it, and of the modules that this process has
    loaded from elsewhere than Python's own folders, which are the user's, by their names.
    """
    package, installed = Path(__file__).parents[1], (Path(sys.prefix), Path(sys.base_prefix))
    files = {file.relative_to(package.parent).as_posix(): file for file in package.rglob("*.py")}
    for module in [*sys.modules.values()]:
        file = Path(getattr(module, "__file__", None) or "")
        elsewhere = not any(file.is_relative_to(folder) for folder in (package, *installed))
        if elsewhere and file.suffix == ".py" and file.is_file():
            files[file.name] = file
    return {name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for name, file in sorted(files.items())}


def require_finite(agents: list[Agent]) -> None:
    """No weight is NaN or infinite. Raises `Diverged`: what was saved before stays."""
    for agent in agents:
        for name, parameter in agent.policy.trained().items():
            if not full_tensor(parameter.detach().isfinite().all()):
                way_out = ("these weights are not finite and not saved, older checkpoints stay. Start a new "
                           "run with a lower --learning_rate")
                raise Diverged("weights", name, agent.name, way_out)


# --- load ---
def checkpoints_of(run_dir: Path) -> list[Path]:
    """The run's checkpoints, newest first."""
    folder = run_dir / "checkpoints"
    if folder.exists():
        own_folder(folder)                                      # no link
    paths = folder.glob("iteration_*-*.safetensors")
    return sorted(paths, key=lambda path: (len(path.name), path.name), reverse=True)


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
        require_same_agents(newest, file, state, agents)
        version, inner, gauss = state["python_random"]
        random.setstate((version, tuple(inner), gauss))
        np.random.set_state(state["numpy_random"])
        torch.set_rng_state(file.get_tensor("random/cpu"))
        if torch.cuda.is_available() and "random/cuda" in file.keys():
            torch.cuda.set_rng_state(file.get_tensor("random/cuda"))
        for agent in agents:
            agent.kl_coef = state["kl_coef"][agent.name]
            put_back(file, agent)
        state["memory"] = unpacked(state["memory"], file, agents[0].policy.device)
    return state


def require_same_agents(checkpoint: Path, file: safe_open, state: dict, agents: list[Agent]) -> None:
    """The weights in a checkpoint are these agents', by name and shape, and so are the kinds of optimizers.
    Raises `UserError`.
    """
    saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys() if "/weights/" in key}
    wanted = {f"{agent.name}/weights/{name}": tuple(parameter.shape)
              for agent in agents for name, parameter in agent.policy.trained().items()}
    if saved != wanted:
        name, shape = min(saved.items() ^ wanted.items())
        way_out = f"is of other agents, which differ in {name} of shape {shape}; put back this run's"
        raise UserError("checkpoint", str(checkpoint), way_out)
    before, now = state["optimizers"], optimizers_of(agents)
    if before != now:
        way_out = f"is of the optimizers {before}, now {now}; undo that edit, or start a new run"
        raise UserError("checkpoint", str(checkpoint), way_out)


def put_back(file: safe_open, agent: Agent) -> None:
    """The inverse of `tensors_of`; each process reads one tensor at a time, and keeps its part."""
    agent.generator.set_state(file.get_tensor(f"{agent.name}/random"))
    trained = agent.policy.trained()
    for name, parameter in trained.items():
        saved = file.get_tensor(f"{agent.name}/weights/{name}")
        parameter.data.copy_(shard_like(saved, parameter))
    for key in file.keys():
        name, _, moment = key.rpartition("/")
        who, _, name = name.partition("/")
        kind, _, name = name.partition("/")
        if who != agent.name or kind not in ("moments", "numbers"):
            continue
        parameter, saved = trained[name], file.get_tensor(key).clone()              # not a view of the file
        x = saved.item() if kind == "numbers" else shard_like(saved.to(parameter.device), parameter)
        agent.optimizer.state[parameter][moment] = x


# --- final models ---
def save_final(run_dir: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(run_dir/final/llm1)` loads the policy. With LoRA the folder holds
    the adapter alone, and names the base that it belongs to. The critic lies beside it, for its user.
    """
    require_finite(agents)
    broadcast(lambda: own_folder(run_dir / "final"))
    for agent in agents:
        policy, whole = agent.policy, None
        activate(policy.lm, policy.adapter)
        if is_sharded(policy.lm) and not policy.adapter:
            whole = gathered(saved_tensors(policy.lm))
        if not is_main():
            continue
        with replaced(run_dir / "final" / agent.name) as folder:
            policy.lm.save_pretrained(folder, state_dict=whole)
            policy.tokenizer.save_pretrained(folder)
            if policy.value_head is not None:
                save_file(policy.value_head.state_dict(), folder / "value_head.safetensors")


def saved_tensors(lm: nn.Module) -> dict[str, Tensor]:
    """A model's parameters, those that are tied once, and the buffers that belong to its weights."""
    persistent = lm.state_dict().keys()
    buffers = {name: x for name, x in lm.named_buffers() if name in persistent}
    return dict(lm.named_parameters()) | buffers


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
