"""Prints the tables of the studies in studies.json, from the rows that stand beside it as NAME.csv.gz.

    python docs/studies/table.py        # all studies but `collapse`, whose tests collapse.py prints
"""
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t

HERE = Path(__file__).resolve().parent
MEANS = ["combined_reward", "reward", "kl", "distinct_2", "repeated_tokens", "base_perplexity"]
EQUAL = {"KL at equal reward": ("kl", "reward"), "reward at equal KL": ("reward", "kl")}
# Groups of pairs in studies.json, and the figures of each for which a test was planned before the runs.
PLANNED = {"combined": ["combined_reward"], "KL at equal reward": ["KL at equal reward"], "untested": [],
           "frontiers": [*EQUAL]}
# Studies whose tests are a family of their own in Holm's correction; those of all others are one.
OWN_FAMILY = ("frontier", "smollm2", "batch256", "rates")
# That one family has 28 planned tests. These are the p values of the ten whose rows are not kept here (they
# are at commit 4345d55): of a partner's reward by the critic, of one less its mean, and of other bases.
REMOVED = [0.000262, 1.74e-05, 0.104, 0.475, 0.000515, 0.543, 0.000224, 0.406, 0.000195, 0.682]
REAL = ("smollm2", "batch256")          # studies on the real data set, not on the bundled generated data
HEAD = """# Tables of the studies

README.md beside this script says how the figures are computed, and what the variants are. A star (\\*) marks
a planned test that is significant after Holm's correction, and a dagger (†) a planned test that is not; no
test was planned for differences without a mark. If a cell is based on fewer seeds than the rest of its row,
the number of seeds is given in parentheses.
"""


def read(study: str) -> pd.DataFrame:
    return pd.read_csv(HERE / f"{study}.csv.gz", dtype={"commit": str}, low_memory=False)


class Difference(NamedTuple):
    """A mean over seeds, its 95% interval, the two-sided p value of 0, the number of seeds."""
    mean: float
    low: float
    high: float
    p: float
    seeds: int

    def __str__(self):
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def difference(a: pd.Series, b: pd.Series) -> Difference:
    """`a - b`, paired by seed, by Student's t: `mean +- t_(n - 1) s / sqrt(n)`, s the sample deviation."""
    x = (a - b).dropna()
    n, mean = len(x), x.mean()
    error = x.std(ddof=1) / np.sqrt(n)
    half = t.ppf(0.975, n - 1) * error
    p = 2 * t.sf(abs(mean) / error, n - 1) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p, n)


def holm(p: list[float]) -> np.ndarray:
    """Adjusted p values: the i-th smallest of m times m - i + 1, at least those before it, at most 1."""
    order = np.argsort(p)
    adjusted = np.maximum.accumulate(np.array(p)[order] * np.arange(len(p), 0, -1)).clip(max=1)
    return adjusted[np.argsort(order)]


class Line(NamedTuple):
    """Evaluations of one agent in the order of training, or ends of a method's runs in the order of KL."""
    kl: np.ndarray
    reward: np.ndarray


Lines = dict[tuple[str, int], list[Line]]           # by variant and seed


def value_at(line: Line, read: str, along: str, level: float) -> float:
    """The figure `read` where `along` first reaches the level, linear between two points."""
    values, levels = getattr(line, read), getattr(line, along)
    i = int(np.argmax(levels >= level))
    return float(np.interp(level, levels[i - 1:i + 1], values[i - 1:i + 1])) if i else float(values[0])


def at_equal(lines: Lines, a: str, b: str, read: str, along: str, frontier: bool) -> Difference:
    """Of `read`, mean over a run's agents, at the smallest level of `along` that an agent of a seed ends at.

    Along frontiers: the mean over 21 even levels, from the higher of the two lines' values at their lowest KL
    to the lower of their largest.
    """
    values = {}
    for seed in sorted({seed for variant, seed in lines if variant == a}):
        if (b, seed) not in lines:
            continue
        reached = [getattr(line, along) for variant in (a, b) for line in lines[variant, seed]]
        levels = (np.linspace(max(x[0] for x in reached), min(x.max() for x in reached), 21) if frontier
                  else [min(x[-1] for x in reached)])
        if levels[0] <= levels[-1]:
            values[seed] = [np.mean([value_at(line, read, along, x) for line in lines[variant, seed]
                                     for x in levels]) for variant in (a, b)]
    frame = pd.DataFrame(values, index=[a, b], dtype=float)
    return difference(frame.loc[a], frame.loc[b])


def lines_of(points: pd.DataFrame, by: list[str]) -> Lines:
    lines: Lines = {}
    for (variant, seed, *_), line in points.groupby(["variant", "seed", *by], sort=False)[["kl", "reward"]]:
        lines.setdefault((variant, seed), []).append(Line(*line.to_numpy().T))
    return lines


def collapsed(rows: pd.DataFrame) -> pd.Series:
    """Whether each agent has lost its reward or its words, from its first evaluation (the base) to its last.

    Its reward is below the base's by a tenth and by 0.05, or its pairs of neighbouring tokens are a third as
    varied, or of 100 tokens 20 more stood earlier in the same response, or it diverged.
    """
    agents = rows.groupby(["variant", "seed", "agent"], sort=False)
    base, end = agents.first(), agents.last()
    return (end.diverged
            | (end.reward < base.reward - (base.reward.abs() / 10).clip(lower=0.05))
            | (end.distinct_2 < base.distinct_2 / 3)
            | (end.repeated_tokens > base.repeated_tokens + 0.2))


def ends(rows: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of each run that did not diverge, mean of its agents, by variant and seed."""
    agents = rows[~rows.diverged].groupby(["variant", "seed", "agent"], sort=False)
    return agents.tail(1).groupby(["variant", "seed"], sort=False).mean(numeric_only=True)


def differences(task: dict, rows: pd.DataFrame) -> dict[tuple, Difference]:
    """{(group, variant, baseline, figure): variant minus baseline} of a task's pairs.

    A frontier is the line through the ends of a method's runs in a seed (variants `METHOD, ETA`) in the order
    of KL. Two methods are compared along their frontiers, and at each eta alone.
    """
    end, found = ends(rows), {}
    frontiers = end.reset_index().sort_values("kl")
    frontiers["variant"] = frontiers.variant.str.rpartition(", ")[0]
    lines = {"frontiers": lines_of(frontiers, []), "runs": lines_of(rows[~rows.diverged], ["agent"])}
    pairs = {group: [*task.get(group, [])] for group in PLANNED}
    for a, b in pairs["frontiers"]:
        pairs["untested"] += [(f"{a}, {eta}", f"{b}, {eta}") for eta in task["times"]]
    for group in PLANNED:
        frontier = group == "frontiers"
        for a, b in pairs[group]:
            for figure in MEANS[:4] if not frontier else []:
                found[group, a, b, figure] = difference(end.loc[a, figure], end.loc[b, figure])
            for figure, axes in EQUAL.items():
                group_lines = lines["frontiers" if frontier else "runs"]
                found[group, a, b, figure] = at_equal(group_lines, a, b, *axes, frontier=frontier)
    return found


def with_extra_variants(task: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Adds agents of some variants one by one (`agents`), runs as if they had ended early (`until`), and some
    variants as if they had been evaluated only at every tenth iteration (`tenth`).
    """
    extra = rows[rows.variant.isin(task.get("agents", []))]
    extra = [extra.assign(variant=extra.variant + ", " + extra.agent)]
    for n in task.get("until", []):
        extra.append(rows[rows.iteration <= n].assign(variant=rows.variant + f", up to iteration {n}"))
    tenth = rows[rows.variant.isin(task.get("tenth", [])) & (rows.iteration % 10 == 0)]
    extra.append(tenth.assign(variant=tenth.variant + ", every tenth iteration"))
    return pd.concat([rows, *extra])


def markdown(lines: list[list]) -> str:
    """A table; lines[0] is its head. Floats have two digits after the point."""
    texts = [[f"{x:.2f}" if isinstance(x, float) else str(x).replace("_", " ") for x in line]
             for line in lines]
    head, *rest = (" | ".join(line) for line in texts)
    return "\n".join([head, "---" + "|--:" * (len(lines[0]) - 1), *rest]) + "\n"


def means_table(rows: pd.DataFrame) -> str:
    """A line for the base, and for each variant its means over seeds."""
    lines = [["variant", "seeds", *MEANS, "collapsed agents"],
             ["base", "", *rows[rows.iteration == 0][MEANS].mean(), ""]]
    end, gone = ends(rows), collapsed(rows)
    for variant in rows.variant.unique():
        values = end.loc[variant, MEANS]
        lines.append([variant, len(values), *values.mean(),
                      f"{gone[variant].sum()} of {len(gone[variant])}"])
    return markdown(lines)


def differences_table(found: dict[tuple, Difference], marks: dict[tuple, str]) -> str:
    """A line for each pair. A cell of fewer seeds than its line's says so."""
    pairs = dict.fromkeys(key[-3:-1] for key in found)
    figures = [*dict.fromkeys(key[-1] for key in found)]
    seeds = {pair: max(x.seeds for key, x in found.items() if key[-3:-1] == pair) for pair in pairs}
    cells = {(key[-3:-1], key[-1]): f"{x}{marks.get(key, '')}"
             + f" ({x.seeds})" * (x.seeds < seeds[key[-3:-1]]) for key, x in found.items()}
    lines = [[*pair, seeds[pair], *(cells.get((pair, figure), "") for figure in figures)] for pair in pairs]
    return markdown([["variant", "minus", "seeds", *figures], *lines])


def share(variants: list[str], rows: pd.DataFrame) -> str:
    """`mean(without - cory) / mean(ppo - cory)` of combined rewards, with a 95% interval (linearised)."""
    cory, without, ppo = (ends(rows).loc[variant].combined_reward for variant in variants)
    gap, ratio = (ppo - cory).mean(), (without - cory).mean() / (ppo - cory).mean()
    rest = difference(without - cory, ratio * (ppo - cory))
    return f"{ratio:.2f} [{ratio + rest.low / gap:.2f}, {ratio + rest.high / gap:.2f}]"


def main() -> None:
    studies, rows, found = json.loads((HERE / "studies.json").read_text()), {}, {}
    for name in [name for name in studies if (HERE / f"{name}.csv.gz").exists()]:
        frame = read(name)
        for task, spec in studies[name]["tasks"].items():
            rows[name, task] = with_extra_variants(spec, frame[frame.task == task])
            found |= {(name, task, *key): x for key, x in differences(spec, rows[name, task]).items()}
    tests = pd.Series({key: x.p for key, x in found.items() if key[-1] in PLANNED[key[2]]})
    marks = {}
    for family, p in tests.groupby(lambda key: key[0] if key[0] in OWN_FAMILY else "all others"):
        values = [*p, *(REMOVED if family == "all others" else [])]
        marks |= dict(zip(p.index, np.where(holm(values)[:len(p)] < 0.05, "*", "†"), strict=True))
    print(HEAD)
    for (name, task), task_rows in rows.items():
        spec = studies[name]["tasks"][task]
        pairs = {key: x for key, x in found.items() if key[:2] == (name, task)}
        commits = ", ".join(sorted(task_rows.commit.str[:10].unique()))
        data = task.replace("imdb", "real reviews" if name in REAL else "generated reviews")
        data = data.replace("gsm8k", "generated word problems")
        print(f"## {name}: {data}\n\n{studies[name]['question']} Code commits: {commits}.\n")
        print(means_table(task_rows))
        print(differences_table(pairs, marks) if pairs else "")
        if "share" in spec:
            print("The gap in combined reward between CORY and PPO with the same number of responses is "
                  "smaller by this share without the partner's reward, each method with settings of its own: "
                  f"{share(spec['share'], task_rows)}.\n")


if __name__ == "__main__":
    main()
