"""Divides rows into optimizer steps, these into forward passes, and tokens into calls of the head. The last
two change results by rounding alone.
"""
from dataclasses import dataclass, fields, replace
from typing import Iterator

import torch
from torch import Tensor

from cory.ppo.model import LanguageModel
from cory.system.distributed import local_rows
from cory.system.sharding import as_many_as_others

# CPU: fastest on 2 cores, as measured. GPU: the paper's models fit on a card (docs/hardware.md).
TOKENS_AT_ONCE = {"cpu": 3 * 2**9, "cuda": 2**12}           # through the transformer, padding included
LOGPROBS_AT_ONCE = {"cpu": 25 * 2**20, "cuda": 2**27}       # elements of (tokens, V): 100 and 512 MiB


@dataclass(frozen=True)
class Experience:
    """What the update trains on: a rollout's tensors, advantages and returns. Padding: EOS in ids, else 0.

    A field's name ends in `_BP`, `_BT` or `_B`, which `take` reads. `Tokens` takes `_BT` fields by name.
    """
    prompt_BP: Tensor           # token ids, padded on the left
    prompt_mask_BP: Tensor      # 1 = real prompt token
    response_BT: Tensor         # sampled token ids, padded on the right
    mask_BT: Tensor             # 1 = real response token
    logp_BT: Tensor             # log pi_old(a_t | s_t), nats
    ref_logp_BT: Tensor         # log pi0(a_t | s_t), nats
    advantage_BT: Tensor        # whitened, and weighted by `importance_cap`, where the settings say so
    value_BT: Tensor | None     # V_old(s_t), units of reward; None without a critic
    return_BT: Tensor | None    # advantage before whitening + V_old; None without a critic

    def take(self, index: Tensor) -> "Experience":
        """The experience of some rows, cut to the longest prompt and the longest response among them."""
        P, T = longest(self.prompt_mask_BP[index]), longest(self.mask_BT[index])
        columns = {"_BP": (slice(-P, None),), "_BT": (slice(0, T),), "_B": ()}
        return replace(self, **{name: x[(index, *columns[name[name.rindex("_"):]])]
                                for name, x in tensors(self).items()})

    def shuffled_mini_batches(self, rows_per_step: int, rows_at_once: int, generator: torch.Generator,
                              sharded: bool = False) -> Iterator[list["Experience"]]:
        """Yields this process's mini-batches for each optimizer step of one shuffled pass. All processes
        have equally many where the model is sharded: some groups of rows are then divided further.
        """
        order = torch.randperm(len(self.mask_BT), generator=generator).to(self.mask_BT.device)
        for rows in order.split(rows_per_step):
            rows = rows[local_rows(len(rows))]
            groups = by_length(self.prompt_mask_BP[rows], self.mask_BT[rows], rows_at_once)
            groups = as_many_as_others(groups) if sharded else groups
            yield [self.take(rows[group]) for group in groups]


@dataclass(frozen=True)
class Tokens:
    """N real response tokens of an experience, in its order: what the losses are computed on."""
    response_N: Tensor
    logp_N: Tensor
    ref_logp_N: Tensor
    advantage_N: Tensor
    value_N: Tensor | None
    return_N: Tensor | None

    @classmethod
    def of(cls, experience: Experience) -> "Tokens":
        real = experience.mask_BT.bool().nonzero(as_tuple=True)      # once: a GPU is waited for there
        columns = {f.name: getattr(experience, f.name.replace("_N", "_BT")) for f in fields(cls)}
        return cls(**{name: None if x is None else x[real] for name, x in columns.items()})

    def split(self, size: int) -> Iterator["Tokens"]:
        """The tokens in order, at most `size` at a time."""
        for start in range(0, len(self.response_N), size):
            yield replace(self, **{name: x[start:start + size] for name, x in tensors(self).items()})


def tensors(record: Experience | Tokens) -> dict[str, Tensor]:
    """The tensors of a record by name, without those that are None."""
    return {name: x for name, x in vars(record).items() if x is not None}


def by_length(prompt_mask_BP: Tensor, mask_BT: Tensor, rows_at_once: int) -> list[Tensor]:
    """Indices of the rows in groups for one forward pass each, of rollout and update, in order of length, so
    that little is padding. Every row is in one group, of at most `rows_at_once` rows and `TOKENS_AT_ONCE`
    tokens, or alone in it.
    """
    max_tokens, length_B2 = TOKENS_AT_ONCE[mask_BT.device.type], lengths(prompt_mask_BP, mask_BT)
    order = length_B2.sum(1).argsort(stable=True)
    groups, start, P, T = [], 0, 0, 0
    for row, (prompt, response) in enumerate(length_B2[order].tolist()):
        P, T = max(P, prompt), max(T, response)
        count = row - start                                 # rows of the open group, without this one
        if count and (count == rows_at_once or (count + 1) * (P + T) > max_tokens):
            groups.append(order[start:row])
            start, P, T = row, prompt, response
    return [*groups, order[start:]]


def lengths(prompt_mask_BP: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, 2): real tokens of each prompt and of each response."""
    return torch.stack([prompt_mask_BP.sum(1), mask_BT.sum(1).long()], 1)


def longest(mask: Tensor) -> int:
    """Most real tokens of any row. They stand side by side: `[:longest]` cuts rows that are padded on the
    right, `[-longest:]` those padded on the left. To leave a token out of the loss, give it the weight 0
    there, and keep its mask 1.
    """
    return int(mask.sum(1).max())


def logit_chunk_size(model: LanguageModel) -> int:
    """How many tokens' logits are made together: a multiple of 64, which matrix products like."""
    return max(64, LOGPROBS_AT_ONCE[model.device.type] // model.vocab_size // 64 * 64)
