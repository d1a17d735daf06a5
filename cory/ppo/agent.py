"""One agent: all state that stays with it when roles are exchanged."""
import copy

import numpy as np
import torch
from torch import Tensor

from cory.config import LR_SCHEDULES, Config
from cory.names import find
from cory.ppo.advantages import estimator
from cory.ppo.formulas import adapted_kl_coef
from cory.ppo.lora import add_adapter
from cory.ppo.model import LanguageModel, PolicyWithValue
from cory.system.sharding import by_placement, shard


class Agent:
    """One LLM of the team (`llm1`, `llm2`, ...), whichever role it plays.

    policy: what it samples from and trains, with its value head; a copy of its base, or an adapter on it.
    reference: what its KL is measured against, the base unless `move_reference` is called. kl_coef: eta.
    draws: the number of random generators created so far.

    Add no attributes: checkpoints would lose them; use `run.state`.
    """

    __slots__ = ("name", "cfg", "index", "base", "policy", "own_reference", "optimizer", "kl_coef",
                 "draws")

    def __init__(self, name: str, base: LanguageModel, cfg: Config, index: int):
        self.name, self.cfg, self.index, self.base = name, cfg, index, base
        self.own_reference, self.draws = None, 0
        _, asked = estimator(cfg)
        adapter = None
        if cfg.lora_rank:
            adapter_seed = int(np.random.SeedSequence((cfg.seed, index)).generate_state(1)[0])
            adapter = add_adapter(base.lm, name, cfg, adapter_seed)
        self.policy = PolicyWithValue(base, adapter, "value_BT" in asked, cfg.gradient_checkpointing)
        if cfg.shard and not cfg.lora_rank:         # with LoRA the base is sharded, and adapters stay whole
            shard(self.policy, cfg)
        self.reset()

    def reset(self) -> None:
        """A new optimizer and the initial KL coefficient; the weights stay."""
        groups = []
        for is_critic in (False, True):
            parameters = [p for name, p in self.policy.trainable_parameters().items()
                          if name.startswith("value_head.") == is_critic]
            groups += [{"params": group, "is_critic": is_critic} for group in by_placement(parameters)]
        self.optimizer = torch.optim.Adam(groups, lr=self.cfg.learning_rate, fused=True)
        self.kl_coef = self.cfg.init_kl_coef
        self.set_learning_rate(iteration=1)

    @property
    def reference(self) -> LanguageModel:
        return self.own_reference or self.base

    def move_reference(self) -> None:
        """From here on the KL is measured against the current policy (iterative KL)."""
        policy = self.policy
        if self.own_reference is None:
            if policy.adapter:
                lm, adapter = policy.lm, add_adapter(policy.lm, f"{self.name}_reference", self.cfg, seed=0)
            else:
                lm, adapter = copy.deepcopy(policy.lm).requires_grad_(False), None
            self.own_reference = LanguageModel(lm, policy.tokenizer, policy.dtype, policy.chat_template,
                                               adapter)
        with torch.no_grad():
            old = self.own_reference.weights().values()
            for x, new in zip(old, policy.weights().values(), strict=True):
                x.copy_(new)

    def generator(self) -> np.random.Generator:
        """A new random generator for each rollout and update, seeded by run seed, agent and a counter."""
        self.draws += 1
        return np.random.default_rng((self.cfg.seed, self.index, self.draws))

    def set_learning_rate(self, iteration: int) -> None:
        """Sets the learning rates of iteration 1, 2, ...: `rate * schedule((iteration - 1) / iterations)`."""
        cfg = self.cfg
        factor = find("lr_schedule", cfg.lr_schedule, LR_SCHEDULES)((iteration - 1) / cfg.iterations)
        for group in self.optimizer.param_groups:
            rate = group["is_critic"] and cfg.critic_learning_rate or cfg.learning_rate
            group["lr"] = rate * factor

    def adapt_kl_coef(self, *kl_B: Tensor) -> None:
        """One step of the KL controller on the KL of an iteration's responses, (B,) in nats for each of the
        agent's rollouts; none with `--kl_target 0`.
        """
        cfg, kl_N = self.cfg, torch.cat(kl_B)
        if cfg.kl_target:
            self.kl_coef = adapted_kl_coef(self.kl_coef, kl_N.mean().item(), cfg.kl_target, cfg.kl_horizon,
                                           len(kl_N))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps besides Adam's state: trained weights, and its own reference, if any."""
        reference = self.own_reference.weights() if self.own_reference else {}
        return self.policy.trainable_parameters() | {f"reference.{name}": x for name, x in reference.items()}

    def numbers(self) -> dict[str, float]:
        return {"kl_coef": self.kl_coef, "draws": self.draws}
