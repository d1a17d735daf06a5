"""Rows of text from a local folder or the Hub, divided into train, validation and test."""
import json
import random
import re
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from cory.config import BUNDLED, Config, located
from cory.errors import UserError


class Data(NamedTuple):
    """Rows to make queries from: strings, tuples, or whatever hashable thing the task's `query` takes."""
    train: list
    validation: list            # to choose settings by
    test: list                  # to report


def load_columns(dataset: str, columns: list[str]) -> dict[str, list]:
    """{split: the text of the column in each row, or a tuple of several}. Raises `UserError`.

    A lone .jsonl file is the split `train`. A folder's train.jsonl, validation.jsonl and test.jsonl are
    read. Any other layout (parquet, csv, the Hub) is read by `datasets`; of several subsets, `main`.
    """
    path = Path(located(dataset))
    if "/" not in dataset and not path.exists() and not dataset.startswith(BUNDLED):
        # `datasets` would take a folder of this name that another project has left in its cache
        raise UserError("dataset", dataset, "is no file or folder here; a Hub name has the form OWNER/NAME")
    files = {"train": path} if path.is_file() else {name: path / f"{name}.jsonl" for name in Data._fields}
    files = {split: file for split, file in files.items() if file.is_file()}
    try:
        splits = {split: parse_jsonl(file) for split, file in files.items()} or read_with_datasets(str(path))
    except Exception as error:                                  # each file format raises errors of its own
        hint = "pass a .jsonl file, a folder with train.jsonl and test.jsonl, or a Hub name"
        raise UserError("dataset", dataset, f"cannot be read ({str(error)[:200]}); {hint}") from error
    if "train" not in splits:
        raise UserError("dataset", dataset, f"has no split named train, only {', '.join(splits)}")
    splits = {split: rows for split, rows in splits.items() if split in Data._fields}
    for split, rows in splits.items():
        for number, row in enumerate(rows, start=1):
            if not (isinstance(row, dict) and all(is_text(row.get(name)) for name in columns)):
                found = ", ".join(row) if isinstance(row, dict) else "none"
                raise UserError("dataset", f"{dataset} ({split}), row {number}",
                                f"needs texts in its {' and '.join(columns)}; columns found: {found}; it is "
                                f"{ascii(row)[:100]}")
    return {split: [*map(itemgetter(*columns), rows)] for split, rows in splits.items()}


def is_text(value) -> bool:
    """Whether a value is a text, not blank, and without lone surrogates, which no tokenizer takes."""
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)


def parse_jsonl(path: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
    return rows


def read_with_datasets(dataset: str) -> dict[str, list[dict]]:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset
    disable_progress_bars()
    main = Path(dataset) / "main"                               # the Hub's layout: a folder for each subset
    place = str(main if main.is_dir() else dataset)
    splits = load_dataset(place, "main" if "main" in get_dataset_config_names(place) else None)
    return {split: rows.to_list() for split, rows in splits.items()}


def divided(cfg: Config, splits: dict[str, list]) -> Data:
    """The splits. Where validation or test is missing, it is drawn from train and not trained on: a tenth of
    the distinct rows, at least `eval_queries`, the same for every seed. Raises `UserError`.
    """
    for split in ("validation", "test"):
        if split not in splits:
            different = list(dict.fromkeys(splits["train"]))
            n = max(cfg.eval_queries, len(different) // 10)
            cfg.require("eval_queries", n < len(different), f"{cfg.dataset} has {len(different)} different "
                        f"rows, and {split} would take as many; lower it or provide more data")
            drawn = dict.fromkeys(random.Random(split).sample(different, n))
            rest = [row for row in splits["train"] if row not in drawn]
            splits = {**splits, split: list(drawn), "train": rest}
    trained_on, held_out = set(splits["train"]), splits[cfg.eval_split]
    for name, need, rows in (("eval_queries", cfg.eval_queries, held_out),
                             ("batch_size", cfg.batch_size // cfg.responses_per_query, splits["train"])):
        cfg.require(name, len(rows) >= need, f"{cfg.dataset} leaves only {len(rows)} rows for its {need} "
                    "queries; lower it or provide more data")
    print(f"{len(splits['train'])} rows to train on, {len(splits['validation'])} of validation, "
          f"{len(splits['test'])} of test")
    if repeated := sum(row in trained_on for row in held_out):
        print(f"{repeated} of {len(held_out)} {cfg.eval_split} rows are training rows, too")
    return Data(**splits)
