"""Differences between variants, paired by seed: runs of one seed see the same queries."""
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import t

from cory.studies.definitions import Study


@dataclass(frozen=True)
class Difference:
    """A variant less its baseline: mean over the seeds that both have, and the mean's 95% interval."""
    mean: float
    low: float                          # NaN of fewer than two seeds
    high: float
    seeds: int

    @property
    def decided(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0

    def __str__(self):
        if not self.seeds:
            return "–"
        interval = "" if np.isnan(self.low) else f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.mean:+.2f}{interval}"


def difference(variant: pd.Series, baseline: pd.Series) -> Difference:
    """Of figures by seed, by the paired t test: `mean +- t_(n - 1) s / sqrt(n)`, s the sample deviation."""
    x = (variant - baseline).dropna()
    n, mean = len(x), x.mean()
    half = t.ppf(0.975, n - 1) * x.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return Difference(mean, mean - half, mean + half, n)


def value_at(points: pd.DataFrame, read: str, along: str, level: float) -> float:
    """An agent's figure `read` where its `along` first reaches the level, linear between two evaluations."""
    reached = int(np.argmax(points[along].to_numpy() >= level))
    if reached == 0:
        return points[read].iloc[0]
    around = points.iloc[reached - 1:reached + 1]
    return float(np.interp(level, around[along], around[read]))


def at_equal(along: str, read: str, rows: pd.DataFrame, variant: str, baseline: str) -> Difference:
    """Of `read`, mean of a run's agents, at one level of `along` for both runs of a seed.

    The level is the smallest that one of their agents ends at, so that each agent reaches it.
    """
    values = {}
    for seed, of_seed in rows[rows.variant.isin([variant, baseline])].groupby("seed"):
        agents = of_seed.groupby(["variant", "agent"])
        level = agents[along].last().min()
        values[seed] = agents.apply(value_at, read, along, level).groupby("variant").mean()
    frame = pd.DataFrame(values, index=[variant, baseline], dtype=float)
    return difference(frame.loc[variant], frame.loc[baseline])


def collapsed(points: pd.DataFrame) -> bool:
    """Whether an agent has lost its reward or its words, from its first evaluation (the base) to its last.

    Its reward is below the base's by a tenth and by 0.05, or its pairs of neighbouring tokens are a third as
    varied, or of 100 tokens 20 more stood earlier in the same answer, or it diverged.
    """
    base, end = points.iloc[0], points.iloc[-1]
    return bool(end.diverged
                or end.reward < base.reward - max(0.05, abs(base.reward) / 10)
                or end.distinct_2 < base.distinct_2 / 3
                or end.repeated_tokens > base.repeated_tokens + 0.2)


def ends(rows: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of each run that did not diverge, mean of its agents, by variant and seed."""
    agents = rows[~rows.diverged].groupby(["variant", "seed", "agent"], sort=False)
    return agents.tail(1).groupby(["variant", "seed"], sort=False).mean(numeric_only=True)


def differences(rows: pd.DataFrame, variant: str, baseline: str) -> dict[str, Difference]:
    """Of one task, by what differs. Combined rewards differ in the weight of KL as well if eta does."""
    per_run = ends(rows)
    figures = {name: difference(per_run.loc[variant, name], per_run.loc[baseline, name])
             for name in ("reward", "kl", "combined_reward", "distinct_2")}
    if rows[rows.variant.isin([variant, baseline])].init_kl_coef.nunique() > 1:
        del figures["combined_reward"]
    pair = rows[~rows.diverged], variant, baseline
    return figures | {"reward at equal KL": at_equal("kl", "reward", *pair),
                      "KL at equal reward": at_equal("reward", "kl", *pair),
                      "distinct-2 at equal reward": at_equal("reward", "distinct_2", *pair)}


def compared(study: Study, rows: pd.DataFrame) -> dict[str, str]:
    """{variant: its baseline} of one task, where both have runs that did not diverge."""
    variants = rows[~rows.diverged].variant.unique()
    pairs = {variant: study.baseline_of(variant) for variant in variants}
    return {variant: baseline for variant, baseline in pairs.items()
            if variant != baseline and baseline in variants}
