"""Population based training (arXiv:1711.09846) of two: every ten iterations the worse agent gets the better
one's weights, and its eta and learning rate times 0.8 or 1.25. Here both also play CORY's roles; the fitness
of an agent is its combined reward since the last time, in whichever role.

    python train_imdb.py --method examples.methods.population:Population
"""
import random

from cory.train import Cory


class Population(Cory):
    needs = {"share_weights": False}
    every = 10
    factors = (0.8, 1.25)

    def respond(self, players, queries, sample):
        self.players = players
        done = self.iteration - 1
        if self.training and done and done % self.every == 0:
            self.replace_worse(players)
        return super().respond(players, queries, sample)

    def replace_worse(self, agents):
        worse, better = sorted(agents, key=lambda agent: agent.memory["fitness"])
        worse.reset()
        weights = better.trainable_parameters().values()
        for p, weight in zip(worse.trainable_parameters().values(), weights, strict=True):
            p.data.copy_(weight.data)
        worse.kl_coef = better.kl_coef * random.choice(self.factors)
        factor = random.choice(self.factors)
        worse.memory["rate"] = better.memory.get("rate", 1.0) * factor
        for agent in agents:
            agent.memory["fitness"] = 0.0

    def scores(self, rollouts, rewards):
        for agent, rollout, reward_B in zip(self.players, rollouts, rewards, strict=True):
            combined_B = reward_B - self.cfg.init_kl_coef * rollout.kl_B
            fitness = agent.memory.get("fitness", 0.0)
            agent.memory["fitness"] = fitness + combined_B.mean().item()
        return super().scores(rollouts, rewards)

    def update(self, role, agent, rollout, score):
        for group in agent.optimizer.param_groups:
            group["lr"] *= agent.memory.get("rate", 1.0)        # the next iteration sets it anew
        return super().update(role, agent, rollout, score)
