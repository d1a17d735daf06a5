"""A centralized critic (CoLLM-CC, arXiv:2601.21972): one value for a query, used and taught by both agents.
Here it is a small network on the frozen base's reading of the query, and each agent has Adam moments for it.

    python train_gsm8k.py --method examples.methods.centralized:Centralized --lam 1 \
        --critic examples.methods.centralized:critic_of_query
"""
from functools import cache

import torch
from torch import nn

from cory.ppo.model import positions
from cory.ppo.sampling import encode_prompts
from cory.train import Cory


class Centralized(Cory):
    needs = {"advantage": "gae", "critic": "examples.methods.centralized:critic_of_query", "lam": 1.0}


@cache
def critic_of_query(base):
    """Agents with the same base get the same critic."""
    return CentralCritic(base)


class CentralCritic(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        width = base.head.in_features
        layers = nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        self.layers = nn.Sequential(*layers).to(base.device)

    def forward(self, batch, hidden):
        ids_BP, mask_BP = encode_prompts(self.base, batch.query, max_new_tokens=0)
        with torch.no_grad():
            hidden_BPH, _ = self.base.hidden_states(ids_BP, mask_BP, positions(mask_BP))
        value_B1 = self.layers(hidden_BPH[:, -1].float())
        return value_B1.expand(batch.mask_BT.shape)
