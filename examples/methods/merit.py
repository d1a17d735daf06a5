"""Roles by merit: they are exchanged after each iteration in which the observer earned more than the pioneer.
`--role_exchange_every` has no effect.

    python train_imdb.py --method examples.methods.merit:Merit
"""
from cory.train import Cory


class Merit(Cory):
    def __init__(self, cfg, task):
        super().__init__(cfg, task)
        self.memory["exchanges"] = 0

    def assign_roles(self, agents, iteration):
        llm1, llm2 = agents
        if self.memory["exchanges"] % 2 == 0:
            return [llm1, llm2]
        return [llm2, llm1]

    def scores(self, rollouts, rewards):
        pioneer_B, observer_B = rewards
        if observer_B.mean() > pioneer_B.mean():
            self.memory["exchanges"] += 1
        return super().scores(rollouts, rewards)
