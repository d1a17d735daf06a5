"""What every task shares: the stream of queries, held-out queries, and the check of rewards."""
import random
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from cory.config import Config
from cory.errors import UserError
from cory.ppo.model import LanguageModel
from cory.system.distributed import processes
from cory.tasks.data import Data, divided, load_columns


class Batch(NamedTuple):
    queries: list[str]          # batch_size of them; each is repeated responses_per_query times in a row
    max_new_tokens: int         # the limit of a response's length


class Task:
    """Queries, a prompt for each role, and a reward.

    A task of your own defines `observer_prompts` and `reward_of`, and may define `columns`, `query`,
    `pioneer_prompts` and `metrics`. A response counts as solved (greedy accuracy, pass@k) if its reward is
    above 0. `data` are the rows that `load_data` returns, `model` is the first agent's base.
    """
    columns: ClassVar[list[str]] = ["text"]     # what is read from each row of the data set
    greedy: ClassVar[bool] = False              # whether held-out evaluation also responds greedily

    def __init__(self, cfg: Config, data: Data, model: LanguageModel):
        self.cfg, self.train = cfg, data.train
        self.tokenizer, self.device = model.tokenizer, model.device
        rng = random.Random("held-out queries")             # the same for every seed
        rows = getattr(data, cfg.eval_split)
        self.held_out_queries = [self.query(row, rng) for row in rng.sample(rows, cfg.eval_queries)]

        longest = sorted(sum(data, []), key=lambda row: len(str(row)))[-1000:]
        queries = [self.query(row, rng) for row in longest]
        prompts = model.encode(self.observer_prompts(queries, [""] * len(queries)))
        need = max(map(len, prompts)) + 8       # a text may gain tokens where it is cut or joined to another
        context, limit = model.context_length or 10**9, cfg.max_response_length
        self.room = context - need - limit      # tokens of another's response that a prompt can show
        cfg.require("max_response_length", self.room >= limit, f"two responses and up to {need} tokens of a "
                    f"prompt exceed the context of {context}; shorten them")

    @classmethod
    def load_data(cls, cfg: Config) -> Data:
        """Reads `columns` before any model is loaded. Rows of one column are strings, others tuples."""
        return divided(cfg, load_columns(cfg.dataset, cls.columns))

    def query(self, row, rng: random.Random) -> str:
        """The query s0 that a row gives: its first column. Whatever is random must be drawn from `rng`."""
        return row if isinstance(row, str) else row[0]

    def pioneer_prompts(self, queries: list[str]) -> list[str]:
        """What the pioneer reads: the bare queries."""
        return queries

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        """What the observer reads: each query with the pioneer's response to it (knowledge transfer)."""
        raise NotImplementedError

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float] | Tensor:
        """The task reward of each response, which depends on its own query and response alone."""
        raise NotImplementedError

    def metrics(self, queries: list[str], responses: list[str]) -> dict[str, float]:
        """What else a task measures, by name: means over the responses."""
        return {}

    def batch(self, iteration: int) -> Batch:
        """Queries of an iteration (1, 2, ...) and its length limit, uniform in the configured range.

        With k = `responses_per_query`, each of the next batch_size / k rows gives one query, repeated k
        times in a row. Each pass over the data is a fresh shuffle. All depends on seed and iteration alone.
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
        def rewards(rows: slice) -> list[float]:
            values, n = self.reward_of(queries[rows], responses[rows]), len(responses[rows])
            try:
                return torch.as_tensor(values, dtype=torch.float32).view(n).tolist()
            except (TypeError, ValueError, RuntimeError) as error:
                hint = f"({error}): a task returns one number for each of its {n} responses"
                raise UserError("reward", str(values)[:60], hint) from error

        reward_B = torch.tensor(processes().gather_parts(len(responses), rewards), device=self.device)
        for i in (~reward_B.isfinite()).nonzero().flatten().tolist():
            text = queries[i] + responses[i]
            raise UserError("reward", reward_B[i].item(), f"of {text[:80]!r} must be a finite number")
        return reward_B

    def cut(self, response: str) -> str:
        """A response, cut to the room in a prompt: its text may have more tokens than were sampled."""
        ids = self.tokenizer(response, add_special_tokens=False)["input_ids"]
        if len(ids) <= self.room:
            return response
        return self.tokenizer.decode(ids[:self.room], clean_up_tokenization_spaces=False)


@lru_cache(maxsize=4)
def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    """The order in which an epoch visits n rows."""
    return random.Random(f"epoch {seed} {epoch}").sample(range(n), n)
