"""The rollout buffer: responses with log-probabilities, KL and values; its division into micro-batches."""
from dataclasses import dataclass, replace
from typing import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cory.errors import UserError
from cory.machine.device import scaled_to_memory
from cory.ppo.model import LanguageModel

# How rows are divided into micro-batches affects results only by rounding.
# Tokens per pass, padding included; the CPU's value was the fastest measured on 2 cores.
MAX_TOKENS_PER_PASS = {"cpu": 3 * 2**9, "cuda": 2**12}
# Logits per pass; an update holds up to seven such tensors, of 48 MiB on a CPU and 512 on a large GPU.
MAX_LOGITS_PER_PASS = {"cpu": 3 * 2**22, "cuda": 2**27}


@dataclass(frozen=True)
class Rollout:
    """Queries, prompts and responses under the policy that sampled them, constant over PPO epochs.

    Prompts are padded on the left, all else on the right, with 0. A field that you add must be None, or have
    one value for each row (a list, or (B,)) or for each response token ((B, T)).
    """
    # sampled
    query: list[str]            # s0: the query that the reward is computed with, whatever the prompt
    text: list[str]             # decoded responses: all that tasks and the other agent's prompt see
    prompt_BP: Tensor           # token ids
    prompt_mask_BP: Tensor      # 1 = real prompt token
    response_BT: Tensor         # sampled token ids
    mask_BT: Tensor             # 1 = real response token; these come first
    sampling_logp_BT: Tensor    # log-probability with which a_t was drawn, nats
    truncated_B: Tensor         # whether the length limit has cut a response
    group_B: Tensor | None = None       # responses with the same number are compared (RLOO, GRPO)
    read_B: Tensor | None = None        # the row of the previous role that a prompt shows; None: the same row
    # by `add_logprobs`
    logp_BT: Tensor | None = None       # log pi_old(a_t | s_t), nats
    ref_logp_BT: Tensor | None = None   # log pi0(a_t | s_t), nats
    kl_BT: Tensor | None = None         # nats: KL(pi_old || pi0) at s_t (full), or log pi_old / pi0 (k1)
    value_BT: Tensor | None = None      # V_old(s_t), units of reward; None without a critic
    # of the update
    advantage_BT: Tensor | None = None  # whitened, if the estimator asks for it
    return_BT: Tensor | None = None     # what the critic learns, units of reward; None without one
    weight_BT: Tensor | None = None     # of each token's loss, 0 on padding
    divisor_B: Tensor | None = None     # a step's weighted loss is divided by its rows' sum of these

    @property
    def kl_B(self) -> Tensor:
        """Sentence-level KL: summed over each response's tokens, nats."""
        return self.kl_BT.sum(1)

    @property
    def sampling_gap(self) -> float:
        """Mean |sampling log-prob - log pi_old| per token, nats: more than rounding error means that the
        trained policy is not the one sampled from.
        """
        gap_BT = (self.sampling_logp_BT - self.logp_BT).abs()
        return (gap_BT.sum() / self.mask_BT.sum()).item()

    def map_fields(self, function: Callable) -> "Rollout":
        """With `function(name, value)` in place of the value of each field that is not None."""
        changed = {name: function(name, x) for name, x in vars(self).items() if x is not None}
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> "Rollout":
        return self.map_fields(lambda _, x: x.to(device) if isinstance(x, Tensor) else x)


LEFT_PADDED = ("prompt_BP", "prompt_mask_BP")


def take(rollout: Rollout, rows: Tensor) -> Rollout:
    """The rows with these indices, trimmed to the longest prompt and the longest response among them."""
    P = max_length(rollout.prompt_mask_BP[rows])
    T = max_length(rollout.mask_BT[rows])
    indices = rows.tolist()

    def cut(name, x):
        if isinstance(x, list):
            return [x[i] for i in indices]
        if x.dim() == 1:
            return x[rows]
        if name in LEFT_PADDED:
            return x[rows, -P:]
        return x[rows, :T]

    return rollout.map_fields(cut)


def join(rollouts: list[Rollout]) -> Rollout:
    """The rows of several rollouts with the same fields, padded to the longest."""
    def joined(name, x):
        xs = [getattr(rollout, name) for rollout in rollouts]
        if isinstance(x, list):
            return sum(xs, [])
        if x.dim() == 1:
            return torch.cat(xs)
        rows = [row for x in xs for row in x]
        side = "left" if name in LEFT_PADDED else "right"
        return pad_sequence(rows, batch_first=True, padding_side=side)

    return rollouts[0].map_fields(joined)


def micro_batches(rollout: Rollout, model: LanguageModel, max_rows: int) -> list[Tensor]:
    """Indices of the rows of each micro-batch, by their length, to keep padding low: at most `max_rows`
    rows, `MAX_TOKENS_PER_PASS` tokens and `MAX_LOGITS_PER_PASS` logits, or one row.
    """
    max_tokens = scaled_to_memory(MAX_TOKENS_PER_PASS, model.device)
    max_logits = scaled_to_memory(MAX_LOGITS_PER_PASS, model.device)
    V = model.head.out_features
    prompt_B = rollout.prompt_mask_BP.sum(1)
    response_B = rollout.mask_BT.sum(1).long()
    order = (prompt_B + response_B).argsort(stable=True)
    length_B2 = torch.stack([prompt_B, response_B], 1)
    indices = []
    start = 0
    P = 0
    T = 0
    for end, (prompt, response) in enumerate(length_B2[order].tolist()):
        count = end - start + 1
        P = max(P, prompt)
        T = max(T, response)
        fits_tokens = count <= max_rows and count * (P + T) <= max_tokens
        fits = fits_tokens and count * T * V <= max_logits
        if count > 1 and not fits:
            indices.append(order[start:end])
            start = end
            P = prompt
            T = response
    indices.append(order[start:])
    return indices[::-1]                        # the longest first: the others then reuse its memory


def require_queries(rollouts: list[Rollout], queries: list[str]) -> None:
    """Raises `UserError` unless each rollout responds to these queries, in this order."""
    if any(rollout.query != queries for rollout in rollouts):
        raise UserError("a rollout has other queries than it was given, or roles have different ones")


def max_length(mask: Tensor) -> int:
    return int(mask.sum(1).max())


def real_ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    pairs = zip(ids.cpu(), mask.cpu().bool(), strict=True)
    return [row[real].tolist() for row, real in pairs]
