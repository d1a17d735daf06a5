"""Methods that only studies need: CORY trained on another score, PPO and CORY evaluated at other times.

Used as `--method docs.studies.methods:StrangersCory`. The logged task_reward stays the task's own.
"""
from torch import Tensor

from cory.train import Cory, Ppo


class StrangersCory(Cory):
    """The partner's reward is that of its response to another query: a partner's noise alone."""

    def scores(self, rollouts, rewards):
        (r1, r2), lam = rewards, self.cfg.partner_reward
        return [r1 + lam * next_row(r2, self.cfg), r2 + lam * next_row(r1, self.cfg)]


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
