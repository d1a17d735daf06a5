"""Runs out of the `runs.jsonl` of pages: what a study goes on from where the folders of its runs are not."""
import json
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Iterator

from cory.errors import UserError
from cory.experiment.saved_config import as_config
from cory.studies.results import REWARD, Result, of_row, require_alike
from cory.studies.runs import StudyRun, differing
from cory.system.files import read_text

# What two rows of one run must have alike.
SAME = ("agents", "roles", "responses", "diverged")


def take(planned: list[StudyRun], files: list[Path]) -> list[StudyRun]:
    """The plan, with the rows that the files have of its runs. A run that has a folder stays as it is there,
    and one of which something is to be measured that no row has is made. Says how many runs were taken, and
    how many files are of use. Raises `UserError`.
    """
    rows: dict[tuple, dict[str, dict]] = {}                     # task, seed, flags: where a row stands: it
    asked, of_use = {key_of(run) for run in planned}, 0         # files that have a run of the plan
    for file in files:
        of_file = read(file)
        of_use += not asked.isdisjoint(of_file)
        for key, of_key in of_file.items():
            rows.setdefault(key, {}).update(of_key)
    if files and not of_use:
        way_out = "has no run of these tasks, variants, seeds, preset and flags; leave it out"
        raise UserError("published", ", ".join(map(str, files)), way_out)

    def taken(run: StudyRun) -> StudyRun:
        whole = {where: row for where, row in rows.get(key_of(run), {}).items() if is_whole(run, row, where)}
        if run.started or not whole:
            return run
        first, *others = whole
        for name in (*SAME, *(["measured"] if run.measure else [])):
            for other in others:
                if whole[other][name] != whole[first][name]:
                    why = f"has other {name} than the same run at {first}"
                    raise UserError("published", other, f"{why}; leave one of the two out")
        most_known = max(whole.values(), key=lambda row: (row["unsteady"] is not None, len(row["answers"])))
        return replace(run, row=most_known)

    found = [taken(run) for run in planned]
    if files:
        n = sum(run.row is not None for run in found)
        print(f"published: {n} of {len(found)} runs, in {of_use} of {len(files)} files", file=sys.stderr)
    return found


def key_of(run: StudyRun) -> tuple:
    return (run.task, run.seed, *run.flags)


def read(file: Path) -> dict[tuple, dict[str, dict]]:
    """{task, seed and flags: {FILE:LINE: row}}. Raises `UserError`."""
    if not file.is_file():
        raise UserError("published", str(file), "is no file; give the runs.jsonl of a study's page")
    rows = {}
    for number, line in enumerate(read_text(file.resolve()).split("\n"), start=1):
        if line.strip():
            where = f"{file}:{number}"
            with understood(where):
                row = json.loads(line)
                rows.setdefault((row["task"], row["seed"], *row["flags"]), {})[where] = row
    return rows


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Whatever is wrong with a row becomes a `UserError` that says where it stands."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise UserError("published", where, f"is no whole row of a study's runs.jsonl ({why}); put a copy of "
                        "it back, or give such a file") from error


def is_whole(run: StudyRun, row: dict, where: str) -> bool:
    """Whether a row has all that is asked of the run. Raises `UserError` for one that is damaged, or that was
    made with settings which these flags no longer mean.
    """
    with understood(where):
        found = of_row(run, row)
        require_figures(found)
        differ = differing(run.asked, asdict(as_config(found.config))) if found.config else []
        measured = found.diverged or run.is_measured(found.measured, found.config)
        metric = row["metric"]
    if metric != REWARD[run.task]:
        raise UserError("published", where, f"is of {metric}, not of {REWARD[run.task]}: leave the file out")
    if differ:
        raise UserError("published", where, f"was made with {'; '.join(differ)}: leave the file out")
    return measured


def require_figures(found: Result) -> None:
    """A run that has not diverged was evaluated from its start to its end. Raises `ValueError`."""
    if found.diverged:
        return
    for agent, points in found.agents.items():
        if [points[0].iteration, points[-1].iteration] != [0, found.config["iterations"]]:
            raise ValueError(f"the evaluations of {agent} do not go from 0 to {found.config['iterations']}")
    require_alike([found])
    _ = found.last, found.eta                                   # agents were evaluated at the same iterations
