"""What a run writes as it goes: metrics.jsonl, samples.jsonl, the progress bar; and what it sends to W&B."""
import json
from contextlib import AbstractContextManager
from functools import cache
from math import isfinite, nan
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from cory.config import Config, short_name
from cory.distributed import processes
from cory.errors import reading
from cory.wandb_log import WandbLog

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
        self.agents, self.say_once = agents, cache(tqdm.write)
        self.rounding = 1e-3 if cfg.dtype == "float32" else 0.05        # of log-probabilities, nats
        if processes().is_main:
            self.metrics, self.samples = (run_dir / name for name in ("metrics.jsonl", "samples.jsonl"))
            for path in (self.metrics, self.samples):
                kept = [row for row in read_jsonl(path) if row["iteration"] <= done] if done else []
                write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.wandb = WandbLog(cfg, agents, run_dir, wandb_id)
        if self.wandb.run:
            for row in read_jsonl(self.metrics):            # W&B ignores those that it has
                self.wandb.send_row(row)
            if done:
                self.send_samples(done)
        self.bar = tqdm(total=cfg.iterations, initial=done, desc=short_name(cfg.method), dynamic_ncols=True,
                        bar_format=BAR, disable=not processes().is_main)

    def __exit__(self, kind, error, traceback):
        self.bar.close()
        self.wandb.finish(failed=kind is not None and not issubclass(kind, SystemExit))     # as of a signal

    def iteration(self, iteration: int, row: dict[str, float], samples: list[dict]) -> None:
        """A row of training metrics, by `NAME/AGENT` or `NAME`, and some texts."""
        if not processes().is_main:
            return
        self.write({"iteration": iteration} | row)
        append_jsonl(self.samples, samples)
        shown = {title: " / ".join(f"{row.get(f'{name}/{agent}', nan):.2f}" for agent in self.agents)
                 for title, name in (("reward", "task_reward"), ("KL", "kl"))}
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
            self.send_samples(iteration)

    def send_samples(self, iteration: int) -> None:
        """The last 200 rows of samples.jsonl, as a table at W&B."""
        self.wandb.send(iteration, lambda wandb: {"samples": wandb.Table(
            dataframe=pd.DataFrame(read_jsonl(self.samples)[-200:]), allow_mixed_types=True)})

    def write(self, row: dict[str, float]) -> None:
        append_jsonl(self.metrics, [row])
        for name, x in row.items():
            if not isfinite(x):
                self.say_once(f"{name} is not finite in some iterations, which its curve leaves out")
        self.wandb.send_row(row)
