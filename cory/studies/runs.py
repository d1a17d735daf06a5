"""Runs of a study as processes of the ordinary scripts, each in a folder of its own: made once, resumed,
kept.
"""
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

from tqdm import tqdm

from cory.command_line import parse
from cory.config import GSM8K_PRESETS, IMDB_PRESETS, Gsm8kConfig, ImdbConfig
from cory.errors import UserError
from cory.studies.definitions import Study

ROOT = Path(__file__).parents[2]
SCRIPTS = {"imdb": (ImdbConfig, IMDB_PRESETS), "gsm8k": (Gsm8kConfig, GSM8K_PRESETS)}
# More evaluations than a single run makes, for curves of reward against KL; nothing to resume a run of
# minutes.
ALWAYS = "--eval_every 10 --sample_rows 2 --save_every 20 --wandb disabled"


@dataclass(frozen=True)
class StudyRun:
    study: str
    task: str
    variant: str
    seed: int
    flags: tuple[str, ...]              # all but seed and folder
    folder: Path

    def command(self) -> list[str]:
        own = ["--seed", str(self.seed), "--run_dir", str(self.folder)]
        return [sys.executable, f"train_{self.task}.py", *self.flags, *own]

    @property
    def finished(self) -> bool:
        return (self.folder / "eval.json").exists()


def plan(name: str, study: Study, tasks: list[str], seeds: list[int], variants: list[str], preset: str,
         flags: list[str], out: Path) -> list[StudyRun]:
    """Every run of a study. One of the same flags in another study lies in the same folder, and is shared."""
    found = []
    for seed in seeds:
        for task in tasks:
            for variant in variants:
                common = ["--preset", preset, *ALWAYS.split(), *flags]
                words = common + resolved(study.variants[variant], task, common)
                folder = out / "runs" / f"{task}-{slug(words)}-seed{seed}"
                found.append(StudyRun(name, task, variant, seed, tuple(words), folder.absolute()))
    return found


def resolved(variant: str, task: str, common: list[str]) -> list[str]:
    """The words of a variant's flags; `learning_rate*4` becomes four times what the `common` flags make it.

    Raises `UserError` for a flag that is among the common ones: the variant would not be what its name says.
    """
    settings, words = parse(*SCRIPTS[task], common), shlex.split(variant)
    for flag, value in zip(words, words[1:], strict=False):
        if flag.startswith("--") and flag in common and "*" not in value:
            way_out = f"is set by the variant `{variant}`; leave it out, or choose --variants"
            raise UserError("flag", flag, way_out)

    def times(word: str) -> str:
        setting, star, factor = word.partition("*")
        if not star:
            return word
        value = getattr(settings, setting)
        return str(round(value * float(factor))) if isinstance(value, int) else f"{value * float(factor):g}"

    return [times(word) for word in words]


def slug(words: list[str]) -> str:
    """A folder's name that tells the flags, without those that every run has; a long one is cut."""
    text = " ".join(words).replace(ALWAYS, "").replace("--", "").replace("cory.studies.loops:", "")
    name = re.sub(r"[^\w.]+", "_", text).strip("_")
    return name if len(name) <= 80 else f"{name[:72]}-{hashlib.sha256(text.encode()).hexdigest()[:7]}"


def make(runs: list[StudyRun], jobs: int) -> list[tuple[StudyRun, str]]:
    """Makes what is not finished, `jobs` at a time with the cores divided. Returns what failed, and how."""
    todo = list({run.folder: run for run in runs if not run.finished}.values())
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    failed = []

    def work(run: StudyRun) -> None:
        started = (run.folder / "config.json").exists()
        command = run.command() if not started else [*run.command()[:2], "--resume", *run.command()[-2:]]
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no output"])[-1]
            failed.append((run, f"status {done.returncode}: {why[-300:]}"))
        bar.update()

    with tqdm(total=len(todo), desc="runs", disable=not todo) as bar, ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, todo))
    return failed


def expected_minutes(runs: list[StudyRun], jobs: int) -> tuple[int, float | None]:
    """(runs to make, minutes), by the finished ones of the same task; None where there is none yet."""
    todo = {run.folder: run for run in runs if not run.finished}
    seconds = {}
    for run in runs:
        if run.finished:
            rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
            seconds.setdefault(run.task, []).append(sum(row.get("seconds", 0.0) for row in rows) * 1.2)
    if not todo or not {run.task for run in todo.values()} <= seconds.keys():
        return len(todo), None
    total = sum(sum(seconds[run.task]) / len(seconds[run.task]) for run in todo.values())
    return len(todo), total / jobs / 60


