"""Self-play with a past self: llm1 is always the observer. The pioneer, llm2, is not trained, but every five
iterations becomes a copy of llm1.

    python train_imdb.py --method examples.methods.selfplay:SelfPlay
"""
from cory.train import Cory


class SelfPlay(Cory):
    def assign_roles(self, agents, iteration):
        llm1, llm2 = agents
        return [llm2, llm1]

    def respond(self, players, queries, sample):
        if self.training and self.iteration % 5 == 1:
            past, present = players
            weights = present.policy.weights()
            for name, p in past.policy.weights().items():
                p.data.copy_(weights[name].data)
        return super().respond(players, queries, sample)

    def update(self, role, agent, rollout, score):
        if agent.name == "llm2":
            return {}
        return super().update(role, agent, rollout, score)
