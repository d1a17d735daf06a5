"""What the paper claims, held against the finished runs of the studies: one table.

    python -m cory.study claims

A claim says where a figure, one for each seed, should lie. It **holds** if the 95% interval of the figure's
mean lies there wholly, does **not** hold if it lies wholly elsewhere, and is **not decided** otherwise, or
below five seeds. "Alike" and "close" are ours to read: within a tenth, or a fifth, of what training gained.
"""
import math
from dataclasses import dataclass
from typing import Callable

import numpy as np

from cory.studies.definitions import STUDIES
from cory.studies.results import Groups, Result, frontier_gap, of_last
from cory.studies.statistics import LEAST_SEEDS, interval
from cory.studies.tables import markdown

PerSeed = dict[int, float]


@dataclass(frozen=True)
class Claim:
    text: str
    study: str
    task: str
    variants: tuple[str, ...]
    figure: Callable[..., PerSeed]          # of the {seed: result} of each variant
    means: str                              # what the figure is
    low: float = -math.inf                  # where it should lie
    high: float = math.inf

    def measured(self, groups: Groups) -> tuple[str, str]:
        """The mean of the figure with its interval and seeds; the verdict."""
        sides = [groups.get(variant, {}) for variant in self.variants]
        shared = set.intersection(*map(set, sides))
        found = self.figure(*({seed: side[seed] for seed in sorted(shared)} for side in sides))
        values = np.array([x for x in found.values() if math.isfinite(x)])
        if not len(values):
            return "not run", "not run"
        low, high = interval(values)
        bounds = "" if math.isnan(low) else f" [{low:.2f}, {high:.2f}]"
        return f"{values.mean():.2f}{bounds}, {len(values)} seeds", self.verdict(low, high, len(values))

    def verdict(self, low: float, high: float, seeds: int) -> str:
        if seeds >= LEAST_SEEDS and self.low < low and high < self.high:
            return "holds"
        if seeds >= LEAST_SEEDS and (high <= self.low or low >= self.high):
            return "does not hold"
        return f"not decided with {seeds} seeds"


def each(of_run: Callable[[Result], float]) -> Callable[[dict[int, Result]], PerSeed]:
    return lambda of_seed: {seed: of_run(run) for seed, run in of_seed.items()}


def less(of_run: Callable[[Result], float]) -> Callable[..., PerSeed]:
    """The first variant's figure less the second's."""
    return lambda first, second: {seed: of_run(run) - of_run(second[seed]) for seed, run in first.items()}


def of(name: str) -> Callable[[Result], float]:
    return lambda run: getattr(run.last, name)


def gained(run: Result) -> float:
    return run.last.reward - run.pair[0].reward


def since_the_middle(name: str) -> Callable[[Result], float]:
    """The last figure less that of the evaluation half-way."""
    return lambda run: getattr(run.last, name) - getattr(run.pair[len(run.pair) // 2], name)


def over(first: dict[int, Result], second: dict[int, Result]) -> PerSeed:
    """The first variant's KL over the second's."""
    ours, theirs = of_last(first, "kl"), of_last(second, "kl")
    return {seed: ours[seed] / theirs[seed] for seed in ours}


def reward_over_gain(first: dict[int, Result], second: dict[int, Result]) -> PerSeed:
    """The first variant's reward less the second's, over what the second gained."""
    return {seed: (run.last.reward - second[seed].last.reward) / gained(second[seed])
            for seed, run in first.items()}


def apart(run: Result) -> float:
    ends = [points[-1].reward for points in run.agents.values()]
    return (max(ends) - min(ends)) / gained(run)


def first_above_second(run: Result) -> float:
    """LLM1, which stays the pioneer where roles stay, above LLM2."""
    first, second = (points[-1].reward for points in run.agents.values())
    return first - second


def solved(k: int) -> Callable[[Result], float]:
    """pass@k, mean of the agents."""
    return lambda run: float(np.mean([run.measured[name][f"pass@{k}"] for name in run.agents]))


def above_base(k: int) -> Callable[[Result], float]:
    return lambda run: solved(k)(run) - run.measured["base"][f"pass@{k}"]


BOTH = ("imdb", "gsm8k")

CLAIMS = [
    Claim("Fig. 3: task rewards end alike", "curves", "imdb", ("cory", "ppo"), reward_over_gain,
          "reward of CORY less PPO's, over PPO's gain", -0.1, 0.1),
    Claim("Fig. 3: PPO's KL ends at more than twice CORY's", "curves", "imdb", ("ppo", "cory"), over,
          "PPO's KL over CORY's", 2.0),
    Claim("Fig. 3: PPO's combined reward falls", "curves", "imdb", ("ppo",),
          each(lambda run: run.last.combined - run.pair[0].combined), "end less start", high=0.0),
    Claim("Fig. 3: CORY's combined reward rises", "curves", "imdb", ("cory",),
          each(lambda run: run.last.combined - run.pair[0].combined), "end less start", 0.0),
    Claim("Fig. 3: LLM1 and LLM2 end close together", "curves", "imdb", ("cory",), each(apart),
          "their difference over their gain", high=0.2),
    Claim("Fig. 4: PPO's reward declines in the second half", "curves", "gsm8k", ("ppo",),
          each(since_the_middle("reward")), "end less middle", high=0.0),
    Claim("Fig. 4: PPO's KL keeps growing", "curves", "gsm8k", ("ppo",), each(since_the_middle("kl")),
          "end less middle, nats", 0.0),
    *(Claim(f"Fig. 5: CORY's pass@{k} is above PPO's", "curves", "gsm8k", ("cory", "ppo"), less(solved(k)),
            "difference", 0.0) for k in (1, 4, 16)),
    *(Claim(f"Fig. 5: CORY's pass@{k} is above the base's", "curves", "gsm8k", ("cory",), each(above_base(k)),
            "difference", 0.0) for k in (1, 16)),
    *(Claim("Fig. 6: without transfer KL is higher", "ablations", task, ("no transfer", "cory"),
            less(of("kl")), "difference, nats", 0.0) for task in BOTH),
    *(Claim("Fig. 6: without transfer reward is unsteady", "ablations", task, ("no transfer", "cory"),
            less(lambda run: run.unsteady), "std of the last half's training rewards, difference", 0.0)
      for task in BOTH),
    *(Claim("Fig. 6: without exchange reward is as good", "ablations", task, ("no exchange", "cory"),
            reward_over_gain, "difference over CORY's gain", -0.1) for task in BOTH),
    *(Claim("Fig. 6: without exchange KL is much higher", "ablations", task, ("no exchange", "cory"), over,
            "KL over CORY's", 1.25) for task in BOTH),
    *(Claim("Fig. 6: without exchange the observer is below the pioneer", "ablations", task, ("no exchange",),
            each(first_above_second), "reward of LLM1 less LLM2's", 0.0) for task in BOTH),
    Claim("Fig. 6: twice the parameters do not save PPO", "ablations", "imdb", ("ppo, gpt2-xl",),
          each(lambda run: run.last.combined - run.pair[0].combined), "combined reward, end less start",
          high=0.0),
    *(Claim("App. E: at a large rate and small eta PPO collapses, CORY does not", "stability", task,
            ("ppo, rate x 10, eta x 0.1", "cory, rate x 10, eta x 0.1"),
            less(lambda run: float(run.collapsed)), "share collapsed, difference", 0.0) for task in BOTH),
    *(Claim("Camera-ready: cooperation is better than competition", "reward", task,
            ("weight 1", "weight -0.5"), less(of("reward")), "reward, difference", 0.0) for task in BOTH),
]
FRONTIER = "Fig. 2c: CORY's frontier over eta lies above PPO's"


def page(found: dict[tuple[str, str], Groups], command: str) -> str:
    """The table, of the groups of finished runs of each (study, task)."""
    rows = []
    for claim in CLAIMS:
        measured, verdict = claim.measured(found.get((claim.study, claim.task), {}))
        rows.append([claim.text, claim.task, claim.means, measured, verdict])
    for task in BOTH:
        height = frontier_gap(found.get(("frontier", task), {}), STUDIES["frontier"])
        measured = verdict = "not run"
        if height.seeds:
            measured = f"{height}, {height.seeds} seeds"
            verdict = {"higher": "holds", "lower": "does not hold"}.get(height.verdict, height.verdict)
        rows.append([FRONTIER, task, "mean height at equal KL", measured, verdict])
    rule = " ".join(__doc__.split("\n\n")[2].split())
    lines = ["# The paper's claims, measured", "", f"    {command}", "", rule, ""]
    head = ["the paper claims", "task", "figure", "measured, 95% interval", "verdict"]
    return "\n".join([*lines, *markdown(head, rows, texts=5)])
