"""What every task shares: data, the stream of queries, held-out queries, and the check of rewards. Text goes
in and numbers come out: a task knows nothing of agents or loops.
"""
import math
import random
from functools import lru_cache
from itertools import islice
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from cory.config import Config
from cory.errors import UserError
from cory.ppo.model import LanguageModel
from cory.system.distributed import all_gather_parts
from cory.tasks.data import DataError, load_columns


class Data(NamedTuple):
    """Rows to make queries of: strings, tuples of strings, or whatever the task's `query` takes."""
    train: list
    validation: list            # to choose settings by
    test: list                  # to report


class Batch(NamedTuple):
    """What one iteration asks of each role."""
    queries: list[str]          # batch_size of them; each stands responses_per_query times in a row
    max_new_tokens: int         # the limit of a response's length


def checked_sizes(cfg: Config, splits: dict[str, list]) -> Data:
    """Rows to train on, to choose by and to report: the splits `train`, `validation` and `test`.

    If validation or test is missing, the one that is there is divided: every second row is for validation. If
    both are missing, the last `4 * eval_queries` rows of train are taken and divided. Raises `UserError`.
    """
    if "train" not in splits:
        found = ", ".join(splits)[:300]
        raise DataError(cfg.dataset, f"has no split named train; splits found: {found}")
    train, validation, test = (splits.get(name, []) for name in ("train", "validation", "test"))
    if not (validation and test):
        held_out = validation or test
        if not held_out:
            train, held_out = train[:-4 * cfg.eval_queries], train[-4 * cfg.eval_queries:]
        validation, test = held_out[::2], held_out[1::2]
    data = Data(train, validation, test)
    for name, need, rows in (("eval_queries", cfg.eval_queries, getattr(data, cfg.eval_split)),
                             ("batch_size", cfg.batch_size // cfg.responses_per_query, train)):
        if len(rows) < need:
            raise UserError(name, getattr(cfg, name), f"{cfg.dataset} leaves only {len(rows)} rows for its "
                            f"{need} queries; lower it or bring more data")
    return data


class Task:
    """Queries, a prompt for each role, and a reward.

    A task of your own defines `observer_prompts` and `reward_of`, and may define `columns`, `query`,
    `is_seen_in_training`, `pioneer_prompts` and `metrics`. If it has an `__init__`, this takes (self, cfg,
    data, model) and begins with `super().__init__(cfg, data, model)`, which already calls `query`. A response
    counts as solved (greedy accuracy, pass@k) if its reward is above 0.
    """
    columns: ClassVar[list[str]] = ["text"]     # what is read of each row of the data set
    greedy: ClassVar[bool] = False              # whether held-out evaluation also answers greedily
    random_reward: ClassVar[bool] = False       # whether the same response may score differently

    def __init__(self, cfg: Config, data: Data, model: LanguageModel):
        own = type(self)
        if own.reward is not Task.reward:
            raise UserError("task", own.__name__, "defines reward, which checks rewards; name it reward_of")
        for name in ("observer_prompts", "reward_of"):
            if getattr(own, name) is getattr(Task, name):
                raise UserError("task", own.__name__, f"defines no {name}(self, queries, responses); add it")
        self.cfg, self.train = cfg, data.train
        # tokens for a response in an observer's prompt: half of the context is left to all else
        self.room = max(cfg.max_response_length, model.context_length // 2 - cfg.max_response_length)
        self.tokenizer, self.device = model.tokenizer, model.device
        rng = random.Random("held-out queries")     # the same for every seed: all seeds share one yardstick
        rows = getattr(data, cfg.eval_split)
        queries = (self.query(row, rng) for row in rng.sample(rows, len(rows)))
        unseen = (query for query in queries if not self.is_seen_in_training(query))
        self.held_out_queries = list(islice(unseen, cfg.eval_queries))
        if len(self.held_out_queries) < cfg.eval_queries:
            way_out = (f"{cfg.dataset} has {len(self.held_out_queries)} {cfg.eval_split} queries that "
                       "training never asks; lower it or bring more data")
            raise UserError("eval_queries", cfg.eval_queries, way_out)

    @classmethod
    def load_data(cls, cfg: Config) -> Data:
        """Reads `columns` before any model is loaded. Rows of one column are strings, of several tuples."""
        splits = load_columns(cfg.dataset, cls.columns)
        if len(cls.columns) == 1:
            splits = {split: [text for (text,) in rows] for split, rows in splits.items()}
        return checked_sizes(cfg, splits)

    def query(self, row, rng: random.Random) -> str:
        """The query s0 that a row gives. Whatever is random in it must be drawn from `rng`."""
        if isinstance(row, str):
            return row
        way_out = "has rows that are no plain text; define query(self, row, rng) -> str"
        raise UserError("task", type(self).__name__, way_out)

    def is_seen_in_training(self, query: str) -> bool:
        """Whether training may ask this query: then it is not held out. Here: never."""
        return False

    def pioneer_prompts(self, queries: list[str]) -> list[str]:
        """What the pioneer reads: the bare queries."""
        return queries

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        """What the observer reads: each query with the pioneer's response to it (knowledge transfer)."""

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float] | Tensor:
        """The task reward of each response, as a list, a tensor or an array; `reward` checks it.

        It depends on its own query and response alone: processes share out a batch, and a resumed run scores
        a few samples again.
        """

    def metrics(self, queries: list[str], responses: list[str]) -> dict[str, float]:
        """What else a task measures, by name: means over the responses, which a run logs and draws."""
        return {}

    def batch(self, iteration: int) -> Batch:
        """Queries of an iteration (1, 2, ...) and its length limit, uniform in the configured range.

        With k = `responses_per_query`, each of the next batch_size / k rows gives one query, which stands k
        times in a row. Each pass over the data is a fresh shuffle. A function of seed and iteration alone:
        every method at a seed sees the same stream, and a resumed run finds its place without saved state.
        DIFFERS: the released code reseeds at every exchange, so that its lengths repeat.
        """
        cfg, n, k = self.cfg, len(self.train), self.cfg.responses_per_query
        distinct = cfg.batch_size // k
        places = range((iteration - 1) * distinct, iteration * distinct)
        rows = [self.train[shuffled(n, cfg.seed, place // n)[place % n]] for place in places]
        rng = random.Random(f"queries {cfg.seed} {iteration}")
        limit = rng.randint(cfg.min_response_length or cfg.max_response_length, cfg.max_response_length)
        queries = [self.query(row, rng) for row in rows]
        return Batch([query for query in queries for _ in range(k)], limit)

    def reward(self, queries: list[str], responses: list[str]) -> Tensor:
        """Task reward r(s0, a) of each response: (B,) float32 on the model's device. Raises `UserError`."""
        n = max(len(queries), len(responses))       # `checked` sees one too many of either
        values = all_gather_parts(n, lambda rows: self.checked(queries[rows], responses[rows]))
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def checked(self, queries: list[str], responses: list[str]) -> list[float]:
        """What `reward_of` returns, in float32, if it is a number for each response. Raises `UserError`."""
        if len(queries) != len(responses):
            way_out = f"for {len(queries)} queries; the task's prompts must be as many as the queries"
            raise UserError("prompts", f"{len(responses)} responses", way_out)
        try:
            values = self.reward_of(queries, responses)
        except SystemExit as stop:
            if stop.code:                               # a signal, say
                raise
            way_out = "would end the run as if it were done; raise an error there"
            raise UserError("reward_of", "sys.exit()", way_out) from stop
        try:
            reward_B = torch.as_tensor(values, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UserError("reward", str(values)[:60], f"is no list of numbers ({error})") from error
        if reward_B.shape != (len(responses),):
            way_out = f"for {len(responses)} responses; return one number for each"
            raise UserError("reward", f"of shape {tuple(reward_B.shape)}", way_out)
        for i, value in enumerate(reward_B.tolist()):
            if not math.isfinite(value):
                text = (queries[i] + responses[i])[:80]
                raise UserError("reward", value, f"sample {i} ({text!r}) needs a finite number")
        return reward_B.tolist()

    def require_context(self, prompt_tokens: int, model: LanguageModel, way_out: str) -> None:
        """Refuses responses too long for the context: an observer's prompt has up to so many tokens beside
        the pioneer's response, and is followed by its own.
        """
        limit, context = self.cfg.max_response_length, model.context_length
        self.cfg.require("max_response_length", prompt_tokens + 2 * limit <= context,
                         f"an observer's prompt has up to {prompt_tokens} tokens, two responses come on top, "
                         f"the context has {context}; {way_out}")
        self.room = context - prompt_tokens - limit

    def cut(self, response: str) -> str:
        """A response for another agent's prompt, without what would leave the answer no room in the context.
        It can have more tokens than were sampled: bytes that are no text become signs of several tokens each,
        and another model's tokenizer reads smaller pieces.
        """
        ids = self.tokenizer(response, add_special_tokens=False)["input_ids"]
        if len(ids) <= self.room:
            return response
        return self.tokenizer.decode(ids[:max(0, self.room - 2)], clean_up_tokenization_spaces=False)


@lru_cache(maxsize=4)
def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    """The order in which an epoch visits n rows."""
    return random.Random(f"epoch {seed} {epoch}").sample(range(n), n)
