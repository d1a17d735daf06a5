"""What a run writes while it goes: metrics.jsonl, samples.jsonl, Weights & Biases, the progress bar."""
import hashlib
import json
from pathlib import Path

from tqdm import tqdm

from cory.config import Config
from cory.experiment.weights_and_biases import WandB
from cory.names import short_name
from cory.system.files import append_jsonl, read_log, replace_text

FILES = ("metrics.jsonl", "samples.jsonl")


def log_digest(run_dir: Path, last: int) -> str:
    """SHA-256 of the rows up to iteration `last`: a checkpoint holds that of the log that it belongs to."""
    rows = [row for name in FILES for row in read_log(run_dir / name) if row["iteration"] <= last]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


class RunLog:
    """Writes to all of them. A resumed log drops the rows past `start`, the last iteration that was saved."""

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, start: int, wandb_id: str):
        self.agents = agents
        self.metrics, self.samples = (run_dir / name for name in FILES)
        for path in (self.metrics, self.samples):
            kept = [row for row in read_log(path) if row["iteration"] <= start] if start else []
            replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.wandb = WandB(cfg, agents, run_dir, wandb_id)
        self.bar = tqdm(total=cfg.iterations, initial=start, desc=short_name(cfg.method), dynamic_ncols=True)

    def iteration(self, iteration: int, metrics: dict, samples: list[dict], roles: dict[str, str]) -> None:
        """`metrics` as in a row of metrics.jsonl; `roles`: which agent played which."""
        played = {"roles": roles} if roles else {}
        append_jsonl(self.metrics, [{"iteration": iteration, **played, **metrics}])
        append_jsonl(self.samples, samples)
        evaluated = any(key.startswith("eval/") for key in metrics)
        self.wandb.iteration(iteration, metrics, roles, read_log(self.samples) if evaluated else [])
        if iteration:
            self.bar.set_postfix_str(bar_text(metrics, self.agents), refresh=False)
            self.bar.update()

    def close(self) -> None:
        """Ends the bar's line, and W&B's run; the second time it does nothing."""
        self.bar.close()
        self.wandb.close()


def bar_text(metrics: dict, agents: list[str]) -> str:
    """`reward 1.55 / 1.61, KL 14.92 / 11.67`: a number for each agent, a dash for one that did not play."""
    def numbers(name: str) -> str:
        values = [metrics.get(f"{agent}/{name}") for agent in agents]
        return " / ".join("-" if value is None else f"{value:.2f}" for value in values)

    return f"reward {numbers('task_reward')}, KL {numbers('kl')}"
