"""A study: variants over seeds as ordinary runs, then tables, verdicts and pictures in one folder.

    python -m cory study curves --jobs 2
    python -m cory study variance --quick --tasks gsm8k
    python -m cory study ablations --tasks imdb --preset gpt2-large --dry_run   # the commands, for a cluster

What follows `--` goes to every run: `python -m cory study curves -- --iterations 20`. A finished run is
not made again, an interrupted one goes on, a failed one is reported and the others go on.
"""
import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from cory.commands.flags import OneLineParser
from cory.errors import UserError, exit_on_user_error
from cory.names import guess
from cory.studies.definitions import STUDIES, Study

QUICK = "20"                                # iterations of a quick study's runs, if no flag says otherwise


def parser() -> argparse.ArgumentParser:
    studies = "\n".join(f"  {name:10s}  {study.claim}" for name, study in STUDIES.items())
    found = OneLineParser(prog="python -m cory study", allow_abbrev=False,
                          description=f"{__doc__}\n{studies}\n  claims      the paper's claims, held "
                                      "against the finished runs of all studies",
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("name", choices=[*STUDIES, "claims"], metavar="NAME", help=", ".join([*STUDIES, "claims"]))
    add("--out", type=Path, default=Path("studies"), help="folder of runs, tables and pictures")
    add("--tasks", nargs="+", choices=["imdb", "gsm8k"], help="those of the study if left out")
    add("--variants", nargs="+", help="those of the study if left out")
    add("--baseline", metavar="VARIANT", help="what all are compared with; the study's own if left out")
    add("--preset", default="tiny")
    add("--seeds", type=int, help="how many, from 0 on; the study's own number if left out")
    add("--jobs", type=int, default=1, help="runs at a time, with the cores divided")
    add("--quick", action="store_true", help=f"2 seeds, few variants, {QUICK} iterations")
    add("--published", nargs="+", type=Path, metavar="FILE", default=[],
        help="runs.jsonl of pages: a run that stands there is not made again")
    add("--dry_run", action="store_true", help="print the commands of what is not finished, one per line")
    return found


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    at = argv.index("--") if "--" in argv else len(argv)
    args, flags = parser().parse_args(argv[:at]), argv[at + 1:]
    command = shlex.join(["python", "-m", "cory", "study", *argv])
    if args.seeds is not None and args.seeds < 1:
        raise UserError("seeds", args.seeds, "must be 1 or more; leave it out for the study's own number")
    if args.jobs < 1:
        raise UserError("jobs", args.jobs, "must be 1 or more")
    if any(flag.partition("=")[0] == "--preset" for flag in flags):
        raise UserError("flag", "--preset", "is the study's own; give it before the --")
    if args.quick and not any(flag.startswith("--iterations") for flag in flags):
        flags = ["--iterations", QUICK, *flags]
    if args.name == "claims":
        hold_claims(args, flags, command)
    else:
        make_study(args, flags, command)


def tasks_of(study: Study, args: argparse.Namespace) -> list[str]:
    """Those asked for, or those of the study that have the preset. Raises `UserError`."""
    from cory.studies.runs import SCRIPTS

    for task in args.tasks or ():
        if task not in study.tasks:
            raise UserError("tasks", task, f"is not of this study; choose from {', '.join(study.tasks)}")
    found = args.tasks or [task for task in study.tasks if args.preset in SCRIPTS[task][1]]
    if not found:
        known = dict.fromkeys(name for task in study.tasks for name in SCRIPTS[task][1])
        raise UserError("preset", args.preset, f"choose from {', '.join(known)}")
    return found


def folder_of(args: argparse.Namespace, flags: list[str]) -> Path:
    """Where the study's page goes: one of other tasks, variants, seeds or flags does not overwrite it."""
    from cory.studies.runs import slug

    if args.quick and flags[:2] == ["--iterations", QUICK]:
        flags = flags[2:]                       # what `quick` says already
    words = [*(["quick"] if args.quick else []), *([args.preset] if args.preset != "tiny" else []),
             *(args.tasks or ()), *(args.variants or ()),
             *([f"less {args.baseline}"] if args.baseline else []),
             *([f"{args.seeds}-seeds"] if args.seeds else []), *flags]
    return args.out / (f"{args.name}-{slug(words)}" if words else args.name)


def make_study(args: argparse.Namespace, flags: list[str], command: str) -> None:
    study = STUDIES[args.name]
    variants = args.variants or study.variants_of(args.preset, args.quick)
    known = study.variants_of(args.preset, quick=False)
    for variant in variants:
        if variant not in known:
            raise UserError("variants", variant, f"{guess(variant, known)}choose from {', '.join(known)}")
    if args.baseline:
        if args.baseline not in variants:
            way_out = f"is not among the variants; {guess(args.baseline, variants)}choose from "
            raise UserError("baseline", args.baseline, way_out + ", ".join(variants))
        claim = f"{study.claim} Here all are held against `{args.baseline}`."
        study = replace(study, claim=claim, baseline=args.baseline, pairs={})
    tasks = tasks_of(study, args)

    from cory.studies import pictures, published, results, runs, tables
    from cory.system.folder import locked

    seeds = list(range(args.seeds or (2 if args.quick else study.seeds)))
    planned = runs.plan(study, tasks, seeds, variants, args.preset, flags, args.out)
    planned = published.take(planned, args.published)
    if args.dry_run:
        for run in runs.to_make(planned):
            if run.started and run.forgets:
                with locked(run.folder):                        # its line deletes the folder
                    pass
            print(runs.line_of(run))
        return
    require_place(args.out)
    n, minutes = runs.expected_minutes(planned, args.jobs)
    expected = "time unknown until one is finished" if minutes is None else f"about {minutes:.0f} minutes"
    results.require_alike(results.of_ended(planned))
    print(f"{args.name}: {len(planned)} runs, {n} to make, {args.jobs} at a time; {expected}",
          flush=True)
    failed = runs.make(planned, args.jobs)
    for run, why in failed:
        print(f"error: {run.task} {run.variant} seed {run.seed} failed, {why}", file=sys.stderr)
    found = results.of_ended(planned)
    results.require_alike(found)
    out = folder_of(args, flags)
    out.mkdir(parents=True, exist_ok=True)
    drawn = [path.name for path in pictures.draw(study, [r for r in found if not r.diverged], out)]
    print(tables.write(args.name, study, found, failed, command, drawn, out))
    print(f"written to {out}: {', '.join(['results.md', 'runs.jsonl', *drawn])}")
    if any(not run.diverged for run, _ in failed):
        raise SystemExit(1)


def require_place(out: Path) -> None:
    """The folder of runs and pages is there, or can be made. Raises `UserError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("out", str(out), f"cannot be made ({error.strerror}); name another folder") from error
    if not os.access(out, os.W_OK):
        raise UserError("out", str(out), "cannot be written to; name another folder")


def hold_claims(args: argparse.Namespace, flags: list[str], command: str) -> None:
    """Of whatever runs are finished; makes none. Raises `UserError` for what a study alone can do."""
    from cory.studies import claims, published, results, runs
    from cory.system.files import replace_text

    for name in ("variants", "baseline", "dry_run"):
        if getattr(args, name):
            raise UserError(name, getattr(args, name), "claims is a table of finished runs; leave it out")
    plans = {}
    for name in dict.fromkeys([*(claim.study for claim in claims.CLAIMS), "frontier"]):
        study = STUDIES[name]
        seeds = list(range(args.seeds or (2 if args.quick else study.seeds)))
        variants = study.variants_of(args.preset, quick=False)
        plans[name] = runs.plan(study, tasks_of(study, args), seeds, variants, args.preset, flags, args.out)
    taken = iter(published.take([run for plan in plans.values() for run in plan], args.published))
    found = {name: results.of_ended([next(taken) for _ in plan]) for name, plan in plans.items()}
    every = [result for ended in found.values() for result in ended]
    if not every:
        way_out = "holds no finished run; make studies first, or give --published docs/studies/*/runs.jsonl"
        raise UserError("out", str(args.out), way_out)
    results.require_alike(every)
    require_place(args.out)
    text, out = claims.page(found, command), folder_of(args, flags)
    out.mkdir(parents=True, exist_ok=True)
    replace_text(out / "results.md", text)
    print(text)
    print(f"written to {out}: results.md")


if __name__ == "__main__":
    main()
