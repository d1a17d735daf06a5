"""A reward of two terms: the classifier's logit, minus 0.1 per character. The mean of each term is logged.

    python train_imdb.py --method cory --task examples.tasks.short:Short
"""
from cory.tasks.imdb import Imdb


class Short(Imdb):
    def compute_rewards(self, queries, responses):
        praise = super().compute_rewards(queries, responses)
        characters = [len(response) for response in responses]
        rewards = [p - 0.1 * n for p, n in zip(praise, characters, strict=True)]
        return rewards, {"praise": praise, "characters": characters}
