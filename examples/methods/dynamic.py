"""DAPO's dynamic sampling (arXiv:2503.14476): groups in which all rewards are equal are replaced by others,
here from at most four batches. Training metrics are those of the groups that are kept.

    python train_gsm8k.py --method examples.methods.dynamic:Dynamic --advantage grpo \
        --responses_per_query 4 --kl_in loss
"""
from dataclasses import replace

import torch

from cory.ppo.rollout import join, take
from cory.train import Ppo


class Dynamic(Ppo):
    def respond(self, players, queries, sample):
        if not self.training:
            return super().respond(players, queries, sample)
        B = len(queries)
        k = self.cfg.responses_per_query
        rollouts = []
        unequal = []                        # for each row, whether the rewards of its group differ
        while sum(unequal) < B and len(rollouts) < 4:
            # further queries are those of iterations after the last one, so that a resumed run asks the same
            more, _ = self.task.batch(self.iteration + len(rollouts) * self.cfg.iterations)
            rollouts += super().respond(players, more, sample)
            reward_B = self.task.reward(more, rollouts[-1].text)
            reward_Gk = reward_B.view(-1, k)
            unequal_G = reward_Gk.amax(1) > reward_Gk.amin(1)
            unequal += unequal_G.repeat_interleave(k).tolist()
        order = sorted(range(len(unequal)), key=lambda row: not unequal[row])
        rollout = take(join(rollouts), torch.tensor(order[:B]))
        group_B = torch.arange(B, device=rollout.mask_BT.device) // k       # numbered anew
        return [replace(rollout, group_B=group_B)]
