"""Held-out evaluation: responses to the bare queries of held-out rows, with fixed random numbers."""
import math

import numpy as np
import torch

from cory.config import Config
from cory.errors import UserError
from cory.ppo.model import LanguageModel
from cory.ppo.rollout import Rollout, join, moved, sample_rollout
from cory.ppo.sampling import real_ids
from cory.system.distributed import processes
from cory.system.sharding import unsharded
from cory.tasks.task import Task

EVALUATION_SEED = 20_241_006    # on one device, the same random numbers for all models, seeds, iterations


def sample_responses(model: LanguageModel, prompts: list[str], length: int, seed: int | None,
                     reference: LanguageModel | None = None) -> Rollout:
    """A sampled response of at most `length` tokens to each prompt, greedy without a seed; with the same seed
    from the same random numbers, whatever the model and the number of processes. With a reference, also with
    log-probabilities and the exact KL.
    """
    most = 128 if model.device.type == "cuda" else max(1, min(128, 8192 // length))
    starts = range(0, len(prompts), most)

    def responses(at: int) -> Rollout:
        some, uniform_TB = prompts[at:at + most], None
        if seed is not None:
            rng = np.random.default_rng((EVALUATION_SEED, seed, at))
            uniform_TB = torch.from_numpy(rng.random((length, len(some))))
        return moved(sample_rollout(model, reference, some, length, uniform_TB, "full", most), "cpu")

    with unsharded(*filter(None, (model, reference))):
        parts = processes().gather_parts(len(starts), lambda mine: [responses(at) for at in starts[mine]])
    return join(parts, model.tokenizer.eos_token_id)


def evaluate(model: LanguageModel, reference: LanguageModel, task: Task, cfg: Config) -> dict[str, float]:
    """`eval_samples` responses of at most `max_response_length` tokens to each held-out query.

    The metrics of docs/settings.md; kl in nats per response, length in tokens per response, EOS included.
    Then the task's own metrics, and those of greedy responses as greedy_NAME, if it asks for them.
    """
    queries, length = task.held_out_queries, cfg.max_response_length
    asked = [query for query in queries for _ in range(cfg.eval_samples)]
    responses = sample_responses(model, task.pioneer_prompts(asked), length, 0, reference)
    ids = real_ids(responses.response_BT, responses.mask_BT)
    reward, kl = task.reward(asked, responses.text).mean().item(), responses.kl_B.mean().item()
    tokens = sum(map(len, ids))
    metrics = {"task_reward": reward, "kl": kl, "combined_reward": reward - cfg.init_kl_coef * kl,
               "length": tokens / len(ids), "distinct_1": distinct(ids, 1), "distinct_2": distinct(ids, 2),
               "repeated_tokens": 1 - sum(len(set(row)) for row in ids) / tokens,
               "base_perplexity": math.exp(-responses.ref_logp_BT.sum().item() / tokens),
               "sampling_gap": responses.sampling_gap}
    metrics = merged(metrics, task.metrics(asked, responses.text))
    if task.greedy:
        greedy = sample_responses(model, task.pioneer_prompts(queries), length, None).text
        metrics |= {f"greedy_{name}": value for name, value in task.metrics(queries, greedy).items()}
    return metrics


def merged(*parts: dict[str, float]) -> dict[str, float]:
    """All metrics together. Raises `UserError` where one would hide another, or is not a number."""
    metrics = {}
    for part in parts:
        for name, value in part.items():
            if name in metrics or isinstance(value, (str, list, dict, tuple)) or value is None:
                raise UserError("metric", name, "is another metric's name, or its value is not one number")
            metrics[name] = float(value)
    return metrics


def distinct(ids: list[list[int]], n: int) -> float:
    """Distinct n-grams over all n-grams, pooled over responses; 0 if no response has n tokens."""
    grams = [tuple(row[i:i + n]) for row in ids for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def best_of_n(reward_Qm: np.ndarray, n: int) -> tuple[float, float]:
    """(bound on the KL, reward) of the best of n responses, from m >= n responses of the base to each query.

        KL <= log n - (n - 1) / n        E[max] = sum_i C(i - 1, n - 1) / C(m, n) r_(i), r_(1) <= ... <= r_(m)

    The reward is the expectation over all subsets of n of the m, averaged over queries; of rewards of 0 and 1
    it is pass@n (Chen et al., arXiv:2107.03374). The bound: Beirami et al., arXiv:2401.01879.
    """
    m = reward_Qm.shape[1]
    weight_m = np.array([math.comb(i, n - 1) / math.comb(m, n) for i in range(m)])
    return math.log(n) - (n - 1) / n, float((np.sort(reward_Qm, 1) @ weight_m).mean())
