"""Differences between variants, paired by seed: runs of one seed see the same queries, in training and
held out.

Sources: Agarwal et al., arXiv:2108.13264 (few runs: intervals, probability of improvement); Henderson et al.,
arXiv:1709.06560 (seeds). Intervals are scipy's bootstrap.
"""
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.stats import binomtest, bootstrap, norm, t

LEVEL, RESAMPLES = 0.95, 9999
# Below, one sign in all differences is no rarity, and neither interval nor verdict is given.
LEAST_SEEDS = 5


@dataclass(frozen=True)
class Difference:
    """A variant less the baseline, over the seeds that both have."""
    mean: float
    low: float                          # 95% interval of the mean; NaN below five seeds
    high: float
    improved: float                     # share of seeds in which the variant is higher, ties half
    seeds: int

    @property
    def verdict(self) -> str:
        """`higher` or `lower` only where the interval leaves 0 out."""
        if self.low > 0:
            return "higher"
        return "lower" if self.high < 0 else f"not decided with {self.seeds} seeds"

    def __str__(self):
        if self.seeds == 0:
            return "never comparable"
        interval = "" if np.isnan(self.low) else f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.mean:+.2f}{interval}"


def interval(x: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean by the expanded percentile bootstrap; (NaN, NaN) below five values.

    The plain one is too narrow for few values (it held the mean of five in 83 of 100 cases); Hesterberg,
    arXiv:1411.5279, sec. 5.3: its level is raised as the normal distribution's interval is to Student's.
    """
    n = len(x)
    if n < LEAST_SEEDS:
        return float("nan"), float("nan")
    if np.ptp(x) == 0:
        return float(x[0]), float(x[0])
    level = 1 - 2 * norm.cdf(-math.sqrt(n / (n - 1)) * t.ppf(1 - (1 - LEVEL) / 2, n - 1))
    found = bootstrap((x,), np.mean, confidence_level=level, n_resamples=RESAMPLES, method="percentile",
                      rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def share_interval(happened: np.ndarray) -> tuple[float, float]:
    """95% interval of how often something happens, of 0s and 1s, by Wilson's score; (NaN, NaN) below five.

    5 of 5 are [0.57, 1]: a bootstrap would give [1, 1]. Source: Brown, Cai and DasGupta, Statistical Science
    16 (2001), which recommends it for few values.
    """
    n = len(happened)
    if n < LEAST_SEEDS:
        return float("nan"), float("nan")
    found = binomtest(int(happened.sum()), n).proportion_ci(LEVEL, method="wilson")
    return float(found.low), float(found.high)


def difference(variant: dict[int, float], baseline: dict[int, float]) -> Difference:
    """{seed: figure} of two variants; a figure that is NaN leaves its seed out."""
    both = [seed for seed in variant if seed in baseline and np.isfinite(variant[seed] - baseline[seed])]
    x = np.array([variant[seed] - baseline[seed] for seed in both])
    if not len(x):
        return Difference(float("nan"), float("nan"), float("nan"), float("nan"), 0)
    improved = float(np.mean((x > 0) + 0.5 * (x == 0)))
    return Difference(float(x.mean()), *interval(x), improved, len(x))


Curve = list[tuple[float, float]]       # (KL, reward) along training, the base first


def frontier_height(curves: list[Curve], others: list[Curve]) -> float:
    """Mean height of the frontier of some runs, `best_within`, above that of others, from the
    smallest KL at which any of them was evaluated to the largest that both reach.
    """
    kls = shared_kls([curves, others], 401)
    return float(np.mean(best_within(curves, kls) - best_within(others, kls)))


def shared_kls(sides: list[list[Curve]], n: int) -> np.ndarray:
    """n KLs from the smallest at which any run was evaluated to the largest that every side reaches."""
    first = min(kl for side in sides for curve in side for kl, _ in curve[1:])
    return np.linspace(first, min(max(kl for curve in side for kl, _ in curve) for side in sides), n)


def best_within(curves: list[Curve], kls: np.ndarray) -> np.ndarray:
    """The frontier of some runs: for each of rising KLs, the highest reward that any of them has anywhere
    within it, linear between evaluations.
    """
    best = np.full(kls.shape, max(curve[0][1] for curve in curves))         # the base's: its KL is 0
    for (x0, y0), (x1, y1) in (pair for curve in curves for pair in pairwise(curve)):
        on = (min(x0, x1) <= kls) & (kls <= max(x0, x1)) & (x0 != x1)
        best[on] = np.maximum(best[on], y0 + (y1 - y0) * (kls[on] - x0) / (x1 - x0))
    return np.maximum.accumulate(best)


def at(curve: Curve, x: float) -> float:
    """The curve's y where it first reaches x, between its points linear; NaN where it never does."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if min(x0, x1) <= x <= max(x0, x1):
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return float("nan")
