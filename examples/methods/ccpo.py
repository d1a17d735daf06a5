"""CCPO (arXiv:2603.21563): the pioneer earns what the observer gains by having read its response, compared
with the mean of the observer's rewards without it. In the authors' code (bhai114/ccpo) it earns the reward of
the observer and a weighted bonus for such a gain, and agents keep their roles.

    python train_gsm8k.py --method examples.methods.ccpo:Ccpo --responses_per_query 4
"""
from cory.ppo.advantages import group_mean
from cory.train import Cory


class Ccpo(Cory):
    def respond(self, players, queries, sample):
        _, observer = players
        rollouts = super().respond(players, queries, sample)
        alone = sample(observer, self.task.pioneer_prompts(queries), queries)
        reward_B = self.task.reward(queries, alone.text)
        self.alone_B = group_mean(reward_B, alone.group_B)
        return rollouts

    def scores(self, rollouts, rewards):
        _, observer_B = rewards
        return [observer_B - self.alone_B, observer_B]

    def team_metrics(self, rollouts, rewards):
        _, observer_B = rewards
        gain_B = observer_B - self.alone_B
        return {"observer_gain": gain_B.mean()}
