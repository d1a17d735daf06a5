"""Rows from a local folder or the Hub, divided into train, validation and test."""
import json
import random
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from cory.config import located
from cory.errors import reading


class Data(NamedTuple):
    """Rows to make queries from: strings, tuples, or whatever hashable thing the task's `query` takes."""
    train: list
    validation: list            # to choose settings by
    test: list                  # to report


def load_columns(dataset: str, columns: list[str]) -> dict[str, list]:
    """{split: the text of the column in each row, or a tuple of several}. Of a folder, the .jsonl files named
    for splits are read; a lone .jsonl file is the split `train`. Any other layout (parquet, csv, the Hub) is
    read by `datasets`; of several subsets, `main`.
    """
    path = Path(located(dataset))
    files = {"train": path} if path.is_file() else {x: path / f"{x}.jsonl" for x in Data._fields}
    with reading(f"dataset {dataset}"):
        splits = {split: read_jsonl(file) for split, file in files.items() if file.exists()}
        splits = splits or read_with_datasets(str(path))
        return {x: [*map(itemgetter(*columns), splits[x])] for x in Data._fields if x in splits}


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]


def read_with_datasets(dataset: str) -> dict[str, list[dict]]:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset
    disable_progress_bars()
    subset = "main" if "main" in get_dataset_config_names(dataset) else None
    return {str(split): rows.to_list() for split, rows in load_dataset(dataset, subset).items()}


def divided(splits: dict[str, list]) -> Data:
    """The splits. Where validation or test is missing, it is drawn from train and not trained on: a tenth of
    the distinct rows, the same for every seed.
    """
    for split in ("validation", "test"):
        if split not in splits:
            different = list(dict.fromkeys(splits["train"]))
            drawn = random.Random(split).sample(different, len(different) // 10)
            rest = set(different) - {*drawn}
            splits = splits | {split: drawn, "train": [row for row in splits["train"] if row in rest]}
    print(", ".join(f"{len(splits[name])} rows for {name}" for name in Data._fields))
    return Data(**splits)
