"""Study `collapse`: the held-out reward at which each agent collapses, and what CORY adds to it.

    python docs/studies/collapse.py                         # of collapse.csv.gz
"""
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from docs.studies.table import HERE, difference, holm, markdown

BASELINES = ("ppo", "ppo, twice the batch", "ppo, half the rate", "strangers")
FIGURES = ["reward", "kl", "combined_reward", "base_perplexity", "distinct_2", "length"]


class Limits(NamedTuple):
    """Where an agent counts as collapsed. The study's own are the defaults."""
    repetition: float = 1 / 2           # distinct_2 below this share of the base's
    perplexity: float = 3               # perplexity under the base above this many times the base's
    length: float = 3                   # below this many tokens on average
    fall: float = 1 / 5                 # reward ends below its highest by this share of its gain


NONE = Limits(repetition=0, perplexity=np.inf, length=0, fall=np.inf)


class Collapse(NamedTuple):
    why: str                            # the limit that was passed first; "" if none was
    iteration: float
    reward: float


def collapse(points: pd.DataFrame, limits: Limits) -> Collapse:
    """Where an agent's evaluations, the base's first, pass the first of the limits.

    Between two evaluations reward, distinct_2, length and the logarithm of perplexity are linear. An agent
    whose reward falls for good collapses at its highest; one that does not collapse counts with its highest.
    """
    base, last, step = points.iloc[0], points.iloc[-1], np.arange(len(points))
    highest = int(points.reward.to_numpy().argmax())
    room = {"repetition": points.distinct_2 - limits.repetition * base.distinct_2,
            "perplexity": np.log(limits.perplexity * base.base_perplexity / points.base_perplexity),
            "length": points.length - limits.length}        # negative beyond the limit
    passed = []
    for why, left in room.items():
        beyond = np.flatnonzero(left < 0)
        if len(beyond):
            around = beyond[0] - 1, beyond[0]
            passed.append((np.interp(0, -left.iloc[[*around]], around), why))
    if points.reward.iloc[highest] - last.reward > limits.fall * (points.reward.iloc[highest] - base.reward):
        passed.append((highest, "reward"))
    if not passed:
        return Collapse("", last.iteration, points.reward.iloc[highest])
    at, why = min(passed)
    return Collapse(why, np.interp(at, step, points.iteration), np.interp(at, step, points.reward))


def collapses(rows: pd.DataFrame, limits: Limits) -> pd.DataFrame:
    """Each agent's collapse, by variant, seed and agent."""
    agents = rows.groupby(["variant", "seed", "agent"], sort=False)
    return pd.DataFrame({key: collapse(points, limits)._asdict() for key, points in agents}).T.rename_axis(
        ["variant", "seed", "agent"])


def means_of_runs(found: pd.DataFrame, figure: str = "reward") -> pd.DataFrame:
    """The mean figure at collapse of a run's agents: a line for each seed, a column for each variant."""
    return found[figure].astype(float).groupby(["variant", "seed"]).mean().unstack("variant")


def main() -> None:
    rows = pd.read_csv(HERE / "collapse.csv.gz", dtype={"commit": str})
    found = collapses(rows, Limits())
    lines = [["variant", "agents", "reward at collapse", "iteration", "repetition", "perplexity", "length",
              "reward falls", "none"]]
    starts = found.assign(start=found.index.get_level_values("agent"))
    for (variant, agent), group in starts.groupby(["variant", "start"], sort=False):
        why = [sum(group.why == name) for name in ("repetition", "perplexity", "length", "reward", "")]
        means = group.reward.astype(float).mean(), group.iteration.astype(float).mean()
        lines.append([f"{variant}, {agent}", len(group), *means, *why])
    print(markdown(lines))

    value = means_of_runs(found)
    iteration = means_of_runs(found, "iteration")
    tests = {baseline: difference(value["cory"], value[baseline]) for baseline in BASELINES}
    adjusted = holm([x.p for x in tests.values()])
    lines = [["CORY minus", "seeds", "reward at collapse", "p", "p after Holm", "iteration of collapse"]]
    for (baseline, x), p in zip(tests.items(), adjusted, strict=True):
        later = difference(iteration["cory"], iteration[baseline])
        lines.append([baseline, x.seeds, f"{x}{'*' if p < 0.05 else '†'}", f"{x.p:.4f}", f"{p:.4f}", later])
    x = difference(value["cory"], value["no partner's reward"])
    lines.append(["no partner's reward (not tested)", x.seeds, str(x), "", "", ""])
    print(markdown(lines))

    others = {f"{name} {own * factor:.3g}": Limits()._replace(**{name: own * factor})
              for name, own in Limits()._asdict().items() for factor in (2 / 3, 3 / 2)}
    others |= {f"{name} alone": NONE._replace(**{name: own}) for name, own in Limits()._asdict().items()}
    lines = [["limits", *BASELINES]]
    for label, limits in others.items():
        moved = means_of_runs(collapses(rows, limits))
        lines.append([label, *(str(difference(moved["cory"], moved[baseline])) for baseline in BASELINES)])
    print(markdown(lines))

    lines = [["variant", "iteration", *FIGURES]]
    means = rows.groupby(["variant", "iteration"], sort=False)[FIGURES].mean()
    lines += [[*key, *mean] for key, mean in zip(means.index, means.to_numpy(), strict=True)]
    print(markdown(lines))


if __name__ == "__main__":
    main()
