"""Debate (Du et al., arXiv:2305.14325): both agents revise after reading each other, and all turns earn the
reward of the revision that is returned. In place of a vote a judge, the base, returns the one that it finds
more probable per token after the bare query.

    python train_gsm8k.py --method examples.methods.debate:Debate --role_exchange_every 0
"""
from dataclasses import replace

import torch

from cory.ppo.sampling import add_logprobs
from cory.train import Cory


class Debate(Cory):
    roles = ("first", "second", "first_revised", "second_revised")
    needs = {"role_exchange_every": 0}

    def respond(self, players, queries, sample):
        llm1, llm2, *_ = players
        bare = self.task.pioneer_prompts(queries)
        first = sample(llm1, bare, queries)
        second = sample(llm2, bare, queries)
        first_revised = sample(llm1, self.task.observer_prompts(queries, second.text), queries)
        second_revised = sample(llm2, self.task.observer_prompts(queries, first.text), queries)
        first_logp_B = self.mean_logp(llm1.base, first_revised, first)
        second_logp_B = self.mean_logp(llm1.base, second_revised, first)
        self.second_wins_B = second_logp_B > first_logp_B
        return [first, second, first_revised, second_revised]

    def mean_logp(self, judge, revised, bare):
        """The judge's mean log-probability of a revision's tokens, after the prompts of `bare`."""
        moved = replace(revised, prompt_BP=bare.prompt_BP, prompt_mask_BP=bare.prompt_mask_BP)
        judged = add_logprobs(moved, judge, judge, "k1", self.cfg.mini_batch_size)
        return judged.logp_BT.sum(1) / judged.mask_BT.sum(1)

    def returned(self, rewards):
        _, _, first_B, second_B = rewards
        return torch.where(self.second_wins_B, second_B, first_B)

    def scores(self, rollouts, rewards):
        return [self.returned(rewards)] * len(rewards)

    def team_metrics(self, rollouts, rewards):
        return {"returned_reward": self.returned(rewards).mean()}
