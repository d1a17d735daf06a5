"""What every task shares: the stream of queries, held-out queries, and the check of rewards. Strings in, floats out."""
import random
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from cory.config import Config
from cory.errors import UserError


class Data(NamedTuple):
    train: list
    held_out: list


def checked_sizes(cfg: Config, splits: dict[str, list]) -> Data:
    """Training and held-out rows: the splits train and test (or validation). Without the second, the last of train are held out."""
    if "train" not in splits:
        raise UserError("dataset", cfg.dataset, f"has no split named train; splits found: {', '.join(splits)}")
    train, held_out = splits["train"], splits.get("test") or splits.get("validation")
    if held_out is None:
        train, held_out = train[:-cfg.eval_queries], train[-cfg.eval_queries:]
    for name, need, rows in (("eval_queries", cfg.eval_queries, held_out), ("batch_size", cfg.batch_size, train)):
        if len(rows) < need:
            raise UserError(name, need, f"{cfg.dataset} leaves only {len(rows)} rows for it; lower it or bring more data")
    return Data(train, held_out)


class Task:
    """A task has queries, a prompt for each role, and a reward; it knows nothing of agents or loops.

    Subclasses define `load_data(cfg)`, which is called before any model is loaded, and `query`, `pioneer_prompts`,
    `observer_prompts` and `reward_of`; what else they measure goes into `figures`. A response counts as solved (greedy accuracy, pass@k)
    if its reward is above 0.
    """
    greedy: ClassVar[bool] = False                                  # whether held-out evaluation also answers greedily

    def __init__(self, cfg: Config, data: Data):
        self.cfg, self.train = cfg, data.train
        rng = random.Random("held-out queries")                     # the same for every seed, so that seeds share one yardstick
        self.held_out_queries = [self.query(row, rng) for row in rng.sample(data.held_out, cfg.eval_queries)]

    def batch(self, iteration: int) -> tuple[list[str], int]:
        """Queries of an iteration (1, 2, ...) and its response length limit in tokens, uniform in the configured range.

        A function of seed and iteration alone, so that every method at a seed sees the same stream and a resumed run finds
        its place without saved state. Each pass over the data is a fresh shuffle. DIFFERS: the released code reseeds at every
        exchange, so that its lengths repeat.
        """
        seed, size, n = self.cfg.seed, self.cfg.batch_size, len(self.train)
        places = (divmod(i, n) for i in range((iteration - 1) * size, iteration * size))
        rows = [self.train[shuffled(n, seed, epoch)[i]] for epoch, i in places]
        rng = random.Random(f"queries {seed} {iteration}")
        length = rng.randint(self.cfg.min_response_length or self.cfg.max_response_length, self.cfg.max_response_length)
        return [self.query(row, rng) for row in rows], length

    def reward(self, queries: list[str], responses: list[str]) -> Tensor:
        """Task reward r(s0, a) of each response, (B,). Raises `UserError` for a wrong count or a value that is no finite number."""
        rewards = self.reward_of(queries, responses)
        try:
            rewards = list(rewards)
        except TypeError as error:
            raise UserError("reward", rewards, "is no list; return one number per response") from error
        if len(rewards) != len(responses):
            raise UserError("reward", f"{len(rewards)} values", f"for {len(responses)} responses; return one number per response")
        for i, value in enumerate(rewards):
            if not is_finite_number(value):
                raise UserError("reward", value, f"sample {i} ({(queries[i] + responses[i])[:80]!r}) needs a finite number")
        return torch.tensor([float(value) for value in rewards])

    def cut(self, response: str) -> str:
        """A response for another agent's prompt: its first max_response_length tokens. It has no more of them, unless sampled bytes that
        are no text were replaced by signs of several tokens."""
        limit, ids = self.cfg.max_response_length, self.tokenizer(response, add_special_tokens=False)["input_ids"]
        return response if len(ids) <= limit else self.tokenizer.decode(ids[:max(0, limit - 2)], clean_up_tokenization_spaces=False)

    def figures(self, queries: list[str], responses: list[str]) -> dict[str, float]:
        """What a task measures beside its reward, by name; means over the responses."""
        return {}


def is_finite_number(value) -> bool:
    """Whether float32 can hold it."""
    try:
        return not isinstance(value, str) and abs(float(value)) < torch.finfo(torch.float32).max
    except (TypeError, ValueError, OverflowError):
        return False


@lru_cache(maxsize=4)
def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"epoch {seed} {epoch}").sample(range(n), n)
