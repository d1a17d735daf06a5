"""Held-out evaluation: a model answers bare queries it was never trained on, with a fixed seed, beside the untrained base."""
import math

import torch

from cory import formulas
from cory.config import Config
from cory.model import LanguageModel
from cory.rollout import sweep
from cory.sampling import decode, encode_prompts, sample
from cory.task import Task

EVALUATION_SEED = 20_241_006        # the same random numbers for every model, method, seed and iteration
ROWS_AT_ONCE = 64


@torch.no_grad()
def evaluate(model: LanguageModel, reference: LanguageModel, task: Task, cfg: Config) -> dict[str, float]:
    """Samples one response of at most `max_response_length` tokens per held-out query, at the training temperature.

    task_reward: mean r(s0, a). kl: exact KL(pi || pi0) summed over each response's tokens, nats, mean over responses.
    combined_reward: task_reward - init_kl_coef kl. length: tokens per response, EOS included. distinct_n: different n-grams
    over all n-grams of all responses. repeated_tokens: share of tokens that stood earlier in the same response.
    base_perplexity: exp of the mean negative log-probability per token under the base, at the same temperature.
    """
    texts, ids, kl, ref_logp = [], [], 0.0, 0.0
    queries = task.held_out_queries
    for at in range(0, len(queries), ROWS_AT_ONCE):
        generator = torch.Generator().manual_seed(EVALUATION_SEED + at)
        prompts = encode_prompts(model, task.pioneer_prompts(queries[at:at + ROWS_AT_ONCE]), cfg.max_response_length)
        response_BT, mask_BT, _ = sample(model, prompts, cfg.max_response_length, generator)
        real = mask_BT.bool()
        hidden, ref_hidden = (m.response_hidden(*prompts, response_BT)[real] for m in (model, reference))
        _, ref_logp_N, kl_N = sweep(model, reference, hidden, ref_hidden, response_BT[real], "full")
        kl, ref_logp = kl + kl_N.sum().item(), ref_logp + ref_logp_N.sum().item()
        texts += decode(model, response_BT, mask_BT)
        ids += [row[keep].tolist() for row, keep in zip(response_BT, real)]
    rewards = task.reward(queries, texts)
    tokens, kl_coef = sum(map(len, ids)), cfg.init_kl_coef
    return {"task_reward": rewards.mean().item(), "kl": kl / len(queries),
            "combined_reward": rewards.mean().item() - kl_coef * kl / len(queries), "length": tokens / len(queries),
            "distinct_1": distinct(ids, 1), "distinct_2": distinct(ids, 2),
            "repeated_tokens": 1 - sum(len(set(row)) for row in ids) / tokens, "base_perplexity": math.exp(-ref_logp / tokens)}


def distinct(ids: list[list[int]], n: int) -> float:
    """Different n-grams over all n-grams, pooled over responses; 0 if no response has n tokens."""
    grams = [tuple(row[i:i + n]) for row in ids for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
