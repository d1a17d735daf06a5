"""What every task shares: the stream of queries, held-out queries, and the check of rewards."""
import random
from typing import ClassVar

import torch
from torch import Tensor

from cory.config import Config
from cory.errors import UserError
from cory.machine.distributed import processes
from cory.ppo.model import LanguageModel
from cory.tasks.data import Data, complete_splits, load_columns


class Task:
    """Queries, a prompt for each role, and a reward. A custom task defines `observer_prompts` and
    `compute_rewards`, and may override the rest. `model` is the first agent's base. Checkpoints keep
    `memory`.
    """
    columns: ClassVar[list[str]] = ["text"]     # what is read from each row of the data set
    greedy: ClassVar[bool] = False              # whether held-out evaluation also responds greedily
    iteration = 0                               # the present one; set by the training loop, as is `training`
    training = False                            # whether responses are trained on; not in held-out evaluation

    def __init__(self, cfg: Config, data: Data, model: LanguageModel):
        self.cfg = cfg
        self.memory = {}
        self.train_rows = data.train
        if not cfg.knowledge_transfer:                      # for all methods: they ask for these prompts
            self.observer_prompts = lambda queries, responses: self.pioneer_prompts(queries)
        self.tokenizer = model.tokenizer
        self.device = model.device
        rng = random.Random("held-out queries")             # the same for every seed
        rows = getattr(data, cfg.eval_split)
        cfg.require("eval_queries", len(rows) >= cfg.eval_queries, f"there are only {len(rows)} rows")
        self.held_out_queries = [self.query(row, rng) for row in rng.sample(rows, cfg.eval_queries)]

    @classmethod
    def load_data(cls, cfg: Config) -> Data:
        """Reads `columns` before any model is loaded. Rows of several columns are tuples."""
        return complete_splits(load_columns(cfg.dataset, cls.columns))

    def query(self, row, rng: random.Random) -> str:
        """The query s0 that a row gives: its first column. Whatever is random must be drawn from `rng`."""
        if isinstance(row, str):
            return row
        return row[0]

    def pioneer_prompts(self, queries: list[str]) -> list[str]:
        return queries

    def observer_prompts(self, queries: list[str], responses: list[str]) -> list[str]:
        """What the observer reads: each query with the pioneer's response to it (knowledge transfer)."""
        raise NotImplementedError

    def compute_rewards(self, queries: list[str], responses: list[str]) -> list[float] | Tensor | tuple:
        """The task reward of each response. A response with a reward above 0 counts as solved.

        May also return (rewards, terms), where `terms` has, by name, a further number for each response, such
        as a term of the reward, whose mean is logged. Each process computes the rewards of its own rows: a
        reward must not depend on other rows.
        """
        raise NotImplementedError

    def on_iteration_end(self, rollouts: list, rewards: list[Tensor]) -> None:
        """Called after the updates of an iteration; rewards: (B,) of each rollout. What the task learns from
        them belongs in `memory`.
        """

    def metrics(self, queries: list[str], responses: list[str]) -> dict:
        """Further means over the responses, by name."""
        return {}

    def batch(self, iteration: int) -> tuple[list[str], int]:
        """The queries of an iteration (1, 2, ...), and the limit of its responses' lengths, in tokens. The
        next batch_size / k rows of the data give a query each, which then stands k times in succession. Each
        pass over the data is a fresh shuffle. All depends on seed and iteration alone.
        DIFFERS: the released code reseeds at every exchange, so that its lengths repeat.
        """
        cfg = self.cfg
        k = cfg.responses_per_query
        n = len(self.train_rows)
        distinct = cfg.batch_size // k
        epoch, start = divmod((iteration - 1) * distinct, n)
        order = []                                          # of the epochs that the batch reaches into
        while len(order) < start + distinct:
            order += random.Random(f"epoch {cfg.seed} {epoch}").sample(range(n), n)
            epoch += 1
        rng = random.Random(f"queries {cfg.seed} {iteration}")
        shortest = cfg.min_response_length or cfg.max_response_length
        limit = rng.randint(shortest, cfg.max_response_length)
        queries = [self.query(self.train_rows[i], rng) for i in order[start:start + distinct]]
        return [queries[i // k] for i in range(cfg.batch_size)], limit

    def reward(self, queries: list[str], responses: list[str]) -> Tensor:
        """Task reward r(s0, a) of each response: (B,) float32 on the model's device."""
        reward_B, _ = self.reward_and_terms(queries, responses)
        return reward_B

    def reward_and_terms(self, queries: list[str], responses: list[str]) -> tuple[Tensor, dict[str, float]]:
        """(task reward of each response, (B,); the mean of each of its terms, by name)."""
        local = processes().local_rows(len(responses))
        count = len(responses[local])
        rewards = self.compute_rewards(queries[local], responses[local])
        terms = {}
        if isinstance(rewards, tuple):
            rewards, terms = rewards
        reward_B = self.gather(rewards, count)
        means = {name: self.gather(x, count).mean().item() for name, x in terms.items()}
        return reward_B, means

    def gather(self, values: list[float] | Tensor, count: int) -> Tensor:
        """The numbers of all processes, of which this one gives `count`."""
        values = torch.as_tensor(values, dtype=torch.float32).flatten().tolist()
        if len(values) != count:
            raise UserError(f"compute_rewards gave {len(values)} numbers for {count} responses")
        return torch.tensor(processes().all_gather(values), device=self.device)
