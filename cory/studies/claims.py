"""What the paper claims, held against the finished runs of the studies: one table.

    python -m cory study claims
"""
import math
from dataclasses import dataclass
from statistics import fmean
from typing import Callable, Iterable

import numpy as np

from cory.errors import UserError
from cory.names import guess
from cory.studies.comparison import frontier_gap, log_ratio, other_yardstick
from cory.studies.definitions import STUDIES
from cory.studies.results import Groups, Point, Result, by_variant
from cory.studies.statistics import LEAST_SEEDS, interval, share_interval
from cory.studies.tables import markdown

PerSeed = dict[int, float]
RULE = """\
A claim says where a figure, one for each seed, should lie. It **holds** if the 95% interval of the figure's
mean lies there wholly, does **not** hold if it lies wholly elsewhere, and is **not decided** otherwise, or
below five seeds. What "alike", "close", "as good" and "much higher" mean is ours to read. A gain is the mean
of all seeds. Figures are of held-out bare queries, the mean of a run's agents, unless they say "in training":
those are the mean of the roles, each played by whichever agent has it, in the last quarter of iterations.
Runs that diverged have no figures, and are counted beside. A share of runs has Wilson's interval. All runs
have the same settings, where the paper's PPO and CORY differ in some (GSM8K: the learning rate). "As fig. 6"
is the paper's claim on the task that it did not test."""


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

    def __post_init__(self):
        """Raises `UserError` for what names no study, task or variant, or says nothing of where it lies."""
        def require(what: str, name: str, known: Iterable[str]) -> None:
            if name not in known:
                way_out = f"there is no {what} {name}; {guess(name, known)}choose from {', '.join(known)}"
                raise UserError("claim", self.text, way_out)

        require("study", self.study, STUDIES)
        require("task", self.task, STUDIES[self.study].tasks)
        for variant in self.variants:
            require("variant", variant, STUDIES[self.study].variants)
        if math.isinf(self.low) and math.isinf(self.high) or self.low >= self.high:
            raise UserError("claim", self.text, "give low or high, or low below high: where it should lie")

    def outcome(self, groups: Groups) -> tuple[str, str]:
        """The mean of the figure with its interval and seeds; the verdict. Of all runs, the diverged too."""
        sides = [groups.get(variant, {}) for variant in self.variants]
        shared = sorted(set.intersection(*map(set, sides)))
        if not shared:
            return "not run", "not run"
        whole = [seed for seed in shared if self.is_share or not any(side[seed].diverged for side in sides)]
        sides = [{seed: side[seed] for seed in whole} for side in sides]
        if whole and not self.is_share:
            ended = dict(zip(self.variants, sides, strict=True))
            if any(other_yardstick(ended, variant, self.variants[0]) for variant in self.variants):
                return "of other rewards or evaluations", "not comparable"
        values = np.array([x for x in self.figure(*sides).values() if math.isfinite(x)]) if whole else ()
        lost = [f"{n} {why}" for n, why in ((len(shared) - len(whole), "diverged"),
                                            (len(whole) - len(values), "without a figure")) if n]
        if not len(values):
            return ", ".join(lost), "not decided"
        low, high = (share_interval if self.is_share else interval)(values)
        bounds = "" if math.isnan(low) else f" [{self.shown(low):.2f}, {self.shown(high):.2f}]"
        text = ", ".join([f"{self.shown(values.mean()):.2f}{bounds}", f"{len(values)} seeds", *lost])
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


def paired_difference(of_run: Callable[[Result], float]) -> Callable[..., PerSeed]:
    """The first variant's figure less the second's."""
    return lambda first, second: {seed: of_run(run) - of_run(second[seed]) for seed, run in first.items()}


def paired_log_ratio(of_run: Callable[[Result], float]) -> Callable[..., PerSeed]:
    """Log of the first variant's figure over the second's."""
    return lambda first, second: {seed: log_ratio(of_run(run), of_run(second[seed]))
                                  for seed, run in first.items()}


def over_gain(of_run: Callable[[Result], float], gain: str = "reward") -> Callable[..., PerSeed]:
    """The first variant's figure less the second's, over what the second has gained, held out."""
    return lambda first, second: shares(paired_difference(of_run)(first, second), second, gain)


def shares(found: PerSeed, of_seed: dict[int, Result], name: str = "reward") -> PerSeed:
    """Of the mean gain of a variant's runs; NaN where training has lost, of which no share says anything."""
    gain = fmean(since_the_start(name)(run) for run in of_seed.values())
    return {seed: x / gain if gain > 0 else math.nan for seed, x in found.items()}


def at_end(name: str) -> Callable[[Result], float]:
    return lambda run: getattr(run.last, name)


def in_training(name: str) -> Callable[[Result], float]:
    """Mean of the roles."""
    return lambda run: fmean(role[name] for role in run.roles.values())


def since_the_start(name: str) -> Callable[[Result], float]:
    return lambda run: getattr(run.last, name) - getattr(run.base, name)


def since_the_middle(name: str) -> Callable[[Result], float]:
    """The last figure less that of the evaluation nearest to half-way; NaN where there is none between base
    and end.
    """
    def found(run: Result) -> float:
        between = run.mean_of_agents[1:-1]

        def off(p: Point) -> float:
            return abs(p.iteration - run.last.iteration / 2)
        return getattr(run.last, name) - getattr(min(between, key=off), name) if between else math.nan
    return found


def agents_apart(of_seed: dict[int, Result]) -> PerSeed:
    """How far the rewards of a run's agents end apart, over the gain."""
    ends = {seed: [points[-1].reward for points in run.agents.values()] for seed, run in of_seed.items()}
    return shares({seed: max(rewards) - min(rewards) for seed, rewards in ends.items()}, of_seed)


def first_above_second(run: Result) -> float:
    """LLM1, which stays the pioneer where roles stay, above LLM2."""
    first, second = (points[-1].reward for points in run.agents.values())
    return first - second


def pioneer_above_observer(run: Result) -> float:
    return run.roles["pioneer"]["task_reward"] - run.roles["observer"]["task_reward"]


def solved(k: int) -> Callable[[Result], float]:
    """pass@k, mean of the agents."""
    return lambda run: float(np.mean([run.measured[name][f"pass@{k}"] for name in run.agents]))


def above_base(k: int) -> Callable[[Result], float]:
    return lambda run: solved(k)(run) - run.measured["base"][f"pass@{k}"]


BOTH = ("imdb", "gsm8k")

CLAIMS = [
    Claim("Fig. 3: task rewards end alike", "curves", "imdb", ("cory", "ppo"), over_gain(at_end("reward")),
          "reward of CORY less PPO's, over PPO's gain", -0.1, 0.1),
    Claim("Fig. 3: PPO's KL ends at more than twice CORY's", "curves", "imdb", ("ppo", "cory"),
          paired_log_ratio(at_end("kl")), "PPO's KL over CORY's", math.log(2), shown=math.exp),
    Claim("Fig. 3: PPO's combined reward falls", "curves", "imdb", ("ppo",),
          each(since_the_start("combined")), "end less start", high=0.0),
    Claim("Fig. 3: CORY's combined reward rises", "curves", "imdb", ("cory",),
          each(since_the_start("combined")), "end less start", 0.0),
    Claim("Fig. 3: LLM1 and LLM2 end close together", "curves", "imdb", ("cory",), agents_apart,
          "their difference over their gain", high=0.2),
    Claim("Fig. 4: PPO's reward declines in the second half", "curves", "gsm8k", ("ppo",),
          each(since_the_middle("reward")), "end less middle", high=0.0),
    Claim("Fig. 4: PPO's KL keeps growing", "curves", "gsm8k", ("ppo",), each(since_the_middle("kl")),
          "end less middle, nats", 0.0),
    *(Claim(f"Fig. 5: CORY's pass@{k} is above PPO's", "curves", "gsm8k", ("cory", "ppo"),
            paired_difference(solved(k)), "difference", 0.0) for k in (1, 4, 16)),
    *(Claim(f"Fig. 5: CORY's pass@{k} is above the base's", "curves", "gsm8k", ("cory",), each(above_base(k)),
            "difference", 0.0) for k in (1, 16)),
    *(claim for task, fig in (("imdb", "Fig. 6"), ("gsm8k", "As fig. 6")) for claim in (
        Claim(f"{fig}: without transfer KL is higher", "ablations", task, ("no transfer", "cory"),
              paired_log_ratio(at_end("kl")), "KL over CORY's", 0.0, shown=math.exp),
        Claim(f"{fig}: without transfer reward is unsteady", "ablations", task, ("no transfer", "cory"),
              paired_difference(lambda run: run.unsteady),
              "in training: std of a role's rewards between iterations, last half, difference", 0.0),
        *(Claim(f"{fig}: without exchange reward is as good", "ablations", task, ("no exchange", "cory"),
                over_gain(of_run, gain), f"{where}difference over CORY's held-out gain", -0.1)
          for where, of_run, gain in (("in training: ", in_training("task_reward"), "sampled_reward"),
                                      ("", at_end("reward"), "reward"))),
        *(Claim(f"{fig}: without exchange KL is much higher", "ablations", task, ("no exchange", "cory"),
                paired_log_ratio(of_run), f"{where}KL over CORY's", math.log(1.25), shown=math.exp)
          for where, of_run in (("in training: ", in_training("kl")), ("", at_end("kl")))),
        *(Claim(f"{fig}: without exchange the observer is below the pioneer", "ablations", task,
                ("no exchange",), each(of_run), means, 0.0)
          for means, of_run in (("in training: reward of the pioneer less the observer's",
                                 pioneer_above_observer),
                                ("reward of LLM1 less LLM2's", first_above_second))))),
    Claim("Fig. 6: twice the parameters do not save PPO", "ablations", "imdb", ("ppo, gpt2-xl",),
          each(since_the_start("combined")), "combined reward, end less start", high=0.0),
    *(Claim(f"{app}: at ten times the rate and a tenth of eta {method.upper()} {does}", "stability", task,
            (f"{method}, rate x 10, eta x 0.1",), each(lambda run: float(run.collapsed)),
            "share of runs in which an agent collapsed", is_share=True, **region)
      for task, app in (("gsm8k", "App. E"), ("imdb", "As app. E"))
      for method, does, region in (("ppo", "collapses", {"low": 0.5}),
                                   ("cory", "does not collapse", {"high": 0.5}))),
    *(Claim("Camera-ready: cooperation is better than competition", "reward", task,
            ("weight 1", "weight -0.5"), paired_difference(at_end("reward")), "reward, difference", 0.0)
      for task in BOTH),
]
FRONTIER = {"gsm8k": "Fig. 2c: CORY's frontier over eta lies above PPO's",
            "imdb": "As fig. 2c: CORY's frontier over eta lies above PPO's"}


def page(results: dict[str, list[Result]], command: str) -> str:
    """The table, of the finished and the diverged runs of each study."""
    def groups(study: str, task: str, diverged: bool = True) -> Groups:
        return by_variant(results.get(study, []), task, diverged)

    rows = []
    for claim in CLAIMS:
        measured, verdict = claim.outcome(groups(claim.study, claim.task))
        rows.append([claim.text, claim.task, claim.means, claim.region, measured, verdict])
    for task in BOTH:
        study, measured, verdict = STUDIES["frontier"], "not run", "not run"
        every, ended = (groups("frontier", task, diverged) for diverged in (True, False))
        lost = sum(run.diverged for of_seed in every.values() for run in of_seed.values())
        if every.keys() >= {*study.variants}:                       # of one eta it would be no frontier
            measured, verdict = f"an eta has no run that ended, {lost} diverged", "not decided"
        if ended.keys() >= {*study.variants}:
            height = frontier_gap(ended, study)
            measured = f"{height}, {height.seeds} seeds" + (f", {lost} diverged" if lost else "")
            verdict = {"higher": "holds", "lower": "does not hold"}.get(height.verdict, height.verdict)
        rows.append([FRONTIER[task], task, "mean height, over the KL of both", "above 0", measured, verdict])
    rule = " ".join(RULE.split())
    lines = ["# The paper's claims, measured", "", f"    {command}", "", rule, ""]
    head = ["the paper claims", "task", "figure", "should lie", "measured, 95% interval", "verdict"]
    return "\n".join([*lines, *markdown(head, rows, texts=6)])
