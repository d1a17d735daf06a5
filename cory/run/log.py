"""What a run writes as it goes: metrics.jsonl, samples.jsonl, Weights & Biases, the progress bar."""
import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from cory.config import Config
from cory.names import short_name
from cory.system.files import append_jsonl, read_jsonl, write_text


class RunLog:
    """Writes all of these. A resumed log drops the rows past `start`, the last iteration that was saved."""

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, start: int, wandb_id: str):
        self.agents = agents
        self.metrics, self.samples = (run_dir / name for name in ("metrics.jsonl", "samples.jsonl"))
        for path in (self.metrics, self.samples):
            kept = [row for row in read_jsonl(path) if row["iteration"] <= start] if start else []
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.wandb = start_wandb(cfg, run_dir, wandb_id)
        self.wandb_id = self.wandb.id if self.wandb else wandb_id
        self.bar = tqdm(total=cfg.iterations, initial=start, desc=short_name(cfg.method), dynamic_ncols=True)

    def iteration(self, iteration: int, metrics: dict, samples: list[dict], roles: dict[str, str]) -> None:
        """`metrics` by key, `role/name`, `agent/name` or `name`; `roles`: which agent played which."""
        row = {"iteration": iteration} | ({"roles": roles} if roles else {}) | metrics
        append_jsonl(self.metrics, [row])
        append_jsonl(self.samples, samples)
        if self.wandb:
            if iteration and any(key.startswith("eval/") for key in metrics):
                import wandb
                table = wandb.Table(dataframe=pd.DataFrame(read_jsonl(self.samples)), allow_mixed_types=True)
                row = row | {"samples": table}
            self.wandb.log(row, step=iteration)
        if iteration:
            self.bar.set_postfix_str(bar_text(metrics, self.agents), refresh=False)
            self.bar.update()

    def plot(self, iteration: int, path: Path) -> None:
        if self.wandb:
            import wandb
            self.wandb.log({"iteration": iteration, "curves": wandb.Image(str(path))})

    def close(self) -> None:
        self.bar.close()
        if self.wandb:
            self.wandb.finish()


def bar_text(metrics: dict, agents: list[str]) -> str:
    """`reward 1.55 / 1.61, KL 14.92 / 11.67`: a number for each agent, a dash for one that did not play; and
    a `sampling_gap` too large to be rounding.
    """
    def numbers(name: str) -> str:
        values = [metrics.get(f"{agent}/{name}") for agent in agents]
        return " / ".join("-" if value is None else f"{value:.2f}" for value in values)

    text = f"reward {numbers('task_reward')}, KL {numbers('kl')}"
    gap = max(metrics.get(f"{agent}/sampling_gap", 0) for agent in agents)
    return text if gap < 0.05 else f"{text}, SAMPLING GAP {gap:.2f}: responses are not the trained policy's"


def start_wandb(cfg: Config, run_dir: Path, wandb_id: str):
    """A W&B run, or None when disabled. Without a key it is kept offline, and says how to upload it."""
    mode = os.environ.get("WANDB_MODE", "online") if cfg.wandb == "auto" else cfg.wandb
    if mode == "disabled":
        return None
    import wandb
    settings = wandb.Settings(silent=True, console="off")
    wandb.setup(settings)                                           # makes `login` silent
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        mode = "offline"
    run = wandb.init(mode=mode, project=cfg.wandb_project, name=os.environ.get("WANDB_NAME", run_dir.name),
                     id=wandb_id or None, resume="allow" if mode == "online" else None, config=asdict(cfg),
                     dir=run_dir, settings=settings)
    if mode == "offline":
        print("W&B is offline (`wandb login` stores a key); upload later with: "
              f"wandb sync {shlex.quote(str(run_dir))}/wandb/offline-run-*", flush=True)
    run.define_metric("*", step_metric="iteration")                 # the x axis of every panel
    return run
