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

QUICK = "20"                                # iterations of a quick study's runs, if no flag says otherwise


def parser() -> argparse.ArgumentParser:
    studies = "\n".join(f"  {name:10s}  {study.claim}" for name, study in STUDIES.items())
    found = OneLineParser(prog="python -m cory.study", allow_abbrev=False,
                          description=f"{__doc__}\n{studies}\n  claims      the paper's claims, held "
                                      "against the finished runs of all studies",
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("name", choices=[*STUDIES, "claims"], metavar="NAME", help=", ".join([*STUDIES, "claims"]))
    add("--out", type=Path, default=Path("studies"), help="folder of runs, tables and pictures")
    add("--tasks", nargs="+", choices=["imdb", "gsm8k"], help="those of the study if left out")
    add("--variants", nargs="+", help="those of the study if left out")
    add("--preset", default="tiny")
    add("--seeds", type=int, default=0, help="how many, from 0 on; the study's own number if left out")
    add("--jobs", type=int, default=1, help="runs at a time, with the cores divided")
    add("--quick", action="store_true", help=f"2 seeds, few variants, {QUICK} iterations")
    add("--dry_run", action="store_true", help="print the commands of what is not finished, one per line")
    return found


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    at = argv.index("--") if "--" in argv else len(argv)
    args, flags = parser().parse_args(argv[:at]), argv[at + 1:]
    command = shlex.join(["python", "-m", "cory.study", *argv])
    if args.seeds < 0:
        raise UserError("seeds", args.seeds, "must be 1 or more; 0 takes the study's own number")
    if args.jobs < 1:
        raise UserError("jobs", args.jobs, "must be 1 or more")
    if args.name == "claims":
        hold_claims(args, flags, command)
    else:
        make_study(args, flags, command)


def make_study(args: argparse.Namespace, flags: list[str], command: str) -> None:
    study = STUDIES[args.name]
    variants = args.variants or study.variants_of(args.preset, args.quick)
    for variant in variants:
        if variant not in study.variants:
            raise UserError("variants", variant, f"choose from {', '.join(study.variants)}")
    for task in args.tasks or ():
        if task not in study.tasks:
            raise UserError("tasks", task, f"is not of this study; choose from {', '.join(study.tasks)}")
    if args.quick and not any(flag.startswith("--iterations") for flag in flags):
        flags = [*flags, "--iterations", QUICK]

    from cory.studies import pictures, results, runs, tables

    seeds = list(range(args.seeds or (2 if args.quick else study.seeds)))
    planned = runs.plan(study, args.tasks or list(study.tasks), seeds, variants, args.preset, flags, args.out)
    if args.dry_run:
        for run in {run.folder: run for run in planned}.values():
            for words in run.commands():
                print(shlex.join(["python", *words[1:]]))
        return
    n, minutes = runs.expected_minutes(planned, args.jobs)
    expected = "time unknown until one is finished" if minutes is None else f"about {minutes:.0f} minutes"
    print(f"{args.name}: {len(planned)} runs, {n} to make, {args.jobs} at a time; {expected}", flush=True)
    failed = runs.make(planned, args.jobs)
    found = [results.read(run) for run in planned if run.finished]
    kind = runs.slug([*(["quick"] if args.quick else []), *([args.preset] if args.preset != "tiny" else []),
                      *(word for word in flags if not args.quick or word not in ("--iterations", QUICK))])
    out = args.out / (f"{args.name}-{kind}" if kind else args.name)
    out.mkdir(parents=True, exist_ok=True)
    drawn = [path.name for path in pictures.draw(study, found, out)]
    print(tables.write(args.name, study, found, failed, command, drawn, out))
    print(f"written to {out}: results.md, runs.jsonl, {', '.join(drawn)}")
    for run, why in failed:
        print(f"error: {run.task} {run.variant} seed {run.seed} failed, {why}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


def hold_claims(args: argparse.Namespace, flags: list[str], command: str) -> None:
    """Of whatever runs are finished; makes none."""
    from cory.experiment.files import replace_text
    from cory.studies import claims, results, runs

    found = {}
    for name in dict.fromkeys([*(claim.study for claim in claims.CLAIMS), "frontier"]):
        study = STUDIES[name]
        seeds, variants = list(range(args.seeds or study.seeds)), study.variants_of(args.preset, args.quick)
        planned = runs.plan(study, list(study.tasks), seeds, variants, args.preset, flags, args.out)
        read = [results.read(run) for run in planned if run.finished]
        found |= {(name, task): results.by_variant(read, task) for task in study.tasks}
    text = claims.page(found, command)
    args.out.mkdir(parents=True, exist_ok=True)
    replace_text(args.out / "claims.md", text)
    print(text)


if __name__ == "__main__":
    main()
