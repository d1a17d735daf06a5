"""In training, eta weighs the KL from a moving average of the agent's weights. The KL that is logged is that
from the base, which itself must stay as it is, since checkpoints do not contain it.

    python train_imdb.py --method examples.methods.moving_reference:MovingReference --kl_penalty k1
"""
from dataclasses import replace

from cory.ppo.sampling import add_logprobs
from cory.train import Cory


class MovingReference(Cory):
    needs = {"kl_penalty": "k1"}

    def update(self, role, agent, rollout, score):
        weights = agent.policy.weights()
        present = {name: p.detach().clone() for name, p in weights.items()}
        average = agent.memory.setdefault("average", present)
        load(weights, average)
        reference = add_logprobs(rollout, agent.policy, agent.policy, "k1", agent.cfg.mini_batch_size)
        load(weights, present)
        kl_BT = rollout.logp_BT - reference.logp_BT
        rollout = replace(rollout, ref_logp_BT=reference.logp_BT, kl_BT=kl_BT)
        metrics = super().update(role, agent, rollout, score)
        for name, p in weights.items():
            average[name].lerp_(p.detach(), 0.05)
        return metrics


def load(weights, tensors):
    for name, p in weights.items():
        p.data.copy_(tensors[name])
