"""Held-out evaluation: answers to bare queries never trained on, with a fixed seed, beside the base's."""
import math
from pathlib import Path

import torch

from cory.config import Config
from cory.errors import UserError
from cory.ppo.model import LanguageModel
from cory.ppo.rollout import logprobs_and_kl
from cory.ppo.sampling import decode, encode_prompts, sample
from cory.system.distributed import all_gather_parts
from cory.system.files import read_jsonl
from cory.system.sharding import unsharded
from cory.tasks.task import Task

EVALUATION_SEED = 20_241_006        # the same random numbers for every model, method, seed and iteration


def rows_at_once(most: int, length: int) -> int:
    """Responses sampled together: fewer where they are long, so that keys and values stay small."""
    return max(1, min(most, 8192 // length))


@torch.no_grad()
def evaluate(model: LanguageModel, reference: LanguageModel, task: Task, cfg: Config) -> dict[str, float]:
    """Samples `eval_samples` responses of at most `max_response_length` tokens to each held-out query.

    task_reward: mean r(s0, a). kl: exact KL(pi || pi0) summed over each response's tokens, nats, mean over
    responses. combined_reward: task_reward - init_kl_coef kl. length: tokens per response, EOS included.
    distinct_n: different n-grams over all n-grams of all responses. repeated_tokens: share of tokens that
    stood earlier in the same response. base_perplexity: exp of the mean negative log-probability per token
    under the base, at the same temperature. Then the task's own metrics, and, if it asks for them, those of
    greedy answers as greedy_NAME.
    """
    queries, limit, k = task.held_out_queries, cfg.max_response_length, cfg.eval_samples
    starts = range(0, len(queries), max(1, rows_at_once(64, limit) // k))
    with unsharded(model, reference):
        batches = all_gather_parts(len(starts), lambda rows: [
            answered(model, reference, task, queries[at:at + starts.step], at, k, limit)
            for at in starts[rows]])
    texts, greedy, ids = ([x for batch in batches for x in batch[i]] for i in range(3))
    kl, ref_logp = (sum(batch[i] for batch in batches) for i in (3, 4))

    of_greedy = with_metrics({}, task, queries, greedy) if task.greedy else {}
    queries = [query for query in queries for _ in range(k)]
    reward, tokens, n = task.reward(queries, texts).mean().item(), sum(map(len, ids)), len(queries)
    own = {"task_reward": reward, "kl": kl / n, "combined_reward": reward - cfg.init_kl_coef * kl / n,
           "length": tokens / n, "distinct_1": distinct(ids, 1), "distinct_2": distinct(ids, 2),
           "repeated_tokens": 1 - sum(len(set(row)) for row in ids) / tokens,
           "base_perplexity": math.exp(-ref_logp / tokens)}
    return with_metrics(own, task, queries, texts) | {f"greedy_{k}": value for k, value in of_greedy.items()}


def answered(model: LanguageModel, reference: LanguageModel, task: Task, queries: list[str], at: int,
             k: int, limit: int) -> tuple[list[str], list[str], list[list[int]], float, float]:
    """k sampled responses to each of some held-out queries, the first of which is number `at`; greedy ones,
    if the task asks for them; the tokens, and over these sums of the exact KL and of log pi0, nats.
    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED + at)
    sampled = [query for query in queries for _ in range(k)]
    prompts = encode_prompts(model, task.pioneer_prompts(sampled), limit)
    response_BT, mask_BT, _ = sample(model, prompts, limit, generator)
    real = mask_BT.bool()
    hidden = model.response_hidden(*prompts, response_BT)[real]
    same = model is reference                       # the base itself, before training
    ref_hidden = hidden if same else reference.response_hidden(*prompts, response_BT)[real]
    _, ref_logp_N, kl_N = logprobs_and_kl(model, reference, hidden, ref_hidden, response_BT[real], "full")
    greedy = answer(model, task.pioneer_prompts(queries), limit, seed=None) if task.greedy else []
    ids = [row[keep].tolist() for row, keep in zip(response_BT, real, strict=True)]
    return decode(model, response_BT, mask_BT), greedy, ids, kl_N.sum().item(), ref_logp_N.sum().item()


def with_metrics(own: dict[str, float], task: Task, queries: list[str],
                 responses: list[str]) -> dict[str, float]:
    """`own` and the task's metrics. Raises `UserError` where one would hide another or is no number."""
    of_task = task.metrics(queries, responses)
    if not isinstance(of_task, dict):
        raise UserError("task", type(task).__name__, f"its metrics returned {of_task!r}; return a dict")
    for name in of_task:
        if name in own or "/" in name:
            way_out = "is measured for every task already, or holds a slash; name the task's otherwise"
            raise UserError("metrics", name, way_out)
    return own | {name: number(name, value) for name, value in of_task.items()}


def number(name: str, value) -> float:
    """A metric as a float: a number, or a tensor that holds one. Raises `UserError`."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError("metrics", name, f"is {str(value)[:60]!r}, not one number; log its mean") from error


@torch.no_grad()
def answer(model: LanguageModel, prompts: list[str], length: int, seed: int | None) -> list[str]:
    """Responses of at most `length` tokens to one batch of prompts; greedy without a seed."""
    encoded = encode_prompts(model, prompts, length)
    drawn = sample(model, encoded, length, None if seed is None else torch.Generator().manual_seed(seed))
    return decode(model, drawn.response_BT, drawn.mask_BT)


def distinct(ids: list[list[int]], n: int) -> float:
    """Different n-grams over all n-grams, pooled over responses; 0 if no response has n tokens."""
    grams = [tuple(row[i:i + n]) for row in ids for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def require_same_reward(task: Task, run_dir: Path) -> None:
    """The task scores the run's last samples (at most 40 rows) as it did then, or raises `UserError`.

    A run's task is known by its name alone; this catches a class, data or reward model edited in place.
    """
    rows = read_jsonl(run_dir / "samples.jsonl")[-40:]
    if not rows and not task.random_reward:
        print("the run kept no samples: that its reward is still the same was not checked", flush=True)
    if task.random_reward:
        return
    for key in [key for key in (rows[0] if rows else {}) if key.endswith("_reward")]:
        responses = [row[key.removesuffix("_reward")] for row in rows]
        now = task.reward([row["query"] for row in rows], responses).tolist()
        for old, response, reward in zip([row[key] for row in rows], responses, now, strict=True):
            if abs(reward - old) > 2e-3 * max(1.0, abs(old)):
                way_out = (f"gives {reward:.4g} to {response[:40]!r}, and gave it {old:.4g} in {run_dir}; "
                           "undo that change, or start a new run")
                raise UserError("task", type(task).__name__, way_out)
