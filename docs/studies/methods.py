"""Methods that only studies need: PPO and CORY trained on another score, or evaluated at other times.

Used as `--method docs.studies.methods:ZeroPpo`. The logged task_reward stays the task's own.
"""
import torch
from torch import Tensor

from cory.train import Cory, Ppo


class Zero:
    """No reward: whatever moves the policy is noise, and the KL penalty."""

    def scores(self, rollouts, rewards):
        return [torch.zeros_like(reward_B) for reward_B in rewards]


class Shuffled:
    """The score of the next response, to another query: as much reward, of which nothing is learned."""

    def scores(self, rollouts, rewards):
        return [next_row(score_B, self.cfg) for score_B in super().scores(rollouts, rewards)]


class ZeroPpo(Zero, Ppo):
    pass


class ZeroCory(Zero, Cory):
    pass


class ShuffledPpo(Shuffled, Ppo):
    pass


class ShuffledCory(Shuffled, Cory):
    pass


class StrangersCory(Cory):
    """The partner's reward is that of its response to another query: a partner's noise alone."""

    def scores(self, rollouts, rewards):
        (r1, r2), lam = rewards, self.cfg.partner_reward
        return [r1 + lam * next_row(r2, self.cfg), r2 + lam * next_row(r1, self.cfg)]


class CentredCory(Cory):
    """The partner's reward less its batch mean: the shared reward without what it adds to every response."""

    def scores(self, rollouts, rewards):
        (r1, r2), lam = rewards, self.cfg.partner_reward
        return [r1 + lam * (r2 - r2.mean()), r2 + lam * (r1 - r1.mean())]


class CriticCory(Cory):
    """The partner's reward as the observer's critic expects it, for the pioneer alone: V at the end of the
    observer's prompt. It has no sample's noise, but a bias, since with `--kl_in reward` it includes the
    observer's KL penalty.
    """

    def scores(self, rollouts, rewards):
        (r1, r2), (_, a2), lam = rewards, rollouts, self.cfg.partner_reward
        if not self.training:               # held-out responses have no values
            return super().scores(rollouts, rewards)
        return [r1 + lam * a2.value_BT[:, 0].to(r2), r2]


class EarlyEvaluations:
    """Evaluated every second iteration up to the tenth, and every tenth from there on."""

    def evaluation_is_due(self, iteration):
        every = 2 if iteration <= 10 else 10
        return iteration == self.cfg.iterations or iteration % every == 0


class FrontierPpo(EarlyEvaluations, Ppo):
    pass


class FrontierCory(EarlyEvaluations, Cory):
    pass


def next_row(x_B: Tensor, cfg) -> Tensor:
    """Each row's value from the row after it; the last row's from the first."""
    hint = "puts responses to one query beside each other, and this method takes neighbours; use 1"
    cfg.require("responses_per_query", cfg.responses_per_query == 1, hint)
    return x_B.roll(-1)
