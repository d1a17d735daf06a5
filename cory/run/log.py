"""What a run writes as it goes: config.json, metrics.jsonl, samples.jsonl, the progress bar, and Weights &
Biases (W&B).
"""
import json
import os
import shlex
from contextlib import AbstractContextManager
from functools import cache
from math import nan
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from cory.config import Config, read_config, to_save
from cory.errors import UserError
from cory.machine.distributed import processes

Metrics = dict[str, dict[str, float]]         # metrics[who][name]; who is an agent, `team`, `mean` or a base

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"      # fits 80 columns


# --- files ---
def write_text(path: Path, text: str) -> None:
    """Replaces a file: a reader finds the old text or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def to_jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    write_text(path, to_jsonl(rows))


def append_jsonl(path: Path, rows: list[dict]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(to_jsonl(rows))


def read_jsonl(path: Path) -> list[dict]:
    """Rows; a last line that a kill has cut off is dropped."""
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


class Logger(AbstractContextManager):
    """Writes in the main process, until its block ends. A resumed log drops the rows past `done`, the last
    iteration that was saved, and goes on with the W&B run `wandb_id`. configs: each agent's settings.
    Afterwards `done` is the last iteration that was logged.

    A metric has one name everywhere, SPLIT/METRIC/WHO, such as `eval/kl/llm1`.
    """

    def __init__(self, cfg: Config, configs: dict[str, Config], run_dir: Path, done: int, wandb_id: str):
        self.agents = [*configs]
        self.run_dir = run_dir
        self.saves = cfg.save_every
        self.done = done
        self.metrics_path = run_dir / "metrics.jsonl"
        self.samples_path = run_dir / "samples.jsonl"
        self.rounding = 1e-3 if cfg.dtype == "float32" else 0.05        # of log-probabilities, nats
        self.warn_once = cache(tqdm.write)              # a text that was printed before is not printed again
        self.wandb = None
        self.wandb_id = wandb_id
        if processes().is_main:
            write_text(run_dir / "config.json", json.dumps(to_save(cfg, configs), indent=1))
            (run_dir / "eval.json").unlink(missing_ok=True)             # only finished runs have one
            for path in (self.metrics_path, self.samples_path):
                rows = read_jsonl(path) if done else []
                write_jsonl(path, [row for row in rows if row["iteration"] <= done])
            self.wandb = start_wandb(cfg, run_dir, wandb_id)
        if self.wandb:
            self.wandb_id = self.wandb.id
            if self.wandb.offline:                          # `wandb sync` uploads this part of the run alone
                for row in read_jsonl(self.metrics_path):
                    self.wandb.log(row, step=row["iteration"])
        self.bar = tqdm(total=cfg.iterations, initial=done, desc=cfg.method, dynamic_ncols=True,
                        bar_format=BAR, disable=not processes().is_main)

    def __exit__(self, kind, error, traceback):
        self.bar.close()
        if self.wandb:
            self.wandb.finish(exit_code=int(kind is not None))
        if kind is KeyboardInterrupt and processes().is_main and self.saves:
            print(f"interrupted; go on with --resume --run_dir {self.run_dir}")

    def log_training(self, iteration: int, metrics: Metrics, seconds: float, samples: list[dict]) -> None:
        """The metrics of an iteration, its duration, and some texts."""
        if iteration <= self.done:
            raise UserError(f"iteration {iteration} is logged already; call `super().train` once")
        self.done = iteration
        if not processes().is_main:
            return
        self.write("train", metrics, iteration=iteration, seconds=seconds)
        append_jsonl(self.samples_path, samples)
        shown = {}
        for title, name in {"reward": "task_reward", "KL": "kl"}.items():
            values = [metrics.get(agent, {}).get(name, nan) for agent in self.agents]
            shown[title] = " / ".join(f"{x:.2f}" for x in values)
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        gaps = [values.get("sampling_gap", 0) for values in metrics.values()]
        if max(gaps) > self.rounding:
            self.warn_once("sampling_gap exceeds rounding: the policy sampled is not the one trained")

    def log_evaluation(self, iteration: int, metrics: Metrics) -> None:
        """Held-out metrics; at W&B also a table of all texts so far."""
        if not processes().is_main:
            return
        self.write("eval", metrics, iteration=iteration)
        if self.wandb and iteration:
            from wandb import Table
            texts = pd.DataFrame(read_jsonl(self.samples_path))
            self.wandb.log({"samples": Table(dataframe=texts, allow_mixed_types=True)}, step=iteration)

    def write(self, split: str, metrics: Metrics, **row: float) -> None:
        """Adds a row to metrics.jsonl, and logs it to W&B."""
        for who, values in metrics.items():
            for name, x in values.items():
                row[f"{split}/{name}/{who}"] = x
        append_jsonl(self.metrics_path, [row])
        if self.wandb:
            self.wandb.log(row, step=row["iteration"])


def start_wandb(cfg: Config, run_dir: Path, id: str):
    """A new W&B run, which leaves any other active; offline without a key or a network; None if W&B is
    disabled. W&B's environment variables apply, such as WANDB_RUN_GROUP.
    """
    mode = cfg.wandb
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE", "online")
    if mode == "disabled":
        return None
    import wandb
    about = dict(
        project=cfg.wandb_project,
        name=os.environ.get("WANDB_NAME", run_dir.name),
        dir=os.environ.get("WANDB_DIR", run_dir),
        id=id or None,
        resume="allow",
        config=read_config(run_dir),
        settings=wandb.Settings(silent=True, console="off", reinit="create_new", init_timeout=30))
    wandb.setup(wandb.Settings(silent=True))                        # makes `login` silent
    try:
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConnectionError("there is no key (`wandb login`)")
        run = wandb.init(mode=mode, **about)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        print(f"W&B: offline, since {reason[:200]}")
        run = wandb.init(mode="offline", **about)
    run.define_metric("*", step_metric="iteration")                 # the x axis of every panel
    where = run.url
    if run.offline:
        where = f"wandb sync {shlex.quote(run.settings.wandb_dir)}/latest-run"
    print(f"W&B: {where}", flush=True)
    return run
