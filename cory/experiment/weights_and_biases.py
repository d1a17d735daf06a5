"""Weights & Biases: where a run goes, under which keys, and what it holds at its end (docs/settings.md)."""
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Callable

from cory.config import Config
from cory.system.hub import short_message

INIT_SECONDS, FINISH_SECONDS = 15, 25       # the most that W&B may keep a run waiting


class WandB:
    """A run's rows, samples and picture in W&B. Where W&B fails, that is said once, and the run goes on."""

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, wandb_id: str):
        self.agents, self.run_dir, self.failed = agents, run_dir, False
        self.run = start_wandb(cfg, run_dir, wandb_id)
        self.id = self.run.id if self.run else wandb_id

    def iteration(self, iteration: int, metrics: dict, roles: dict[str, str], samples: list[dict]) -> None:
        """A row of metrics.jsonl; with `samples`, the table of them."""
        row = {"iteration": iteration} | prefixed(metrics, self.agents, roles)
        self.attempt(lambda: self.run.log(row, step=iteration))
        if samples and not self.failed:             # tables wait for the server, rows do not
            self.attempt(lambda: self.run.log({"samples": table(samples)}, step=iteration))

    def picture(self, iteration: int) -> None:
        """curves.png, which has been drawn: it joins the last row."""
        def log() -> None:
            import wandb
            self.run.log({"iteration": iteration, "curves": wandb.Image(str(self.run_dir / "curves.png"))})

        self.attempt(log)

    def close(self) -> None:
        """What could not be sent by then lies in the run's folder. The second time it does nothing."""
        self.attempt(lambda: self.run.finish())
        self.run = None

    def attempt(self, call: Callable[[], None]) -> None:
        """The one place where W&B's errors end, which are of kinds of its own."""
        if self.run is None:
            return
        try:
            call()
        except Exception as error:
            if not self.failed:
                print(f"W&B fails ({short_message(error)}). metrics.jsonl has every row; upload what W&B "
                      f"kept with: wandb sync {shlex.quote(str(self.run_dir))}/wandb/run-*", flush=True)
            self.failed = True


def start_wandb(cfg: Config, run_dir: Path, wandb_id: str):
    """A W&B run, or None when disabled. Offline, without a key or a connection, it says how to upload it."""
    choice = os.environ.get("WANDB_MODE", "auto") if cfg.wandb == "auto" else cfg.wandb
    if choice == "disabled":
        return None
    import wandb
    tags = [tag.strip() for tag in cfg.wandb_tags.split(",") if tag.strip()]
    settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS,
                              login_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS,
                              finish_timeout_raises=True)
    options = dict(project=cfg.wandb_project, group=cfg.wandb_group or None, tags=tags or None,
                   name=cfg.wandb_name or run_dir.name, id=wandb_id or None, config=asdict(cfg),
                   dir=run_dir, settings=settings)
    run = None
    wandb.setup(settings)                                           # makes `login` silent
    try:
        # it looks for a key, and asks no server
        if choice in ("auto", "online") and wandb.login(prompt=False, verify=False):
            print(f"waiting for W&B, at most {INIT_SECONDS} s", flush=True)
            run = wandb.init(mode="online", resume="allow", **options)
    except wandb.errors.Error as error:
        print(f"going online failed: {short_message(error)}")
    if run is None:
        run = wandb.init(mode="offline", **options)
        append = "--append " if wandb_id else ""
        print(f"W&B is offline (`wandb login` stores a key); upload later with: wandb sync {append}"
              f"{shlex.quote(str(run_dir))}/wandb/offline-run-*", flush=True)
    run.define_metric("*", step_metric="iteration")                 # the x axis of every panel
    return run


def prefixed(metrics: dict, agents: list[str], roles: dict[str, str]) -> dict:
    """`pioneer/kl` as `role/pioneer/kl`, `llm1/kl` as `agent/llm1/kl`; others keep their names.

    Of several agents, `agent/llm1/role` is the place of its first role among `roles`: 0 is the pioneer.
    """
    players = list(roles.values()) if len(agents) > 1 else []
    row = {f"agent/{name}/role": players.index(name) for name in agents if name in players}
    prefixes = dict.fromkeys(roles, "role/") | dict.fromkeys(agents, "agent/")
    return row | {prefixes.get(key.partition("/")[0], "") + key: value for key, value in metrics.items()}


def table(rows: list[dict]):
    """A column for whatever any of the rows holds."""
    import pandas as pd
    import wandb
    return wandb.Table(dataframe=pd.DataFrame(rows), allow_mixed_types=True)
