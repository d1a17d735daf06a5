"""An agent: what travels together when roles are exchanged."""
import torch

from cory.config import Config
from cory.ppo.advantages import estimator, parameter_names
from cory.ppo.lora import add_adapter
from cory.ppo.model import LanguageModel, PolicyWithValue
from cory.system.sharding import by_placement, shard

SEED_STEP = 2 * 0x4F1BBCDD          # twice an odd number: it comes back to 0 after 2^31 pairs of agents


class Agent:
    """One LLM of the team (`llm1`, `llm2`, ...), whichever role it plays.

    It has its settings `cfg`, its base model `reference` (which agents of equal bases share), its policy, its
    value head if the advantage needs a critic, Adam, the KL coefficient and the random stream that it samples
    and shuffles with. Its policy starts as a copy of the reference, or with LoRA as an adapter on it.

    What else an agent keeps must be saved by experiment/checkpoint.py (numbers in `json_state`, tensors in
    `tensors_of`, both in `load_checkpoint`), or a resumed run begins it anew. This includes a reference that
    moves; held-out KL is measured against it, and moves too.
    """

    def __init__(self, name: str, reference: LanguageModel, cfg: Config, index: int):
        self.name, self.reference, self.cfg = name, reference, cfg
        self.seed = agent_seed(cfg.seed, index)
        adapter = add_adapter(reference.lm, name, cfg, self.seed) if cfg.lora else None
        critic = "value_BT" in parameter_names(estimator(cfg.advantage, cfg.responses_per_query))
        self.policy = PolicyWithValue(reference, adapter, critic)
        if cfg.shard and not cfg.lora:          # with LoRA the run shards the base, and adapters stay whole
            shard(self.policy.lm, cfg)          # before `reset`: Adam takes the weights as they are then
        self.reset()

    def reset(self) -> None:
        """Resets all but the weights: Adam's moments, KL coefficient, and the random stream, which then
        repeats from its beginning.

        Another optimizer goes here. `set_learning_rate` overwrites the `lr` of each group, by `is_critic`: a
        factor of a group's own needs a key of its own, to be read there. A checkpoint keeps the tensors and
        numbers that `state` has for each parameter, and nothing else. It puts them back on the parameter's
        device, where fused optimizers have them. An optimizer made of two offers `param_groups`, `state`,
        `step` and `zero_grad` of both. `tests/test_loop.py` shows whether a killed run still resumes to the
        same bits. `require_disk` and `python -m cory plan` count two such tensors for each weight.
        """
        trained = self.policy.trained()
        groups = []
        for is_critic in (False, True):
            parameters = [p for name, p in trained.items() if name.startswith("value_head.") == is_critic]
            groups += [{"params": group, "is_critic": is_critic} for group in by_placement(parameters)]
        self.optimizer = torch.optim.Adam(groups, lr=self.cfg.learning_rate, fused=True)
        self.kl_coef = self.cfg.init_kl_coef
        self.generator = torch.Generator().manual_seed(self.seed)


def agent_seed(seed: int, index: int) -> int:
    """A seed below 2^32 that no other agent (index 0, 1, 2, ...) of a run has.

    PyTorch's CPU generator uses the low 32 bits of its seed. The first two agents of two runs (seeds below
    2^31) never share one. Nor do further agents, if the runs' seeds are small.
    """
    return (2 * seed + index % 2 + index // 2 * SEED_STEP) % 2**32
