"""What every task shares: the stream of queries, held-out queries, and the check of rewards. Strings in, floats out."""
import math
import random
from functools import lru_cache

import torch
from torch import Tensor

from cory.config import Config
from cory.errors import UserError


class Task:
    """A task has queries, a prompt for each role, and a reward; it knows nothing of agents or loops.

    Subclasses define `query`, `pioneer_prompts`, `observer_prompts` and `reward_of`.
    """

    def __init__(self, cfg: Config, train: list, held_out: list):
        for name, need, rows in (("batch_size", cfg.batch_size, train), ("eval_queries", cfg.eval_queries, held_out)):
            if len(rows) < need:
                raise UserError(name, need, f"{cfg.dataset} has only {len(rows)} rows for it; lower it or bring more data")
        self.cfg, self.train = cfg, train
        rng = random.Random("held-out queries")                     # the same for every seed, so that seeds share one yardstick
        self.held_out_queries = [self.query(row, rng) for row in rng.sample(held_out, cfg.eval_queries)]

    def batch(self, iteration: int) -> tuple[list[str], int]:
        """Queries of an iteration (1, 2, ...) and its response length limit in tokens, uniform in the configured range.

        A function of seed and iteration alone, so that every method at a seed sees the same stream and a resumed run finds
        its place without saved state. Each pass over the data is a fresh shuffle.
        """
        seed, size, n = self.cfg.seed, self.cfg.batch_size, len(self.train)
        places = (divmod(i, n) for i in range((iteration - 1) * size, iteration * size))
        rows = [self.train[shuffled(n, seed, epoch)[i]] for epoch, i in places]
        rng = random.Random(f"queries {seed} {iteration}")
        length = rng.randint(self.cfg.min_response_length, self.cfg.max_response_length)
        return [self.query(row, rng) for row in rows], length

    def reward(self, queries: list[str], responses: list[str]) -> Tensor:
        """Task reward r(s0, a) of each response, (B,). Raises `UserError` for a wrong count or a value that is no finite number."""
        rewards = self.reward_of(queries, responses)
        if len(rewards) != len(responses):
            raise UserError("reward", f"{len(rewards)} values", f"for {len(responses)} responses; return one number per response")
        for i, value in enumerate(rewards):
            if not is_finite_number(value):
                raise UserError("reward", value, f"sample {i} ({(queries[i] + responses[i])[:80]!r}) needs a finite number; no "
                                "parameter was changed in this iteration")
        return torch.tensor([float(value) for value in rewards])


def is_finite_number(value) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


@lru_cache(maxsize=4)
def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"epoch {seed} {epoch}").sample(range(n), n)
