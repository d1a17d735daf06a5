"""How rows are divided into forward passes and calls of the LM head: it affects results only by rounding."""
import torch
from torch import Tensor

from cory.ppo.model import LanguageModel

# Tokens of a pass through the transformer, padding included: on a CPU the fastest measured on 2 cores.
MAX_TOKENS_PER_PASS = {"cpu": 3 * 2**9, "cuda": 2**12}
# Logits computed at once, of which an update keeps up to five tensors: 32 and 512 MiB each.
MAX_LOGITS_PER_PASS = {"cpu": 2**23, "cuda": 2**27}


def max_length(mask: Tensor) -> int:
    """The largest number of real tokens in a row."""
    return int(mask.sum(1).max())


def by_length(prompt_mask_BP: Tensor, mask_BT: Tensor, max_rows: int) -> list[Tensor]:
    """Indices of the rows in groups for one pass each, in order of length, to keep padding low: at most
    `max_rows` rows and `MAX_TOKENS_PER_PASS` tokens, or one row.
    """
    max_tokens = MAX_TOKENS_PER_PASS[mask_BT.device.type]
    length_B2 = torch.stack([prompt_mask_BP.sum(1), mask_BT.sum(1).long()], 1)
    order = length_B2.sum(1).argsort(stable=True)
    groups, start, P, T = [], 0, 0, 0
    for row, (prompt, response) in enumerate(length_B2[order].tolist()):
        P, T = max(P, prompt), max(T, response)
        count = row - start                                 # rows of the open group, without this one
        if count and (count == max_rows or (count + 1) * (P + T) > max_tokens):
            groups.append(order[start:row])
            start, P, T = row, prompt, response
    return [*groups, order[start:]]


def lm_head_tokens(model: LanguageModel) -> int:
    """How many tokens' logits are computed together: a multiple of 64, for efficient matrix products."""
    vocab_size = model.lm.get_output_embeddings().weight.shape[0]
    return max(64, MAX_LOGITS_PER_PASS[model.device.type] // vocab_size // 64 * 64)
