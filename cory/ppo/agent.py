"""What travels together when roles are exchanged."""
import torch

from cory.config import Config
from cory.ppo.lora import add_adapter
from cory.ppo.model import LanguageModel, PolicyWithValue


class Agent:
    """One LLM of the pair (`llm1`, `llm2`), whichever role it plays: policy, value head, Adam, KL coefficient, random stream.

    Agents start as copies of the reference, or with LoRA as adapters on it. Each samples and shuffles with a generator of its own, so
    that what one agent does never moves the random stream of the other.
    """

    def __init__(self, name: str, reference: LanguageModel, cfg: Config, index: int):
        self.name, self.cfg = name, cfg
        self.seed = 2 * cfg.seed + index
        self.policy = PolicyWithValue(reference, add_adapter(reference.lm, name, cfg, self.seed) if cfg.lora else None)
        self.reset()

    def reset(self) -> None:
        """Everything but the weights as at the start: Adam's moments, KL coefficient, random stream."""
        self.optimizer = torch.optim.Adam(self.policy.trained().values(), lr=self.cfg.learning_rate, fused=True)
        self.kl_coef = self.cfg.init_kl_coef
        self.generator = torch.Generator().manual_seed(self.seed)
