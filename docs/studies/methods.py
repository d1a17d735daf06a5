"""Methods that only studies need: PPO and CORY trained on another score, or evaluated at other times.

Used as `--method docs.studies.methods:ZeroPpo`. The logged task_reward stays the task's own.
"""
import torch
from torch import Tensor

from cory.train import Cory, Ppo


class Zero:
    """No reward: whatever moves the policy is noise, and the KL penalty."""

    def score(self, agent, rollout, reward_B, partner_B):
        return torch.zeros_like(reward_B)


class Shuffled:
    """The score of the next response, to another query: as much reward, of which nothing is learned."""

    def score(self, agent, rollout, reward_B, partner_B):
        return next_row(super().score(agent, rollout, reward_B, partner_B), agent.cfg)


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

    def partner_rewards(self, r1, r2, a2, cfg):
        require_sampled(cfg)
        return next_row(r2, cfg), next_row(r1, cfg)


class CentredCory(Cory):
    """The partner's reward less its batch mean: the shared reward without what it adds to every response."""

    def partner_rewards(self, r1, r2, a2, cfg):
        require_sampled(cfg)
        return r2 - r2.mean(), r1 - r1.mean()


class EarlyEvaluations:
    """Evaluated every second iteration up to the tenth, and every tenth from there on."""

    def train(self, run):
        all_iterations = run.iterations

        def iterations():
            for iteration in all_iterations():
                run.cfg.eval_every = 2 if iteration <= 10 else 10
                yield iteration

        run.iterations = iterations
        super().train(run)


class FrontierPpo(EarlyEvaluations, Ppo):
    pass


class FrontierCory(EarlyEvaluations, Cory):
    pass


def next_row(x_B: Tensor, cfg) -> Tensor:
    """Each row's value from the row behind it; the last row's from the first."""
    hint = "puts responses to one query beside each other, and this method takes neighbours; use 1"
    cfg.require("responses_per_query", cfg.responses_per_query == 1, hint)
    return x_B.roll(-1)


def require_sampled(cfg) -> None:
    hint = "this method changes the sampled partner's reward; leave it out"
    cfg.require("partner_term", cfg.partner_term == "sampled", hint)
