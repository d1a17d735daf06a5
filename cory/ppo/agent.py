"""One agent: all state that stays with it when roles are exchanged."""
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor, nn

from cory.config import Config
from cory.machine.sharding import is_sharded, shard
from cory.ppo.advantages import find_estimator
from cory.ppo.model import LanguageModel


class Agent:
    """One LLM of the team (`llm1`, `llm2`, ...), whichever role it plays.

    policy: what it samples from and trains; a copy of its base, or an adapter on it. critic: its V, or None.
    base: what its KL is measured against. kl_coef: eta. draws: random generators created so far.

    memory: whatever else it must remember, kept by checkpoints: numbers, text, tensors, collections of these.
    iteration: the present one.
    """

    def __init__(self, name: str, base: LanguageModel, cfg: Config, index: int):
        self.name, self.cfg, self.index, self.base = name, cfg, index, base
        self.draws, self.memory, self.iteration = 0, {}, 1
        with torch.random.fork_rng(devices=[]):         # initial weights depend on run seed and agent alone
            torch.manual_seed(int(np.random.SeedSequence((cfg.seed, index)).generate_state(1)[0]))
            self.policy = base.new_policy(name, cfg)
            self.critic = cfg.find("critic")(base) if find_estimator(cfg).critic else None
        for parameter in self.policy.weights().values():
            parameter.requires_grad_(True)
        if cfg.shard and not cfg.lora_rank:         # with LoRA the base is sharded, and adapters stay whole
            shard(self.policy, cfg)
        self.reset()

    def reset(self) -> None:
        """A new optimizer and the initial KL coefficient; the weights stay."""
        groups = defaultdict(list)
        for name, parameter in self.trainable_parameters().items():
            # no operation can mix sharded tensors with others
            groups[name.startswith("critic."), is_sharded(parameter)].append(parameter)
        of_adam = [{"params": group, "is_critic": is_critic} for (is_critic, _), group in groups.items()]
        self.optimizer = torch.optim.Adam(of_adam, fused=True)
        self.set_learning_rate(self.iteration)
        self.kl_coef = self.cfg.init_kl_coef

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """By name: `lm.NAME` of all weights or the adapter's, and `critic.NAME`."""
        of_critic = dict(self.critic.named_parameters()) if self.critic else {}
        return ({f"lm.{name}": p for name, p in self.policy.weights().items()}
                | {f"critic.{name}": p for name, p in of_critic.items()})

    def generator(self) -> np.random.Generator:
        """A new random generator for each rollout and update, seeded by run seed, agent and a counter."""
        self.draws += 1
        return np.random.default_rng((self.cfg.seed, self.index, self.draws))

    def set_learning_rate(self, iteration: int) -> None:
        """Sets the learning rates of iteration 1, 2, ...: `rate * schedule((iteration - 1) / iterations)`."""
        cfg, self.iteration = self.cfg, iteration
        factor = cfg.find("lr_schedule")((iteration - 1) / cfg.iterations)
        for group in self.optimizer.param_groups:
            own_rate = group["is_critic"] and cfg.critic_learning_rate > 0
            group["lr"] = factor * (cfg.critic_learning_rate if own_rate else cfg.learning_rate)


def adaptive(agent: Agent, kl_N: Tensor) -> float:
    """The next eta by the adaptive controller of Ziegler et al. 2019, sec. 2.2; constant if `kl_target` is 0.

        error = clip(KL / target - 1, -0.2, 0.2)        eta <- eta (1 + error N / horizon)

    KL is the mean of the N responses' KL, in nats. A controller of your own has these arguments, and may use
    `agent.iteration`.
    """
    cfg, n = agent.cfg, len(kl_N)
    if not cfg.kl_target:
        return agent.kl_coef
    error = min(max(kl_N.mean().item() / cfg.kl_target - 1, -0.2), 0.2)
    return agent.kl_coef * (1 + error * n / cfg.kl_horizon)


# --- learning-rate schedules: from the progress of training, 0 to just below 1, to a factor ---
def constant(progress: float) -> float:
    return 1.0


def linear(progress: float) -> float:
    return 1.0 - progress
