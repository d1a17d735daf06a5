"""Prompts to responses: the sampling loop. Shapes as in `cory.ppo.model`."""
from typing import NamedTuple

import torch
from torch import Tensor

from cory.config import Config
from cory.errors import Diverged, UserError
from cory.ppo import formulas
from cory.ppo.cache import empty_cache
from cory.ppo.minibatches import longest
from cory.ppo.model import LanguageModel, positions
from cory.system.distributed import all_reduce_max, local_rows, world_size

# After so many tokens the loop looks which rows have ended: only there it waits for the GPU.
STEPS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 8}


class Prompts(NamedTuple):
    ids_BP: Tensor      # token ids, padded on the left with EOS
    mask_BP: Tensor     # 1 = real token


class Sample(NamedTuple):
    response_BT: Tensor         # sampled ids; EOS on padding
    mask_BT: Tensor             # float, 1 = real response token: up to the first of `end_ids`, it included
    sampling_logp_BT: Tensor    # log q of each token, q what it was drawn from; 0 on padding


def encode_prompts(model: LanguageModel, prompts: list[str], max_new_tokens: int) -> Prompts:
    """Tokenizes, with the model's BOS if any, and pads on the left. An EOS written inside a prompt stays.

    Raises `UserError` for a prompt without tokens, or one whose response would leave the model's context.
    """
    rows = model.tokenizer(prompts)["input_ids"]
    for text, row in zip(prompts, rows, strict=True):
        if not row:
            raise UserError("prompt", text, "has no tokens; remove the empty row from the data")
        if len(row) + max_new_tokens > model.context_length:
            raise UserError("prompt", text[:60], f"{len(row)} tokens + {max_new_tokens} of response "
                            f"exceed the model's context of {model.context_length}; shorten the queries "
                            "or the responses")
    width = max(map(len, rows))
    ids = torch.tensor([[model.tokenizer.eos_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Prompts(ids.to(model.device), mask.to(model.device))


def real_ids(response_BT: Tensor, mask_BT: Tensor) -> list[list[int]]:
    """The tokens of each response, without its padding."""
    lengths = mask_BT.sum(1).long().tolist()
    return [row[:n] for row, n in zip(response_BT.tolist(), lengths, strict=True)]


def decode(model: LanguageModel, response_BT: Tensor, mask_BT: Tensor) -> list[str]:
    """Responses as text, without special tokens: all that rewards and the other agent see."""
    ids = real_ids(response_BT, mask_BT)
    return model.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def sampling_logprobs(logp_BV: Tensor, cfg: Config) -> Tensor:
    """log q, the distribution that a rollout's tokens are drawn from, of the policy's log pi, both (B, V) in
    nats.

        q proportional to pi^(1 / sampling_temperature), over the fewest tokens that hold `top_p` of that
        (Holtzman et al., arXiv:1904.09751), 0 elsewhere

    To sample in another way, change this function and leave `draw` alone: what stands here is recorded, so
    that `sampling_gap` shows how far q is from pi, and `--importance_cap` corrects for it. A rule
    that needs earlier tokens must be given them by `sampling_loop`. Evaluation draws from pi, and never comes
    here.
    """
    if cfg.sampling_temperature != 1.0:
        logp_BV = (logp_BV / cfg.sampling_temperature).log_softmax(-1)
    if cfg.top_p < 1.0:
        sorted_BV, token_BV = logp_BV.sort(-1, descending=True)
        p_BV = sorted_BV.exp()
        above_BV = p_BV.cumsum(-1) - p_BV                       # what more likely tokens hold together
        logp_BV = logp_BV.scatter(-1, token_BV, sorted_BV.where(above_BV < cfg.top_p, -torch.inf))
        logp_BV = logp_BV.log_softmax(-1)
    return logp_BV


def draw(logp_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One token per row by inversion: the first v with `sum_{u <= v} p_u > uniform * sum_u p_u`.

    Never one of probability 0. In float64: uniform numbers of 24 bits would never draw most tokens of p below
    6e-8, and there are many. One uniform number per row, of a CPU generator, gives the same stream on every
    device.
    """
    cumulative_BV = logp_BV.softmax(-1).cumsum(-1, dtype=torch.float64)     # softmax(log p) = p
    total_B1 = cumulative_BV[:, -1:]
    # rounding may give uniform * total = total, beyond every token
    largest_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    threshold_B1 = (uniform_B[:, None] * total_B1).minimum(largest_B1)
    # right=True: strictly above the threshold, so never a token of probability 0
    token_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(1)
    return token_B.clamp(max=logp_BV.shape[1] - 1)          # where all is NaN: `sample` refuses it


@torch.no_grad()
def sample(model: LanguageModel, prompts: Prompts, max_new_tokens: int, generator: torch.Generator | None,
           is_local: bool = False, cfg: Config | None = None) -> Sample:
    """Samples `a ~ pi(. | prompt)` until one of `end_ids` or `max_new_tokens`; greedily without a generator.

    The distribution is that of `model.logprobs`, which rollouts keep and the update trains. With `cfg`, in
    rollouts alone, tokens are drawn from `sampling_logprobs` instead. There is no repetition penalty
    (DIFFERS: the released code samples with one and trains without).

    Each step takes one number of `generator`, on the CPU, for each prompt, ended or not. With `is_local` the
    prompts are this process's share: numbers are taken for those of all processes.

    Raises `Diverged` where log-probabilities are NaN.
    """
    B = len(prompts.ids_BP) * (world_size() if is_local else 1)
    rows = local_rows(B) if is_local else slice(B)
    uniform_TB = None
    if generator is not None:
        uniform_TB = uniforms(generator.clone_state(), max_new_tokens, B)[:, rows].to(model.device)
    with model.autocast():                      # once for all steps, so that each weight is cast once
        sampled = sampling_loop(model, prompts, max_new_tokens, uniform_TB, cfg)
    if generator is not None:
        # All processes move on by the longest response of any, so that their streams stay alike. Another rule
        # changes the numbers that tests/test_trajectory.py has stored.
        steps = sampled.mask_BT.shape[1]
        uniforms(generator, all_reduce_max(steps) if is_local else steps, B)
    if sampled.sampling_logp_BT.isnan().any():           # one NaN or +inf logit makes all of its row NaN
        way_out = ("go on from the last checkpoint or start anew, with a lower --learning_rate or "
                   "--max_grad_norm 1")
        raise Diverged("log-probability", float("nan"), "the model", way_out)
    return sampled


def uniforms(generator: torch.Generator, steps: int, B: int) -> Tensor:
    """The next (steps, B) numbers of a stream, uniform in [0, 1), on the CPU."""
    return torch.rand(steps, B, generator=generator, dtype=torch.float64)


def sampling_loop(model: LanguageModel, prompts: Prompts, max_new_tokens: int,
                  uniform_TB: Tensor | None, cfg: Config | None) -> Sample:
    """`sample` as a function of one uniform number for each token, or greedy without them.

    R of the B rows are computed. Once a quarter of them have ended, those are dropped, and with them the
    leading columns that are padding in all others; on a GPU this is looked at every 8 tokens. The cache has
    the same R rows in the same order. The three tensors that are returned have all B rows.
    """
    B, device = len(prompts.ids_BP), model.device
    eos, ends = model.tokenizer.eos_token_id, torch.tensor(model.end_ids, device=device)
    response_BT = torch.full((B, max_new_tokens), eos, device=device)
    mask_BT, sampling_logp_BT = (torch.zeros(B, max_new_tokens, device=device) for _ in range(2))
    # the rows that are computed, and whether each of them still runs
    row_R, running_R = torch.arange(B, device=device), torch.ones(B, dtype=torch.bool, device=device)
    ids_RL, mask_RL, position_ids_RL = prompts.ids_BP, prompts.mask_BP, positions(prompts.mask_BP)
    cache = empty_cache()
    for t in range(max_new_tokens):
        hidden_RLH, cache = model.body(ids_RL, mask_RL, position_ids_RL, cache)
        logp_RV = model.logprobs(hidden_RLH[:, -1])
        if cfg is not None:
            logp_RV = sampling_logprobs(logp_RV, cfg)
        token_R = logp_RV.argmax(-1) if uniform_TB is None else draw(logp_RV, uniform_TB[t, row_R])
        token_R = torch.where(running_R, token_R, eos)
        response_BT[row_R, t] = token_R
        mask_BT[row_R, t] = running_R.float()
        sampling_logp_BT[row_R, t] = formulas.token_logprobs(logp_RV, token_R).where(running_R, 0.0)
        running_R = running_R & ~torch.isin(token_R, ends)

        ids_RL, position_ids_RL = token_R[:, None], position_ids_RL[:, -1:] + 1
        mask_RL = torch.cat([mask_RL, torch.ones_like(mask_RL[:, :1])], dim=1)
        if (t + 1) % STEPS_BETWEEN_LOOKS[device.type]:
            continue
        start_R = mask_RL.argmax(1).where(running_R, mask_RL.shape[1])
        count, first_column = torch.stack([running_R.sum(), start_R.min()]).tolist()    # the only wait
        if count == 0:
            break
        if count <= 3 / 4 * len(row_R):
            keep = torch.nonzero_static(running_R, size=count).squeeze(1)
            for layer in cache.layers:
                layer.keep(keep, first_column)
            row_R, running_R, mask_RL = row_R[keep], running_R[keep], mask_RL[keep, first_column:]
            ids_RL, position_ids_RL = ids_RL[keep], position_ids_RL[keep]
    T = longest(mask_BT)
    return Sample(response_BT[:, :T], mask_BT[:, :T], sampling_logp_BT[:, :T])
