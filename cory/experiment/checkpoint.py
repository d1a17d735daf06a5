"""State on disk, so that a killed run continues bit for bit (on CPU; some CUDA kernels add in varying order);
and the final models, for plain transformers.

Weights are safetensors; optimizer moments and random generators are tensors read with `weights_only=True`;
the rest is JSON. Nothing is ever unpickled. A checkpoint is written to a temporary folder beside its place,
flushed, renamed; `latest` moves last, and only then is the previous checkpoint removed.
"""
import functools
import json
import platform
import random
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from cory.config import Config
from cory.errors import UserError
from cory.experiment.files import flush, replace_text
from cory.ppo.agent import Agent
from cory.ppo.lora import select


def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], roles: list[Agent],
                    wandb_id: str) -> None:
    """`agents` are all of them; `roles` the same ones in the order of their roles in the next iteration."""
    folder = run_dir / "checkpoints"
    final, temporary = folder / f"iteration_{iteration:06d}", folder / "writing"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for agent in agents:
        weights = {name: p.detach().contiguous() for name, p in agent.policy.trained().items()}
        save_file(weights, temporary / f"{agent.name}.safetensors")
        training = {"optimizer": agent.optimizer.state_dict(), "generator": agent.generator.get_state()}
        torch.save(training, temporary / f"{agent.name}.training.pt")
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    torch.save({"cpu": torch.get_rng_state(), "cuda": on_gpus}, temporary / "random.pt")
    kind, keys, *rest = np.random.get_state()
    state = {"iteration": iteration, "roles": [agent.name for agent in roles],
             "kl_coef": {agent.name: agent.kl_coef for agent in agents}, "wandb_id": wandb_id,
             "versions": versions(),
             "python_random": random.getstate(), "numpy_random": [kind, keys.tolist(), *rest]}
    (temporary / "state.json").write_text(json.dumps(state))
    put_in_place(temporary, final)      # `final` can exist already if a run was killed before the next line
    replace_text(folder / "latest", final.name)
    for old in folder.glob("iteration_*"):
        if old != final:
            shutil.rmtree(old)


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


def load_checkpoint(run_dir: Path, agents: list[Agent]) -> dict | None:
    """Puts back what `save_checkpoint` saved. Returns the JSON part; None before the first checkpoint."""
    latest = run_dir / "checkpoints" / "latest"
    if not latest.exists():
        return None
    folder = latest.parent / latest.read_text().strip()
    state = json.loads((folder / "state.json").read_text())
    for agent in agents:
        saved = load_file(folder / f"{agent.name}.safetensors")
        for name, parameter in agent.policy.trained().items():
            parameter.data.copy_(saved[name])
        training = torch.load(folder / f"{agent.name}.training.pt", weights_only=True, map_location="cpu")
        agent.optimizer.load_state_dict(training["optimizer"])
        agent.generator.set_state(training["generator"])
        agent.kl_coef = state["kl_coef"][agent.name]
    version, inner, gauss = state["python_random"]
    random.setstate((version, tuple(inner), gauss))
    kind, keys, *rest = state["numpy_random"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    generators = torch.load(folder / "random.pt", weights_only=True, map_location="cpu")
    torch.set_rng_state(generators["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(generators["cuda"])
    return state


def save_final(run_dir: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(run_dir/final/llm1)` loads the policy; its critic lies beside it.
    With LoRA the folder holds the adapter alone, and names the base that it belongs to.
    """
    for agent in agents:
        policy, final = agent.policy, run_dir / "final" / agent.name
        temporary = final.with_name(f"{agent.name}.writing")
        shutil.rmtree(temporary, ignore_errors=True)
        select(policy.lm, policy.adapter)
        policy.lm.save_pretrained(temporary)
        policy.tokenizer.save_pretrained(temporary)
        if policy.value_head is not None:
            save_file(policy.value_head.state_dict(), temporary / "value_head.safetensors")
        put_in_place(temporary, final)


def require_disk(cfg: Config, run_dir: Path, agents: list[Agent]) -> None:
    """Room for final models and two checkpoints, of weights with two moments each. Raises `UserError`."""
    weights = sum(p.numel() * p.element_size() for agent in agents for p in agent.policy.trained().values())
    written = sum(p.stat().st_size for p in run_dir.rglob("*") if p.is_file())
    need, free = (7 if cfg.save_every else 1) * weights - written, shutil.disk_usage(run_dir).free
    if free < need:
        raise UserError("run_dir", str(run_dir), f"its disk has {free / 1e9:.2f} GB free and this run needs "
                        f"{need / 1e9:.2f} GB; use another folder, or --save_every 0 for final models only")


def put_in_place(temporary: Path, final: Path) -> None:
    """Flushes a finished folder and renames it; an older one of that name goes first."""
    flush(*(p for p in temporary.rglob("*") if p.is_file()), temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    flush(final.parent)
