"""What a run writes as it goes: metrics.jsonl, samples.jsonl, Weights & Biases, the progress bar."""
import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from cory.config import Config
from cory.distributed import processes
from cory.errors import short_name


# --- files ---
def write_text(path: Path, text: str) -> None:
    """Replaces a file: a reader finds the old text or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def append_jsonl(path: Path, rows: list[dict]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[dict]:
    """Rows, none if there is no file; a last line that a kill has cut off is dropped."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


class Logger:
    """Writes all of these, in the main process. A resumed log drops the rows past `done`, the last iteration
    that was saved. As a context manager it ends the log.
    """

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, done: int, wandb_id: str):
        self.agents, self.wandb_id = agents, wandb_id
        self.rounding = 1e-3 if cfg.dtype == "float32" else 0.05        # of log-probabilities, nats
        if not processes().is_main:
            return
        self.metrics, self.samples = (run_dir / name for name in ("metrics.jsonl", "samples.jsonl"))
        for path in (self.metrics, self.samples):
            kept = [row for row in read_jsonl(path) if row["iteration"] <= done] if done else []
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.wandb = start_wandb(cfg, run_dir, wandb_id)
        self.wandb_id = self.wandb.id if self.wandb else wandb_id
        self.bar = tqdm(total=cfg.iterations, initial=done, desc=short_name(cfg.method), dynamic_ncols=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if processes().is_main:
            self.bar.close()
            if self.wandb:
                self.wandb.finish(exit_code=int(kind is not None))

    def iteration(self, iteration: int, row: dict[str, float], samples: list[dict]) -> None:
        """A row of training metrics, by `NAME/AGENT` or `NAME`, and some texts."""
        if processes().is_main:
            self.write(iteration, row)
            append_jsonl(self.samples, samples)
            self.bar.set_postfix_str(bar_text(row, self.agents, self.rounding), refresh=False)
            self.bar.update()

    def evaluation(self, iteration: int, row: dict[str, float]) -> None:
        """A row of held-out metrics, `eval_NAME/AGENT`."""
        if processes().is_main:
            self.write(iteration, row)
            samples = read_jsonl(self.samples)
            if self.wandb and samples:
                import wandb
                table = wandb.Table(dataframe=pd.DataFrame(samples), allow_mixed_types=True)
                self.wandb.log({"iteration": iteration, "samples": table}, step=iteration)

    def write(self, iteration: int, row: dict[str, float]) -> None:
        row = {"iteration": iteration} | row
        append_jsonl(self.metrics, [row])
        if self.wandb:
            self.wandb.log(row, step=iteration)

    def plot(self, iteration: int, path: Path) -> None:
        if self.wandb:
            import wandb
            self.wandb.log({"iteration": iteration, "curves": wandb.Image(str(path))})


def bar_text(row: dict[str, float], agents: list[str], rounding: float) -> str:
    """`reward 1.55 / 1.61, KL 14.92 / 11.67`: a number for each agent, a dash for one that did not play; and
    a `sampling_gap` larger than `rounding`.
    """
    def numbers(*names: str) -> str:
        values = [next((row[f"{name}/{agent}"] for name in names if f"{name}/{agent}" in row), None)
                  for agent in agents]
        return " / ".join("-" if value is None else f"{value:.2f}" for value in values)

    text = f"reward {numbers('task_reward')}, KL {numbers('kl_full', 'kl_k1')}"
    gap = max(row.get(f"sampling_gap/{agent}", 0) for agent in agents)
    alarm = f", SAMPLING GAP {gap:.2g}: responses are not the trained policy's"
    return text if gap < rounding else text + alarm


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
