"""For five iterations, only the critics learn, while the learning-rate schedule runs on. A loss without the
policy loss would not do, because the gradient of the default critic also reaches the transformer.

    python train_imdb.py --method examples.methods.warmup:WarmUp
"""
from cory.train import Cory


class WarmUp(Cory):
    def update(self, role, agent, rollout, score):
        if self.iteration > 5:
            return super().update(role, agent, rollout, score)
        kl_coef = agent.kl_coef
        for group in agent.optimizer.param_groups:
            if not group["is_critic"]:
                group["lr"] = 0.0                   # until the next iteration sets it
        metrics = super().update(role, agent, rollout, score)
        for p in agent.policy.weights().values():
            agent.optimizer.state.pop(p, None)      # Adam forgets the policy's gradients
        agent.kl_coef = kl_coef
        return metrics
