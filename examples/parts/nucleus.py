"""Top-p: agents sample from, and train, policies without improbable tokens. Take one optimizer step per
iteration, since a token that an update moves out of the nucleus is less probable by a factor of 2e-9.

    python train_imdb.py --method examples.parts.nucleus:Nucleus --gradient_accumulation_steps 4
"""
import torch

from cory.ppo.model import LanguageModel, Policy
from cory.train import Cory


class Nucleus(Cory):
    """The base has all tokens, so that the KL is above 0 from the start. In a loss (k3) it is biased, because
    some tokens are hardly ever sampled. Use float32: rounding to bfloat16 moves tokens out of the nucleus.
    """

    def __init__(self, cfg, task):
        super().__init__(cfg, task)
        Policy.logits = top_p               # an agent's policy; the base is a LanguageModel


def top_p(self, hidden_NH):
    """Lowers logits by 20, except those of the most probable tokens, whose probabilities add up to 0.9."""
    logits_NV = LanguageModel.logits(self, hidden_NH)
    p_NV, token_NV = logits_NV.softmax(-1).sort(-1, descending=True)
    before_NV = p_NV.cumsum(-1) - p_NV              # of all tokens that are more probable
    is_outside_NV = (before_NV > 0.9).to(p_NV)
    lowered_NV = torch.zeros_like(p_NV).scatter(1, token_NV, is_outside_NV)
    return logits_NV - 20 * lowered_NV
