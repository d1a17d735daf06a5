"""A moving average of each agent's weights is evaluated and saved in place of the weights. With LoRA, the
matrices A and B are averaged, which for one agent over time is close to an average of their products.

    python train_imdb.py --method examples.methods.average:Average
"""
from cory.train import Cory


class Average(Cory):
    def evaluate(self, agents, players):
        exchange(agents)
        metrics = super().evaluate(agents, players)
        exchange(agents)
        return metrics

    def train(self, agents, logger):
        super().train(agents, logger)
        exchange(agents)                            # the final models are saved now

    def update(self, role, agent, rollout, score):
        metrics = super().update(role, agent, rollout, score)
        for name, p in agent.policy.weights().items():
            average = agent.memory.setdefault(name, p.detach().clone())
            average.lerp_(p.detach(), 0.05)
        return metrics


def exchange(agents):
    """Each agent's weights for their averages, and back."""
    for agent in agents:
        weights = agent.policy.weights()
        for name, average in agent.memory.items():
            agent.memory[name] = weights[name].detach().clone()
            weights[name].data.copy_(average)
