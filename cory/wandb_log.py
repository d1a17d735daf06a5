"""Weights & Biases. Failures there never stop training, and each error is reported once."""
import os
import shlex
import textwrap
from collections import defaultdict
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Callable

from tqdm import tqdm

from cory.config import Config, default_group, short_name
from cory.distributed import processes

MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")        # W&B's


class WandbLog:
    """run: the W&B run, offline without a key or a network; None if W&B is not wanted, and in all processes
    but the main one. id: by which a resumed run goes on.
    """

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, id: str):
        self.agents, self.id, self.run, self.upload = agents, id, None, ""
        self.constants, self.trained = {}, set()
        self.say_once = cache(tqdm.write)
        mode = os.environ.get("WANDB_MODE", "online") if cfg.wandb == "auto" else cfg.wandb
        if mode == "disabled" or not processes().is_main:
            return
        state = "offline"
        try:
            self.run = init_wandb(cfg, run_dir, id, mode)
        except Exception as error:
            state = f"{one_line(error)}, so offline"
            self.run = self.guard(init_wandb, cfg, run_dir, id, "offline")
        if self.run:
            self.id = self.run.id
            folder = shlex.quote(f"{self.run.settings.wandb_dir}/latest-run")
            self.upload = f"; upload with: wandb sync {folder}"
            print(f"W&B: {state}{self.upload}" if self.run.offline else f"W&B: {self.run.url}", flush=True)

    def send(self, iteration: int, values: Callable) -> None:
        """Sends what `values` returns, a dictionary, for the module wandb."""
        if self.run:
            import wandb
            self.guard(lambda: self.run.log(values(wandb), step=iteration))

    def send_row(self, row: dict[str, float]) -> None:
        """Sends each metric; with an evaluation also the bases' values, from iteration 0, and means over the
        agents that have been trained.
        """
        if row["iteration"] == 0:
            self.constants = {key: x for key, x in row.items() if "/base" in key}
        self.trained |= {agent for agent in self.agents if f"grad_norm/{agent}" in row}
        if any(key.startswith("eval_") for key in row):
            of_trained = defaultdict(list)
            for key, x in row.items():
                name, _, who = key.rpartition("/")
                if who in (self.trained or self.agents):
                    of_trained[f"{name}/mean"].append(x)
            row = self.constants | row | {name: fmean(xs) for name, xs in of_trained.items()}
        values = {in_section(key): x for key, x in row.items()}
        self.send(row["iteration"], lambda _: values)

    def finish(self, failed: bool) -> None:
        if self.run:
            if not self.run.offline:
                print("finishing the upload to W&B, which may take a minute", flush=True)
            self.guard(self.run.finish, exit_code=int(failed))

    def guard(self, call: Callable, *args, **named):
        try:
            return call(*args, **named)
        except Exception as error:
            self.say_once(f"W&B: {one_line(error)}; the run goes on{self.upload or ' without it'}")


def in_section(key: str) -> str:
    """What W&B calls a key of metrics.jsonl. Panels stand in sections by what precedes the first slash."""
    if key == "iteration":
        return key
    if key.startswith("eval_"):
        return key.replace("eval_", "eval/", 1)
    return f"time/{key}" if "second" in key else f"train/{key}"


def one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 200)


def init_wandb(cfg: Config, run_dir: Path, id: str, mode: str):
    """A W&B run, beside any that is active. W&B's own variables come before what is not set by a flag. Raises
    whatever W&B does.
    """
    import wandb
    if (asked := os.environ.get("WANDB_MODE", mode)) not in MODES:
        raise ValueError(f"WANDB_MODE is {asked!r}, not online, offline or disabled")
    settings = wandb.Settings(mode=mode, silent=True, console="off", finish_timeout=60, reinit="create_new",
                              finish_timeout_raises=True,
                              init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 20)))
    wandb.setup(wandb.Settings(silent=True))                        # makes `login` silent
    if mode != "offline" and not wandb.login(prompt=False, verify=False):
        raise ConnectionError("no key (`wandb login`)")
    tags = [tag[:64] for tag in (short_name(cfg.task), short_name(cfg.method), cfg.preset)]  # W&B's maximum
    run = wandb.init(
        project=cfg.wandb_project, name=os.environ.get("WANDB_NAME", run_dir.name), id=id or None,
        group=cfg.wandb_group or default_group(cfg, {}), resume="allow", config=asdict(cfg),
        tags=None if "WANDB_TAGS" in os.environ else tags, settings=settings,
        dir=Path(os.environ.get("WANDB_DIR", run_dir.parent), run_dir.name))
    run.define_metric("*", step_metric="iteration")                 # the x axis of every panel
    return run
