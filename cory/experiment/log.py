"""What a run writes while it goes: metrics.jsonl, samples.jsonl, Weights & Biases, the progress bar."""
import json
from pathlib import Path

from tqdm import tqdm

from cory.config import Config
from cory.experiment.files import append_jsonl, read_log, replace_text
from cory.experiment.weights_and_biases import finish_wandb, log_results, prefixed, start_wandb, wandb_table
from cory.names import short_name


class RunLog:
    """Writes to all of them. A resumed log drops the rows past `start`, the last iteration that was saved."""

    def __init__(self, cfg: Config, agents: list[str], run_dir: Path, start: int, wandb_id: str):
        self.agents, self.run_dir = agents, run_dir
        self.metrics, self.samples = run_dir / "metrics.jsonl", run_dir / "samples.jsonl"
        for path in (self.metrics, self.samples):
            kept = [row for row in read_log(path) if row["iteration"] <= start] if start else []
            replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.sample_rows = read_log(self.samples)
        self.wandb = start_wandb(cfg, run_dir, wandb_id)
        self.wandb_id = self.wandb.id if self.wandb else wandb_id
        self.bar = tqdm(total=cfg.iterations, initial=start, desc=short_name(cfg.method), dynamic_ncols=True)

    def iteration(self, iteration: int, metrics: dict, samples: list[dict], roles: dict[str, str]) -> None:
        """`metrics` as in a row of metrics.jsonl; `roles`: which agent played which."""
        played = {"roles": roles} if roles else {}
        append_jsonl(self.metrics, [{"iteration": iteration, **played, **metrics}])
        append_jsonl(self.samples, samples)
        self.sample_rows += samples
        if self.wandb:
            row = {"iteration": iteration, **prefixed(metrics, self.agents, roles)}
            if self.sample_rows and any(key.startswith("eval/") for key in metrics):
                row["samples"] = wandb_table(self.sample_rows)
            self.wandb.log(row, step=iteration)
        if iteration:
            self.bar.set_postfix_str(bar_text(metrics, self.agents), refresh=False)
            self.bar.update()

    def finish(self, held_out: dict) -> None:
        """`held_out` is what eval.json holds; curves.png has been drawn."""
        if self.wandb:
            log_results(self.wandb, self.run_dir, held_out)
        self.close()

    def close(self) -> None:
        """Ends the bar's line, and W&B's run; the second time it does nothing."""
        self.bar.close()
        if self.wandb:
            self.wandb, run = None, self.wandb
            finish_wandb(run, self.run_dir)


def bar_text(metrics: dict, agents: list[str]) -> str:
    """`reward 1.55 / 1.61, KL 14.92 / 11.67`: a number for each agent, a dash for one that did not play."""
    def of_agents(name: str) -> str:
        values = [metrics.get(f"{agent}/{name}") for agent in agents]
        return " / ".join("-" if value is None else f"{value:.2f}" for value in values)

    return f"reward {of_agents('task_reward')}, KL {of_agents('kl')}"
