"""MARFT (jwliao-ai/MARFT, token_level_buffer.py): GAE across agents. The pioneer's last token bootstraps from
the observer's critic at its first token, and only the observer's response is rewarded. Here each agent has a
critic and whitens its advantages, and token rewards include the KL penalty.

    python train_gsm8k.py --method examples.methods.marft:Marft
"""
from cory.ppo.update import add_advantages
from cory.train import Cory


class Marft(Cory):
    needs = {"advantage": "gae"}

    def respond(self, players, queries, sample):
        self.players = players
        return super().respond(players, queries, sample)

    def scores(self, rollouts, rewards):
        _, observer = self.players
        _, observer_B = rewards
        rollout = add_advantages(rollouts[1], observer_B, observer)
        value_B = rollout.value_BT[:, 0]
        advantage_B = rollout.return_BT[:, 0] - value_B             # not whitened
        next_B = value_B + self.cfg.lam * advantage_B               # V_{t+1} + lambda A_{t+1}
        return [self.cfg.gamma * next_B, observer_B]
