"""MAGRPO (arXiv:2508.04652, OpenMLRL/CoMLRL): both agents respond to the bare query, and learn from one joint
reward minus its group's mean. Here it is the sum of their rewards, and PPO's ratio clip and KL penalty stay.

    python train_gsm8k.py --method examples.methods.magrpo:Magrpo --responses_per_query 4 \
        --advantage examples.methods.magrpo:mean_baseline
"""
from cory.ppo.advantages import estimator, group_mean
from cory.train import Cory


class Magrpo(Cory):
    needs = {"advantage": "examples.methods.magrpo:mean_baseline"}

    def respond(self, players, queries, sample):
        prompts = self.task.pioneer_prompts(queries)
        return [sample(player, prompts, queries) for player in players]

    def scores(self, rollouts, rewards):
        joint_B = sum(rewards)
        return [joint_B, joint_B]

    def team_metrics(self, rollouts, rewards):
        return {"joint_reward": sum(rewards).mean()}


@estimator(critic=False, whiten=False, grouped=True)
def mean_baseline(reward_BT, mask_BT, group_B, **_):
    return_B = (reward_BT * mask_BT).sum(1)
    advantage_B = return_B - group_mean(return_B, group_B)
    return advantage_B[:, None] * mask_BT, None
