"""What a run writes as it goes: metrics.jsonl, samples.jsonl, Weights & Biases, the progress bar."""
import json
import os
import shlex
import textwrap
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache
from math import nan
from pathlib import Path
from typing import Callable

import pandas as pd
from tqdm import tqdm

from cory.config import Config, short_name
from cory.distributed import processes


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
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


class Logger(AbstractContextManager):
    """Writes in the main process, until its block ends. A resumed log drops the rows past `done`, the last
    iteration that was saved.
    """

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, done: int, wandb_id: str):
        self.agents, self.wandb, self.wandb_id = agents, None, wandb_id
        self.say_once = cache(tqdm.write)
        self.rounding = 1e-3 if cfg.dtype == "float32" else 0.05        # of log-probabilities, nats
        if not processes().is_main:
            return
        self.metrics, self.samples = (run_dir / name for name in ("metrics.jsonl", "samples.jsonl"))
        for path in (self.metrics, self.samples):
            kept = [row for row in read_jsonl(path) if row["iteration"] <= done] if done else []
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.start_wandb(cfg, run_dir)
        self.bar = tqdm(total=cfg.iterations, initial=done, desc=short_name(cfg.method), dynamic_ncols=True)

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
        self.send_row(row)

    # --- Weights & Biases ---
    def start_wandb(self, cfg: Config, run_dir: Path) -> None:
        """Without a key or a network, the run is kept offline."""
        self.constants, self.upload = {}, ""
        wanted = os.environ.get("WANDB_MODE", "online") if cfg.wandb == "auto" else cfg.wandb
        for mode in () if wanted == "disabled" else (wanted, "offline"):
            self.wandb = self.wandb or self.guard(init_wandb, cfg, run_dir, self.wandb_id, mode)
        if not self.wandb:
            return
        self.wandb_id = self.wandb.id
        folder = shlex.quote(f"{self.wandb.settings.wandb_dir}/latest-run")
        self.upload = f"; upload later with: wandb sync {folder}"
        print(f"W&B is offline{self.upload}" if self.wandb.offline else f"W&B: {self.wandb.url}", flush=True)
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
            reason = textwrap.shorten(str(error), 200)
            self.say_once(f"W&B: {reason}; the run goes on{self.upload}")

    def send_row(self, row: dict[str, float]) -> None:
        """Sends each metric, its mean over agents, and with each evaluation the bases' values."""
        if row["iteration"] == 0:
            self.constants = {key: x for key, x in row.items() if "/base" in key}
        of_agents = {key: x for key, x in row.items() if key.rpartition("/")[2] in self.agents}
        means = pd.Series(of_agents, dtype=float).groupby(lambda key: f"{key.rpartition('/')[0]}/mean").mean()
        constants = self.constants if any(key.startswith("eval_") for key in row) else {}
        values = constants | row | means.to_dict()
        self.send(row["iteration"], lambda _: values)


def init_wandb(cfg: Config, run_dir: Path, wandb_id: str, mode: str):
    """A W&B run. W&B's own variables come before what is not set by a flag. Raises whatever W&B does."""
    import wandb
    settings = wandb.Settings(mode=mode, silent=True, console="off", finish_timeout=60,
                              finish_timeout_raises=True,
                              init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 20)))
    wandb.setup(settings)                                           # makes `login` silent
    if mode != "offline" and not wandb.login(prompt=False, verify=False):
        raise ConnectionError("no key (`wandb login` stores one)")
    what = [short_name(cfg.task), short_name(cfg.method), cfg.preset]
    run = wandb.init(
        project=cfg.wandb_project, name=os.environ.get("WANDB_NAME", run_dir.name), id=wandb_id or None,
        group=os.environ.get("WANDB_RUN_GROUP", "-".join(what)), resume="allow", config=asdict(cfg),
        tags=None if "WANDB_TAGS" in os.environ else what, settings=settings,
        dir=Path(os.environ.get("WANDB_DIR", run_dir.parent), run_dir.name))
    run.define_metric("*", step_metric="iteration")                 # the x axis of every panel
    return run
