"""What travels together when roles are exchanged."""
import torch

from cory.config import Config
from cory.model import LanguageModel, PolicyWithValue


class Agent:
    """One LLM of the pair (`llm1`, `llm2`), whichever role it plays: policy, value head, Adam, KL coefficient, random stream.

    Agents start as copies of the reference. Each samples and shuffles with a generator of its own, so that what one agent
    does never moves the random stream of the other.
    """

    def __init__(self, name: str, reference: LanguageModel, cfg: Config, index: int):
        self.name, self.cfg, self.index = name, cfg, index
        self.policy = PolicyWithValue(reference).requires_grad_(True)
        self.reset()

    def reset(self) -> None:
        """Everything but the weights as at the start: Adam's moments, KL coefficient, random stream."""
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.cfg.learning_rate, fused=True)
        self.kl_coef = self.cfg.init_kl_coef
        self.generator = torch.Generator().manual_seed(2 * self.cfg.seed + self.index)
