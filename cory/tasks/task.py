"""What every task shares: the stream of queries, held-out queries, and the check of rewards."""
import random
from typing import ClassVar

import torch
from torch import Tensor

from cory.config import Config
from cory.errors import UserError
from cory.machine.distributed import processes
from cory.ppo.model import LanguageModel
from cory.tasks.data import Data, divided, load_columns


class Task:
    """Queries, a prompt for each role, and a reward. A task of your own defines `observer_prompts` and
    `reward_of`, and may define the rest. `model` is the first agent's base. Checkpoints keep `memory`.
    """
    columns: ClassVar[list[str]] = ["text"]     # what is read from each row of the data set
    greedy: ClassVar[bool] = False              # whether held-out evaluation also responds greedily
    iteration, training = 0, False              # the present iteration; false in held-out evaluation

    def __init__(self, cfg: Config, data: Data, model: LanguageModel):
        self.cfg, self.train_rows, self.memory = cfg, data.train, {}
        self.tokenizer, self.device = model.tokenizer, model.device
        rng = random.Random("held-out queries")             # the same for every seed
        rows = getattr(data, cfg.eval_split)
        cfg.require("eval_queries", len(rows) >= cfg.eval_queries, f"there are only {len(rows)} rows")
        self.held_out_queries = [self.query(row, rng) for row in rng.sample(rows, cfg.eval_queries)]

    @classmethod
    def load_data(cls, cfg: Config) -> Data:
        """Reads `columns` before any model is loaded. Rows of one column are strings, others tuples."""
        return divided(load_columns(cfg.dataset, cls.columns))

    def query(self, row, rng: random.Random) -> str:
        """The query s0 that a row gives: its first column. Whatever is random must be drawn from `rng`."""
        return row if isinstance(row, str) else row[0]

    def pioneer_prompts(self, queries: list[str]) -> list[str]:
        return queries

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        """What the observer reads: each query with the pioneer's response to it (knowledge transfer)."""
        raise NotImplementedError

    def reward_of(self, queries: list[str], responses: list[str]) -> list[float] | Tensor | tuple:
        """The task reward of each response, which depends on its own query and response alone: each process
        asks for its own rows. A response counts as solved if it is above 0. May also return (rewards, parts):
        by name, further numbers for each response, such as the terms of a sum, whose means are logged.
        """
        raise NotImplementedError

    def learn(self, rollouts: list, rewards: list[Tensor]) -> None:
        """Called after each iteration, before its evaluation; rewards: (B,) each. Learn into `memory`."""

    def metrics(self, queries: list[str], responses: list[str]) -> dict[str, float]:
        """Further means over the responses, by name."""
        return {}

    def batch(self, iteration: int) -> tuple[list[str], int]:
        """The queries of an iteration (1, 2, ...), and the limit of its responses' lengths. Each of the next
        batch_size / k rows gives one query, k times in a row. Each pass over the data is a fresh shuffle.
        All depends on seed and iteration alone.
        DIFFERS: the released code reseeds at every exchange, so that its lengths repeat.
        """
        cfg, n, k = self.cfg, len(self.train_rows), self.cfg.responses_per_query
        distinct = cfg.batch_size // k
        start = (iteration - 1) * distinct
        order = []                                          # of the epochs that the batch reaches into
        for epoch in range(start // n, (start + distinct - 1) // n + 1):
            order += random.Random(f"epoch {cfg.seed} {epoch}").sample(range(n), n)
        rows = [self.train_rows[i] for i in order[start % n:][:distinct]]
        rng = random.Random(f"queries {cfg.seed} {iteration}")
        limit = rng.randint(cfg.min_response_length or cfg.max_response_length, cfg.max_response_length)
        queries = [self.query(row, rng) for row in rows]
        return [query for query in queries for _ in range(k)], limit

    def reward(self, queries: list[str], responses: list[str]) -> Tensor:
        """Task reward r(s0, a) of each response: (B,) float32 on the model's device."""
        return self.reward_and_parts(queries, responses)[0]

    def reward_and_parts(self, queries: list[str], responses: list[str]) -> tuple[Tensor, dict[str, float]]:
        """(task reward of each response, (B,); the mean of each of its parts, by name)."""
        mine = processes().rows(len(responses))
        answer = self.reward_of(queries[mine], responses[mine])
        rewards, parts = answer if isinstance(answer, tuple) else (answer, {})
        asked = len(responses[mine])
        for values in (rewards, *parts.values()):
            if (count := torch.as_tensor(values).numel()) != asked:
                raise UserError(f"reward_of gave {count} numbers for {asked} responses")
        return self.of_all(rewards), {name: self.of_all(x).mean().item() for name, x in parts.items()}

    def of_all(self, values: list[float] | Tensor) -> Tensor:
        """A number for each row of all processes, from those of this one."""
        values = torch.as_tensor(values, dtype=torch.float32).flatten().tolist()
        return torch.tensor(processes().gather(values), device=self.device)
