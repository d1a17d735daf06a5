"""Rows of text from a local folder, a local .jsonl file or the Hub."""
import json
import logging
from functools import partial
from pathlib import Path

from cory.errors import UserError

DataError = partial(UserError, "dataset")           # DataError(place, way_out)


def load_columns(dataset: str, columns: list[str], subset: str = "") -> dict[str, list[tuple[str, ...]]]:
    """{split: a tuple of the columns' texts for each row}. Raises `UserError` naming file and row.

    A lone .jsonl file is the split `train`. Folders of `<split>.jsonl` are read here, so that a broken line
    can be named; any other layout (parquet, csv, Hub) is read by `datasets`. `subset` names the part to take
    of a data set that comes in several.
    """
    path = Path(dataset)
    lone = path.suffix == ".jsonl" and path.is_file()
    files = {"train": path} if lone else {file.stem: file for file in sorted(path.glob("*.jsonl"))}
    splits = {split: read_jsonl(file) for split, file in files.items()} or read_with_datasets(dataset, subset)
    return {split: texts_of(f"{dataset} ({split})", rows, columns) for split, rows in splits.items()}


def read_jsonl(path: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        place = f"{path}:{number}"
        try:
            rows.append(json.loads(line))
        except UnicodeDecodeError as error:
            raise DataError(place, f"is not UTF-8 at byte {error.start} of the line; re-encode it") from error
        except json.JSONDecodeError as error:
            raise DataError(place, f"is not JSON ({error.msg}, column {error.colno}); mend it") from error
        if not isinstance(rows[-1], dict):
            raise DataError(place, "is not a JSON object with named columns")
    return rows


def read_with_datasets(dataset: str, subset: str) -> dict[str, list[dict]]:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset
    disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)    # what goes wrong is raised, in one line
    path, inner = Path(dataset), Path(dataset) / subset         # the Hub's layout: a folder per subset
    looks_local = path.is_absolute() or dataset.startswith(".") or dataset.count("/") > 1
    if looks_local and not path.exists():
        raise DataError(dataset, "no such file or folder")
    try:
        if path.is_dir():
            splits = load_dataset(str(inner if inner.is_dir() else path))
        else:
            splits = load_dataset(dataset, subset if subset in get_dataset_config_names(dataset) else None)
        return {split: rows.to_list() for split, rows in splits.items()}
    except Exception as error:                                  # each file format raises errors of its own
        if path.exists():
            raise DataError(dataset, f"could not be read: {error.__cause__ or error}; mend it") from error
        raise DataError(dataset, "is neither a local path nor to be had from the Hub now; with a network run "
                        f"`hf download {dataset} --repo-type dataset --local-dir DIR`, pass DIR") from error


def texts_of(source: str, rows: list[dict], columns: list[str]) -> list[tuple[str, ...]]:
    if not rows:
        raise DataError(source, "has no rows")
    for column in columns:
        if column not in rows[0]:
            raise DataError(source, f"has no column {column!r}; columns found: {', '.join(rows[0])}")
        for number, row in enumerate(rows, start=1):
            place, text = f"{source}, row {number}", row.get(column)
            if not isinstance(text, str):
                raise DataError(place, f"its {column!r} is {text!r}, not text; mend or remove the row")
            if not text.strip():
                raise DataError(place, f"its {column!r} is empty; remove the row")
    return [tuple(row[column] for column in columns) for row in rows]
