"""Rows of text from a local folder, a local .jsonl file or the Hub, divided into train, validation and test."""
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
    """Rows to make queries of: strings, tuples of strings, or whatever the task's `query` takes."""
    train: list
    validation: list            # to choose settings by
    test: list                  # to report


def load_columns(dataset: str, columns: list[str], subset: str = "") -> dict[str, list[tuple[str, ...]]]:
    """{split: a tuple of the columns' texts for each row}. Raises `UserError` that names file and row.

    A lone .jsonl file is the split `train`. Of a folder the files train.jsonl, validation.jsonl and test.jsonl
    are read; any other layout (parquet, csv, the Hub) is read by `datasets`. `subset` names the part to take of
    a data set that comes in several.
    """
    path = Path(dataset)
    files = {split: path / f"{split}.jsonl" for split in SPLITS if (path / f"{split}.jsonl").is_file()}
    if path.suffix == ".jsonl":
        files = {"train": path}
    splits = {split: read_jsonl(file) for split, file in files.items()} or read_with_datasets(dataset, subset)
    return {split: texts_of(f"{dataset} ({split})", rows, columns) for split, rows in splits.items()
            if split in SPLITS}


def read_jsonl(path: Path) -> list[dict]:
    if not path.exists():
        raise DataError(str(path), "no such file; check the path")
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
    place, _, revision = dataset.rpartition("@") if "@" in dataset else (dataset, "", None)
    try:
        if Path(dataset).exists():
            inner = Path(dataset) / subset                      # the Hub's layout: a folder for each subset
            splits = load_dataset(str(inner if inner.is_dir() else dataset))
        else:
            subsets = get_dataset_config_names(place, revision=revision)
            splits = load_dataset(place, subset if subset in subsets else None, revision=revision)
    except Exception as error:                                  # each file format raises errors of its own
        hint = "pass a folder with train.jsonl and test.jsonl, or a name of the Hub"
        raise DataError(dataset, f"cannot be read ({str(error)[:200]}); {hint}") from error
    return {split: rows.to_list() for split, rows in splits.items()}


def texts_of(source: str, rows: list[dict], columns: list[str]) -> list[tuple[str, ...]]:
    for number, row in enumerate(rows, start=1):
        for column in columns:
            if column not in row:
                raise DataError(source, f"has no column {column!r} in row {number}; it has {', '.join(row)[:200]}")
            text = row[column]
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{source}, row {number}", f"its {column!r} is {text!r}, no text; mend or remove it")
    return [tuple(row[column] for column in columns) for row in rows]


def divided(cfg: Config, splits: dict[str, list]) -> Data:
    """The splits train, validation and test. One of the last two that is missing is drawn out of train, which
    does not train on it: a tenth of its different rows (at least `eval_queries`), drawn at random and alike for
    every seed. A split that is there is used whole. Raises `UserError`.
    """
    if "train" not in splits:
        raise DataError(cfg.dataset, f"has no split named train; splits found: {', '.join(splits)[:300]}")
    train, held_out = splits["train"], {}
    for split in ("validation", "test"):
        held_out[split] = splits.get(split)
        if not held_out[split]:
            different = list(dict.fromkeys(train))
            n = max(cfg.eval_queries, len(different) // 10)
            held_out[split] = random.Random(split).sample(different, min(n, len(different)))
            drawn = set(held_out[split])
            train = [row for row in train if row not in drawn]
    data = Data(train, **held_out)
    for name, need, rows in (("eval_queries", cfg.eval_queries, getattr(data, cfg.eval_split)),
                             ("batch_size", cfg.batch_size // cfg.responses_per_query, train)):
        if len(rows) < need:
            raise UserError(name, getattr(cfg, name), f"{cfg.dataset} leaves only {len(rows)} rows for its "
                            f"{need} queries; lower it or bring more data")
    trained_on = {*map(repr, train)}
    repeated = sum(repr(row) in trained_on for row in getattr(data, cfg.eval_split))
    if repeated:
        print(f"{repeated} of {len(getattr(data, cfg.eval_split))} {cfg.eval_split} rows are training rows, too")
    return data
