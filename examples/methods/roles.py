"""Whoever plays the observer is trained with another lambda of GAE. Gamma, the loss, its mean and clipping,
mini-batches and epochs can be changed in this way, too; learning rates and eta are in `agent.optimizer` and
`agent.kl_coef`.

    python train_imdb.py --method examples.methods.roles:Roles
"""
from dataclasses import replace

from cory.train import Cory


class Roles(Cory):
    def update(self, role, agent, rollout, score):
        settings = agent.cfg
        if role == "observer":
            agent.cfg = replace(settings, lam=0.8)
        metrics = super().update(role, agent, rollout, score)
        agent.cfg = settings
        return metrics
