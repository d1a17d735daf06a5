"""Token rewards: CORY's score is spread evenly over a response's tokens, and each token costs 0.01.

    python train_imdb.py --method examples.methods.dense:Dense
"""
from cory.train import Cory


class Dense(Cory):
    def scores(self, rollouts, rewards):
        token_scores = []
        scores = super().scores(rollouts, rewards)
        for rollout, score_B in zip(rollouts, scores, strict=True):
            length_B = rollout.mask_BT.sum(1)
            share_B = score_B / length_B - 0.01
            token_scores.append(share_B[:, None] * rollout.mask_BT)
        return token_scores
