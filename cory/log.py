"""What a run writes as it goes: metrics.jsonl, samples.jsonl, Weights & Biases, the progress bar."""
import json
import os
import shlex
import textwrap
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Callable

import pandas as pd
from tqdm import tqdm

from cory.config import Config, default_group
from cory.distributed import processes
from cory.errors import reading, short_name

WANDB_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")      # W&B's
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"      # fits 80 columns


# --- files ---
def write_text(path: Path, text: str) -> None:
    """Replaces a file: a reader finds the old text or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def append_jsonl(path: Path, rows: list[dict]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[dict]:
    """Rows; a last line that a kill has cut off is dropped."""
    with reading(path):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


class Logger(AbstractContextManager):
    """Writes in the main process, until its block ends. A resumed log drops the rows past `done`, the last
    iteration that was saved.
    """

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, done: int, wandb_id: str):
        self.agents, self.wandb, self.wandb_id = agents, None, wandb_id
        self.say_once = cache(tqdm.write)
        self.rounding = 1e-3 if cfg.dtype == "float32" else 0.05        # of log-probabilities, nats
        if processes().is_main:
            self.metrics, self.samples = (run_dir / name for name in ("metrics.jsonl", "samples.jsonl"))
            for path in (self.metrics, self.samples):
                kept = [row for row in read_jsonl(path) if row["iteration"] <= done] if done else []
                write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
            self.start_wandb(cfg, run_dir)
        self.bar = tqdm(total=cfg.iterations, initial=done, desc=short_name(cfg.method), dynamic_ncols=True,
                        bar_format=BAR, disable=not processes().is_main)

    def __exit__(self, kind, error, traceback):
        self.bar.close()
        if self.wandb:
            if not self.wandb.offline:
                print("finishing the upload to W&B, which may take a minute", flush=True)
            failed = kind is not None and not issubclass(kind, SystemExit)      # a signal is no failure
            self.guard(self.wandb.finish, exit_code=int(failed))

    def iteration(self, iteration: int, row: dict[str, float], samples: list[dict]) -> None:
        """A row of training metrics, by `NAME/AGENT` or `NAME`, and some texts."""
        if not processes().is_main:
            return
        self.write({"iteration": iteration} | row)
        append_jsonl(self.samples, samples)
        values = {key.replace("kl_k1/", "kl_full/"): x for key, x in row.items()}
        shown = {title: " / ".join(f"{values.get(f'{name}/{agent}', nan):.2f}" for agent in self.agents)
                 for title, name in (("reward", "task_reward"), ("KL", "kl_full"))}
        gap = max(row.get(f"sampling_gap/{agent}", 0) for agent in self.agents)
        if gap > self.rounding:
            self.say_once("sampling_gap exceeds rounding error: the policy sampled is not the one trained")
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def evaluation(self, iteration: int, row: dict[str, float]) -> None:
        """A row of held-out metrics, `eval_NAME/AGENT`."""
        if processes().is_main:
            self.write({"iteration": iteration} | row)
        if iteration:
            self.send(iteration, lambda wandb: {"samples": wandb.Table(
                dataframe=pd.DataFrame(read_jsonl(self.samples)[-200:]), allow_mixed_types=True)})

    def write(self, row: dict[str, float]) -> None:
        append_jsonl(self.metrics, [row])
        for name, x in row.items():
            if not isfinite(x):
                self.say_once(f"{name} is not finite in some iterations, which its curve leaves out")
        self.send_row(row)

    # --- Weights & Biases ---
    def start_wandb(self, cfg: Config, run_dir: Path) -> None:
        """Without a key or a network, the run is kept offline."""
        self.constants, self.upload = {}, ""
        mode = os.environ.get("WANDB_MODE", "online") if cfg.wandb == "auto" else cfg.wandb
        state = "offline"
        if mode == "disabled":
            return
        try:
            self.wandb = init_wandb(cfg, run_dir, self.wandb_id, mode)
        except Exception as error:
            state = f"{one_line(error)}, so offline"
            self.wandb = self.guard(init_wandb, cfg, run_dir, self.wandb_id, "offline")
        if not self.wandb:
            return
        self.wandb_id = self.wandb.id
        folder = shlex.quote(f"{self.wandb.settings.wandb_dir}/latest-run")
        self.upload = f"; upload with: wandb sync {folder}"
        print(f"W&B: {state}{self.upload}" if self.wandb.offline else f"W&B: {self.wandb.url}", flush=True)
        for row in read_jsonl(self.metrics):        # W&B ignores those that it has
            self.send_row(row)

    def send(self, iteration: int, values: Callable) -> None:
        """Sends what `values` returns, a dictionary, for the module wandb."""
        if self.wandb:
            import wandb
            self.guard(lambda: self.wandb.log(values(wandb), step=iteration))

    def guard(self, call: Callable, *args, **named):
        """Calls W&B. Failures there never stop training; each error is reported once."""
        try:
            return call(*args, **named)
        except Exception as error:
            self.say_once(f"W&B: {one_line(error)}; the run goes on{self.upload or ' without it'}")

    def send_row(self, row: dict[str, float]) -> None:
        """Sends each metric, its mean over agents, and with each evaluation the bases' values."""
        if row["iteration"] == 0:
            self.constants = {key: x for key, x in row.items() if "/base" in key}
        of_agents = defaultdict(list)
        for key, x in row.items():
            name, _, who = key.rpartition("/")
            if who in self.agents:
                of_agents[f"{name}/mean"].append(x)
        means = {name: fmean(xs) for name, xs in of_agents.items()}
        constants = self.constants if any(key.startswith("eval_") for key in row) else {}
        values = constants | row | means
        self.send(row["iteration"], lambda _: values)


def one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 200)


def init_wandb(cfg: Config, run_dir: Path, wandb_id: str, mode: str):
    """A W&B run, beside any that is active. W&B's own variables come before what is not set by a flag. Raises
    whatever W&B does.
    """
    import wandb
    if (asked := os.environ.get("WANDB_MODE", mode)) not in WANDB_MODES:
        raise ValueError(f"WANDB_MODE is {asked!r}, not online, offline or disabled")
    settings = wandb.Settings(mode=mode, silent=True, console="off", finish_timeout=60, reinit="create_new",
                              finish_timeout_raises=True,
                              init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 20)))
    wandb.setup(wandb.Settings(silent=True))                        # makes `login` silent
    if mode != "offline" and not wandb.login(prompt=False, verify=False):
        raise ConnectionError("no key (`wandb login`)")
    tags = [tag[:64] for tag in (short_name(cfg.task), short_name(cfg.method), cfg.preset)]  # W&B's maximum
    run = wandb.init(
        project=cfg.wandb_project, name=os.environ.get("WANDB_NAME", run_dir.name), id=wandb_id or None,
        group=cfg.wandb_group or default_group(cfg, {}), resume="allow", config=asdict(cfg),
        tags=None if "WANDB_TAGS" in os.environ else tags, settings=settings,
        dir=Path(os.environ.get("WANDB_DIR", run_dir.parent), run_dir.name))
    run.define_metric("*", step_metric="iteration")                 # the x axis of every panel
    return run
