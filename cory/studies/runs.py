"""The runs of a study: processes of the ordinary scripts, each in a folder of its own, made once."""
import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from tqdm import tqdm

from cory.config import EXPERIMENTS
from cory.errors import DIVERGED, UserError
from cory.experiment.flags import parse
from cory.experiment.saved_config import load_config
from cory.studies.definitions import Study
from cory.system.files import append_jsonl

ROOT = Path(__file__).parents[2]
# Flags of every run, which those behind the study's `--` override: evaluations enough for a curve.
COMMON = "--eval_every 10 --sample_rows 2 --save_every 20 --wandb disabled"
OF_THE_STUDY = {"preset", "seed", "run_dir", "resume", "task"}      # what no flag of a run may set
FREE = {"run_dir", "resume"}                                        # may differ in a run that is there
BY_MACHINE = {"device", "dtype", "head_precision", "cpu_matmul"}    # may, too, where they are `auto`


@dataclass(frozen=True)
class StudyRun:
    task: str
    variant: str
    seed: int
    flags: tuple[str, ...]              # all but seed and folder
    folder: Path

    @property
    def started(self) -> bool:
        return (self.folder / "config.json").exists()

    @property
    def finished(self) -> bool:
        return (self.folder / "eval.json").exists()

    @property
    def log(self) -> Path:
        """What the last try writes. It stays if that fails."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def error(self) -> str:
        """The last error in its log, or else the log's last line; empty without a log."""
        text = self.log.read_text(errors="replace") if self.log.is_file() else ""
        errors = re.findall(r"(?:error|\w+Error): .*", text)
        return (errors or text.strip().splitlines() or [""])[-1][:300]

    @property
    def diverged(self) -> bool:
        """Whether it ended in NaN or infinity, as it would again. Delete its log to have it tried again."""
        return self.started and not self.finished and DIVERGED in self.error

    @property
    def command(self) -> list[str]:
        """Trains it, from its start or from its last checkpoint."""
        script = os.path.relpath(ROOT / f"train_{self.task}.py")
        how = ["--resume"] if self.started else [*self.flags, "--seed", str(self.seed)]
        return ["python", script, *how, "--run_dir", str(self.folder)]

    @property
    def line(self) -> str:
        """The command for a shell, with its errors in the log, where the study looks for them."""
        folder, log = shlex.quote(str(self.folder.parent)), shlex.quote(str(self.log))
        return f"mkdir -p {folder} && {shlex.join(self.command)} 2> {log}"


def plan(study: Study, tasks: list[str], variants: list[str], seeds: range, preset: str, flags: list[str],
         out: Path) -> list[StudyRun]:
    """Every run of a study. `flags` are those that every run gets.

    Runs of the same flags in two studies share a folder. Raises `UserError`, before anything runs, for flags
    that no run may have.
    """
    common, runs = ["--preset", preset, *COMMON.split(), *flags], []
    for task, variant in product(tasks, variants):
        words = study.variants[variant].split()
        for name in setting_names([*flags, *words]) & OF_THE_STUDY:
            raise UserError("flag", f"--{name}", "is the study's to set; leave it out")
        multiples = {word.partition("*")[0] for word in words if "*" in word}
        for name in (setting_names(flags) & setting_names(words)) - multiples:
            way_out = f"is set by the variant `{variant}`; leave it out, or choose other --variants"
            raise UserError("flag", f"--{name}", way_out)
        otherwise = asdict(parse(*EXPERIMENTS[task], common))
        words = [multiplied(word, otherwise) for word in words]
        name = f"{task}-{slug([*words, '--preset', preset, *flags])}"
        settings = asdict(parse(*EXPERIMENTS[task], [*common, *words]))
        for seed in seeds:
            run = StudyRun(task, variant, seed, (*common, *words), out / "runs" / f"{name}-seed{seed}")
            if run.started:
                require_settings(run.folder, settings | {"seed": seed})
            runs.append(run)
    return sorted(runs, key=lambda run: run.seed)           # all variants of one seed, then of the next


def setting_names(words: list[str]) -> set[str]:
    """The settings that flags set: `--batch_size=8 --lora` sets batch_size and lora."""
    return {word[2:].partition("=")[0] for word in words if word.startswith("--")}


def multiplied(word: str, settings: dict) -> str:
    """`batch_size*2` as twice the setting; any other word as it is. Raises `UserError`."""
    name, star, factor = word.partition("*")
    if not star:
        return word
    value = settings.get(name)
    try:
        product = value * float(factor)
    except (TypeError, ValueError) as error:
        raise UserError("variant", word, "must be a setting that is a number, times a number") from error
    return str(round(product)) if isinstance(value, int) else f"{product:g}"


def slug(flags: list[str]) -> str:
    """A folder's name that tells the flags."""
    text = " ".join(flags)
    name = re.sub(r"[^\w.-]+", "_", text.replace("--", "").replace("cory.studies.loops:", ""))
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]          # two flags of one name differ in it
    return f"{name[:72]}-{digest}"


def require_settings(folder: Path, asked: dict) -> None:
    """The run in the folder has the settings that are asked for. Raises `UserError`."""
    made = asdict(load_config(folder))
    free = FREE | {name for name in BY_MACHINE if asked[name] == "auto"}
    differ = [f"{name} {made[name]}, not {value}" for name, value in asked.items()
              if made[name] != value and name not in free]
    if differ:
        raise UserError("run_dir", str(folder), f"was made with {'; '.join(differ)}: delete it, or take "
                        "another --out")


def to_make(runs: list[StudyRun]) -> list[StudyRun]:
    """Those that are neither finished nor diverged, each folder once."""
    return list({run.folder: run for run in runs if not run.finished and not run.diverged}.values())


def make(runs: list[StudyRun], jobs: int) -> list[StudyRun]:
    """Makes what is not finished, `jobs` at a time with the cores divided. Returns the runs that failed."""
    unfinished, threads, failed = to_make(runs), max(1, cores() // jobs), set()

    def work(run: StudyRun) -> None:
        status, core_seconds = process(run, threads)
        if run.started:
            (run.folder / "cost.jsonl").touch()
            append_jsonl(run.folder / "cost.jsonl", [{"core_seconds": core_seconds}])
        if status == 0:
            run.log.unlink(missing_ok=True)
        else:
            failed.add(run.folder)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(tqdm(pool.map(work, unfinished), total=len(unfinished), desc="runs", disable=not unfinished))
        except KeyboardInterrupt:                           # the runs have had the signal, too, and save
            pool.shutdown(cancel_futures=True)
            raise
    return [run for run in runs if run.diverged or run.folder in failed]


def process(run: StudyRun, threads: int) -> tuple[int, float]:
    """Runs the command to its end. Returns its exit status, and its seconds times the cores that it held.

    The process writes into the log, not into a pipe: a study that is killed does not take its runs along.
    """
    environment, start = {**os.environ, "OMP_NUM_THREADS": str(threads)}, time.perf_counter()
    command = [sys.executable, *run.command[1:]]
    with run.log.open("w") as log:
        status = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
    if status < 0:                                          # killed: it could say nothing itself
        with run.log.open("a") as log:
            log.write(f"error: ended by signal {-status}\n")
    return status, threads * (time.perf_counter() - start)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
