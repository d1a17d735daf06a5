"""Both agents are trained on r(s0, a1 a2), the reward of their two responses joined into one text.

    python train_imdb.py --method examples.methods.together:Together
"""
from cory.train import Cory


class Together(Cory):
    def joint_reward(self, rollouts):
        pioneer, observer = rollouts
        pairs = zip(pioneer.text, observer.text, strict=True)
        joined = [a1 + a2 for a1, a2 in pairs]
        return self.task.reward(pioneer.query, joined)

    def scores(self, rollouts, rewards):
        joint_B = self.joint_reward(rollouts)
        return [joint_B, joint_B]

    def team_metrics(self, rollouts, rewards):
        return {"joint_reward": self.joint_reward(rollouts).mean()}
