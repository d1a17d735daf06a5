"""A study: variants over seeds, each an ordinary run, then rows, tables and pictures in one folder.

    python -m cory study curves --jobs 2                    # into studies/curves
    python -m cory study ablations --quick --tasks imdb     # 2 seeds, 3 variants, 20 iterations
    python -m cory study paper --preset gpt2-large --dry_run            # the commands, for a cluster
    python -m cory study curves --from rows.csv             # the page from rows; nothing is run

What follows `--` goes to every run: `python -m cory study curves -- --iterations 20`. A finished run is
not made again, an interrupted one goes on, a failed one is reported and the others go on.
"""
from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cory.errors import UserError, exit_on_user_error
from cory.experiment.flags import OneLineParser
from cory.names import guess
from cory.system.files import replace_text

if TYPE_CHECKING:                           # pandas takes longer to import than --help may take
    import pandas as pd

    from cory.studies.definitions import Study
    from cory.studies.runs import StudyRun

QUICK_ITERATIONS, QUICK_SEEDS, QUICK_VARIANTS = "20", 2, 3


def parser(studies: dict) -> argparse.ArgumentParser:
    questions = "\n".join(f"  {name:10s}  {study.question}" for name, study in studies.items())
    flags = OneLineParser(prog="python -m cory study", allow_abbrev=False,
                          description=f"{__doc__}\n{questions}",
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("name", choices=studies, metavar="NAME", help=", ".join(studies))
    add("--out", type=Path, default=Path("studies"), help="folder of the runs, and of a folder for the study")
    add("--tasks", nargs="+", choices=["imdb", "gsm8k"], help="those of the study if left out")
    add("--variants", nargs="+", help="those of the study if left out")
    add("--baseline", metavar="VARIANT", help="what all are compared with; the study's own if left out")
    add("--preset", default="tiny")
    add("--seeds", type=int, help="how many; the study's own number if left out")
    add("--jobs", type=int, default=1, help="runs at a time, with the cores divided")
    add("--quick", action="store_true",
        help=f"{QUICK_SEEDS} seeds, {QUICK_VARIANTS} variants, {QUICK_ITERATIONS} iterations")
    add("--from", nargs="+", type=Path, metavar="ROWS", dest="rows", help="rows.csv to make the page from")
    add("--dry_run", action="store_true", help="print the commands of what is not finished, one per line")
    return flags


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    from cory.studies.definitions import STUDIES
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    args, flags = parser(STUDIES).parse_args(argv[:end]), argv[end + 1:]
    study = STUDIES[args.name]
    check(args, flags, study)
    if args.baseline:
        study = replace(study, baseline=args.baseline, baselines={})

    from cory.studies import page, rows, runs

    if args.rows:
        frame, failed = rows.read(args.rows, task=args.tasks, variant=args.variants), []
    else:
        planned = plan(study, args, flags)
        if args.dry_run:
            print(*(run.line for run in runs.to_make(planned)), sep="\n")
            return
        frame, failed = make(study, planned, args)
    if frame.empty:
        raise SystemExit(1 if failed else 0)
    rows.require_comparable(frame, study)
    out = args.out / (f"{args.name}-quick" if args.quick else args.name)
    require_place(out)
    replace_text(out / "rows.csv", frame.to_csv(index=False))
    command = shlex.join(["python", "-m", "cory", "study", *argv])
    print(page.write(args.name, study, rows.read([out / "rows.csv"]), failed, command, out))
    print(f"written to {out}: results.md, rows.csv, pictures")
    if failed:
        raise SystemExit(1)


def check(args: argparse.Namespace, flags: list[str], study: Study) -> None:
    """Raises `UserError` for what this study cannot do."""
    for name in ("seeds", "jobs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(name, value, "must be 1 or more")
    asked = {"tasks": args.tasks, "variants": args.variants, "baseline": args.baseline and [args.baseline]}
    for field, names in asked.items():
        known = study.tasks if field == "tasks" else study.variants
        for name in names or ():
            if name not in known:
                near = guess(name, known)
                raise UserError(field, name, f"is not of this study; {near}choose from {', '.join(known)}")
    if args.rows and flags:
        raise UserError("flags", " ".join(flags), "are for runs, and --from makes none; leave them out")


def plan(study: Study, args: argparse.Namespace, flags: list[str]) -> list[StudyRun]:
    """The runs that the command line asks for. Raises `UserError`."""
    from cory.studies import runs
    tasks = args.tasks or [task for task in study.tasks if args.preset in runs.SETTINGS[task][1]]
    if not tasks:
        presets = dict.fromkeys(name for task in study.tasks for name in runs.SETTINGS[task][1])
        raise UserError("preset", args.preset, f"choose from {', '.join(presets)}")
    variants, seeds = list(study.variants), study.seeds
    if args.quick:
        variants, seeds = variants[:QUICK_VARIANTS], seeds[:QUICK_SEEDS]
        if "iterations" not in runs.setting_names(flags):
            flags = ["--iterations", QUICK_ITERATIONS, *flags]
    if args.seeds:
        seeds = range(seeds.start, seeds.start + args.seeds)
    return runs.plan(study, tasks, args.variants or variants, seeds, args.preset, flags, args.out)


def make(study: Study, planned: list[StudyRun], args: argparse.Namespace) -> tuple[pd.DataFrame, list[str]]:
    """Makes the runs. Returns the rows of those that ended, and a line for each that failed."""
    from cory.studies import rows, runs
    require_place(args.out / "runs")
    rows.require_comparable(rows.of_runs(planned), study)           # before hours are spent on the others
    unfinished = len(runs.to_make(planned))
    print(f"{args.name}: {len(planned)} runs, {unfinished} to make, {args.jobs} at a time", flush=True)
    failed = [f"{run.task}, {run.variant}, seed {run.seed}: {run.error}"
              for run in runs.make(planned, args.jobs)]
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return rows.of_runs(planned), failed


def require_place(out: Path) -> None:
    """The folder is there, or can be made. Raises `UserError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("out", str(out), f"cannot be made ({error.strerror}); name another folder") from error


if __name__ == "__main__":
    main()
