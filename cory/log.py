"""What a run writes as it goes: metrics.jsonl, samples.jsonl, Weights & Biases, the progress bar."""
import json
import os
import shlex
import textwrap
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Callable

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


INIT_SECONDS = 20                   # to reach W&B


class Logger:
    """Writes metrics, samples, W&B and the progress bar, in the main process, until its block ends. A resumed
    log drops the rows past `done`, the last iteration that was saved.
    """

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, done: int, wandb_id: str):
        self.agents, self.wandb, self.wandb_id, self.failures = agents, None, wandb_id, set()
        self.rounding = 1e-3 if cfg.dtype == "float32" else 0.05        # of log-probabilities, nats
        if not processes().is_main:
            return
        self.metrics, self.samples = (run_dir / name for name in ("metrics.jsonl", "samples.jsonl"))
        for path in (self.metrics, self.samples):
            kept = [row for row in read_jsonl(path) if row["iteration"] <= done] if done else []
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.guard(self.start_wandb, cfg, run_dir)
        self.bar = tqdm(total=cfg.iterations, initial=done, desc=short_name(cfg.method), dynamic_ncols=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if processes().is_main:
            self.bar.close()
        if self.wandb:
            if not self.wandb.offline:
                print("finishing the upload to W&B, which may take a minute", flush=True)
            failed = kind is not None and not issubclass(kind, SystemExit)      # a signal is no failure
            self.guard(self.wandb.finish, exit_code=int(failed))

    def iteration(self, iteration: int, row: dict[str, float], samples: list[dict]) -> None:
        """A row of training metrics, by `NAME/AGENT` or `NAME`, and some texts."""
        if processes().is_main:
            self.write({"iteration": iteration} | row)
            append_jsonl(self.samples, samples)
            self.bar.set_postfix_str(bar_text(row, self.agents, self.rounding), refresh=False)
            self.bar.update()

    def evaluation(self, iteration: int, row: dict[str, float]) -> None:
        """A row of held-out metrics, `eval_NAME/AGENT`."""
        if processes().is_main:
            self.write({"iteration": iteration} | row)
        if self.wandb and iteration:
            self.guard(self.samples_to_wandb, iteration)

    def write(self, row: dict[str, float]) -> None:
        append_jsonl(self.metrics, [row])
        if self.wandb:
            self.guard(self.to_wandb, row)

    # --- Weights & Biases ---
    def guard(self, call: Callable, *args, **named) -> None:
        """Calls W&B. What fails there ends no training; each kind of error is reported once."""
        try:
            call(*args, **named)
        except Exception as error:
            if type(error) not in self.failures:
                where = f"; upload later with: {self.upload}" if self.wandb else ""
                reason = textwrap.shorten(str(error), 200)
                print(f"\nW&B failed, and the run goes on: {reason}{where}", flush=True)
            self.failures.add(type(error))

    def start_wandb(self, cfg: Config, run_dir: Path) -> None:
        """Without a key or a network, the run is kept offline."""
        mode = os.environ.get("WANDB_MODE", "online") if cfg.wandb == "auto" else cfg.wandb
        if mode == "disabled":
            return
        try:
            self.wandb, why = init_wandb(cfg, run_dir, self.wandb_id, mode), "`wandb login` stores a key"
        except Exception as error:
            why = textwrap.shorten(str(error), 200)
            self.wandb = init_wandb(cfg, run_dir, self.wandb_id, "offline")
        self.wandb_id, self.constants = self.wandb.id, {}
        self.upload = "wandb sync " + shlex.quote(f"{self.wandb.settings.wandb_dir}/latest-run")
        print(f"W&B is offline ({why}); upload later with: {self.upload}" if self.wandb.offline else
              f"W&B: {self.wandb.url}", flush=True)
        self.wandb.define_metric("*", step_metric="iteration")          # the x axis of every panel
        for row in read_jsonl(self.metrics):        # a killed process has lost some; W&B drops what it has
            self.to_wandb(row)

    def to_wandb(self, row: dict[str, float]) -> None:
        """The row with the mean over agents of each metric, and with each evaluation the bases' values."""
        if row["iteration"] == 0:
            self.constants = {key: x for key, x in row.items() if "/base" in key}
        of_agents = defaultdict(list)
        for key, value in row.items():
            name, _, who = key.rpartition("/")
            if who in self.agents:
                of_agents[f"{name}/mean"].append(value)
        means = {key: fmean(values) for key, values in of_agents.items()}
        constants = self.constants if any(key.startswith("eval_") for key in row) else {}
        self.wandb.log(constants | row | means, step=row["iteration"])

    def samples_to_wandb(self, iteration: int) -> None:
        import wandb
        table = wandb.Table(dataframe=pd.DataFrame(read_jsonl(self.samples)), allow_mixed_types=True)
        self.wandb.log({"samples": table}, step=iteration)

    def plot(self, iteration: int, path: Path) -> None:
        if self.wandb:
            import wandb
            self.guard(lambda: self.wandb.log({"curves": wandb.Image(str(path))}, step=iteration))


def init_wandb(cfg: Config, run_dir: Path, wandb_id: str, mode: str):
    """A W&B run, offline if there is no key. Raises whatever W&B does, e.g. if it is not reached in time."""
    import wandb
    settings = wandb.Settings(mode=mode, silent=True, console="off", init_timeout=INIT_SECONDS,
                              finish_timeout=60, finish_timeout_raises=True)
    wandb.setup(settings)                                           # makes `login` silent
    if mode != "offline" and not wandb.login(prompt=False, verify=False):
        settings.mode = "offline"
    what = [short_name(cfg.task), short_name(cfg.method), cfg.preset]
    # W&B's own variables come before what is not set by a flag
    project = cfg.wandb_project
    if project == Config.wandb_project:
        project = os.environ.get("WANDB_PROJECT", project)
    return wandb.init(
        project=project, name=os.environ.get("WANDB_NAME", run_dir.name), id=wandb_id or None,
        group=os.environ.get("WANDB_RUN_GROUP", "-".join(what)), resume="allow", config=asdict(cfg),
        tags=None if "WANDB_TAGS" in os.environ else what, settings=settings,
        dir=Path(os.environ.get("WANDB_DIR", run_dir.parent), run_dir.name))


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
