"""Makes the runs of a study in studies.json: each variant at each seed, in a folder of its own.

    python docs/studies/grid.py frontier --jobs 2   # runs the study, then writes studies/frontier/rows.csv.gz

Each run has one core. Ctrl-C ends all runs. The same command goes on: finished runs are
skipped, interrupted and failed ones resumed. One that diverged would do so again: it stays in the rows.
"""
import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEPT = {"commit", "agent", "method", "dtype", "batch_size", "init_kl_coef"}     # though all runs agree
ENDED = ("finished", "diverged")
LEFT_OUT = {"config_class", "agents", "task", "seed", "run_dir", "resume", "iterations"}


@dataclass(frozen=True)
class GridRun:
    task: str
    variant: str
    seed: int
    flags: list[str]                    # all but seed and folder
    folder: Path

    @property
    def log(self) -> list[str]:
        """Lines that the last try printed, below the commit that it ran at."""
        path = Path(f"{self.folder}.log")
        return re.findall(r".*\S", path.read_text(errors="replace")) if path.exists() else ["unknown"]

    @property
    def state(self) -> str:
        if (self.folder / "eval.json").exists():
            return "finished"
        if not (self.folder / "config.json").exists():
            return "not started"
        return "diverged" if "diverged" in self.log[-1] else "interrupted"

    @property
    def command(self) -> list[str]:
        flags = ["--resume"] if self.state != "not started" else [*self.flags, "--seed", str(self.seed)]
        return [sys.executable, f"train_{self.task}.py", *flags, "--run_dir", str(self.folder)]


def plan(study: dict, out: Path) -> list[GridRun]:
    """Every run, one seed after the other. A task's variants are crossed with its `times`, if it has them."""
    runs = []
    for task, spec in study["tasks"].items():
        for variant, own in spec["variants"].items():
            for suffix, more in spec.get("times", {"": ""}).items():
                flags = shlex.split(f"{study['flags']} {own} {more}")
                name = f"{variant}, {suffix}" if suffix else variant
                digest = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:6]  # other flags, other folder
                stem = re.sub(r"[^\w.]+", "_", f"{task} {name} {digest}")
                runs += [GridRun(task, name, seed, flags, out / "runs" / f"{stem}-seed{seed}")
                         for seed in study["seeds"]]
    return sorted(runs, key=lambda run: run.seed)


def make(run: GridRun) -> bool:
    """Runs the command to its end; whether it succeeded."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Path(f"{run.folder}.log").open("w") as log:
        print(git.stdout[:10] or "unknown", file=log, flush=True)
        return subprocess.run(run.command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode == 0


def rows_of(run: GridRun) -> list[dict]:
    """A row for each held-out evaluation and agent."""
    config = json.loads((run.folder / "config.json").read_text())
    lines = (run.folder / "metrics.jsonl").read_text().split("\n")[:-1]     # a kill may have cut off the last
    logged, rows = [json.loads(line) for line in lines], []
    about = {"task": run.task, "variant": run.variant, "seed": run.seed, "diverged": run.state == "diverged",
             "core_seconds": sum(row.get("seconds", 0) for row in logged),      # without evaluations
             "commit": run.log[0],
             **{name: value for name, value in config.items() if name not in LEFT_OUT}}
    for row in logged:
        for agent in config["agents"]:
            keys = [(key, *key.removeprefix("eval/").split("/")) for key in row if key.startswith("eval/")]
            metrics = {name: row[key] for key, name, who in keys if who in ("team", agent)}
            if metrics:
                reward = metrics.get("greedy_task_reward", metrics["task_reward"])
                evaluation = {"agent": agent, "iteration": row["iteration"], "reward": reward}
                rows.append(about | evaluation | metrics)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("study", help="a name in studies.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, a core each")
    args = parser.parse_args(argv)
    out = Path("studies", args.study).resolve()
    runs = plan(json.loads((HERE / "studies.json").read_text())[args.study], out)
    unfinished = [run for run in runs if run.state not in ENDED]
    (out / "runs").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            for i, ok in enumerate(pool.map(make, unfinished), start=1):
                print(f"{i} of {len(unfinished)}: {'finished' if ok else 'failed'}", flush=True)
        except KeyboardInterrupt:                           # the runs have had the signal, too
            pool.shutdown(cancel_futures=True)
            return 130
    rows = pd.DataFrame([row for run in runs if run.state in ENDED for row in rows_of(run)])
    if len(rows):
        alike = {name for name in rows.loc[:, "commit":"agent"] if rows[name].nunique(dropna=False) == 1}
        rows.drop(columns=alike - KEPT).to_csv(out / "rows.csv.gz", index=False, float_format="%.7g",
                                               compression={"method": "gzip", "mtime": 0})
    for run in runs:
        if run.state != "finished":
            print(f"{run.state}: {run.folder}: {run.log[-1]}")
    print(f"{sum(run.state == 'finished' for run in runs)} of {len(runs)} runs finished: {out}/rows.csv.gz")
    return int(any(run.state not in ENDED for run in runs))


if __name__ == "__main__":
    sys.exit(main())
