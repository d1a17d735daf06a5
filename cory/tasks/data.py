"""Rows from a local folder or the Hub, divided into train, validation and test."""
import json
import random
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from cory.config import expand_bundled
from cory.errors import UserError, as_user_error


class Data(NamedTuple):
    """Rows to make queries from: strings, tuples, or whatever hashable thing the task's `query` takes."""
    train: list
    validation: list            # to choose settings by
    test: list                  # to report


def load_columns(dataset: str, columns: list[str]) -> dict[str, list]:
    """{split: the column's value in each row, or a tuple of several}. Of a folder, the .jsonl files named
    for splits are read; a lone file is the split `train`. Any other layout (parquet, csv, the Hub) is
    read by `datasets`; of several subsets, `main`.
    """
    path = Path(expand_bundled(dataset))
    files = {split: path / f"{split}.jsonl" for split in Data._fields}
    for name in ("dev", "val", "valid"):
        if (path / f"{name}.jsonl").exists():
            raise UserError("dataset", dataset, f"contains {name}.jsonl; name it validation.jsonl")
    if path.suffix == ".jsonl":
        files = {"train": path}
    pick = itemgetter(*columns)
    with as_user_error(f"dataset {dataset}"):
        splits = {split: read_rows(file) for split, file in files.items() if file.exists()}
        if not splits:
            splits = read_with_datasets(str(path))
        return {split: [*map(pick, splits[split])] for split in Data._fields if split in splits}


def read_rows(path: Path) -> list[dict]:
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def read_with_datasets(dataset: str) -> dict[str, list[dict]]:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset
    disable_progress_bars()
    file = Path(dataset).resolve()
    if file.is_file():
        splits = load_dataset(str(file.parent), data_files=file.name)
    else:
        subset = "main" if "main" in get_dataset_config_names(dataset) else None
        splits = load_dataset(dataset, subset)
    return {str(split): rows.to_list() for split, rows in splits.items()}


def complete_splits(splits: dict[str, list]) -> Data:
    """Where validation or test is missing, it is drawn from train and not trained on: a tenth of the distinct
    rows, the same for every seed. Prints the size of each split.
    """
    splits = dict(splits)
    if "train" not in splits:
        raise UserError(f"the data has no split `train`, only {[*splits]}")
    for split in ("validation", "test"):
        if split not in splits:
            distinct = [*dict.fromkeys(splits["train"])]
            drawn = random.Random(split).sample(distinct, len(distinct) // 10)
            held_out = {*drawn}
            splits[split] = drawn
            splits["train"] = [row for row in splits["train"] if row not in held_out]
    print(", ".join(f"{len(splits[name])} rows for {name}" for name in Data._fields))
    return Data(**splits)
