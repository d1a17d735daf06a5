"""Distillation: in the last third of the run llm1 is always the pioneer, and alone learns, by SFT, the better
of the team's two responses as its response to the bare query. This is RAFT (arXiv:2304.06767) with the best
of two agents' samples, and with PPO's batches and learning rates. The critics rest.

    python train_imdb.py --method examples.methods.distill:Distill
"""
from dataclasses import replace

import torch

from cory.ppo.rollout import join, take
from cory.ppo.sampling import add_logprobs
from cory.train import Cory


class Distill(Cory):
    needs = {"share_weights": False}

    def is_late(self, iteration):
        return 3 * iteration > 2 * self.cfg.iterations

    def assign_roles(self, agents, iteration):
        if self.is_late(iteration):
            return [*agents]
        return super().assign_roles(agents, iteration)

    def scores(self, rollouts, rewards):
        pioneer_B, observer_B = rewards
        rows = torch.arange(len(pioneer_B), device=pioneer_B.device)
        rows[observer_B > pioneer_B] += len(rows)
        self.better = take(join(rollouts), rows)
        self.earned_B = torch.maximum(pioneer_B, observer_B)
        return super().scores(rollouts, rewards)

    def update(self, role, agent, rollout, score):
        if not self.is_late(self.iteration):
            return super().update(role, agent, rollout, score)
        if agent.name == "llm2":
            return {}
        cfg = agent.cfg
        taught = replace(self.better, prompt_BP=rollout.prompt_BP, prompt_mask_BP=rollout.prompt_mask_BP)
        taught = add_logprobs(taught, agent.policy, agent.base, cfg.kl_penalty, cfg.mini_batch_size,
                              agent.critic)
        agent.cfg = replace(cfg, loss="examples.methods.distill:sft")
        metrics = super().update(role, agent, taught, self.earned_B)        # which is logged as the score
        agent.cfg = cfg
        return metrics


def sft(agent, batch, logp_BT, entropy_BT, value_BT):
    return -logp_BT, {"policy_loss": -logp_BT, "entropy": entropy_BT}
