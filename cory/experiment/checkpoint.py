"""State on disk, so that a killed run continues bit for bit (on CPU; some CUDA kernels add in varying order);
and the final models, for plain transformers.

Weights are safetensors; optimizer moments and random generators are tensors read with `weights_only=True`;
the rest is JSON. Nothing is ever unpickled. A checkpoint is written to a temporary folder beside its place,
flushed, and renamed, so that the newest folder `iteration_N` is always whole. Two are kept.

Each holds `checksums.sha256`, as `sha256sum -c` reads it, and is checked against it before any of it is used.
"""
import functools
import hashlib
import json
import platform
import random
import re
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from math import inf
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
from cory.system.files import own_folder, put_in_place, read_json, read_text, readable, remove, writable
from cory.system.sharding import full_tensor, is_sharded, shard_like

CHECKSUMS, KEPT = "checksums.sha256", 2
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
         torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}    # in safetensors


def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], roles: list[Agent],
                    wandb_id: str) -> None:
    """`agents` are all of them; `roles` the same ones in the order of their roles in the next iteration.
    Raises `UserError`, and leaves the older checkpoints, for weights that are not finite or a full disk.
    """
    require_finite(agents)
    folder = run_dir / "checkpoints"
    final, temporary = folder / f"iteration_{iteration:06d}", folder / "writing"
    with writable(temporary):
        if is_main():
            own_folder(folder)
            remove(temporary)
            temporary.mkdir()
        for agent in agents:
            trained = agent.policy.trained()
            write_tensors(temporary / f"{agent.name}.safetensors", trained)
            write_tensors(temporary / f"{agent.name}.moments.safetensors", moments_of(agent, trained))

        def complete() -> None:
            write_state(temporary, iteration, agents, roles, wandb_id)
            names = sorted(path.name for path in temporary.iterdir())
            sums = zip(digests(temporary, names), names, strict=True)
            (temporary / CHECKSUMS).write_text("".join(f"{digest}  {name}\n" for digest, name in sums))
            put_in_place(temporary, final)
            for old in checkpoints_of(run_dir)[KEPT:]:
                remove(old)

        broadcast(complete)


def moments_of(agent: Agent, trained: dict) -> dict:
    """The tensors of the optimizer's state, as `PARAMETER/NAME`; a number of it is a tensor, too."""
    return {f"{name}/{key}": torch.as_tensor(x) for name, p in trained.items()
            for key, x in agent.optimizer.state[p].items()}


def write_tensors(path: Path, tensors: dict) -> None:
    """A safetensors file, one tensor after another: of a model that is divided among processes no more than
    one is put together at a time. Every process takes part, the first writes.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, x in tensors.items():
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": KINDS[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") if is_main() else nullcontext() as file:
        if file:
            file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            whole = full_tensor(x.detach())
            if file:
                file.write(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def write_state(folder: Path, iteration: int, agents: list[Agent], roles: list[Agent], wandb_id: str) -> None:
    generators = {agent.name: agent.generator.get_state() for agent in agents}
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0)
    torch.save({"cpu": torch.get_rng_state(), "cuda": on_gpu, "agents": generators}, folder / "random.pt")
    kind, keys, *rest = np.random.get_state()
    state = {"iteration": iteration, "roles": [agent.name for agent in roles],
             "kl_coef": {agent.name: agent.kl_coef for agent in agents}, "wandb_id": wandb_id,
             "versions": versions(),
             "python_random": random.getstate(), "numpy_random": [kind, keys.tolist(), *rest]}
    (folder / "state.json").write_text(json.dumps(state))


@functools.cache
def versions() -> dict[str, str]:
    """What this process computes with: packages, and the commit of this code where it lies in a clone."""
    found = {"commit": "unknown", "python": platform.python_version()}
    found |= {module.__name__: module.__version__ for module in (torch, transformers, np)}
    with suppress(OSError):
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        git = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
        found["commit"] = git.stdout.strip() or found["commit"]
    return found


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The run's checkpoints, newest first."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    own_folder(folder)                                      # no link
    of_number = {int(path.name[10:]): path for path in folder.iterdir()
                 if re.fullmatch(r"iteration_[0-9]{6,9}", path.name)}
    return [of_number[number] for number in sorted(of_number, reverse=True)]


def load_checkpoint(run_dir: Path, agents: list[Agent]) -> dict | None:
    """Puts back the newest checkpoint. Returns its JSON part; None where there is none.

    Raises `UserError`, before anything is changed, for what is damaged; an older whole checkpoint is offered.
    """
    there = checkpoints_of(run_dir)
    if not there:
        return None
    newest, *older = there
    if any(newest.glob("*.training.pt")):
        way_out = "was written by an older version, in its format; go on with that, or start a new run"
        raise UserError("checkpoint", str(newest), way_out)
    try:
        broadcast(lambda: require_unharmed(newest))
    except UserError as error:
        whole = next((folder for folder in older if is_unharmed(folder)), None)
        offer = f"; {whole.name} is whole: delete {newest} to go on from it" if whole else ""
        raise UserError("checkpoint", newest.name, f"{error}{offer}") from error
    state = checked_state(newest, agents)
    for agent in agents:
        require_shapes(newest, agent)
    with readable(newest / "random.pt"):
        generators = torch.load(newest / "random.pt", weights_only=True, map_location="cpu")
        version, inner, gauss = state["python_random"]
        kind, keys, *rest = state["numpy_random"]
        random.setstate((version, tuple(inner), gauss))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(generators["cpu"])
        if torch.cuda.is_available() and len(generators["cuda"]):
            torch.cuda.set_rng_state(generators["cuda"])
        for agent in agents:
            agent.generator.set_state(generators["agents"][agent.name])
            agent.kl_coef = state["kl_coef"][agent.name]
    for agent in agents:
        put_back(newest, agent)
    return state


def put_back(folder: Path, agent: Agent) -> None:
    """An agent's weights and moments, one tensor at a time."""
    trained = agent.policy.trained()
    path = folder / f"{agent.name}.safetensors"
    with readable(path), safe_open(path, "pt") as file:
        for name, parameter in trained.items():
            whole = file.get_tensor(name)
            if not whole.isfinite().all():
                raise UserError("file", str(path), f"{name} holds numbers that are not finite")
            parameter.data.copy_(shard_like(whole, parameter))
    path = folder / f"{agent.name}.moments.safetensors"
    with readable(path), safe_open(path, "pt") as file:
        for key in file.keys():
            name, _, what = key.rpartition("/")
            parameter, x = trained[name], file.get_tensor(key).clone()          # not a view of the file
            agent.optimizer.state[parameter][what] = shard_like(x.to(parameter.device), parameter)


def require_unharmed(folder: Path) -> None:
    """Every file, and no other, is there and as it was written. Raises `UserError` that names the file."""
    lines = read_text(folder / CHECKSUMS).splitlines(keepends=True)
    if not all(re.fullmatch(r"[0-9a-f]{64}  [\w.-]+\n", line) for line in lines):
        raise UserError("file", str(folder / CHECKSUMS), "is damaged (no list of checksums)")
    expected = {line[66:-1]: line[:64] for line in lines}
    there = {path.name for path in folder.iterdir()} - {CHECKSUMS}
    for name in sorted(there ^ expected.keys()):
        why = "is missing" if name in expected else f"is not in {CHECKSUMS}"
        raise UserError("file", str(folder / name), why)
    for name, digest in zip(expected, digests(folder, list(expected)), strict=True):
        if digest != expected[name]:
            raise UserError("file", str(folder / name), "is damaged (its checksum is another)")


def is_unharmed(folder: Path) -> bool:
    with suppress(UserError):
        require_unharmed(folder)
        return True
    return False


def digests(folder: Path, names: list[str]) -> list[str]:
    """SHA-256 of each plain file, several at a time."""
    def digest(name: str) -> str:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise UserError("file", str(path), "is no plain file; put back a copy of it")
        with readable(path), path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(digest, names))


def checked_state(folder: Path, agents: list[Agent]) -> dict:
    """state.json, if it can be of these agents. Raises `UserError`."""
    path, names = folder / "state.json", [agent.name for agent in agents]
    with readable(path):
        state = read_json(path)
        roles, kl_coef = state["roles"], state["kl_coef"]
        number = state["iteration"]
        sound = {"iteration": type(number) is int and number == int(folder.name[10:]),
                 "roles": {*roles} == {*names} and (len(roles) == len(names) or len(names) == 1),
                 "kl_coef": kl_coef.keys() == {*names} and all(0 <= x < inf for x in kl_coef.values()),
                 "wandb_id": isinstance(state["wandb_id"], str),
                 "versions": isinstance(state["versions"], dict)}
    for name, holds in sound.items():
        if not holds:
            why = f"holds {name} {state[name]!r}, which is not of this run; put back a copy of it"
            raise UserError("file", str(path), why)
    return state


def require_shapes(folder: Path, agent: Agent) -> None:
    """The tensors of an agent's files have its parameters' names and shapes. Raises `UserError`."""
    trained = agent.policy.trained()
    path = folder / f"{agent.name}.safetensors"
    with readable(path), safe_open(path, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    for name in sorted(shapes.keys() ^ trained.keys()):
        why = "lacks" if name in trained else "has an unknown"
        raise UserError("file", str(path), f"{why} {name}: it is of another agent or model")
    for name, shape in shapes.items():
        if shape != trained[name].shape:
            raise UserError("file", str(path), f"{name} is {shape}, not {tuple(trained[name].shape)}")
    path = folder / f"{agent.name}.moments.safetensors"
    with readable(path), safe_open(path, "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    for key, shape in shapes.items():
        name = key.rpartition("/")[0]
        if name not in trained or shape not in ((), trained[name].shape):
            raise UserError("file", str(path), f"{key} is {shape}, of no parameter of this agent")
    moments = {key.rpartition("/")[2] for key in shapes}
    for name in {key.rpartition("/")[0] for key in shapes}:         # without a gradient so far it has none
        for key in (f"{name}/{moment}" for moment in moments):
            if key not in shapes:
                raise UserError("file", str(path), f"lacks {key}: it is of another agent or model")


def require_finite(agents: list[Agent]) -> None:
    """No weight is NaN or infinite. Raises `Diverged`: what was saved before stays."""
    for agent in agents:
        for name, parameter in agent.policy.trained().items():
            if not full_tensor(parameter.detach().isfinite().all()):
                way_out = ("these weights are not finite and not saved, older checkpoints stay. Start a new "
                           "run with a lower --learning_rate")
                raise Diverged("weights", name, agent.name, way_out)


def save_final(run_dir: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(run_dir/final/llm1)` loads the policy; its critic lies beside it.
    With LoRA the folder holds the adapter alone, and names the base that it belongs to.
    """
    require_finite(agents)
    for agent in agents:
        policy, final = agent.policy, run_dir / "final" / agent.name
        temporary = final.with_name(f"{agent.name}.writing")
        with writable(final):
            if is_main():
                own_folder(final.parent)
                remove(temporary)
                temporary.mkdir()
            activate(policy.lm, policy.adapter)
            save_model(policy, temporary)
            if not is_main():
                continue
            policy.tokenizer.save_pretrained(temporary)
            if policy.value_head is not None:
                save_file(policy.value_head.state_dict(), temporary / "value_head.safetensors")
            put_in_place(temporary, final)


def save_model(policy: PolicyWithValue, folder: Path) -> None:
    """What `from_pretrained` loads; of a model that is divided among processes, one tensor after another."""
    lm, in_parts = policy.lm, is_sharded(policy.lm) and not policy.adapter
    if in_parts:
        write_tensors(folder / "model.safetensors", saved_tensors(lm))
    if is_main() and in_parts:
        lm.config.save_pretrained(folder)
        if lm.generation_config:
            lm.generation_config.save_pretrained(folder)
    elif is_main():
        lm.save_pretrained(folder)


def saved_tensors(lm: nn.Module) -> dict[str, Tensor]:
    """A model's parameters, those that are tied once, and the buffers that belong to its weights."""
    belong = lm.state_dict().keys()
    return dict(lm.named_parameters()) | {name: x for name, x in lm.named_buffers() if name in belong}


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
