"""A run's folder: one process at a time; checkpoints, from which a killed run continues bit for bit (on a
CPU; some CUDA kernels add in varying order); signals, after which it saves and ends; and the final models,
for plain transformers.
"""
import os
import shutil
import signal
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Iterator

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from cory.distributed import full_tensor, is_sharded, processes, shard_like
from cory.errors import UserError
from cory.ppo.agent import Agent

# Ctrl-C; a scheduler's end, and its warning; a closed terminal
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[Path]:
    """The run's folder, its own alone until the block ends; it is removed if it is still empty then."""
    if not processes().is_main:
        yield folder
        return
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


@contextmanager
def signals_noted(received: list[int]) -> Iterator[None]:
    """A block in which the first of `SIGNALS` is noted in `received`, and a second one ends the program at
    once. Signals that are ignored stay so, as SIGHUP under `nohup`. Outside the main thread, where Python
    cannot install handlers, signals keep their effect.

    Processes forked in the block, as the workers of a pool are, do not note signals: they are ended by all
    but Ctrl-C, which a terminal sends to them as well, and which leaves them to the iteration.
    """
    own = os.getpid()

    def note(number: int, frame) -> None:
        if os.getpid() != own:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if received and processes().size == 1:                  # torchrun repeats the first one
            raise KeyboardInterrupt
        if not received and processes().is_main:
            with suppress(OSError):                             # the terminal may be closed
                os.write(2, b"\nfinishing this iteration first\n")     # a `print` may be interrupted
        received.append(int(number))

    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in SIGNALS if is_main and signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def save_checkpoint(run_dir: Path, iteration: int, agents: list[Agent], about: dict) -> None:
    """Keeps the previous checkpoint. `about` is whatever else a run needs."""
    state = about | {"iteration": iteration, "agents": {}}
    for agent in agents:
        parameters = agent.trainable_parameters()
        state["agents"][agent.name] = {
            "attributes": {name: x for name, x in vars(agent).items() if name not in Agent.REBUILT},
            "tensors": gathered(parameters),
            "adam": {name: gathered(agent.optimizer.state[p]) for name, p in parameters.items()}}
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
        vars(agent).update(of_agent["attributes"])
        for name, p in parameters[agent.name].items():
            p.data.copy_(shard_like(of_agent["tensors"][name], p))
            agent.optimizer.state[p] = {moment: shard_like(x.clone().to(p.device), p)
                                        for moment, x in of_agent["adam"][name].items()}
    return state


def save_final(run_dir: Path, agents: list[Agent]) -> None:
    """`AutoModelForCausalLM.from_pretrained(run_dir/final/llm1)` loads the policy. With LoRA the folder holds
    only the adapter, and names its base.
    """
    for agent in agents:
        policy, whole = agent.policy, None
        if is_sharded(policy.lm) and not policy.adapter:
            once = {**dict(policy.lm.named_parameters()), **dict(policy.lm.named_buffers())}    # if tied
            whole = gathered({name: x for name, x in policy.lm.state_dict().items() if name in once})
        if not processes().is_main:
            continue
        folder = run_dir / "final" / agent.name
        policy.activate()
        policy.lm.save_pretrained(folder, state_dict=whole)
        policy.tokenizer.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):           # which is written for its owner's eyes alone
            shutil.copymode(folder / "tokenizer_config.json", path)
