"""AT-GRPO (arXiv:2510.11062): k responses of the pioneer are compared, and the observer reads the best one.
Here the team's reward reaches this one alone; the others earn their reward. Held out, there is one response.

    python train_gsm8k.py --method examples.methods.atgrpo:AtGrpo --advantage grpo \
        --responses_per_query 4 --kl_in loss
"""
from dataclasses import replace

from cory.train import Cory


class AtGrpo(Cory):
    needs = {"advantage": "grpo"}
    alpha = 1.0                             # weight of the team's reward

    def respond(self, players, queries, sample):
        if not self.training:
            return super().respond(players, queries, sample)
        pioneer, observer = players
        k = self.cfg.responses_per_query
        first = sample(pioneer, self.task.pioneer_prompts(queries), queries)
        reward_Gk = self.task.reward(queries, first.text).view(-1, k)
        start_G = first.group_B[::k] * k                # the first row of each group
        self.best_G = start_G + reward_Gk.argmax(1)

        read_B = self.best_G.repeat_interleave(k)
        shown = [first.text[row] for row in read_B.tolist()]
        second = sample(observer, self.task.observer_prompts(queries, shown), queries)
        return [first, replace(second, read_B=read_B)]

    def scores(self, rollouts, rewards):
        pioneer_B, observer_B = rewards
        observer_Gk = observer_B.view(len(self.best_G), -1)
        score_B = pioneer_B.clone()
        score_B[self.best_G] += self.alpha * observer_Gk.mean(1)
        return [score_B, observer_B]
