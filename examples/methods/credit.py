"""The observer cannot influence the pioneer's reward, so it is trained on its reward alone.

    python train_imdb.py --method examples.methods.credit:Credit
"""
from cory.train import Cory


class Credit(Cory):
    def scores(self, rollouts, rewards):
        pioneer_B, observer_B = rewards
        return [pioneer_B + self.cfg.partner_reward * observer_B, observer_B]
