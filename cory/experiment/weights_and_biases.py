"""Weights & Biases: where a run goes, under which keys, and what it holds at its end (docs/settings.md)."""
import json
import netrc
import os
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlparse

from cory.config import Config

INIT_SECONDS, FINISH_SECONDS = 15, 25       # the most that W&B may keep a run waiting


def start_wandb(cfg: Config, run_dir: Path, wandb_id: str):
    """A W&B run, or None when disabled. Offline, without a key or a connection, it says how to upload it."""
    choice = os.environ.get("WANDB_MODE", "auto") if cfg.wandb == "auto" else cfg.wandb
    if choice == "disabled":
        return None
    import wandb
    tags = [tag.strip() for tag in cfg.wandb_tags.split(",") if tag.strip()]
    options = dict(project=cfg.wandb_project, group=cfg.wandb_group or None, tags=tags or None,
                   name=cfg.wandb_name or run_dir.name, id=wandb_id or None, config=asdict(cfg),
                   dir=run_dir, settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS,
                                                        login_timeout=INIT_SECONDS,
                                                        finish_timeout=FINISH_SECONDS,
                                                        finish_timeout_raises=True))
    run, why = None, "no key found, `wandb login` stores one"
    if choice in ("offline", "dryrun"):                             # the latter is W&B's older name
        why = "asked for"
    elif has_wandb_key():
        print(f"waiting for W&B, at most {INIT_SECONDS} s", flush=True)
        try:
            run = wandb.init(mode="online", resume="allow", **options)
        except wandb.errors.Error as error:
            why = f"going online failed: {' '.join(str(error).split())[:200]}"
    if run is None:
        run = wandb.init(mode="offline", **options)
        print(f"W&B is offline ({why}); upload later with: wandb sync {'--append ' if wandb_id else ''}"
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
    A value that is neither number nor text goes as JSON, which W&B takes as text.
    """
    players = list(roles.values()) if len(agents) > 1 else []
    row = {f"agent/{name}/role": players.index(name) for name in agents if name in players}
    for key, value in metrics.items():
        owner, slash, _ = key.partition("/")
        prefix = "agent/" if slash and owner in agents else "role/" if slash and owner in roles else ""
        row[prefix + key] = value if isinstance(value, (int, float, str)) else json.dumps(value)
    return row


def wandb_table(rows: list[dict]):
    """A column for whatever any of the rows holds."""
    import wandb
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name) for name in columns] for row in rows]
    return wandb.Table(columns=columns, data=cells, allow_mixed_types=True)


def shown_results(run_dir: Path, held_out: dict) -> dict:
    """The curves and the held-out table, which join the row of the last iteration."""
    import wandb
    found = {name: metrics for name, metrics in held_out.items() if isinstance(metrics, dict)}
    rows = [{"metric": key} | {name: found[name].get(key) for name in found}
            for key in dict.fromkeys(key for metrics in found.values() for key in metrics)]
    return {"curves": wandb.Image(str(run_dir / "curves.png")), "held_out_table": wandb_table(rows)}


def finish_wandb(run, run_dir: Path) -> None:
    """Leaves W&B. What could not be sent by then lies in the run's folder, and how to send it is said."""
    try:
        run.finish()
    except Exception as error:                          # of its connection, of kinds of its own
        say_silent("does not end", run_dir, error)


def say_silent(how: str, run_dir: Path, error: Exception) -> None:
    why = " ".join(str(error).split())[:120]
    print(f"W&B {how} ({type(error).__name__}: {why}). metrics.jsonl has every row; upload what W&B kept "
          f"with: wandb sync {run_dir}/wandb/run-*", flush=True)
