"""What a run writes while it goes: metrics.jsonl, samples.jsonl, Weights & Biases, the progress bar."""
import json
from pathlib import Path

from tqdm import tqdm

from cory.config import Config
from cory.experiment.weights_and_biases import (
    finish_wandb,
    prefixed,
    say_silent,
    shown_results,
    start_wandb,
    wandb_table,
)
from cory.names import short_name
from cory.system.files import append_jsonl, read_log, replace_text


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
        self.wandb_id, self.wandb_answers = self.wandb.id if self.wandb else wandb_id, True
        self.bar = tqdm(total=cfg.iterations, initial=start, desc=short_name(cfg.method), dynamic_ncols=True)

    def iteration(self, iteration: int, metrics: dict, samples: list[dict], roles: dict[str, str]) -> None:
        """`metrics` as in a row of metrics.jsonl; `roles`: which agent played which."""
        played = {"roles": roles} if roles else {}
        append_jsonl(self.metrics, [{"iteration": iteration, **played, **metrics}])
        append_jsonl(self.samples, samples)
        self.sample_rows += samples
        if self.wandb:
            row = {"iteration": iteration, **prefixed(metrics, self.agents, roles)}
            evaluated = self.sample_rows and any(key.startswith("eval/") for key in metrics)
            self.send(row, {"samples": wandb_table(self.sample_rows)} if evaluated else {}, step=iteration)
        if iteration:
            self.bar.set_postfix_str(bar_text(metrics, self.agents), refresh=False)
            self.bar.update()

    def finish(self, held_out: dict) -> None:
        """`held_out` is what eval.json holds; curves.png has been drawn."""
        if self.wandb:
            self.send({"iteration": held_out["iteration"]}, shown_results(self.run_dir, held_out))
            if self.wandb:
                self.wandb.summary.update({"held_out": held_out})
        self.close()

    def send(self, row: dict, shown: dict, **where) -> None:
        """A row with what W&B has to upload before it takes it, such as tables. Where W&B does not answer,
        that is left out from then on; where its own process has died, the run goes on without it.
        """
        if shown and self.wandb_answers:
            try:
                return self.wandb.log(row | shown, **where)
            except Exception as error:                  # of its connection, of kinds of its own
                self.wandb_answers = False
                say_silent("takes no tables and pictures", self.run_dir, error)
        try:
            self.wandb.log(row, **where)
        except Exception as error:
            say_silent("goes no further", self.run_dir, error)
            self.wandb = None

    def end_bar(self) -> None:
        self.bar.close()

    def close(self) -> None:
        """Ends the bar's line, and W&B's run; the second time it does nothing."""
        self.bar.close()
        if self.wandb:
            self.wandb, run = None, self.wandb
            finish_wandb(run, self.run_dir)


class NoLog:
    """Of the processes that do not lead: it writes nothing."""
    wandb_id = ""

    def iteration(self, *_) -> None:
        pass

    def end_bar(self) -> None:
        pass

    def close(self) -> None:
        pass


def bar_text(metrics: dict, agents: list[str]) -> str:
    """`reward 1.55 / 1.61, KL 14.92 / 11.67`: a number for each agent, a dash for one that did not play."""
    def of_agents(name: str) -> str:
        values = [metrics.get(f"{agent}/{name}") for agent in agents]
        return " / ".join("-" if value is None else f"{value:.2f}" for value in values)

    return f"reward {of_agents('task_reward')}, KL {of_agents('kl')}"
