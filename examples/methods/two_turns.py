"""The pioneer responds again after it has read the observer's response, and learns from both of its responses
at once. It takes twice as many optimizer steps as the observer, and its eta goes by the KL of both.

    python train_imdb.py --method examples.methods.two_turns:TwoTurns
"""
from dataclasses import replace

import torch

from cory.ppo.rollout import join
from cory.train import Cory


class TwoTurns(Cory):
    roles = ("pioneer", "observer", "reviser")      # of two agents, the one that is the pioneer also revises

    def update(self, role, agent, rollout, score):
        if role == "pioneer":
            self.first = rollout, score             # for the reviser's update, in the same iteration
            return {}
        if role == "reviser":
            first_rollout, first_score_B = self.first
            # revised responses are compared with each other (RLOO, GRPO)
            group_B = rollout.group_B + first_rollout.group_B.max() + 1
            revised = replace(rollout, group_B=group_B)
            rollout = join([first_rollout, revised])
            score = torch.cat([first_score_B, score])
        return super().update(role, agent, rollout, score)
