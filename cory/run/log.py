"""What a run writes as it goes: metrics.jsonl, samples.jsonl, the progress bar, Weights & Biases (W&B)."""
import json
import os
import shlex
import sys
from contextlib import AbstractContextManager
from functools import cache
from math import nan
from pathlib import Path
from typing import Callable

import pandas as pd
from tqdm import tqdm

from cory.config import Config, read_config
from cory.machine.distributed import processes

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
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


class Logger(AbstractContextManager):
    """Writes in the main process, until its block ends. A resumed log drops the rows past `done`, the last
    iteration that was saved, and goes on with the W&B run `wandb_id`.
    """

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, done: int, wandb_id: str):
        self.agents, self.wandb, self.say_once = agents, None, cache(tqdm.write)
        self.rounding = 1e-3 if cfg.dtype == "float32" else 0.05        # of log-probabilities, nats
        self.metrics, self.samples = run_dir / "metrics.jsonl", run_dir / "samples.jsonl"
        if processes().is_main:
            for path in (self.metrics, self.samples):
                kept = [row for row in read_jsonl(path) if row["iteration"] <= done] if done else []
                write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
            self.wandb = start_wandb(cfg, run_dir, wandb_id)
        self.wandb_id = self.wandb.id if self.wandb else wandb_id
        self.bar = tqdm(total=cfg.iterations, initial=done, desc=cfg.method, dynamic_ncols=True,
                        bar_format=BAR, disable=not processes().is_main)

    def __exit__(self, kind, error, traceback):
        self.bar.close()
        if self.wandb:
            self.wandb.finish(exit_code=int(kind is not None))
        if kind is KeyboardInterrupt and processes().is_main:
            print(f"interrupted; go on with: python {sys.argv[0]} --resume --run_dir {self.metrics.parent}")

    def iteration(self, iteration: int, row: dict[str, float], samples: list[dict]) -> None:
        """A row of training metrics, by `NAME/AGENT` or `NAME`, and some texts."""
        if processes().is_main:
            self.write(dict(iteration=iteration, **row))
            append_jsonl(self.samples, samples)
            shown = {title: " / ".join(f"{row.get(f'{name}/{agent}', nan):.2f}" for agent in self.agents)
                     for title, name in (("reward", "task_reward"), ("KL", "kl"))}
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()
            if max(row.get(f"sampling_gap/{agent}", 0) for agent in self.agents) > self.rounding:
                self.say_once("sampling_gap exceeds rounding: the policy sampled is not the one trained")

    def evaluation(self, iteration: int, row: dict[str, float]) -> None:
        """A row of held-out metrics, `eval_NAME/WHO`; at W&B also a table of the last texts."""
        if processes().is_main:
            self.write(dict(iteration=iteration, **row))
            texts = dict(dataframe=pd.DataFrame(read_jsonl(self.samples)[-200:]), allow_mixed_types=True)
            self.send(iteration, lambda wandb: {"samples": wandb.Table(**texts)})

    def write(self, row: dict[str, float]) -> None:
        append_jsonl(self.metrics, [row])
        self.send(row["iteration"], lambda _: {in_section(key): x for key, x in row.items()})

    def send(self, iteration: int, values: Callable) -> None:
        """Sends what `values` returns, a dictionary, for the module wandb."""
        if self.wandb:
            import wandb
            self.wandb.log(values(wandb), step=iteration)


def in_section(key: str) -> str:
    """What W&B calls a key of metrics.jsonl. Panels stand in sections by what precedes the first slash."""
    if key == "iteration":
        return key
    return key.replace("eval_", "eval/", 1) if key.startswith("eval_") else f"train/{key}"


def start_wandb(cfg: Config, run_dir: Path, id: str):
    """A W&B run, beside any that is active; offline without a key or a network; None if W&B is disabled. Its
    own variables hold, such as WANDB_RUN_GROUP.
    """
    mode = os.environ.get("WANDB_MODE", "online") if cfg.wandb == "auto" else cfg.wandb
    if mode == "disabled":
        return None
    import wandb
    settings = wandb.Settings(silent=True, console="off", reinit="create_new", init_timeout=30)
    about = dict(project=cfg.wandb_project, name=os.environ.get("WANDB_NAME", run_dir.name), id=id or None,
                 resume="allow", config=read_config(run_dir), dir=os.environ.get("WANDB_DIR", run_dir),
                 settings=settings)
    wandb.setup(wandb.Settings(silent=True))                        # makes `login` silent
    try:
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConnectionError("there is no key (`wandb login`)")
        run = wandb.init(mode=mode, **about)
    except Exception as error:
        print(f"W&B: offline, since {str(error).splitlines()[0][:200]}")
        run = wandb.init(mode="offline", **about)
    run.define_metric("*", step_metric="iteration")                 # the x axis of every panel
    upload = f"wandb sync {shlex.quote(run.settings.wandb_dir)}/latest-run"
    print(f"W&B: {upload if run.offline else run.url}", flush=True)
    return run
