"""Rows from a local folder or the Hub, divided into train, validation and test."""
import json
import random
import re
from collections import defaultdict
from glob import has_magic
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from cory.config import Config, located
from cory.errors import UserError


class Data(NamedTuple):
    """Rows to make queries from: strings, tuples, or whatever hashable thing the task's `query` takes."""
    train: list
    validation: list            # to choose settings by
    test: list                  # to report


# Other names of that split.
VALIDATION = dict.fromkeys(("valid", "val", "dev"), "validation")


def load_columns(dataset: str, columns: list[str]) -> dict[str, list]:
    """{split: the text of the column in each row, or a tuple of several}. Raises `UserError`.

    A lone .jsonl file is the split `train`. Of a folder, .jsonl files named for splits are read. Any other
    layout (parquet, csv, the Hub) is read by `datasets`; of several subsets, `main`. A line names what is not
    read.
    """
    path = Path(located(dataset))
    if not path.exists() and (path.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset)):
        # `datasets` would take a folder of this name that another project has left in its cache
        raise UserError("dataset", dataset, "is not a file or folder here; Hub names are OWNER/NAME")
    try:
        of_splits, files = read_jsonl_files(path) or read_with_datasets(str(path))
    except Exception as error:                                  # each file format raises errors of its own
        hint = "pass a .jsonl file, a folder with train.jsonl and test.jsonl, or a Hub name"
        raise UserError("dataset", dataset, f"cannot be read ({str(error)[:200]}); {hint}") from error
    splits = defaultdict(list)
    for name, rows in of_splits:
        splits[VALIDATION.get(name, name)] += rows
    if rest := [name for name in splits if name not in Data._fields] + other_files(path, files):
        print(f"not read of {dataset}: {', '.join(rest[:5])}{', ...' * (len(rest) > 5)}")
    if "train" not in splits:
        raise UserError("dataset", dataset, f"has no split named train, only {', '.join(splits)}")
    splits = {split: splits[split] for split in Data._fields if split in splits}
    for split, rows in splits.items():
        for number, row in enumerate(rows, start=1):
            if not (isinstance(row, dict) and all(is_text(row.get(name)) for name in columns)):
                raise UserError("dataset", f"{dataset} ({split}), row {number}",
                                f"needs texts in its {' and '.join(columns)}; it is {ascii(row)[:200]}")
    return {split: [*map(itemgetter(*columns), rows)] for split, rows in splits.items()}


def split_of(file: Path) -> str:
    """The split that a file is named for: `validation` by `dev.csv` or `Val-00000-of-00002.jsonl`."""
    name = re.sub(r"[-_.]?\d+(-of-\d+)?$", "", file.stem.lower())
    return VALIDATION.get(name, name)


def other_files(folder: Path, read: set[Path]) -> list[str]:
    """Those of a folder that are not read, without hidden ones and descriptions."""
    folder = folder.resolve()
    names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*.*"))
             if file.is_file() and file not in read]
    return [name for name in names if not re.search(r"(^|/)\.|\.md$", name)]


def is_text(value) -> bool:
    """Whether a value is a text, not blank, and without lone surrogates, which no tokenizer takes."""
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)


# (split, rows) of each file or split, and the files that were read
RowsAndFiles = tuple[list[tuple[str, list[dict]]], set[Path]]


def read_jsonl_files(path: Path) -> RowsAndFiles | None:
    """The rows of a file or of a folder's files that are named for splits; None where there are none."""
    if path.is_file():
        return [("train", parse_jsonl(path))], {path}
    files = [file for file in sorted(path.resolve().glob("*.jsonl")) if split_of(file) in Data._fields]
    return ([(split_of(file), parse_jsonl(file)) for file in files], {*files}) if files else None


def parse_jsonl(path: Path) -> list[dict]:
    """Parsed as one document, so that an error has the number of its line."""
    lines = path.read_text(encoding="utf-8-sig").strip().split("\n")
    try:
        return json.loads("[" + ",\n".join(lines) + "]")
    except ValueError as error:
        raise ValueError(f"{path.name}, {error}") from error


def read_with_datasets(dataset: str) -> RowsAndFiles:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset_builder
    disable_progress_bars()
    folder = Path(dataset).resolve()
    if folder.exists() and has_magic(str(folder)):
        raise ValueError("its path has one of * ? [, which `datasets` takes for a pattern: rename it")
    main = Path(dataset) / "main"                               # the Hub's layout: a folder for each subset
    place = str(main if main.is_dir() else dataset)
    subset = "main" if "main" in get_dataset_config_names(place) else None
    builder = load_dataset_builder(place, subset)
    files_of = builder.config.data_files if folder.exists() else {}
    read = {Path(file): str(split) for split, files in files_of.items() for file in files}
    for file, split in read.items():
        if split_of(file) in {*Data._fields} - {split}:
            raise ValueError(f"{file.name} would be read as {split}; `datasets` knows lower-case names alone")
    builder.download_and_prepare()
    return [(str(split), rows.to_list()) for split, rows in builder.as_dataset().items()], {*read}


def divided(cfg: Config, splits: dict[str, list]) -> Data:
    """The splits. Where validation or test is missing, it is drawn from train and not trained on: a tenth of
    the distinct rows, the same for every seed.
    """
    for split in ("validation", "test"):
        if split not in splits:
            different = list(dict.fromkeys(splits["train"]))
            drawn = random.Random(split).sample(different, len(different) // 10)
            rest = set(different) - {*drawn}
            splits = splits | {split: drawn, "train": [row for row in splits["train"] if row in rest]}
    trained_on, held_out = set(splits["train"]), splits[cfg.eval_split]
    for name, need, rows in (("eval_queries", cfg.eval_queries, held_out),
                             ("batch_size", cfg.batch_size // cfg.responses_per_query, splits["train"])):
        cfg.require(name, len(rows) >= need, f"{cfg.dataset} leaves only {len(rows)} rows for its {need} "
                    "queries; lower it or provide more data")
    print(f"{len(splits['train'])} rows for training, {len(splits['validation'])} for validation, "
          f"{len(splits['test'])} for testing")
    if repeated := sum(row in trained_on for row in held_out):
        print(f"{repeated} of {len(held_out)} {cfg.eval_split} rows also occur in the training data")
    return Data(**splits)
