"""One agent: all state that stays with it when roles are exchanged."""
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
    base: what its KL is measured against. kl_coef: eta. rng_count: random generators created so far.
    sampled_tokens: of all its responses in this iteration, also of those that no agent is trained on.

    memory: whatever else it must remember, kept by checkpoints: numbers, text, tensors, collections of these.
    iteration: the present one.
    """

    def __init__(self, name: str, base: LanguageModel, cfg: Config, index: int):
        self.name = name
        self.base = base
        self.cfg = cfg
        self.index = index
        self.rng_count = 0
        self.sampled_tokens = 0
        self.memory = {}
        self.iteration = 1
        self.critic = None
        with torch.random.fork_rng(devices=[]):         # initial weights depend on run seed and agent alone
            torch.manual_seed(seed_from((cfg.seed, index)))
            self.policy = base.new_policy(name, cfg)
            if find_estimator(cfg).critic:
                self.critic = cfg.resolve("critic")(base)
        for parameter in self.policy.weights().values():
            parameter.requires_grad_(True)
        if cfg.shard and not cfg.lora_rank:         # with LoRA the base is sharded, and adapters stay whole
            shard(self.policy, cfg)
        self.reset()

    def reset(self) -> None:
        """A new optimizer and the initial KL coefficient; the weights stay."""
        groups = {}
        for name, parameter in self.trainable_parameters().items():
            is_critic = name.startswith("critic.")
            key = is_critic, is_sharded(parameter)      # Adam cannot mix sharded tensors with others
            group = groups.setdefault(key, {"params": [], "is_critic": is_critic})
            group["params"].append(parameter)
        self.optimizer = torch.optim.Adam(groups.values(), fused=True)
        self.set_learning_rates()
        self.kl_coef = self.cfg.init_kl_coef

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """By name: `lm.NAME` of all weights or the adapter's, and `critic.NAME`."""
        trainable = {f"lm.{name}": p for name, p in self.policy.weights().items()}
        if self.critic:
            trainable |= {f"critic.{name}": p for name, p in self.critic.named_parameters()}
        return trainable

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of its models, by name: what is trained, and the critic's buffers."""
        tensors = self.trainable_parameters()
        if self.critic:
            tensors |= {f"critic.{name}": x for name, x in self.critic.named_buffers()}
        return tensors

    @property
    def is_trained(self) -> bool:
        """Whether there has been an update since `reset`."""
        return any(self.optimizer.state.values())

    def generator(self) -> np.random.Generator:
        """A new random generator for each rollout and update, seeded by run seed, agent and a counter."""
        self.rng_count += 1
        return np.random.default_rng((self.cfg.seed, self.index, self.rng_count))

    def begin(self, iteration: int) -> None:
        """Begins iteration 1, 2, ..., with no tokens sampled yet."""
        self.iteration = iteration
        self.sampled_tokens = 0
        self.set_learning_rates()

    def set_learning_rates(self) -> None:
        """`rate * schedule((iteration - 1) / iterations)`, of the policy and of the critic."""
        cfg = self.cfg
        progress = (self.iteration - 1) / cfg.iterations
        schedule = cfg.resolve("lr_schedule")
        factor = schedule(progress)
        cfg.require("lr_schedule", factor >= 0, f"gives {self.name} {factor} times its learning rate")
        for group in self.optimizer.param_groups:
            rate = cfg.learning_rate
            if group["is_critic"]:
                rate = cfg.critic_learning_rate or rate
            group["lr"] = factor * rate


def seed_from(entropy, spawn_key=()) -> int:
    """A seed for PyTorch; different numbers or keys give unrelated ones."""
    (seed,) = np.random.SeedSequence(entropy, spawn_key=spawn_key).generate_state(1)
    return int(seed)


def adaptive(agent: Agent, kl_B) -> float:
    """The next eta by the adaptive controller of Ziegler et al. 2019, sec. 2.2; constant if `kl_target` is 0.

        error = clip(KL / target - 1, -0.2, 0.2)        eta <- eta (1 + error N / horizon)

    KL is the mean over the rollout's N responses, in nats. A custom controller has these arguments, and may
    use `agent.iteration`.
    """
    cfg = agent.cfg
    if not cfg.kl_target:
        return agent.kl_coef
    error = kl_B.mean().item() / cfg.kl_target - 1
    clipped = min(max(error, -0.2), 0.2)
    return agent.kl_coef * (1 + clipped * len(kl_B) / cfg.kl_horizon)


# --- learning-rate schedules: from the progress of training, 0 to just below 1, to a factor ---
def constant(progress: float) -> float:
    return 1.0


def linear(progress: float) -> float:
    return 1.0 - progress
