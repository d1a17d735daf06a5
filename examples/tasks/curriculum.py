"""A curriculum: it starts with the shortest fifth of the problems, and longer ones follow when more than half
of the responses are correct.

    python train_gsm8k.py --method cory --task examples.tasks.curriculum:Curriculum
"""
import torch

from cory.tasks.gsm8k import Gsm8k


class Curriculum(Gsm8k):
    def __init__(self, *args):
        super().__init__(*args)
        self.by_length = sorted(self.train_rows, key=lambda row: len(row[0]))
        self.memory["share"] = 0.2

    def batch(self, iteration):
        n = int(self.memory["share"] * len(self.by_length))
        self.train_rows = self.by_length[:n]
        return super().batch(iteration)

    def on_iteration_end(self, rollouts, rewards):
        if torch.cat(rewards).mean() > 0.5:
            self.memory["share"] = min(1.0, self.memory["share"] + 0.1)
