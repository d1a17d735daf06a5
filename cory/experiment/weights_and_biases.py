"""Weights & Biases: where a run goes, under which keys, and what it holds at its end (docs/settings.md)."""
import netrc
import os
from dataclasses import asdict
from pathlib import Path
from typing import Callable
from urllib.parse import urlparse

from cory.config import Config

INIT_SECONDS, FINISH_SECONDS = 15, 25       # the most that W&B may keep a run waiting


class WandB:
    """A run's rows, tables and picture in W&B. Where W&B fails, that is said once, and the run goes on."""

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, wandb_id: str):
        self.agents, self.run_dir, self.failed = agents, run_dir, False
        self.run = start_wandb(cfg, run_dir, wandb_id)
        self.id = self.run.id if self.run else wandb_id

    def iteration(self, iteration: int, metrics: dict, roles: dict[str, str], samples: list[dict]) -> None:
        """A row of metrics.jsonl; with `samples`, the table of them."""
        row = {"iteration": iteration} | prefixed(metrics, self.agents, roles)
        self.attempt(lambda: self.run.log(row, step=iteration))
        if samples and not self.failed:             # tables wait for the server, rows do not
            self.attempt(lambda: self.run.log({"samples": wandb_table(samples)}, step=iteration))

    def results(self, held_out: dict) -> None:
        """What eval.json holds, and curves.png, which has been drawn: they join the last iteration's row."""
        self.attempt(lambda: self.run.summary.update({"held_out": held_out}))
        if not self.failed:
            self.attempt(lambda: self.log_results(held_out))

    def log_results(self, held_out: dict) -> None:
        import wandb
        of_names = {name: metrics for name, metrics in held_out.items() if isinstance(metrics, dict)}
        keys = dict.fromkeys(key for metrics in of_names.values() for key in metrics)
        rows = [{"metric": key} | {name: of_names[name].get(key) for name in of_names} for key in keys]
        self.run.log({"iteration": held_out["iteration"], "held_out_table": wandb_table(rows),
                      "curves": wandb.Image(str(self.run_dir / "curves.png"))})

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
            why = " ".join(str(error).split())[:120]
            if not self.failed:
                print(f"W&B fails ({type(error).__name__}: {why}). metrics.jsonl has every row; upload what "
                      f"W&B kept with: wandb sync {self.run_dir}/wandb/run-*", flush=True)
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
    if choice not in ("offline", "dryrun") and has_wandb_key():
        print(f"waiting for W&B, at most {INIT_SECONDS} s", flush=True)
        try:
            run = wandb.init(mode="online", resume="allow", **options)
        except wandb.errors.Error as error:
            print(f"going online failed: {' '.join(str(error).split())[:200]}")
    if run is None:
        run = wandb.init(mode="offline", **options)
        append = "--append " if wandb_id else ""
        print(f"W&B is offline (`wandb login` stores a key); upload later with: wandb sync {append}"
              f"{run_dir}/wandb/offline-run-*", flush=True)
    run.define_metric("*", step_metric="iteration")                 # the x axis of every panel
    return run


def has_wandb_key() -> bool:
    """A key in WANDB_API_KEY, or in netrc for the host of WANDB_BASE_URL."""
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return bool(os.environ.get("WANDB_API_KEY")) or host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def prefixed(metrics: dict, agents: list[str], roles: dict[str, str]) -> dict:
    """`pioneer/kl` as `role/pioneer/kl`, `llm1/kl` as `agent/llm1/kl`; others keep their names.

    Of several agents, `agent/llm1/role` is the place of its first role among `roles`: 0 is the pioneer.
    """
    players = list(roles.values()) if len(agents) > 1 else []
    row = {f"agent/{name}/role": players.index(name) for name in agents if name in players}
    for key, value in metrics.items():
        owner, slash, _ = key.partition("/")
        prefix = "agent/" if slash and owner in agents else "role/" if slash and owner in roles else ""
        row[prefix + key] = value
    return row


def wandb_table(rows: list[dict]):
    """A column for whatever any of the rows holds."""
    import wandb
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name) for name in columns] for row in rows]
    return wandb.Table(columns=columns, data=cells, allow_mixed_types=True)
