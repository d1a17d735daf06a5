"""A study: variants over seeds, each an ordinary run, then rows, tables and pictures in one folder.

    python -m cory study curves --jobs 2                    # into studies/curves
    python -m cory study ablations --quick --tasks imdb     # 2 seeds, 3 variants, 20 iterations
    python -m cory study paper --preset gpt2-large --dry_run            # the commands, for a cluster
    python -m cory study curves --from rows.csv             # the page from rows; nothing is run

What follows `--` goes to every run: `python -m cory study curves -- --iterations 20`. A finished run is
not made again, an interrupted one goes on, a failed one is reported and the others go on.
"""
import argparse
import shlex
import sys
from pathlib import Path

import pandas as pd

from cory.config import EXPERIMENTS
from cory.errors import UserError, exit_on_user_error
from cory.experiment.flags import OneLineParser
from cory.studies import page, rows, runs
from cory.studies.definitions import STUDIES, Study
from cory.studies.runs import StudyRun
from cory.system.files import own_folder, replace_text

QUICK_ITERATIONS, QUICK_SEEDS, QUICK_VARIANTS = "20", 2, 3


def parser() -> argparse.ArgumentParser:
    questions = "\n".join(f"  {name:10s}  {study.question}" for name, study in STUDIES.items())
    flags = OneLineParser(prog="python -m cory study", allow_abbrev=False,
                          description=f"{__doc__}\n{questions}",
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("name", choices=STUDIES, metavar="NAME", help=", ".join(STUDIES))
    add("--out", type=Path, default=Path("studies"), help="folder of the runs, and of a folder for the study")
    add("--tasks", nargs="+", help="those of the study if left out")
    add("--variants", nargs="+", help="those of the study if left out")
    add("--preset", default="tiny")
    add("--seeds", type=int, help="how many; the study's own number if left out")
    add("--jobs", type=int, default=1, help="runs at a time, with the cores divided")
    add("--quick", action="store_true",
        help=f"{QUICK_SEEDS} seeds, {QUICK_VARIANTS} variants, {QUICK_ITERATIONS} iterations")
    add("--from", nargs="+", type=Path, metavar="ROWS", dest="rows", help="rows.csv to make the page from")
    add("--dry_run", action="store_true", help="print the commands of what is not finished, one per line")
    return flags


@exit_on_user_error
def main(argv: list[str]) -> None:
    end = argv.index("--") if "--" in argv else len(argv)
    args, flags = parser().parse_args(argv[:end]), argv[end + 1:]
    study = STUDIES[args.name]
    check(args, study)
    if args.rows:
        frame, failed = rows.read(args.rows, task=args.tasks, variant=args.variants), []
    else:
        planned = plan(study, args, flags)
        if args.dry_run:
            print(*(run.line for run in runs.to_make(planned)), sep="\n")
            return
        frame, failed = make(planned, args)
    if frame.empty:
        raise SystemExit(1 if failed else 0)
    rows.require_comparable(frame)
    out = own_folder(args.out / (f"{args.name}-quick" if args.quick else args.name), parents=True)
    replace_text(out / "rows.csv", frame.to_csv(index=False))
    command = shlex.join(["python", "-m", "cory", "study", *argv])
    print(page.write(args.name, study, rows.read([out / "rows.csv"]), failed, command, out))
    print(f"written to {out}: results.md, rows.csv, pictures")
    if failed:
        raise SystemExit(1)


def check(args: argparse.Namespace, study: Study) -> None:
    """Raises `UserError` for what this study cannot do."""
    for name in ("jobs", "seeds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(name, getattr(args, name), "must be 1 or more")
    for field, known in (("tasks", study.tasks), ("variants", study.variants)):
        for name in getattr(args, field) or ():
            if name not in known:
                raise UserError(field, name, f"is not of this study; choose from {', '.join(known)}")


def plan(study: Study, args: argparse.Namespace, flags: list[str]) -> list[StudyRun]:
    """The runs that the command line asks for. Raises `UserError`."""
    with_preset = [task for task in study.tasks if args.preset in EXPERIMENTS[task][1]]
    variants, seeds = list(study.variants), study.seeds
    if args.quick:
        variants, seeds = variants[:QUICK_VARIANTS], seeds[:QUICK_SEEDS]
        if "iterations" not in runs.setting_names(flags):
            flags = ["--iterations", QUICK_ITERATIONS, *flags]
    if args.seeds:
        seeds = range(seeds.start, seeds.start + args.seeds)
    return runs.plan(study, args.tasks or with_preset or study.tasks, args.variants or variants, seeds,
                     args.preset, flags, args.out)


def make(planned: list[StudyRun], args: argparse.Namespace) -> tuple[pd.DataFrame, list[str]]:
    """Makes the runs. Returns the rows of those that ended, and a line for each that failed."""
    own_folder(args.out / "runs", parents=True)
    rows.require_comparable(rows.of_runs(planned))          # before hours are spent on the others
    unfinished = len(runs.to_make(planned))
    print(f"{args.name}: {len(planned)} runs, {unfinished} to make, {args.jobs} at a time", flush=True)
    failed = [f"{run.task}, {run.variant}, seed {run.seed}: {run.error}"
              for run in runs.make(planned, args.jobs)]
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return rows.of_runs(planned), failed
