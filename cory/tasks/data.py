"""Rows of text from a local folder, a local .jsonl file or the Hub."""
import json
import logging
import os
import re
from functools import partial
from pathlib import Path

from cory.errors import UserError
from cory.system import hub

DataError = partial(UserError, "dataset")           # DataError(place, way_out)
MOST_FILES = 200_000                                # of a folder: `datasets` walks through all, even of /
HALF_CHARACTER = re.compile("[\ud800-\udfff]")      # half of a pair of UTF-16, which no tokenizer takes


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


def read_jsonl(path: Path) -> list[dict]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(str(path), f"cannot be read ({error.strerror}); mend or remove it") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            way_out = f"is no row of JSON ({hub.short_message(error)}); mend it"
            raise DataError(f"{path}:{number}", way_out) from error
        if not isinstance(rows[-1], dict):
            raise DataError(f"{path}:{number}", "is not a JSON object with named columns")
    return rows


def read_with_datasets(dataset: str, subset: str) -> dict[str, list[dict]]:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset
    disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)    # what goes wrong is raised, in one line
    path, inner = Path(dataset), Path(dataset) / subset         # the Hub's layout: a folder per subset
    path = inner if os.path.isdir(inner) else path
    files = 0
    for _, _, names in os.walk(path):
        files += len(names)
        if files > MOST_FILES:
            raise DataError(dataset, f"holds more than {MOST_FILES} files; name the folder of the data alone")
    hub.reach(dataset)
    place, revision = hub.with_revision(dataset)
    fetch = f"`hf download {dataset.replace('@', ' --revision ')} --repo-type dataset --local-dir DIR`"
    if revision and hub.constants.is_offline_mode():            # the cache may hold another one
        raise DataError(dataset, f"needs the Hub for its revision; with a network run {fetch}, then pass DIR")
    try:
        if path.is_dir():
            splits = load_dataset(str(path))
        else:
            subsets = get_dataset_config_names(place, revision=revision)
            splits = load_dataset(place, subset if subset in subsets else None, revision=revision)
        return {split: rows.to_list() for split, rows in splits.items()}
    except Exception as error:                                  # each file format raises errors of its own
        way_out = "mend its files" if path.is_dir() else f"with a network run {fetch}, then pass DIR"
        why = hub.short_message(error.__cause__ or error)
        raise DataError(dataset, f"could not be read ({why}); {way_out}") from error


def texts_of(source: str, rows: list[dict], columns: list[str]) -> list[tuple[str, ...]]:
    if not rows:
        raise DataError(source, "has no rows")
    for column in columns:
        if column not in rows[0]:
            raise DataError(source, f"has no column {column!r}; columns found: {', '.join(rows[0])[:300]}")
        for number, row in enumerate(rows, start=1):
            text = row.get(column)
            if not isinstance(text, str) or not text.strip() or HALF_CHARACTER.search(text):
                way_out = "which is empty, no text or holds half a character; mend or remove the row"
                raise DataError(f"{source}, row {number}", f"its {column!r} is {repr(text)[:60]}, {way_out}")
    return [tuple(row[column] for column in columns) for row in rows]
