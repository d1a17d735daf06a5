"""Rows of text from a local folder, a local .jsonl file or the Hub."""
import json
import logging
import os
import stat
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import BinaryIO

from cory.errors import UserError, printable
from cory.system import hub

DataError = partial(UserError, "dataset")           # DataError(place, way_out)

READ = {".jsonl", ".json", ".csv", ".parquet", ".txt"}      # endings of files that rows are read from
LARGEST = 4 * 2**30                                         # bytes of one file


def load_columns(dataset: str, columns: list[str], subset: str = "") -> dict[str, list[tuple[str, ...]]]:
    """{split: a tuple of the columns' texts for each row}. Raises `UserError` naming file and row.

    A lone .jsonl file is the split `train`. Folders of `<split>.jsonl` are read here, so that a broken line
    can be named; any other layout (parquet, csv, Hub) is read by `datasets`. `subset` names the part to take
    of a data set that comes in several.
    """
    path, files = Path(dataset), {}
    if os.path.isdir(dataset):
        files = {file.stem: file for file in sorted(path.glob("*.jsonl"))}
    elif path.suffix == ".jsonl" and os.path.isfile(dataset):
        files = {"train": path}
    elif os.path.exists(dataset):
        raise DataError(dataset, "is neither a folder nor a .jsonl file; put it into a folder and name that")
    else:
        hub.require_hub_name("dataset", dataset)
    splits = {split: read_jsonl(file) for split, file in files.items()} or read_with_datasets(dataset, subset)
    return {split: texts_of(f"{dataset} ({split})", rows, columns) for split, rows in splits.items()}


def open_file(path: Path) -> BinaryIO:
    """A regular file, or a link to one, of a size that memory holds. Raises `UserError`."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise DataError(str(path), "is no regular file; put the file itself there")
        if about.st_size > LARGEST:
            raise DataError(str(path), f"has {about.st_size / 1e9:.1f} GB, and all rows are held in memory; "
                            f"take a part of up to {LARGEST / 1e9:.1f} GB")
        return path.open("rb")
    except OSError as error:
        raise DataError(str(path), f"cannot be opened ({error.strerror}); mend or remove it") from error


def read_jsonl(path: Path) -> list[dict]:
    rows = []
    with open_file(path) as file:
        lines = file.read().splitlines()
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        try:
            rows.append(json.loads(line))
        except UnicodeDecodeError as error:
            raise DataError(place, f"is not UTF-8 at byte {error.start} of the line; re-encode it") from error
        except json.JSONDecodeError as error:
            raise DataError(place, f"is not JSON ({error.msg}, column {error.colno}); mend it") from error
        except (ValueError, RecursionError) as error:       # thousands of digits or of brackets
            raise DataError(place, f"is no JSON of a row ({hub.short_message(error)}); mend it") from error
        if not isinstance(rows[-1], dict):
            raise DataError(place, "is not a JSON object with named columns")
    return rows


def read_with_datasets(dataset: str, subset: str) -> dict[str, list[dict]]:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset
    disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)    # what goes wrong is raised, in one line
    path, inner = Path(dataset), Path(dataset) / subset         # the Hub's layout: a folder per subset
    path = inner if os.path.isdir(inner) else path
    for file in path.rglob("*") if path.is_dir() else ():
        if file.suffix in READ and not file.name.startswith(".") and not os.path.isdir(file):
            open_file(file).close()
    hub.reach(dataset)
    try:
        if path.is_dir():
            splits = load_dataset(str(path))
        else:
            splits = load_dataset(dataset, subset if subset in get_dataset_config_names(dataset) else None)
        return {split: rows.to_list() for split, rows in splits.items()}
    except Exception as error:                                  # each file format raises errors of its own
        if path.is_dir():
            cause = error.__cause__ or error
            way_out = f"could not be read: {hub.short_message(cause)}; mend it"
            raise DataError(file_read_in(cause) or dataset, way_out) from error
        raise DataError(dataset, "is neither a local path nor to be had from the Hub now; with a network run "
                        f"`hf download {dataset} --repo-type dataset --local-dir DIR`, pass DIR") from error


def file_read_in(error: BaseException) -> str | None:
    """What the reader of `datasets` that raised it has in its variable `file`."""
    frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__)]
    return next((names["file"] for names in frames if isinstance(names.get("file"), str)), None)


def texts_of(source: str, rows: list[dict], columns: list[str]) -> list[tuple[str, ...]]:
    if not rows:
        raise DataError(source, "has no rows")
    for column in columns:
        if column not in rows[0]:
            columns_found = printable(", ".join(rows[0]))[:300]
            raise DataError(source, f"has no column {column!r}; columns found: {columns_found}")
        for number, row in enumerate(rows, start=1):
            place, text = f"{source}, row {number}", row.get(column)
            if not isinstance(text, str):
                shown = repr(text)[:60]
                raise DataError(place, f"its {column!r} is {shown}, not text; mend or remove the row")
            if not text.strip():
                raise DataError(place, f"its {column!r} is empty; remove the row")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = text[error.start]
                raise DataError(place, f"its {column!r} holds {half!r}, half a character, which no tokenizer "
                                "takes; mend or remove the row") from error
    return [tuple(row[column] for column in columns) for row in rows]
