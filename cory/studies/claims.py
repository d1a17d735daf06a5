"""What the paper claims, held against the finished runs of the studies: one table.

    python -m cory.study claims

A claim says where a figure, one for each seed, should lie. It **holds** if the 95% interval of the figure's
mean lies there wholly, does **not** hold if it lies wholly elsewhere, and is **not decided** otherwise, or
below five seeds. What "alike", "close", "as good" and "much higher" mean is ours to read. A seed that gained
nothing is left out where a share of the gain is asked. A share of runs has Wilson's interval. All runs have
the same settings, where the paper's PPO and CORY differ in some (GSM8K: the learning rate). "As fig. 6" is
the paper's claim on the task that it did not test.
"""
import math
from dataclasses import dataclass
from typing import Callable

import numpy as np

from cory.studies.definitions import STUDIES
from cory.studies.results import Groups, Result, by_variant, frontier_gap, log_ratio, of_last
from cory.studies.statistics import LEAST_SEEDS, interval, share_interval
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
    shown: Callable[[float], float] = float     # math.exp of a figure that is a logarithm
    is_share: bool = False                  # of runs, also of those that diverged, which have no end

    def outcome(self, groups: Groups) -> tuple[str, str]:
        """The mean of the figure with its interval and seeds; the verdict."""
        sides = [groups.get(variant, {}) for variant in self.variants]
        shared = set.intersection(*map(set, sides))
        found = self.figure(*({seed: side[seed] for seed in sorted(shared)} for side in sides))
        values = np.array([x for x in found.values() if math.isfinite(x)])
        if not len(values):
            return "not run", "not run"
        low, high = (share_interval if self.is_share else interval)(values)
        bounds = "" if math.isnan(low) else f" [{self.shown(low):.2f}, {self.shown(high):.2f}]"
        left_out = f", {len(found) - len(values)} left out" if len(found) > len(values) else ""
        text = f"{self.shown(values.mean()):.2f}{bounds}, {len(values)} seeds{left_out}"
        return text, self.verdict(low, high, len(values))

    @property
    def region(self) -> str:
        """Where the figure should lie, in words."""
        low, high = (f"{self.shown(end):g}" for end in (self.low, self.high))
        if math.isinf(self.low):
            return f"below {high}"
        return f"above {low}" if math.isinf(self.high) else f"{low} to {high}"

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


def since_the_start(name: str) -> Callable[[Result], float]:
    return lambda run: getattr(run.last, name) - getattr(run.mean_of_agents[0], name)


def gained(run: Result) -> float:
    """NaN where training has lost: no share of that says anything."""
    gain = since_the_start("reward")(run)
    return gain if gain > 0 else math.nan


def since_the_middle(name: str) -> Callable[[Result], float]:
    """The last figure less that of the evaluation half-way; NaN where there is none between base and end."""
    def found(run: Result) -> float:
        points = run.mean_of_agents
        middle = points[len(points) // 2] if len(points) > 2 else None
        return getattr(run.last, name) - getattr(middle, name) if middle else math.nan
    return found


def over(first: dict[int, Result], second: dict[int, Result]) -> PerSeed:
    """Log of the first variant's KL over the second's."""
    ours, theirs = of_last(first, "kl"), of_last(second, "kl")
    return {seed: log_ratio(ours[seed], theirs[seed]) for seed in ours}


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
          "PPO's KL over CORY's", math.log(2), shown=math.exp),
    Claim("Fig. 3: PPO's combined reward falls", "curves", "imdb", ("ppo",),
          each(since_the_start("combined")), "end less start", high=0.0),
    Claim("Fig. 3: CORY's combined reward rises", "curves", "imdb", ("cory",),
          each(since_the_start("combined")), "end less start", 0.0),
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
    *(claim for task, fig in (("imdb", "Fig. 6"), ("gsm8k", "As fig. 6")) for claim in (
        Claim(f"{fig}: without transfer KL is higher", "ablations", task, ("no transfer", "cory"), over,
              "KL over CORY's", 0.0, shown=math.exp),
        Claim(f"{fig}: without transfer reward is unsteady", "ablations", task, ("no transfer", "cory"),
              less(lambda run: run.unsteady), "std of a role's rewards in the last half, difference", 0.0),
        Claim(f"{fig}: without exchange reward is as good", "ablations", task, ("no exchange", "cory"),
              reward_over_gain, "difference over CORY's gain", -0.1),
        Claim(f"{fig}: without exchange KL is much higher", "ablations", task, ("no exchange", "cory"), over,
              "KL over CORY's", math.log(1.25), shown=math.exp),
        Claim(f"{fig}: without exchange the observer is below the pioneer", "ablations", task,
              ("no exchange",), each(first_above_second), "reward of LLM1 less LLM2's", 0.0))),
    Claim("Fig. 6: twice the parameters do not save PPO", "ablations", "imdb", ("ppo, gpt2-xl",),
          each(since_the_start("combined")), "combined reward, end less start", high=0.0),
    *(Claim(f"{app}: at ten times the rate and a tenth of eta {method.upper()} {does}", "stability", task,
            (f"{method}, rate x 10, eta x 0.1",), each(lambda run: float(run.collapsed)), "share collapsed",
            is_share=True, **region)
      for task, app in (("gsm8k", "App. E"), ("imdb", "As app. E"))
      for method, does, region in (("ppo", "collapses", {"low": 0.5}),
                                   ("cory", "does not collapse", {"high": 0.5}))),
    *(Claim("Camera-ready: cooperation is better than competition", "reward", task,
            ("weight 1", "weight -0.5"), less(of("reward")), "reward, difference", 0.0) for task in BOTH),
]
FRONTIER = {"gsm8k": "Fig. 2c: CORY's frontier over eta lies above PPO's",
            "imdb": "As fig. 2c: CORY's frontier over eta lies above PPO's"}


def page(results: dict[str, list[Result]], command: str) -> str:
    """The table, of the finished and the diverged runs of each study."""
    def groups(study: str, task: str, diverged: bool = False) -> Groups:
        return by_variant(results.get(study, []), task, diverged)

    rows = []
    for claim in CLAIMS:
        measured, verdict = claim.outcome(groups(claim.study, claim.task, claim.is_share))
        rows.append([claim.text, claim.task, claim.means, claim.region, measured, verdict])
    for task in BOTH:
        of_task, study = groups("frontier", task), STUDIES["frontier"]
        measured = verdict = "not run"
        if of_task.keys() >= {*study.variants}:                     # of one eta it would be no frontier
            height = frontier_gap(of_task, study)
            measured = f"{height}, {height.seeds} seeds"
            verdict = {"higher": "holds", "lower": "does not hold"}.get(height.verdict, height.verdict)
        rows.append([FRONTIER[task], task, "mean height, over the KL of both", "above 0", measured, verdict])
    rule = " ".join(__doc__.split("\n\n")[2].split())
    lines = ["# The paper's claims, measured", "", f"    {command}", "", rule, ""]
    head = ["the paper claims", "task", "figure", "should lie", "measured, 95% interval", "verdict"]
    return "\n".join([*lines, *markdown(head, rows, texts=6)])
