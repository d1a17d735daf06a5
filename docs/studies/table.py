"""Tables and plots of the studies in studies.json whose rows stand beside it, as NAME.csv.

    python docs/studies/table.py > docs/studies/tables.md   # and search.png, frontiers.png, collapse.png
"""
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from scipy.stats import t

HERE = Path(__file__).resolve().parent
MEANS = ["combined_reward", "reward", "kl", "distinct_2", "repeated_tokens", "base_perplexity"]
EQUAL = {"KL at equal reward": ("kl", "reward"), "reward at equal KL": ("reward", "kl")}
# Studies whose tests have a correction of their own.
OWN_FAMILY = ("frontier", "smollm2", "batch256", "rates")
# Groups of pairs in studies.json, and the figures of each whose differences are tested.
TESTED = {"all figures": [*MEANS[:3], *EQUAL], "combined and KL": ["combined_reward", "kl"],
            "combined": ["combined_reward"], "untested": [], "frontiers": [*EQUAL],
            "KL at equal reward": ["KL at equal reward"]}
COLORS = {"PPO, twice the batch": "#003f7f", "PPO, same batch": "#6fb7e0", "CORY": "#d55e00",
          "CORY without partner's reward": "#e0b000"}
TITLES = {("frontier", "imdb"): "tiny, IMDB", ("frontier", "gsm8k"): "tiny, GSM8K",
          ("smollm2", "imdb"): "SmolLM2", ("batch256", "imdb"): "SmolLM2, the paper's batch"}
# Lines of the table on docs/results.md: a label, a study, a task, CORY's variant and PPO's.
SUMMARY = [
    ("IMDB, same batch", "tuned", "imdb", "cory", "ppo"),
    ("IMDB, twice the batch", "tuned", "imdb", "cory", "ppo, twice the batch"),
    ("IMDB, both at CORY's settings, same batch", "parts", "imdb", "cory", "ppo"),
    ("IMDB, PPO with a quarter of the responses", "tuned", "imdb", "cory", "ppo, half the iterations"),
    ("GSM8K, same batch", "tuned", "gsm8k", "cory, lower rate", "ppo"),
    ("GSM8K, twice the batch", "tuned", "gsm8k", "cory, lower rate", "ppo, twice the batch"),
    ("GSM8K, both at CORY's first draw, same batch", "parts", "gsm8k", "cory", "ppo"),
    ("GSM8K, PPO with a quarter of the responses", "tuned", "gsm8k", "cory, lower rate",
     "ppo, half the iterations"),
    *((f"{base}, along five etas, {label}", "frontier", task, "cory", ppo)
      for base, task in (("IMDB", "imdb"), ("GSM8K", "gsm8k"))
      for label, ppo in (("same batch", "ppo"), ("twice the batch", "ppo, twice the batch"))),
    *((f"GSM8K, {rate}, {label}", "rates", "gsm8k", f"cory, {rate}", f"{ppo}, {rate}")
      for rate in ("rate 1.5e-4", "rate 3e-4", "rate 6e-4")
      for label, ppo in (("same batch", "ppo"), ("twice the batch", "ppo, twice the batch"))),
    *((f"SmolLM2, along two etas, {label}", "smollm2", "imdb", "cory", ppo)
      for label, ppo in (("same batch", "ppo"), ("twice the batch", "ppo, twice the batch"))),
    *((f"SmolLM2, {eta}, {label}", "smollm2", "imdb", f"cory, {eta}", f"{ppo}, {eta}")
      for eta in ("eta 0.05", "eta 0.15")
      for label, ppo in (("same batch", "ppo"), ("twice the batch", "ppo, twice the batch")))]


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


def value_at(points: pd.DataFrame, read: str, along: str, level: float) -> float:
    """The figure `read` where `along` first reaches the level, linear between two points."""
    reached = int(np.argmax(points[along].to_numpy() >= level))
    around = points.iloc[max(0, reached - 1):reached + 1]
    return float(np.interp(level, around[along], around[read])) if reached else points[read].iloc[0]


def at_equal(rows: pd.DataFrame, a: str, b: str, read: str, along: str, frontier: bool) -> Difference:
    """Of `read`, mean over a run's agents, at the smallest level of `along` that an agent of a seed ends at.

    Or along frontiers, each in order of KL through the ends of a method's runs in a seed (variants `METHOD,
    ...`): the mean over 21 even levels that both reach.
    """
    points, values = rows[~rows.diverged], {}
    if frontier:
        ended = ends(rows).reset_index().sort_values("kl")
        points = ended.assign(variant=ended.variant.str.rpartition(", ")[0], agent="their mean")
    for seed, of_seed in points[points.variant.isin([a, b])].groupby("seed"):
        lines = of_seed.groupby(["variant", "agent"])
        reached = lines[along]
        levels = (np.linspace(reached.first().max(), reached.max().min(), 21) if frontier
                  else [reached.last().min()])
        if levels[0] <= levels[-1]:
            of_lines = {key: np.mean([value_at(line, read, along, x) for x in levels]) for key, line in lines}
            values[seed] = pd.Series(of_lines).groupby(level=0).mean()
    frame = pd.DataFrame(values, index=[a, b], dtype=float)
    return difference(frame.loc[a], frame.loc[b])


def collapsed(points: pd.DataFrame) -> bool:
    """Whether an agent has lost its reward or its words, from its first evaluation (the base) to its last.

    Its reward is below the base's by a tenth and by 0.05, or its pairs of neighbouring tokens are a third as
    varied, or of 100 tokens 20 more stood earlier in the same response, or it diverged.
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


def differences(task: dict, rows: pd.DataFrame) -> dict[tuple, Difference]:
    """{(group, variant, baseline, figure): variant less baseline} of a task's pairs; along frontiers,
    also at each eta alone.
    """
    end, found = ends(rows), {}
    pairs = {group: [*task.get(group, [])] for group in TESTED}
    for a, b in pairs["frontiers"]:
        pairs["untested"] += [(f"{a}, {eta}", f"{b}, {eta}") for eta in task["times"]]
    for group in TESTED:
        for a, b in pairs[group]:
            for figure in MEANS[:4] if group != "frontiers" else []:
                found[group, a, b, figure] = difference(end.loc[a, figure], end.loc[b, figure])
            for figure, axes in EQUAL.items():
                found[group, a, b, figure] = at_equal(rows, a, b, *axes, frontier=group == "frontiers")
    return found


def with_extra_variants(task: dict, rows: pd.DataFrame) -> pd.DataFrame:
    """Adds agents of some variants one by one (`agents`), and runs as if they had ended early (`until`)."""
    extra = rows[rows.variant.isin(task.get("agents", []))]
    extra = [extra.assign(variant=extra.variant + ", " + extra.agent)]
    for n in task.get("until", []):
        extra.append(rows[rows.iteration <= n].assign(variant=rows.variant + f", until {n}"))
    return pd.concat([rows, *extra])


def draws_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Combined rewards of variants `METHOD DRAW` at the first seed: a line for each draw of all methods."""
    end = ends(rows[rows.seed == rows.seed.min()]).combined_reward.droplevel("seed")
    end.index = end.index.str.rsplit(" ", n=1, expand=True)
    return end.unstack(0).dropna()


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
    for variant, of_variant in rows.groupby("variant", sort=False):
        gone = [collapsed(points) for _, points in of_variant.groupby(["seed", "agent"])]
        end = ends(of_variant)
        lines.append([variant, len(end), *end[MEANS].mean(), f"{sum(gone)} of {len(gone)}"])
    return markdown(lines)


def differences_table(found: dict[tuple, Difference], stands: set) -> str:
    """A line for each pair. A star: a test that stands after Holm's correction."""
    lines = {}
    for key, x in found.items():
        *_, a, b, figure = key
        line = lines.setdefault((a, b), {"seeds": x.seeds})
        line |= {"seeds": min(x.seeds, line["seeds"]), figure: f"{x}{'*' * (key in stands)}"}
    figures = [*next(iter(lines.values()))]
    cells = [[*pair, *(of_pair.get(figure, "") for figure in figures)] for pair, of_pair in lines.items()]
    return markdown([["variant", "less", *figures], *cells])


def share(variants: list[str], rows: pd.DataFrame) -> str:
    """`mean(without - cory) / mean(ppo - cory)` of combined rewards, with a 95% interval (linearised)."""
    cory, without, ppo = (ends(rows).loc[variant].combined_reward for variant in variants)
    gap, ratio = (ppo - cory).mean(), (without - cory).mean() / (ppo - cory).mean()
    rest = difference(without - cory, ratio * (ppo - cory))
    return f"{ratio:.2f} [{ratio + rest.low / gap:.2f}, {ratio + rest.high / gap:.2f}]"


def judged_table() -> str:
    """Means of a judge's marks and of the reward, with standard errors; what praise and reward correlate."""
    rows = pd.read_csv(HERE / "judged.csv").drop(columns=["query", "agent"])
    marks = rows.groupby("variant", sort=False)
    cells = marks.mean().map("{:.2f}".format) + " ± " + marks.sem().map("{:.2f}".format)
    table = markdown([["variant", *cells], *cells.reset_index().to_numpy().tolist()])
    return f"{table}\nPraise and reward: correlation {rows.praise.corr(rows.reward):.2f}.\n"


def plot_draws(axis, rows: pd.DataFrame, task: dict) -> None:
    """CORY and PPO of twice the batch at each draw, in order of PPO's; below -0.7, at -0.7 with its value."""
    draws = draws_of(rows).sort_values("ppo")
    shown = draws.clip(lower=-0.7)
    axis.vlines(shown.index, shown.ppo, shown.cory, color="lightgray")
    for name, label in (("ppo", "PPO, twice the batch"), ("cory", "CORY")):
        axis.plot(shown.index, shown[name], "o", color=COLORS[label], label=label)
        for draw, value in draws[name][draws[name] < -0.7].items():
            axis.annotate(f"{value:.1f}", (draw, -0.7), xytext=(6, -3), textcoords="offset points")
    axis.axhline(rows[rows.iteration == 0].combined_reward.mean(), color="gray", ls=":", label="base")
    axis.set(xlabel="draw", ylabel="combined reward")


def plot_frontier(axis, rows: pd.DataFrame, task: dict) -> None:
    """A dot for each run in the plane of KL and reward, a line for each method through its means at each eta;
    grey crosses: the base and the best of 4 of its responses.
    """
    end = ends(rows).reset_index()
    for label, method in zip(COLORS, task["variants"], strict=True):
        if label == "CORY without partner's reward":
            continue
        runs = end[end.variant.str.startswith(f"{method}, eta")]
        means = runs.groupby("init_kl_coef")[["kl", "reward"]].mean()
        axis.plot(runs.kl, runs.reward, ".", color=COLORS[label], alpha=0.5)
        axis.plot(means.kl, means.reward, "-", color=COLORS[label], label=label)
        labels = []                                     # etas whose points are close share one
        for eta, mean in means.iterrows() if label == "CORY" else ():
            if labels and abs(mean.kl - labels[-1][1].kl) < 0.2:
                labels[-1][0] += f", {eta:g}"
            else:
                labels.append([f"{eta:g}", mean])
        for text, mean in labels:
            axis.annotate(text, mean, xytext=(4, -12), textcoords="offset points", fontsize=8)
    base = rows[rows.iteration == 0]
    is_log = bool(end.kl.max() / end.kl.min() > 100)
    kl_of_base = ("base (KL 0)", end.kl.min() / 5) if is_log else ("base", 0)
    for name, kl, reward in ((*kl_of_base, base.reward.mean()),
                             ("best of 4", np.log(4) - 3 / 4, task["best_of_4"])):
        axis.plot(kl, reward, "x", color="gray")
        axis.annotate(name, (kl, reward), xytext=(-4, 6), textcoords="offset points", color="gray",
                      fontsize=8)
    greedy = rows.task.iloc[0] == "gsm8k"
    axis.set(xlabel=f"KL (nats{', logarithmic' * is_log})", ylabel="greedy accuracy" if greedy else "reward",
             xscale="log" if is_log else "linear")


def plot_variety(axis, rows: pd.DataFrame, task: dict) -> None:
    """The share of distinct pairs of tokens against KL during training: a line for each agent. Below the grey
    line it has collapsed by that criterion.
    """
    for label, method in zip(COLORS, task["variants"], strict=True):
        of_method = rows[rows.variant.str.startswith(f"{method}, eta")]
        for _, line in of_method.groupby(["variant", "seed", "agent"]):
            axis.plot(line.kl, line.distinct_2, color=COLORS[label])
    axis.axhline(rows[rows.iteration == 0].distinct_2.mean() / 3, color="gray", ls=":")
    axis.set(xlabel="KL (nats)", ylabel="distinct_2", xlim=(0, 80))


def plot_perplexity(axis, rows: pd.DataFrame, task: dict) -> None:
    """The perplexity under the base of each agent's final responses at the smallest eta, against KL. The grey
    line: three times the base's.
    """
    smallest = rows[(rows.init_kl_coef == rows.init_kl_coef.min()) & ~rows.diverged]
    last = smallest.groupby(["variant", "seed", "agent"]).tail(1)
    for label, method in zip(COLORS, task["variants"], strict=True):
        if label != "CORY without partner's reward":
            agents = last[last.variant.str.startswith(f"{method}, eta")]
            axis.plot(agents.kl, agents.base_perplexity, "o", color=COLORS[label], label=label)
    axis.axhline(3 * rows[rows.iteration == 0].base_perplexity.mean(), color="gray", ls=":")
    axis.set(xlabel="KL (nats)", ylabel="perplexity under the base", yscale="log")


def planned(study: str, task: str, group: str, a: str, b: str, figure: str) -> bool:
    """Whether a test of combined reward was fixed before the first six studies ran (README.md): 28 tests."""
    if figure != "combined_reward" or group in ("untested", "frontiers"):
        return False
    of_tuned = b == "ppo, twice the batch" and a != "cory, lower rate"          # whose draw was found later
    return study in ("parts", "transfer", "paper") or study == "tuned" and of_tuned


def summary(found: dict[tuple, Difference], stands: set) -> str:
    """CORY less PPO on each base. A star: a planned test that is significant after Holm's correction, among
    the 28 of combined reward or, as in `stands`, those along etas or the six at equal rates.
    """
    tests = [key for key in found if planned(*key)]
    adjusted = holm([found[key].p for key in tests])
    stands = {key for key in stands if key[2] == "frontiers" or key[0] == "rates"}
    stands |= {key for key, p in zip(tests, adjusted, strict=True) if p < 0.05}
    lines = [["CORY minus PPO (seeds)", "combined reward", "KL at equal reward", "reward at equal KL"]]
    for label, study, task, a, b in SUMMARY:
        cells = {}
        for key, x in found.items():
            if key[:2] == (study, task) and key[3:5] == (a, b):
                cells[key[5]] = f"{x}{'*' * (key in stands)}"
                seeds = x.seeds
        shown = [cells.get(figure, "–") for figure in ("combined_reward", *EQUAL)]
        lines.append([f"{label} ({seeds})", *shown])
    return markdown(lines)


# Name of the file, and its panels: a study, a task, and what is drawn of it.
PLOTS = {"search": [("search", "imdb", plot_draws), ("search", "gsm8k", plot_draws)],
         "frontiers": [("frontier", "imdb", plot_frontier), ("frontier", "gsm8k", plot_frontier),
                       ("smollm2", "imdb", plot_frontier)],
         "collapse": [("batch256", "imdb", plot_variety), ("frontier", "imdb", plot_perplexity)]}


def main() -> None:
    studies, rows, found, stands = json.loads((HERE / "studies.json").read_text()), {}, {}, set()
    for name in [name for name in studies if (HERE / f"{name}.csv").exists()]:
        frame = pd.read_csv(HERE / f"{name}.csv", dtype={"commit": str}, low_memory=False)
        for task, spec in studies[name]["tasks"].items():
            rows[name, task] = with_extra_variants(spec, frame[frame.task == task])
            found |= {(name, task, *key): x for key, x in differences(spec, rows[name, task]).items()}
    tests = pd.Series({key: x.p for key, x in found.items() if key[5] in TESTED[key[2]]})
    for _, p in tests.groupby(lambda key: key[0] if key[0] in OWN_FAMILY else "all others"):
        stands |= {key for key, adjusted in zip(p.index, holm(p), strict=True) if adjusted < 0.05}
    print("# Tables of the studies\n\nMade by table.py; [README](README.md) says what the figures are.\n")
    print(f"## Summary\n\n{summary(found, stands)}")
    for (name, task), of_task in rows.items():
        spec = studies[name]["tasks"][task]
        pairs = {key: x for key, x in found.items() if key[:2] == (name, task)}
        commits = ", ".join(sorted(of_task.commit.unique()))
        print(f"## {name}: {task}\n\n{studies[name]['question']} By the code of {commits}.\n")
        print(means_table(of_task))
        print(differences_table(pairs, stands) if pairs else "")
        if "share" in spec:
            print(f"Share of the gap that the partner's reward makes: {share(spec['share'], of_task)}.\n")
        if "draws" in spec:
            more = draws_of(of_task).eval("ppo - cory")
            print(f"PPO is above CORY in {sum(more > 0)} of {len(more)} draws; median {more.median():.2f}.\n")
    about = "Marks of 1 to 5 by a language model for 30 responses each of smollm2 (seed 400, eta 0.05)"
    print(f"## judged\n\n{about}, ± standard errors.\n\n{judged_table()}")
    for name, panels in PLOTS.items():
        figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), layout="constrained")
        for axis, (study, task, plot) in zip(axes, panels, strict=True):
            plot(axis, rows[study, task], studies[study]["tasks"][task])
            axis.set_title(TITLES.get((study, task), task.upper()))
        figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.savefig(HERE / f"{name}.png", dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
