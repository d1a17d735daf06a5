"""Runs of a study as processes of the ordinary scripts, each in a folder of its own: made once, resumed."""
import hashlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Iterable, NamedTuple

from tqdm import tqdm

from cory.commands.flags import parse
from cory.config import (
    GSM8K_PRESETS,
    IMDB_PRESETS,
    METHODS,
    Config,
    Gsm8kConfig,
    ImdbConfig,
)
from cory.errors import DIVERGED, UserError
from cory.experiment.saved_config import load_config, read_config
from cory.names import find, guess
from cory.studies.definitions import Study
from cory.system.files import read_json, read_log
from cory.system.folder import locked

ROOT = Path(__file__).parents[2]
SCRIPTS = {"imdb": (ImdbConfig, IMDB_PRESETS), "gsm8k": (Gsm8kConfig, GSM8K_PRESETS)}
# More evaluations than a single run makes, for curves of reward against KL.
ALWAYS = "--eval_every 10 --sample_rows 2 --save_every 20 --wandb disabled"


class Measure(NamedTuple):
    """What is measured of a finished run."""
    command: str                        # module and flags
    file: str                           # which it writes into the run's folder
    figures: list[str]                  # that this must hold
    how: dict[str, int]                 # what the file must say of how they were made


MEASURES = {"pass@k": Measure("cory.commands.evaluate --samples 16 --k 1 2 4 8 16", "evaluation/results.json",
                              [f"pass@{k}" for k in (1, 2, 4, 8, 16)], {"samples": 16}),
            "team": Measure("cory.studies.team --rounds 4", "team.json", ["first", "second", "team", "alone"],
                            {"rounds": 4})}
MACHINE_SETTINGS = ("device", "dtype", "head_precision", "cpu_matmul")      # whose `auto` the machine settles


@dataclass(frozen=True)
class StudyRun:
    task: str
    variant: str
    seed: int
    flags: tuple[str, ...]              # all but seed and folder
    folder: Path
    measure: str = ""                   # a name in MEASURES, if there is something to measure when trained
    row: dict | None = None             # of a published `runs.jsonl`, of which the run is taken

    def commands(self) -> list[list[str]]:
        """What is left to do: training, from the start or from the last checkpoint; then measuring."""
        left, folder = [], str(self.folder)
        if not self.trained:
            script = [sys.executable, f"train_{self.task}.py"]
            resumes = self.started and not self.forgets
            how = ["--resume"] if resumes else [*self.flags, "--seed", str(self.seed)]
            if self.started and self.forgets:
                left.append(["rm", "-r", folder])
            left.append([*script, *how, "--run_dir", folder])
        if not self.measured:
            module, *flags = MEASURES[self.measure].command.split()
            left.append([sys.executable, "-m", module, folder, *flags])
        return left

    @property
    def asked(self) -> dict:
        """The settings that its flags ask for. Raises `UserError`."""
        return asdict(settings_of(self.task, self.flags)) | {"seed": self.seed}

    @property
    def started(self) -> bool:
        return (self.folder / "config.json").exists()

    @property
    def forgets(self) -> bool:
        """Whether the loop remembers what no checkpoint holds, so that it can only be made from its start."""
        method = settings_of(self.task, self.flags).method
        return getattr(find("method", method, METHODS), "from_start", False)

    @property
    def log(self) -> Path:
        """What the last try said, while it runs and if it failed."""
        return self.folder.with_name(self.folder.name + ".log")

    @property
    def diverged(self) -> bool:
        if self.row is not None:
            return self.row["diverged"]
        return not self.trained and bool(re.search(f"error: .*{DIVERGED}", self.said))

    @property
    def said(self) -> str:
        """What stands in its log; '' if there is none."""
        return self.log.read_text(errors="replace") if self.log.is_file() else ""

    @property
    def trained(self) -> bool:
        return (self.folder / "eval.json").exists()

    @property
    def measured(self) -> bool:
        if not self.measure:
            return True
        path = self.folder / MEASURES[self.measure].file
        return path.exists() and self.is_measured(read_json(path), read_config(self.folder))

    def is_measured(self, found: dict, cfg: dict) -> bool:
        """Whether these figures, of a run of these settings, are what is to be measured."""
        if not self.measure:
            return True
        measure = MEASURES[self.measure]
        settings = {"queries": "eval_queries", "temperature": "temperature"}
        how = measure.how | {key: cfg[name] for key, name in settings.items() if key in found}
        sides = ["base", *(["agents"] if self.measure == "team" else cfg["agents"])]
        whole = all({*measure.figures} <= found.get(side, {}).keys() for side in sides)
        return whole and how.items() <= found.items()

    @property
    def finished(self) -> bool:
        return self.row is not None or self.trained and self.measured


@cache
def settings_of(task: str, flags: tuple[str, ...]) -> Config:
    return parse(*SCRIPTS[task], list(flags))


def plan(study: Study, tasks: list[str], seeds: list[int], variants: list[str], preset: str,
         flags: list[str], out: Path) -> list[StudyRun]:
    """Every run of a study. One of the same flags in another study lies in the same folder, and is shared.
    Raises `UserError`, before anything is made, for whatever is wrong with the study or its flags.
    """
    require_sound(study)
    common = ["--preset", preset, *ALWAYS.split(), *flags]
    words = {(task, variant): common + resolved(study.variants[variant], task, common)
             for task in tasks for variant in variants}
    found, flags_of = [], {}
    for seed in seeds:
        for (task, variant), of_run in words.items():
            folder = out / "runs" / f"{task}-{slug(of_run)}-seed{seed}"
            if flags_of.setdefault(folder, of_run) != of_run:
                way_out = f"is of `{shlex.join(flags_of[folder])}`, too: give one of them another name"
                raise UserError("run_dir", str(folder), way_out)
            measure = study.measure.get(task, "")
            run = StudyRun(task, variant, seed, tuple(of_run), folder.absolute(), measure)
            require_as_defined(run)
            found.append(run)
    return found


def require_sound(study: Study) -> None:
    """Every name in it is of something that there is. Raises `UserError`."""
    def require(field: str, names: Iterable[str], known: Iterable[str]) -> None:
        for name in names:
            if name not in known:
                way_out = f"is unknown; {guess(name, known)}choose from {', '.join(known)}"
                raise UserError(field, name, way_out)

    require("tasks", study.tasks, SCRIPTS)
    require("baseline", [study.baseline], study.variants)
    for field in ("quick", "pairs", "only"):
        require(field, getattr(study, field), study.variants)
    require("pairs", study.pairs.values(), study.variants)
    require("only", study.only.values(), {name for _, presets in SCRIPTS.values() for name in presets})
    require("measure", study.measure, study.tasks)
    require("measure", study.measure.values(), MEASURES)
    for variant, baseline in study.pairs.items():
        if variant == baseline:
            raise UserError("pairs", variant, "is its own baseline; name another, or leave it out")
    if study.sweeps and study.sweeps.keys() != {"ppo", "cory"}:
        raise UserError("sweeps", list(study.sweeps), "must be of ppo and cory")
    for method, names in study.sweeps.items():
        require("sweeps", names, [name for name in study.variants if name.startswith(f"{method}, ")])
    for variant in study.variants:
        if "|" in variant or variant != " ".join(variant.split()):
            raise UserError("variant", variant, "must be one line without | and without spaces around it")


def require_as_defined(run: StudyRun) -> None:
    """The flags are sound, and a run that is there was made with these settings. Raises `UserError`."""
    asked = run.asked
    if run.measure == "team" and not asked["knowledge_transfer"]:
        way_out = "an observer that sees no answer is no team; leave it out"
        raise UserError("knowledge_transfer", False, way_out)
    if run.started and (differ := differing(asked, asdict(load_config(run.folder)))):
        way_out = f"was made with {'; '.join(differ)}: delete it, or take another --out"
        raise UserError("run_dir", str(run.folder), way_out)


def differing(asked: dict, made: dict) -> list[str]:
    """Settings of a run that are not what is asked for: `lam 0.9, not 1.0`."""
    return [f"{name} {made[name]}, not {value}" for name, value in asked.items() if value != made[name]
            and not (name in MACHINE_SETTINGS and value == "auto") and name not in ("run_dir", "resume")]


def resolved(variant: str, task: str, common: list[str]) -> list[str]:
    """The words of a variant's flags; `learning_rate*4` becomes four times what the `common` flags make it.

    A flag that says what the run would have anyway is dropped, but for --method. Raises `UserError` for what
    is no list of `--name value`, and for a flag that is among the common ones: the variant would not be what
    its name says.
    """
    def refused(why: str) -> UserError:
        return UserError("variant", variant, why)

    settings = parse(*SCRIPTS[task], common)
    try:
        words = shlex.split(variant)
    except ValueError as error:
        raise refused(f"cannot be read ({error})") from error
    pairs = len(words) % 2 == 0 and all(word.startswith("--") for word in words[::2])
    if not pairs or any(word.startswith("--") for word in words[1::2]):
        raise refused("must be flags as `--name value`, each with its value")
    for name in (word[2:] for word in words[::2]):
        if not hasattr(settings, name):
            near = guess(name, vars(settings))
            raise refused(f"there is no setting {name}; {near}give flags as `--name value`")
        if name in ("seed", "run_dir", "resume", "task"):
            raise refused(f"--{name} is the study's to set; leave it out")
    given = {word.split("=")[0].replace("-", "_").replace("__no_", "__") for word in common
             if word.startswith("--")}
    for flag in given & {f"__{name}" for name in ("seed", "run_dir", "resume", "task")}:
        raise UserError("flag", flag.replace("__", "--"), "is the study's to set; leave it out")

    def times(value: str) -> str:
        setting, star, factor = value.partition("*")
        if not star:
            return value
        now = getattr(settings, setting, None)
        if isinstance(now, bool) or not isinstance(now, (int, float)) or not is_number(factor):
            raise refused(f"{value} must be a setting that is a number, times a number")
        if isinstance(now, int) and round(now * float(factor)) == now and float(factor) != 1:
            raise refused(f"{value} is {now}, as without it; take another factor")
        return str(round(now * float(factor))) if isinstance(now, int) else f"{now * float(factor):g}"

    said = {flag: times(value) for flag, value in zip(words[::2], words[1::2], strict=True)}
    for flag, value in said.items():
        if flag.replace("-", "_") in given and value in words:
            way_out = f"is set by the variant `{variant}`; leave it out, or choose --variants"
            if flag in ALWAYS.split():
                way_out = f"is the same in every run of a study; leave it out of the variant `{variant}`"
            raise UserError("flag", flag, way_out)
    all_words = [word for pair in said.items() for word in pair]
    changed = parse(*SCRIPTS[task], [*common, *all_words])
    return [word for flag, value in said.items() for word in (flag, value)
            if flag == "--method" or getattr(changed, flag[2:]) != getattr(settings, flag[2:])]


def is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def slug(words: list[str]) -> str:
    """A folder's name that tells the flags, without those that every run has; a long one is cut."""
    text = " ".join(words).replace(ALWAYS, "").replace("--", "").replace("cory.studies.loops:", "")
    name = re.sub(r"[^\w.-]+", "_", text).strip("_")
    return name if len(name) <= 80 else f"{name[:72]}-{hashlib.sha256(text.encode()).hexdigest()[:7]}"


def make(runs: list[StudyRun], jobs: int) -> list[tuple[StudyRun, str]]:
    """Makes what is not finished, `jobs` at a time with the cores divided. Returns what failed, and how.

    A run that diverged would do so again, and is not made again: delete its log to have it tried.
    """
    todo = to_make(runs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    why = {run.folder: "diverged, as published" if run.row else last_words(run.said)
           for run in runs if run.diverged}

    def work(run: StudyRun) -> None:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        commands = run.commands()
        try:
            with locked(run.folder) if run.started else nullcontext():      # no other process is at it
                run.log.unlink(missing_ok=True)
                if commands[0][0] == "rm":
                    shutil.rmtree(run.folder)
                    commands = commands[1:]
        except UserError as error:
            why[run.folder], commands = str(error), []
        for command in commands:
            with run.log.open("w") as log:      # no pipe: a study that is killed does not take its runs along
                done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            if done.returncode:
                why[run.folder] = f"status {done.returncode}: {last_words(run.said)}"
                break
            run.log.unlink(missing_ok=True)
        bar.update()

    with tqdm(total=len(todo), desc="runs", disable=not todo) as bar, ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(work, todo))
        except KeyboardInterrupt:                               # the runs have had the signal, too, and save
            pool.shutdown(cancel_futures=True)
            raise
    return [(run, why[run.folder]) for run in runs if run.folder in why]        # variants may share a run


def to_make(runs: list[StudyRun]) -> list[StudyRun]:
    """Those that are neither finished nor diverged, each folder once."""
    return list({run.folder: run for run in runs if not run.finished and not run.diverged}.values())


def line_of(run: StudyRun) -> str:
    """The commands of a run for a shell, whose errors stand in its log then, as they do when made here."""
    words = [line if line[0] == "rm" else ["python", *line[1:]] for line in run.commands()]
    lines = [shlex.join(line) for line in words]
    if not run.trained:
        at = [line[0] for line in words].index("python")
        lines[at] += f" 2> {shlex.quote(str(run.log))}"
        lines.insert(at, shlex.join(["mkdir", "-p", str(run.folder.parent)]))
    return " && ".join(lines)


def last_words(said: str) -> str:
    """The error in what a process wrote, or else its last line."""
    errors = re.findall(r"(?:error|\w+Error): .*", said)
    return (errors or said.strip().splitlines() or ["no output"])[-1][:300]


def expected_minutes(runs: list[StudyRun], jobs: int) -> tuple[int, float | None]:
    """(runs to make, minutes), by the finished ones of the same task; None where there is none yet."""
    todo, seconds = to_make(runs), {}
    for run in runs:
        if run.trained:
            rows = read_log(run.folder / "metrics.jsonl")
            seconds.setdefault(run.task, []).append(sum(row.get("seconds", 0.0) for row in rows) * 1.2)
    if not {run.task for run in todo} <= seconds.keys():
        return len(todo), None
    total = sum(sum(seconds[run.task]) / len(seconds[run.task]) for run in todo if not run.trained)
    return len(todo), total / jobs / 60
