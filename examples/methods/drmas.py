"""Dr. MAS (arXiv:2602.08847, langfengQ/DrMAS): scores are normalized over each agent's responses to a query.
`Pooled`, its baseline, normalizes over those of all agents; the authors' code counts a trajectory once.
With --partner_reward 1 all agents have the same scores, and the two hardly differ.

    python train_gsm8k.py --method examples.methods.drmas:DrMas --responses_per_query 4 \
        --advantage examples.methods.drmas:given --kl_in loss
"""
import torch

from cory.ppo.advantages import estimator
from cory.train import Cory


class DrMas(Cory):
    needs = {"advantage": "examples.methods.drmas:given", "kl_in": "loss"}
    over = (2,)                             # of the dimensions role, query, response

    def scores(self, rollouts, rewards):
        scores = super().scores(rollouts, rewards)
        self.plain = dict(zip(self.roles, scores, strict=True))
        k = self.cfg.responses_per_query
        score_RGk = torch.stack(scores).view(len(scores), -1, k)
        std, mean = torch.std_mean(score_RGk, self.over, keepdim=True)
        normalized_RGk = (score_RGk - mean) / (std + 1e-6)
        return [*normalized_RGk.flatten(1)]

    def update(self, role, agent, rollout, score):
        metrics = super().update(role, agent, rollout, score)
        return metrics | {"score": self.plain[role].mean().item()}      # not normalized


class Pooled(DrMas):
    over = (0, 2)


@estimator(critic=False, whiten=False, grouped=True)
def given(reward_BT, mask_BT, **_):
    """The score of a response as the advantage of each of its tokens."""
    return reward_BT.sum(1, keepdim=True) * mask_BT, None
