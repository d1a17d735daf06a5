"""Prompts to rollouts: the sampling loop, then log-probabilities, KL and values.

Shapes as in `cory.ppo.model`.
"""
from dataclasses import replace
from functools import partial
from typing import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, DynamicLayer

from cory.errors import UserError
from cory.machine.device import scaled_to_memory
from cory.machine.distributed import processes
from cory.machine.sharding import unsharded
from cory.ppo import formulas
from cory.ppo.agent import Agent
from cory.ppo.model import LanguageModel, positions
from cory.ppo.rollout import (
    Rollout,
    join,
    max_length,
    micro_batches,
    real_ids,
    require_queries,
    take,
)

# Tokens between checks for finished rows. A check waits for the GPU, as does the mask at each token.
EOS_CHECK_INTERVAL = {"cpu": 1, "cuda": 8}
# Limit for the keys, values and probabilities of the rows that are sampled together.
MAX_SAMPLING_BYTES = {"cpu": 2**29, "cuda": 2**34}


def collect_rollout(agent: Agent, prompts: list[str], queries: list[str], max_new_tokens: int,
                    policy: LanguageModel | None = None) -> Rollout:
    """`a ~ pi(. | prompt)` for each prompt, with log-probabilities, KL and values; pi is the agent's policy,
    or the one given. The responses to k consecutive prompts, k = `responses_per_query`, form a group.
    """
    cfg = agent.cfg
    policy = policy or agent.policy
    B = len(prompts)
    uniform_TB = torch.from_numpy(agent.generator().random((max_new_tokens, B)))
    with unsharded(policy, agent.base):
        rollout = generate(cfg.resolve("sampler"), policy, prompts, queries, max_new_tokens, uniform_TB,
                           agent.base, kl_penalty=cfg.kl_penalty, max_rows=cfg.mini_batch_size,
                           critic=agent.critic)
    agent.sampled_tokens += int(rollout.mask_BT.sum())
    group_B = torch.arange(B, device=policy.device) // cfg.responses_per_query
    return replace(rollout, group_B=group_B)


def generate(sampler: Callable, model: LanguageModel, prompts: list[str], queries: list[str],
             max_new_tokens: int, uniform_TB: Tensor | None, reference: LanguageModel, **options) -> Rollout:
    """A response to each prompt by a sampler such as `sample_tokens`, with what `add_logprobs` adds. Each
    process generates its rows, as many at a time as their keys and values fit; all then receive the whole
    rollout.
    """
    B = len(queries)
    if not isinstance(prompts, list) or len(prompts) != B:
        raise UserError(f"there must be a list of {B} prompts, one for each query, not {str(prompts)[:60]}")
    longest = max(map(len, model.encode(prompts)))
    size = rows_at_once(model, longest + max_new_tokens)
    local = processes().local_rows(B)
    chunks = []
    for start in range(local.start, local.stop, size):
        rows = slice(start, min(start + size, local.stop))
        uniform = None
        if uniform_TB is not None:
            uniform = uniform_TB[:, rows].to(model.device)
        chunk = sampler(model, prompts[rows], queries[rows], max_new_tokens, uniform)
        require_queries([chunk], queries[rows])
        chunk = add_logprobs(chunk, model, reference, **options)
        chunks.append(chunk.to("cpu"))
    return join(processes().all_gather(chunks)).to(model.device)


def rows_at_once(model: LanguageModel, length: int) -> int:
    """How many rows of this length, in tokens, are sampled together."""
    config = model.lm.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)            # fewer, if they are grouped
    head_dim = getattr(config, "head_dim", None) or model.head.in_features // heads
    cache_bytes = 8 * config.num_hidden_layers * kv_heads * head_dim * length   # keys and values in float32
    draw_bytes = 16 * model.head.out_features                           # logits, p and its cumulative sum
    return max(1, scaled_to_memory(MAX_SAMPLING_BYTES, model.device) // (cache_bytes + draw_bytes))


# --- sampling ---
def encode_prompts(model: LanguageModel, prompts: list[str], max_new_tokens: int) -> tuple:
    """(token ids, mask), each (B, P), padded on the left with 0."""
    rows = model.encode(prompts)
    config = model.lm.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or 10**9         # not every config has it
    for text, row in zip(prompts, rows, strict=True):
        if not 0 < len(row) <= context - max_new_tokens:
            raise UserError("prompt", text[:60], f"has {len(row)} tokens, and must have 1 to "
                            f"{context - max_new_tokens}; shorten the queries or the responses")
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    ids_BP = pad_sequence(ids, batch_first=True, padding_side="left")
    mask_BP = pad_sequence([*map(torch.ones_like, ids)], batch_first=True, padding_side="left")
    return ids_BP.to(model.device), mask_BP.to(model.device)


def decode(model: LanguageModel, prompt_ids: list, response_ids: list) -> list[str]:
    """What the model wrote after each prompt, without special tokens. Decoded together with the prompt, since
    some tokenizers drop the space that a text begins with.
    """
    to_texts = partial(model.tokenizer.batch_decode, skip_special_tokens=True,
                       clean_up_tokenization_spaces=False)
    prompts = to_texts(prompt_ids)
    whole = to_texts([a + b for a, b in zip(prompt_ids, response_ids, strict=True)])
    return [text[len(prompt):] for prompt, text in zip(prompts, whole, strict=True)]


def draw(logp_BV, uniform_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token per row by inverse-transform sampling, and its log-probability `log(p_v / sum_u p_u)`. The
    token is the first v with `sum_{u <= v} p_u > uniform * sum_u p_u`; without uniform numbers it is the most
    probable one.

    In float64, because float32 would miss the many tokens with p below 6e-8.
    """
    p_BV = logp_BV.softmax(-1)              # softmax(log p) = p; if you edit p here, it may have any sum
    cumulative_BV = p_BV.cumsum(-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    if uniform_B is None:
        token_B1 = p_BV.argmax(-1, keepdim=True)
    else:
        # rounding may give uniform * total = total, beyond every token
        largest_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
        threshold_B1 = (uniform_B[:, None] * total_B1).minimum(largest_B1)
        # right=True: strictly above the threshold, so never a token of probability 0
        token_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
        token_B1 = token_B1.clamp(max=logp_BV.shape[1] - 1)         # where all is NaN
    drawn_B1 = p_BV.gather(1, token_B1) / total_B1
    return token_B1.squeeze(1), drawn_B1.squeeze(1).log().to(logp_BV.dtype)


class RoomyLayer(DynamicLayer):
    """Keys and values of a layer, in tensors with room for `capacity` tokens: a DynamicLayer copies all of
    them at each token. It keeps every key; the model's mask applies a sliding window.
    """

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def update(self, keys: Tensor, values: Tensor, *_, **__):
        start = self.length
        self.length += keys.shape[2]
        if start == 0:
            self.lazy_initialization(keys, values)
            room = 0, 0, 0, self.capacity - self.length
            # keys that autocast leaves in float32 are cast here once, not by attention at each token
            self.keys = nn.functional.pad(keys.to(values.dtype), room)
            self.values = nn.functional.pad(values, room)
        self.keys[:, :, start:self.length] = keys
        self.values[:, :, start:self.length] = values
        return self.keys[:, :, :self.length], self.values[:, :, :self.length]

    def get_seq_length(self) -> int:
        return self.length


@torch.no_grad()
def sample_tokens(model: LanguageModel, prompts: list[str], queries: list[str], max_new_tokens: int,
                  uniform_TB: Tensor | None) -> Rollout:
    """Samples `a ~ pi(. | prompt)` until one of `end_ids` or `max_new_tokens`, using one uniform number per
    token; greedily without them.

    DIFFERS: the released code samples with a repetition penalty and trains without.

    R of the B rows are still computed. Whenever a quarter of them have ended, these are dropped. The cache
    has the same R rows in the same order.
    """
    device = model.device
    prompt_BP, prompt_mask_BP = encode_prompts(model, prompts, max_new_tokens)
    ends = torch.tensor([*model.end_ids], device=device)
    mask_BT = torch.zeros(len(prompts), max_new_tokens, device=device)
    sampling_logp_BT = torch.zeros_like(mask_BT)
    response_BT = torch.zeros_like(mask_BT, dtype=torch.long)
    row_R = torch.arange(len(prompts), device=device)       # the rows that are still computed,
    running_R = torch.ones_like(row_R, dtype=torch.bool)    # and whether each of them has not ended yet
    truncated_B = running_R.clone()                         # those that have not ended
    ids_RL = prompt_BP
    mask_RL = prompt_mask_BP
    position_ids_RL = positions(mask_RL)
    uniform_R = None
    cache = Cache(layer_class_to_replicate=partial(RoomyLayer, prompt_BP.shape[1] + max_new_tokens))
    with model.autocast():                      # once for all tokens, so that a trained weight is cast once
        for t in range(max_new_tokens):
            hidden_RLH, cache = model.hidden_states(ids_RL, mask_RL, position_ids_RL, cache)
            logp_RV = model.logprobs(hidden_RLH[:, -1])
            if uniform_TB is not None:
                uniform_R = uniform_TB[t, row_R]
            token_R, drawn_logp_R = draw(logp_RV, uniform_R)
            token_R = token_R.where(running_R, 0)
            response_BT[row_R, t] = token_R
            mask_BT[row_R, t] = running_R.float()
            sampling_logp_BT[row_R, t] = drawn_logp_R.where(running_R, 0.0)
            running_R = running_R & ~torch.isin(token_R, ends)
            truncated_B[row_R] = running_R

            ids_RL = token_R[:, None]
            position_ids_RL = position_ids_RL[:, -1:] + 1
            mask_RL = nn.functional.pad(mask_RL, (0, 1), value=1)
            if (t + 1) % EOS_CHECK_INTERVAL[device.type]:
                continue
            count = int(running_R.sum())
            if count == 0:
                break
            if count <= 3 / 4 * len(row_R):
                keep = torch.nonzero_static(running_R, size=count).squeeze(1)
                cache.batch_select_indices(keep)
                row_R = row_R[keep]
                running_R = running_R[keep]
                ids_RL = ids_RL[keep]
                mask_RL = mask_RL[keep]
                position_ids_RL = position_ids_RL[keep]
    T = max_length(mask_BT)
    response_BT = response_BT[:, :T]
    mask_BT = mask_BT[:, :T]
    sampling_logp_BT = sampling_logp_BT[:, :T]
    text = decode(model, real_ids(prompt_BP, prompt_mask_BP), real_ids(response_BT, mask_BT))
    return Rollout(queries, text, prompt_BP, prompt_mask_BP, response_BT, mask_BT, sampling_logp_BT,
                   truncated_B)


# --- log-probabilities ---
@torch.no_grad()
def add_logprobs(rollout: Rollout, policy: LanguageModel, reference: LanguageModel, kl_penalty: str,
                 max_rows: int, critic: nn.Module | None = None) -> Rollout:
    """Adds logp_BT, ref_logp_BT, kl_BT and, with a critic, value_BT, in micro-batches of at most `max_rows`
    rows. If the update has the same limit, rounding is similar: initial ratios are nearly 1 even in bfloat16.
    """
    logp_BT = torch.zeros_like(rollout.mask_BT)
    ref_logp_BT = torch.zeros_like(logp_BT)
    kl_BT = torch.zeros_like(logp_BT)
    value_BT = None if critic is None else torch.zeros_like(logp_BT)
    for index in micro_batches(rollout, policy, max_rows):
        micro_batch = take(rollout, index)
        real = micro_batch.mask_BT.nonzero(as_tuple=True)
        in_rollout = index[real[0]], real[1]                # the same tokens
        model_inputs = micro_batch.prompt_BP, micro_batch.prompt_mask_BP, micro_batch.response_BT
        hidden_BTH = policy.response_hidden(*model_inputs)
        ref_hidden_BTH = hidden_BTH                         # a base is its own reference
        if reference is not policy:
            ref_hidden_BTH = reference.response_hidden(*model_inputs)
        # in one call, so that its (N, V) tensors are freed before the next pass
        logp_N, ref_logp_N, kl_N = logprobs_and_kl(
            policy.logprobs(hidden_BTH[real]), reference.logprobs(ref_hidden_BTH[real]),
            micro_batch.response_BT[real], kl_penalty)
        logp_BT[in_rollout] = logp_N
        ref_logp_BT[in_rollout] = ref_logp_N
        kl_BT[in_rollout] = kl_N
        if critic is not None:
            value_BT[in_rollout] = critic(micro_batch, hidden_BTH)[real]
    return replace(rollout, logp_BT=logp_BT, ref_logp_BT=ref_logp_BT, kl_BT=kl_BT, value_BT=value_BT)


def logprobs_and_kl(logp_NV, ref_logp_NV, token_N, kl_penalty: str) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, reference log-probs, KL) of N tokens, each (N,) in nats, from all log-probabilities."""
    logp_N = formulas.token_logprobs(logp_NV, token_N)
    ref_logp_N = formulas.token_logprobs(ref_logp_NV, token_N)
    if kl_penalty == "full":
        return logp_N, ref_logp_N, formulas.kl_full(logp_NV, ref_logp_NV)
    return logp_N, ref_logp_N, formulas.kl_k1(logp_N, ref_logp_N)
