"""Prompts to responses: the sampling loop. Shapes as in `cory.ppo.model`."""
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from cory.errors import UserError
from cory.ppo.model import LanguageModel, positions

# Tokens between checks for finished rows, the loop's only GPU sync.
EOS_CHECK_INTERVAL = {"cpu": 1, "cuda": 8}


class Prompts(NamedTuple):
    ids_BP: Tensor      # token ids, padded on the left with EOS
    mask_BP: Tensor     # 1 = real token


class Sample(NamedTuple):
    response_BT: Tensor         # sampled ids; EOS on padding
    mask_BT: Tensor             # float, 1 = real response token, up to the first of `end_ids`, inclusive
    logp_BT: Tensor             # log-probability of each token as it was drawn, nats; 0 on padding


def encode_prompts(model: LanguageModel, prompts: list[str], max_new_tokens: int) -> Prompts:
    """Tokenizes and pads on the left. Raises `UserError` for a prompt that is empty, that leaves the response
    no room in the model's context, or that has a token without an embedding.
    """
    rows, context = model.encode(prompts), model.context_length or 10**9
    embeddings = model.lm.get_input_embeddings().weight.shape[0]
    for text, row in zip(prompts, rows, strict=True):
        if not row or max(row) >= embeddings:
            raise UserError("prompt", text[:60], "has no tokens, or one that the model has no embedding for; "
                            "remove this row from the data")
        if len(row) + max_new_tokens > context:
            raise UserError("prompt", text[:60], f"{len(row)} tokens + {max_new_tokens} of response exceed "
                            f"the model's context of {context}; shorten the queries or the responses")
    width = max(map(len, rows))
    ids = torch.tensor([[model.tokenizer.eos_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Prompts(ids.to(model.device), mask.to(model.device))


def real_ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), mask.cpu().bool(), strict=True)]


def decode(model: LanguageModel, prompts: Prompts, sample: Sample) -> list[str]:
    """What the model wrote after each prompt, without special tokens: all that rewards and the other agent
    see. Decoded together with the prompt, since some tokenizers drop the space that a text begins with.
    """
    def texts(rows: list[list[int]]) -> list[str]:
        return model.tokenizer.batch_decode(rows, skip_special_tokens=True,
                                            clean_up_tokenization_spaces=False)

    prompt_ids, response_ids = real_ids(*prompts), real_ids(sample.response_BT, sample.mask_BT)
    whole = texts([prompt + response for prompt, response in zip(prompt_ids, response_ids, strict=True)])
    return [text[len(prompt):] for prompt, text in zip(texts(prompt_ids), whole, strict=True)]


def draw(logp_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverse-transform sampling, and its log-probability. The token is the first v with
    `sum_{u <= v} p_u > uniform * sum_u p_u`.

    It depends on its row's number alone, whichever rows are computed alongside it. Its probability is
    never 0. Float64, because float32 would miss the many tokens with p below 6e-8. To draw from another
    distribution, put its log-probabilities in place of logp_BV: `sampling_gap` shows the difference.
    """
    p_BV = logp_BV.softmax(-1)              # softmax(log p) = p
    cumulative_BV = p_BV.cumsum(-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    # rounding may give uniform * total = total, beyond every token
    largest_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    threshold_B1 = (uniform_B[:, None] * total_B1).minimum(largest_B1)
    # right=True: strictly above the threshold, so never a token of probability 0
    token_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(1)
    token_B = token_B.clamp(max=logp_BV.shape[1] - 1)       # where all is NaN: `sample` raises
    return token_B, p_BV.gather(1, token_B[:, None]).squeeze(1).log()


@torch.no_grad()
def sample(model: LanguageModel, prompts: Prompts, max_new_tokens: int, uniform_TB: Tensor | None) -> Sample:
    """Samples `a ~ pi(. | prompt)` until one of `end_ids` or `max_new_tokens`, using one uniform number per
    token; greedily without them. Raises `UserError` where log-probabilities are NaN.

    DIFFERS: the released code samples with a repetition penalty and trains without.

    R of the B rows are computed. Once a quarter of them have ended, those are dropped, and with them the
    leading columns that are padding in all others. The cache has the same R rows in the same order.
    """
    B, device = len(prompts.ids_BP), model.device
    eos, ends = model.tokenizer.eos_token_id, torch.tensor(model.end_ids, device=device)
    uniform_TB = None if uniform_TB is None else uniform_TB.to(device)
    response_BT = torch.full((B, max_new_tokens), eos, device=device)
    mask_BT, logp_BT = (torch.zeros(B, max_new_tokens, device=device) for _ in range(2))
    # the rows that are computed, and whether each of them still runs
    row_R, running_R = torch.arange(B, device=device), torch.ones(B, dtype=torch.bool, device=device)
    ids_RL, mask_RL, position_ids_RL = prompts.ids_BP, prompts.mask_BP, positions(prompts.mask_BP)
    cache = DynamicCache()          # keeps all keys of a sliding window, too: the model's mask hides the rest
    with model.autocast():                      # once for all tokens, so that each weight is cast once
        for t in range(max_new_tokens):
            hidden_RLH, cache = model.hidden_states(ids_RL, mask_RL, position_ids_RL, cache)
            logp_RV = model.logprobs(hidden_RLH[:, -1])
            if uniform_TB is None:
                drawn_logp_R, token_R = logp_RV.max(-1)
            else:
                token_R, drawn_logp_R = draw(logp_RV, uniform_TB[t, row_R])
            token_R = torch.where(running_R, token_R, eos)
            response_BT[row_R, t] = token_R
            mask_BT[row_R, t] = running_R.float()
            logp_BT[row_R, t] = drawn_logp_R.where(running_R, 0.0)
            running_R = running_R & ~torch.isin(token_R, ends)

            ids_RL, position_ids_RL = token_R[:, None], position_ids_RL[:, -1:] + 1
            mask_RL = torch.cat([mask_RL, torch.ones_like(mask_RL[:, :1])], dim=1)
            if (t + 1) % EOS_CHECK_INTERVAL[device.type]:
                continue
            start_R = mask_RL.argmax(1).where(running_R, mask_RL.shape[1])
            count, first_column = torch.stack([running_R.sum(), start_R.min()]).tolist()    # the only wait
            if count == 0:
                break
            if count <= 3 / 4 * len(row_R):
                keep = torch.nonzero_static(running_R, size=count).squeeze(1)
                for layer in cache.layers:
                    layer.keys, layer.values = (x[keep, :, first_column:] for x in (layer.keys, layer.values))
                row_R, running_R, mask_RL = row_R[keep], running_R[keep], mask_RL[keep, first_column:]
                ids_RL, position_ids_RL = ids_RL[keep], position_ids_RL[keep]
    if logp_BT.isnan().any():                               # one NaN or +inf logit makes all of its row NaN
        raise UserError("log-probability", float("nan"), "the model has diverged; go on from the last "
                       "checkpoint or start again, with a lower --learning_rate or with --max_grad_norm 1")
    T = max_length(mask_BT)
    return Sample(response_BT[:, :T], mask_BT[:, :T], logp_BT[:, :T])


def max_length(mask: Tensor) -> int:
    return int(mask.sum(1).max())
