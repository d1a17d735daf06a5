"""Rows of text from a local folder or the Hub, divided into train, validation and test."""
import json
import random
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cory.config import Config
from cory.errors import UserError

DataError = partial(UserError, "dataset")           # DataError(place, hint)
SPLITS = ("train", "validation", "test")


class Data(NamedTuple):
    """Rows to make queries of: strings, tuples, or whatever hashable thing the task's `query` takes."""
    train: list
    validation: list            # to choose settings by
    test: list                  # to report


def load_columns(dataset: str, columns: list[str], subset: str = "") -> dict[str, list[tuple[str, ...]]]:
    """{split: a tuple of the columns' texts for each row}. Raises `UserError` that names file and row.

    A lone .jsonl file is the split `train`. Of a folder train.jsonl, validation.jsonl and test.jsonl are
    read; any other layout (parquet, csv, the Hub) is read by `datasets`, and of its parts the one `subset`.
    """
    path = Path(dataset)
    files = {split: path / f"{split}.jsonl" for split in SPLITS if (path / f"{split}.jsonl").is_file()}
    if path.suffix == ".jsonl" and path.is_file():
        files = {"train": path}
    splits = {split: read_jsonl(file) for split, file in files.items()} or read_with_datasets(dataset, subset)
    if "train" not in splits:
        raise DataError(dataset, f"has no split named train; splits found: {', '.join(splits)[:300]}")
    return {split: texts_of(f"{dataset} ({split})", rows, columns) for split, rows in splits.items()
            if split in SPLITS}


def read_jsonl(path: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise DataError(f"{path}:{number}", f"is no row of JSON ({error}); mend it") from error
    return rows


def read_with_datasets(dataset: str, subset: str) -> dict[str, list[dict]]:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset
    disable_progress_bars()
    try:
        if Path(dataset).exists():
            inner = Path(dataset) / subset                      # the Hub's layout: a folder for each subset
            splits = load_dataset(str(inner if inner.is_dir() else dataset))
        else:
            name, _, revision = dataset.partition("@")
            subsets = get_dataset_config_names(name, revision=revision or None)
            splits = load_dataset(name, subset if subset in subsets else None, revision=revision or None)
    except Exception as error:                                  # each file format raises errors of its own
        hint = "pass a .jsonl file, a folder with train.jsonl and test.jsonl, or a name of the Hub"
        raise DataError(dataset, f"cannot be read ({str(error)[:200]}); {hint}") from error
    return {split: rows.to_list() for split, rows in splits.items()}


def texts_of(source: str, rows: list[dict], columns: list[str]) -> list[tuple[str, ...]]:
    for number, row in enumerate(rows, start=1):
        for column in columns:
            text = row.get(column)
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{source}, row {number}", f"needs a text in column {column!r} and has "
                                f"{text!r}; columns found: {', '.join(row)[:200]}")
    return [tuple(row[column] for column in columns) for row in rows]


def divided(cfg: Config, splits: dict[str, list]) -> Data:
    """The splits. Where validation or test is missing, it is drawn out of train and not trained on: a tenth
    of the different rows, at least `eval_queries`, the same for every seed. Raises `UserError`.
    """
    train, held_out = splits["train"], {}
    for split in ("validation", "test"):
        if split in splits:
            held_out[split] = splits[split]
            continue
        different = list(dict.fromkeys(train))
        n = min(max(cfg.eval_queries, len(different) // 10), len(different))
        held_out[split] = random.Random(split).sample(different, n)
        drawn = set(held_out[split])
        train = [row for row in train if row not in drawn]
    rows, trained_on = held_out[cfg.eval_split], set(train)
    for name, need, found in (("eval_queries", cfg.eval_queries, len(rows)),
                              ("batch_size", cfg.batch_size // cfg.responses_per_query, len(train))):
        cfg.require(name, found >= need, f"{cfg.dataset} leaves only {found} rows for its {need} queries; "
                    "lower it or bring more data")
    if repeated := sum(row in trained_on for row in rows):
        print(f"{repeated} of {len(rows)} {cfg.eval_split} rows are training rows, too")
    return Data(train, **held_out)
