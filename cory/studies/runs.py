"""Runs of a study as processes of the ordinary scripts, each in a folder of its own: made once, resumed."""
import hashlib
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from cory.command_line import parse
from cory.config import GSM8K_PRESETS, IMDB_PRESETS, Gsm8kConfig, ImdbConfig, read_config
from cory.errors import UserError
from cory.experiment.files import read_jsonl
from cory.studies.definitions import Study

ROOT = Path(__file__).parents[2]
SCRIPTS = {"imdb": (ImdbConfig, IMDB_PRESETS), "gsm8k": (Gsm8kConfig, GSM8K_PRESETS)}
# More evaluations than a single run makes, for curves of reward against KL.
ALWAYS = "--eval_every 10 --sample_rows 2 --save_every 20 --wandb disabled"


@dataclass(frozen=True)
class StudyRun:
    task: str
    variant: str
    seed: int
    flags: tuple[str, ...]              # all but seed and folder
    folder: Path

    def command(self) -> list[str]:
        """From the start, or, where a run has been started, from its last checkpoint."""
        where, script = ["--run_dir", str(self.folder)], [sys.executable, f"train_{self.task}.py"]
        if (self.folder / "config.json").exists():
            return [*script, "--resume", *where]
        return [*script, *self.flags, "--seed", str(self.seed), *where]

    @property
    def finished(self) -> bool:
        return (self.folder / "eval.json").exists()


def plan(study: Study, tasks: list[str], seeds: list[int], variants: list[str], preset: str,
         flags: list[str], out: Path) -> list[StudyRun]:
    """Every run of a study. One of the same flags in another study lies in the same folder, and is shared."""
    found = []
    for seed in seeds:
        for task in tasks:
            for variant in variants:
                common = ["--preset", preset, *ALWAYS.split(), *flags]
                words = common + resolved(study.variants[variant], task, common)
                folder = out / "runs" / f"{task}-{slug(words)}-seed{seed}"
                run = StudyRun(task, variant, seed, tuple(words), folder.absolute())
                require_as_defined(run)
                found.append(run)
    return found


def require_as_defined(run: StudyRun) -> None:
    """The flags are sound, and a run that is there was made with these settings. Raises `UserError`."""
    asked = asdict(parse(*SCRIPTS[run.task], [*run.flags, "--seed", str(run.seed)]))
    if not (run.folder / "config.json").exists():
        return
    made = read_config(run.folder)
    differ = [name for name, value in asked.items() if value not in ("auto", made.get(name))
              and name not in ("run_dir", "resume")]
    if differ:
        way_out = f"was made with another {', '.join(differ)}; delete it, or take another --out"
        raise UserError("out", str(run.folder), way_out)


def resolved(variant: str, task: str, common: list[str]) -> list[str]:
    """The words of a variant's flags; `learning_rate*4` becomes four times what the `common` flags make it.

    Raises `UserError` for a flag that is among the common ones: the variant would not be what its name says.
    """
    settings, words = parse(*SCRIPTS[task], common), shlex.split(variant)
    given = {word.split("=")[0].replace("-", "_") for word in common if word.startswith("--")}
    for flag in given & {f"__{name}" for name in ("seed", "run_dir", "resume", "task")}:
        raise UserError("flag", flag.replace("__", "--"), "is the study's to set; leave it out")
    for flag, value in zip(words, words[1:], strict=False):
        if flag.startswith("--") and flag.replace("-", "_") in given and "*" not in value:
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
    name = re.sub(r"[^\w.-]+", "_", text).strip("_")
    return name if len(name) <= 80 else f"{name[:72]}-{hashlib.sha256(text.encode()).hexdigest()[:7]}"


def make(runs: list[StudyRun], jobs: int) -> list[tuple[StudyRun, str]]:
    """Makes what is not finished, `jobs` at a time with the cores divided. Returns what failed, and how."""
    todo = list({run.folder: run for run in runs if not run.finished}.values())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    failed = []

    def work(run: StudyRun) -> None:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(run.command(), cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            run.folder.with_name(run.folder.name + ".log").write_text(done.stdout + done.stderr)
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
            rows = read_jsonl(run.folder / "metrics.jsonl")
            seconds.setdefault(run.task, []).append(sum(row.get("seconds", 0.0) for row in rows) * 1.2)
    if not {run.task for run in todo.values()} <= seconds.keys():
        return len(todo), None
    total = sum(sum(seconds[run.task]) / len(seconds[run.task]) for run in todo.values())
    return len(todo), total / jobs / 60
