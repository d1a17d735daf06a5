"""C3 (arXiv:2603.06859, EIT-EAST-Lab/C3): k alternatives of a response are compared in a fixed context. Of
the authors' tree this has two parts: alternatives of the pioneer, each scored by one response of the observer
that follows it, and alternatives of the observer after the first of the pioneer's.

    python train_gsm8k.py --method examples.methods.c3:C3 --advantage rloo --responses_per_query 4
"""
from dataclasses import replace

from cory.train import Cory


class C3(Cory):
    needs = {"advantage": "rloo"}

    def respond(self, players, queries, sample):
        if not self.training:
            return super().respond(players, queries, sample)
        pioneer, observer = players
        first = sample(pioneer, self.task.pioneer_prompts(queries), queries)
        prompts = self.task.observer_prompts(queries, first.text)
        followed = sample(observer, prompts, queries)
        self.followed_B = self.task.reward(queries, followed.text)

        read_B = first.group_B * self.cfg.responses_per_query       # the first row of each group
        fixed = [first.text[row] for row in read_B.tolist()]
        second = sample(observer, self.task.observer_prompts(queries, fixed), queries)
        return [first, replace(second, read_B=read_B)]

    def scores(self, rollouts, rewards):
        _, observer_B = rewards
        return [self.followed_B, observer_B]
