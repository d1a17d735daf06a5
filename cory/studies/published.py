"""Runs out of the `runs.jsonl` of pages: what a study goes on from where the folders of its runs are not."""
from dataclasses import replace
from pathlib import Path

from cory.config import portable
from cory.errors import UserError
from cory.experiment.files import read_jsonl, readable
from cory.studies.results import of_row
from cory.studies.runs import StudyRun, differing


def take(planned: list[StudyRun], files: list[Path]) -> list[StudyRun]:
    """The plan, with the rows that the files have of its runs. A run that has a folder stays as it is there,
    and one of which something is to be measured that the files do not have is made. Raises `UserError`.
    """
    rows: dict[tuple, list[tuple[Path, dict]]] = {}
    for file in files:
        if not file.exists():
            raise UserError("published", str(file), "is not there; give the runs.jsonl of a study's page")
        with readable(file):
            for row in read_jsonl(file):
                rows.setdefault((row["task"], row["seed"], *row["flags"]), []).append((file, row))

    def taken(run: StudyRun) -> StudyRun:
        found = rows.get((run.task, run.seed, *run.flags), [])
        whole = [(file, row) for file, row in found if is_whole(run, row, file)]
        if run.started or not whole:
            return run
        (first, row), *others = whole
        for other, same in others:
            if same["agents"] != row["agents"]:
                why = f"has other figures of {run.task}, {run.variant}, seed {run.seed} than {first}"
                raise UserError("published", str(other), f"{why}; leave one of the two out")
        return replace(run, row=row)

    return [taken(run) for run in planned]


def is_whole(run: StudyRun, row: dict, file: Path) -> bool:
    """Whether a row has all that is asked of the run. Raises `UserError` for one that is damaged, or that was
    made with settings which these flags no longer mean.
    """
    with readable(file):
        found = of_row(run, row)
        if not found.diverged:
            _ = found.base, found.last, found.eta, found.dtype
        measured = found.diverged or run.is_measured(found.measured, found.config)
    if differ := differing(portable(run.asked), found.config):
        why = f"has {run.task}, {run.variant}, seed {run.seed} made with {'; '.join(differ)}"
        raise UserError("published", str(file), f"{why}: leave the file out")
    return measured
