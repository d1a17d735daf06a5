"""What every task shares: rows from a local folder or the Hub, divided into train, validation and test; the
stream of queries; held-out queries; the check of rewards.
"""
import json
import random
import re
from collections import defaultdict
from glob import has_magic
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from cory.config import Config, located
from cory.distributed import processes
from cory.errors import UserError
from cory.ppo.model import LanguageModel


# --- data ---
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
        parts, files = read_jsonl_files(path) or read_with_datasets(str(path))
    except Exception as error:                                  # each file format raises errors of its own
        hint = "pass a .jsonl file, a folder with train.jsonl and test.jsonl, or a Hub name"
        raise UserError("dataset", dataset, f"cannot be read ({str(error)[:200]}); {hint}") from error
    splits = defaultdict(list)
    for name, rows in parts:
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


# (split, rows) for each part of the data, and the files that were read
Parts = tuple[list[tuple[str, list[dict]]], set[Path]]


def read_jsonl_files(path: Path) -> Parts | None:
    """The rows of a file or of a folder's files that are named for splits; None where there are none."""
    if path.is_file():
        return [("train", parse_jsonl(path))], {path}
    files = [file for file in sorted(path.resolve().glob("*.jsonl")) if split_of(file) in Data._fields]
    return ([(split_of(file), parse_jsonl(file)) for file in files], {*files}) if files else None


def parse_jsonl(path: Path) -> list[dict]:
    """As one document, so that an error has the number of its line."""
    lines = path.read_text(encoding="utf-8-sig").strip().split("\n")
    try:
        return json.loads("[" + ",\n".join(lines) + "]")
    except ValueError as error:
        raise ValueError(f"{path.name}, {error}") from error


def read_with_datasets(dataset: str) -> Parts:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset, load_dataset_builder
    disable_progress_bars()
    folder = Path(dataset).resolve()
    if folder.exists() and has_magic(str(folder)):
        raise ValueError("its path has one of * ? [, which `datasets` takes for a pattern: rename it")
    main = Path(dataset) / "main"                               # the Hub's layout: a folder for each subset
    place = str(main if main.is_dir() else dataset)
    which = place, "main" if "main" in get_dataset_config_names(place) else None
    parts = [(str(split), rows.to_list()) for split, rows in load_dataset(*which).items()]
    splits = load_dataset_builder(*which).config.data_files if folder.exists() else {}
    read = {Path(file): str(split) for split, files in splits.items() for file in files}
    for file, split in read.items():
        if split_of(file) in {*Data._fields} - {split}:
            raise ValueError(f"{file.name} would be read as {split}; `datasets` knows lower-case names alone")
    return parts, {*read}


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
    print(f"{len(splits['train'])} rows to train on, {len(splits['validation'])} of validation, "
          f"{len(splits['test'])} of test")
    if repeated := sum(row in trained_on for row in held_out):
        print(f"{repeated} of {len(held_out)} {cfg.eval_split} rows also occur in the training data")
    return Data(**splits)


# --- tasks ---
class Task:
    """Queries, a prompt for each role, and a reward. A task of your own defines `observer_prompts` and
    `reward_of`, and may define the rest. `model` is the first agent's base. Checkpoints keep `memory`.
    """
    columns: ClassVar[list[str]] = ["text"]     # what is read from each row of the data set
    greedy: ClassVar[bool] = False              # whether held-out evaluation also responds greedily

    def __init__(self, cfg: Config, data: Data, model: LanguageModel):
        self.cfg, self.train, self.memory = cfg, data.train, {}
        self.tokenizer, self.device = model.tokenizer, model.device
        rng = random.Random("held-out queries")             # the same for every seed
        rows = getattr(data, cfg.eval_split)
        self.held_out_queries = [self.query(row, rng) for row in rng.sample(rows, cfg.eval_queries)]

    @classmethod
    def load_data(cls, cfg: Config) -> Data:
        """Reads `columns` before any model is loaded. Rows of one column are strings, others tuples."""
        return divided(cfg, load_columns(cfg.dataset, cls.columns))

    def query(self, row, rng: random.Random) -> str:
        """The query s0 that a row gives: its first column. Whatever is random must be drawn from `rng`."""
        return row if isinstance(row, str) else row[0]

    def pioneer_prompts(self, queries: list[str]) -> list[str]:
        return queries

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        """What the observer reads: each query with the pioneer's response to it (knowledge transfer)."""
        raise NotImplementedError

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float] | Tensor:
        """The task reward of each response, which depends on its own query and response alone. A response
        counts as solved if it is above 0.
        """
        raise NotImplementedError

    def learn(self, queries: list[str], rewards: list[Tensor]) -> None:
        """What an iteration's responses earned, (B,) for each role; what is learned belongs in `memory`."""

    def metrics(self, queries: list[str], responses: list[str]) -> dict[str, float]:
        """Further means over the responses, by name."""
        return {}

    def batch(self, iteration: int) -> tuple[list[str], int]:
        """The queries of an iteration (1, 2, ...), and the limit of its responses' lengths. Each of the next
        batch_size / k rows gives one query, k times in a row. Each pass over the data is a fresh shuffle.
        All depends on seed and iteration alone.
        DIFFERS: the released code reseeds at every exchange, so that its lengths repeat.
        """
        cfg, n, k = self.cfg, len(self.train), self.cfg.responses_per_query
        distinct = cfg.batch_size // k
        start = (iteration - 1) * distinct
        order = []                                          # of the epochs that the batch reaches into
        for epoch in range(start // n, (start + distinct - 1) // n + 1):
            order += random.Random(f"epoch {cfg.seed} {epoch}").sample(range(n), n)
        rows = [self.train[i] for i in order[start % n:][:distinct]]
        rng = random.Random(f"queries {cfg.seed} {iteration}")
        limit = rng.randint(cfg.min_response_length or cfg.max_response_length, cfg.max_response_length)
        queries = [self.query(row, rng) for row in rows]
        return [query for query in queries for _ in range(k)], limit

    def reward(self, queries: list[str], responses: list[str]) -> Tensor:
        """Task reward r(s0, a) of each response: (B,) float32 on the model's device."""
        mine = processes().rows(len(responses))
        n = len(responses[mine])
        values = self.reward_of(queries[mine], responses[mine]) if n else []
        rewards = torch.as_tensor(values, dtype=torch.float32).view(n).tolist()
        reward_B = torch.tensor(processes().gather(rewards), device=self.device)
        for query, response, reward in zip(queries, responses, reward_B.tolist(), strict=True):
            if not isfinite(reward):
                raise UserError("reward", reward, f"of {query + response!r:.80} must be a finite number")
        return reward_B
