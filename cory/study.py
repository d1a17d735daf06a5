"""A study: variants over seeds as ordinary runs, then tables, verdicts and pictures in one folder.

    python -m cory.study curves --jobs 2
    python -m cory.study variance --quick --tasks gsm8k
    python -m cory.study ablations --tasks imdb --preset gpt2-large --dry_run   # the commands, for a cluster

What follows `--` goes to every run: `python -m cory.study curves -- --iterations 20`. A finished run is
not made again, an interrupted one goes on, a failed one is reported and the others go on.
"""
import argparse
import shlex
import sys
from pathlib import Path

from cory.command_line import OneLineParser
from cory.errors import UserError, exit_on_user_error
from cory.studies.definitions import STUDIES


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    at = argv.index("--") if "--" in argv else len(argv)
    studies = "\n".join(f"  {name:10s}  {study.claim}" for name, study in STUDIES.items())
    parser = OneLineParser(prog="python -m cory.study", allow_abbrev=False,
                           description=f"{__doc__}\n{studies}",
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("name", choices=STUDIES, metavar="NAME", help=", ".join(STUDIES))
    add("--out", type=Path, default=Path("studies"), help="folder of runs, tables and pictures")
    add("--tasks", nargs="+", choices=["imdb", "gsm8k"], help="those of the study if left out")
    add("--variants", nargs="+", help="those of the study if left out")
    add("--preset", default="tiny")
    add("--seeds", type=int, default=0, help="how many, from 0 on; the study's own number if left out")
    add("--jobs", type=int, default=1, help="runs at a time, with the cores divided")
    add("--quick", action="store_true", help="2 seeds, few variants")
    add("--dry_run", action="store_true", help="print the commands of what is not finished, one per line")
    args = parser.parse_args(argv[:at])
    study = STUDIES[args.name]
    variants = args.variants or list(study.quick if args.quick else study.variants)
    for variant in variants:
        if variant not in study.variants:
            raise UserError("variants", variant, f"choose from {', '.join(study.variants)}")
    seeds = list(range(args.seeds or (2 if args.quick else study.seeds)))
    for task in args.tasks or ():
        if task not in study.tasks:
            raise UserError("tasks", task, f"is not of this study; choose from {', '.join(study.tasks)}")
    if args.jobs < 1:
        raise UserError("jobs", args.jobs, "must be 1 or more")
    if args.seeds < 0:
        raise UserError("seeds", args.seeds, "must be 1 or more; 0 takes the study's own number")

    from cory.studies import pictures, results, runs

    tasks = args.tasks or list(study.tasks)
    planned = runs.plan(study, tasks, seeds, variants, args.preset, argv[at + 1:], args.out)
    if args.dry_run:
        for run in planned:
            if not run.finished:
                print(shlex.join(["python", *run.command()[1:]]))
        return
    n, minutes = runs.expected_minutes(planned, args.jobs)
    expected = "time unknown until one is finished" if minutes is None else f"about {minutes:.0f} minutes"
    print(f"{args.name}: {len(planned)} runs, {n} to make, {args.jobs} at a time; {expected}", flush=True)
    failed = runs.make(planned, args.jobs)
    found = [results.read(run) for run in planned if run.finished]
    kind = runs.slug([*(["quick"] if args.quick else []), *([args.preset] if args.preset != "tiny" else []),
                      *argv[at + 1:]])
    out = args.out / (f"{args.name}-{kind}" if kind else args.name)
    out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "cory.study", *argv])
    print(results.write(args.name, study, found, failed, command, out))
    written = pictures.draw(study, found, out)
    print(f"written to {out}: results.md, runs.jsonl, {', '.join(path.name for path in written)}")
    for run, why in failed:
        print(f"error: {run.task} {run.variant} seed {run.seed} failed, {why}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
