"""A critic with a hidden layer, whose gradient does not reach the transformer.

    python train_imdb.py --method cory --critic examples.parts.critic:Deep
"""
from torch import nn


class Deep(nn.Module):
    def __init__(self, base):
        super().__init__()
        width = base.head.in_features
        layers = nn.Sequential(
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1))
        self.layers = layers.to(base.device)

    def forward(self, batch, hidden):
        """hidden: the policy's. Another network may compute values from the tokens of `batch`, a rollout."""
        value_BT1 = self.layers(hidden.float().detach())
        return value_BT1.squeeze(-1)
