"""What travels together when roles are exchanged."""
import torch

from cory.config import Config
from cory.ppo.advantages import estimator, needs_critic
from cory.ppo.lora import add_adapter
from cory.ppo.model import LanguageModel, PolicyWithValue
from cory.system.sharding import by_placement, shard

SEED_STEP = 2 * 0x4F1BBCDD          # twice an odd number: it comes back to 0 after 2^31 pairs of agents


class Agent:
    """One LLM of the team (`llm1`, `llm2`, ...), whichever role it plays.

    It owns its policy, its value head if the advantage needs a critic, Adam, the KL coefficient and a
    random stream. Agents start as copies of the reference, or with LoRA as adapters on it. Each samples
    and shuffles with a generator of its own, so that what one agent does never moves the random stream of
    another.
    """

    def __init__(self, name: str, reference: LanguageModel, cfg: Config, index: int):
        self.name, self.cfg = name, cfg
        self.seed = agent_seed(cfg.seed, index)
        adapter = add_adapter(reference.lm, name, cfg, self.seed) if cfg.lora else None
        critic = needs_critic(estimator(cfg.advantage, cfg.responses_per_query))
        self.policy = PolicyWithValue(reference, adapter, critic)
        if cfg.shard and not cfg.lora:
            shard(self.policy.lm, cfg)
        self.reset()

    def reset(self) -> None:
        """Resets all but the weights: Adam's moments, KL coefficient, random stream."""
        trained = self.policy.trained()
        critic = [p for name, p in trained.items() if name.startswith("value_head.")]
        policy = [p for name, p in trained.items() if not name.startswith("value_head.")]
        groups = [{"params": group, "is_critic": is_critic}
                  for is_critic, parameters in ((False, policy), (True, critic))
                  for group in by_placement(parameters)]
        self.optimizer = torch.optim.Adam(groups, lr=self.cfg.learning_rate, fused=True)
        self.kl_coef = self.cfg.init_kl_coef
        self.generator = torch.Generator().manual_seed(self.seed)


def agent_seed(seed: int, index: int) -> int:
    """A seed below 2^32 that no other agent (index 0, 1, 2, ...) of a run has.

    PyTorch's CPU generator uses the low 32 bits of its seed. The first two agents of two runs (seeds below
    2^31) never share one. A step of each further pair is so large that runs of small seeds share none.
    """
    return (2 * seed + index % 2 + index // 2 * SEED_STEP) % 2**32
