"""Held-out evaluation: answers to bare queries never trained on, with a fixed seed, beside the base's."""
import math
from pathlib import Path
from typing import Collection

import torch

from cory.config import Config
from cory.errors import UserError
from cory.ppo.model import LanguageModel
from cory.ppo.rollout import logprobs_and_kl
from cory.ppo.sampling import decode, encode_prompts, real_ids, sample
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

    task_reward: mean r(s0, a). kl: exact KL(pi || pi0) summed over a response's tokens, nats, mean over
    responses. combined_reward: task_reward - init_kl_coef kl. length: tokens per response, EOS included.
    distinct_n: different n-grams over all. repeated_tokens: share of tokens that stood earlier in the same
    response. base_perplexity: exp of the mean of -log pi0 per token. Then the task's own metrics, and those
    of greedy answers as greedy_NAME, if it asks for them.
    """
    queries, k = task.held_out_queries, cfg.eval_samples
    starts = range(0, len(queries), max(1, rows_at_once(64, cfg.max_response_length) // k))
    with unsharded(model, reference):
        batches = all_gather_parts(len(starts), lambda rows: [
            answered(model, reference, task, queries[at:at + starts.step], at, cfg) for at in starts[rows]])
    texts, greedy, ids = ([x for batch in batches for x in batch[i]] for i in range(3))
    kl, ref_logp = (sum(batch[i] for batch in batches) for i in (3, 4))

    sampled_queries = [query for query in queries for _ in range(k)]
    reward, tokens, n = task.reward(sampled_queries, texts).mean().item(), sum(map(len, ids)), len(ids)
    metrics = {"task_reward": reward, "kl": kl / n, "combined_reward": reward - cfg.init_kl_coef * kl / n,
               "length": tokens / n, "distinct_1": distinct(ids, 1), "distinct_2": distinct(ids, 2),
               "repeated_tokens": 1 - sum(len(set(row)) for row in ids) / tokens,
               "base_perplexity": math.exp(-ref_logp / tokens)}
    metrics |= checked(task.metrics(sampled_queries, texts), taken=metrics)
    if task.greedy:
        greedy_metrics = checked(task.metrics(queries, greedy))
        metrics |= {f"greedy_{name}": value for name, value in greedy_metrics.items()}
    return metrics


def answered(model: LanguageModel, reference: LanguageModel, task: Task, queries: list[str], at: int,
             cfg: Config) -> tuple[list[str], list[str], list[list[int]], float, float]:
    """Answers to held-out queries, the first of which is number `at`: `eval_samples` texts to each; a greedy
    one to each, if the task asks for it; the sampled tokens; sums over these of KL(pi || pi0) and log pi0.
    """
    limit = cfg.max_response_length
    sampled_queries = [query for query in queries for _ in range(cfg.eval_samples)]
    prompts = encode_prompts(model, task.pioneer_prompts(sampled_queries), limit)
    generator = torch.Generator().manual_seed(EVALUATION_SEED + at)
    response_BT, mask_BT, _ = sample(model, prompts, limit, generator)
    real = mask_BT.bool()
    hidden = model.response_hidden(*prompts, response_BT)[real]
    same = model is reference                       # the base itself, before training
    ref_hidden = hidden if same else reference.response_hidden(*prompts, response_BT)[real]
    _, ref_logp_N, kl_N = logprobs_and_kl(model, reference, hidden, ref_hidden, response_BT[real], "full")
    texts = decode(model, response_BT, mask_BT)
    greedy = answer(model, task.pioneer_prompts(queries), limit, seed=None) if task.greedy else []
    return texts, greedy, real_ids(response_BT, mask_BT), kl_N.sum().item(), ref_logp_N.sum().item()


def checked(metrics: dict, taken: Collection[str] = ()) -> dict[str, float]:
    """`metrics` as floats. Raises `UserError` for a name that is taken, or a value that is no number."""
    if not isinstance(metrics, dict):
        raise UserError("metrics", metrics, "are no dict; return one of numbers by name")
    numbers = {}
    for name, value in metrics.items():
        if name in taken or "/" in name:
            raise UserError("metrics", name, "is taken or holds a slash; give this metric another name")
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            why = f"is {str(value)[:60]!r}, not one number; log its mean"
            raise UserError("metrics", name, why) from error
    return numbers


@torch.no_grad()
def answer(model: LanguageModel, prompts: list[str], length: int, seed: int | None) -> list[str]:
    """Responses of at most `length` tokens to one batch of prompts; greedy without a seed."""
    encoded = encode_prompts(model, prompts, length)
    drawn = sample(model, encoded, length, None if seed is None else torch.Generator().manual_seed(seed))
    return decode(model, drawn.response_BT, drawn.mask_BT)


def answers(model: LanguageModel, prompts: list[str], cfg: Config, seed: int) -> list[str]:
    """Sampled responses to any number of prompts; with the same seed the same ones."""
    starts = range(0, len(prompts), rows_at_once(64, cfg.max_response_length))
    with unsharded(model):
        return [text for texts in all_gather_parts(len(starts), lambda rows: [
            answer(model, prompts[at:at + starts.step], cfg.max_response_length, EVALUATION_SEED + seed + at)
            for at in starts[rows]]) for text in texts]


def distinct(ids: list[list[int]], n: int) -> float:
    """Different n-grams over all n-grams, pooled over responses; 0 if no response has n tokens."""
    grams = [tuple(row[i:i + n]) for row in ids for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def require_same_reward(task: Task, run_dir: Path) -> None:
    """The task scores the run's last samples (at most 40 rows) as it did then, or raises `UserError`.

    A run's task is known by its name alone; this catches a class, data or reward model edited in place.
    """
    if task.random_reward:
        return
    rows = read_jsonl(run_dir / "samples.jsonl")[-40:]
    if not rows:
        print("the run kept no samples: that its reward is still the same was not checked", flush=True)
        return
    keys = dict.fromkeys(key for row in rows for key in row if key.endswith("_reward"))
    for role in [key.removesuffix("_reward") for key in keys]:
        answered = [row for row in rows if role in row]         # bases answer at evaluations alone
        now = task.reward([row["query"] for row in answered], [row[role] for row in answered]).tolist()
        for row, reward in zip(answered, now, strict=True):
            before = row[f"{role}_reward"]
            if not math.isclose(reward, before, rel_tol=2e-3, abs_tol=2e-3):
                raise UserError("task", type(task).__name__, f"gives {reward:.4g} to {row[role][:40]!r}, and "
                                f"gave it {before:.4g} in {run_dir}; undo that change, or start a new run")
