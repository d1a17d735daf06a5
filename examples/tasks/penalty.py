"""A task with a further setting, which is also a flag of this script. Resume its runs with it, too.

    python -m examples.tasks.penalty --method cory --per_character 0.2
"""
from dataclasses import dataclass

from cory.config import ImdbConfig, parse, setting
from cory.errors import exit_on_user_error
from cory.tasks.imdb import Imdb
from cory.train import train
from train_imdb import PRESETS


@dataclass(frozen=True)
class PenaltyConfig(ImdbConfig):
    task: str = "examples.tasks.penalty:Penalty"
    per_character: float = setting(0.1, "subtracted from the reward, per character of the response", min=0)


class Penalty(Imdb):
    def compute_rewards(self, queries, responses):
        praise = super().compute_rewards(queries, responses)
        rewards = []
        for p, text in zip(praise, responses, strict=True):
            rewards.append(p - self.cfg.per_character * len(text))
        return rewards


@exit_on_user_error
def main(argv=None):
    train(parse(PenaltyConfig, PRESETS, argv))


if __name__ == "__main__":
    main()
