"""At each exchange of roles, Adam's moments and eta start anew, as in the code that CORY's authors released.

    python train_imdb.py --method examples.methods.fresh:Fresh
"""
from cory.train import Cory


class Fresh(Cory):
    needs = {"share_weights": False}

    def update(self, role, agent, rollout, score):
        every = self.cfg.role_exchange_every
        done = self.iteration - 1
        if every and done > 0 and done % every == 0:
            agent.reset()
        return super().update(role, agent, rollout, score)
