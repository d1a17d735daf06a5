"""Draws drift.png, collapse.png, methods.png, and README's ../hero.png from the rows beside it.

    python docs/studies/figures.py
"""
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from scipy.stats import t

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from docs.studies.table import HERE, collapsed, ends, lines_of, read, value_at
from docs.studies.teams import NAMES, OUTCOMES, TASKS, outcomes

LABELS = {"ppo, twice the batch": "PPO, same number of responses", "ppo": "PPO, half as many responses",
          "cory": "CORY"}
COLORS = {"ppo, twice the batch": "#08519c", "ppo": "#6baed6", "cory": "#d94801"}
MARKERS = {"ppo, twice the batch": "s", "ppo": "D", "cory": "o"}
ETAS = {"eta x 10": "10 times", "eta x 3": "3 times", "eta x 1": "default eta",
        "eta x 0.3": "0.3 times", "eta x 0.1": "0.1 times"}
STYLE = {"font.size": 11, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
         "legend.frameon": False}


def half_width(values: pd.DataFrame | pd.Series) -> np.ndarray:
    """Half of Student's 95% interval of the mean over seeds, which are the rows."""
    return t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))


def plot_training(axis, rows: pd.DataFrame) -> None:
    for method, label in LABELS.items():
        runs = rows[rows.variant == method].groupby(["seed", "iteration"]).combined_reward.mean().unstack()
        mean, half = runs.mean(), half_width(runs)
        axis.plot(mean, color=COLORS[method], marker=MARKERS[method], ms=5, lw=2, clip_on=False)
        axis.fill_between(mean.index, mean - half, mean + half, color=COLORS[method], alpha=0.2, lw=0)
        axis.annotate(label.replace(", ", ",\n"), (mean.index[-1], mean.iloc[-1]), xytext=(6, 0), va="center",
                      textcoords="offset points", color=COLORS[method], annotation_clip=False)
    axis.axhline(runs[0].mean(), color="gray", ls=":")
    axis.annotate("base", (runs.columns[-1], runs[0].mean()), xytext=(6, 0), textcoords="offset points",
                  va="center", color="gray", annotation_clip=False)
    axis.set(xlim=(0, runs.columns[-1]), xlabel="iteration", ylabel="combined reward (held out)",
             title="Default eta: ten seeds, 95% intervals")


def plot_reward_and_kl(axis, rows: pd.DataFrame) -> None:
    end, gone = ends(rows), collapsed(rows)
    base = rows[rows.iteration == 0].reward.mean()
    for method in LABELS:
        variants = [f"{method}, {eta}" for eta in ETAS]
        runs = [end.loc[variant, ["kl", "reward"]] for variant in variants]
        kl, reward = np.array([run.mean() for run in runs]).T
        axis.plot([0, *kl], [base, *reward], color=COLORS[method], lw=1.5)
        for variant, run, x, y in zip(variants, runs, kl, reward, strict=True):
            half = half_width(run)
            axis.errorbar(x, y, half.reward, half.kl, fmt=MARKERS[method], color=COLORS[method], ms=6,
                          mfc="white" if gone[variant].any() else None, capsize=2)
    for text, x, y in zip(ETAS.values(), kl, reward, strict=True):                          # CORY's
        axis.annotate(text, (x, y), xytext=(7, -15), textcoords="offset points", color="gray")
    axis.set_xscale("symlog", linthresh=1)
    axis.set(xlim=(0, 100), xlabel="KL from the base (nats per response)", ylabel="reward (held out)",
             title="Five etas, five seeds: up and left is better")
    axis.set_xticks([0, 0.5, 1, 3, 10, 30], ["0", "0.5", "1", "3", "10", "30"])
    axis.minorticks_off()
    axis.legend(handles=[*methods(), hollow("some agents repeat themselves")], loc="upper left", fontsize=10)


def plot_drift(axis, rows: pd.DataFrame, rival: str) -> None:
    """CORY's KL less the rival's where both first reach a reward: a line for each seed.

    It is read off the lines through the ends of each method's runs, and dashed towards ends at which an agent
    has collapsed.
    """
    end = ends(rows).assign(gone=collapsed(rows).groupby(["variant", "seed"]).any())
    end = end.reset_index().sort_values("kl")
    end["method"] = end.variant.str.rpartition(", ")[0]
    lines = lines_of(end.assign(variant=end.method), [])
    for seed in sorted(end.seed.unique()):
        (cory,), (ppo,) = lines["cory", seed], lines[rival, seed]
        low, high = max(cory.reward[0], ppo.reward[0]), min(cory.reward.max(), ppo.reward.max())
        levels = np.linspace(low, high, 200)
        kl, kl_of_ppo = ([value_at(line, "kl", "reward", level) for level in levels] for line in (cory, ppo))
        more = np.subtract(kl, kl_of_ppo)
        sound_ends = end[(end.seed == seed) & ~end.gone]
        sound = levels <= sound_ends.groupby("method").reward.max()[["cory", rival]].min()
        axis.plot(levels[sound], more[sound], color=COLORS[rival], lw=2)
        axis.plot(levels[~sound], more[~sound], "--", color=COLORS[rival], lw=1.2)
    axis.axhline(0, color="black", lw=1)
    default = end[end.variant == f"{rival}, eta x 1"].reward.mean()
    axis.axvline(default, ymax=0.5, color="gray", ls=":")
    axis.annotate("PPO's reward with\nthe default eta", (default, 9), xytext=(-5, 0), ha="right",
                  color="gray", textcoords="offset points")
    axis.annotate("above 0: CORY needs more KL", (0.02, 0.98), xycoords="axes fraction", va="top")
    axis.set(xlabel="reward", title=f"Against {LABELS[rival]}", ylim=(-1.5, 25))


def plot_variety(axis, rows: pd.DataFrame, against: str) -> None:
    """distinct_2 of each agent along its training, drawn against another figure."""
    for (variant, _, _), line in rows.groupby(["variant", "seed", "agent"]):
        method, _, eta = variant.rpartition(", ")
        axis.plot(line[against], line.distinct_2, "-" if eta == "eta 0.05" else "--", color=COLORS[method],
                  marker=MARKERS[method], ms=5, lw=1.2)
    third = rows[rows.iteration == 0].distinct_2.mean() / 3
    axis.axhline(third, color="gray", ls=":")
    if against == "iteration":
        axis.annotate("a third of the base's", (100, third), xytext=(0, 3), textcoords="offset points",
                      ha="right", color="gray")
    axis.set(xlabel=against, ylabel="distinct_2", ylim=(-0.03, 0.95))


def plot_perplexity(axis, rows: pd.DataFrame) -> None:
    gone = collapsed(rows)
    for method in LABELS:
        agents = rows[rows.variant == f"{method}, eta x 0.1"].groupby(["seed", "agent"]).last()
        repeats = gone[f"{method}, eta x 0.1"].loc[agents.index]
        for which, face in ((repeats, "white"), (~repeats, COLORS[method])):
            axis.plot(agents.distinct_2[which], agents.base_perplexity[which], MARKERS[method], ms=7,
                      color=COLORS[method], mfc=face)
    limit = 3 * rows[rows.iteration == 0].base_perplexity.mean()
    axis.axhline(limit, color="gray", ls=":")
    axis.annotate("three times the base's", (1, limit), xycoords=("axes fraction", "data"), xytext=(0, 3),
                  textcoords="offset points", ha="right", color="gray")
    axis.set(yscale="log", xlabel="distinct_2", ylabel="perplexity under the base", ylim=(50, 3500))
    axis.set_yticks([100, 300, 1000, 3000], ["100", "300", "1000", "3000"])
    axis.minorticks_off()


def plot_outcome(axis, values: pd.DataFrame) -> None:
    """A dot for each method with its 95% interval over seeds, which are the rows, and a line at the base."""
    axis.axvline(values["base"].mean(), color="gray", ls=":")
    values = values[[*NAMES]]
    names = [*NAMES.values()]
    axis.errorbar(values.mean(), names, xerr=half_width(values), fmt="o", color="black", capsize=3)
    axis.set_xlabel("combined reward (held out)")


def methods() -> list[Line2D]:
    return [Line2D([], [], color=COLORS[method], label=label, marker=MARKERS[method])
            for method, label in LABELS.items()]


def hollow(label: str) -> Line2D:
    return Line2D([], [], color="gray", ls="", marker="o", mfc="white", label=label)


def styles(solid: str, dashed: str) -> list[Line2D]:
    return [Line2D([], [], color="gray", ls=style, label=label)
            for style, label in (("-", solid), ("--", dashed))]


def save(figure, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(out: Path = HERE) -> None:
    plt.rcParams.update(STYLE)
    frontier, large, tuned = read("frontier"), read("batch256"), read("tuned")
    frontier = frontier[(frontier.task == "imdb") & ~frontier.variant.str.startswith("no partner's reward")]

    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4), layout="constrained")
    plot_training(left, tuned[tuned.task == "imdb"])
    plot_reward_and_kl(right, frontier)
    save(figure, out.parent / "hero.png")

    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained", sharey=True)
    for axis, rival in zip(axes, ("ppo", "ppo, twice the batch"), strict=True):
        plot_drift(axis, frontier, rival)
    axes[0].set_ylabel("CORY's KL minus PPO's (nats)")
    handles = styles("between runs without repetition", "towards runs in which agents repeat themselves")
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    save(figure, out / "drift.png")

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    plot_variety(axes[0], large, "iteration")
    plot_variety(axes[1], large[large.iteration <= 40], "reward")
    plot_perplexity(axes[2], frontier)
    axes[0].set_title("SmolLM2, the paper's batch")
    axes[1].set_title("The same agents up to iteration 40")
    axes[2].set_title("Generated reviews, a tenth of the default eta")
    axes[0].legend(handles=styles("eta 0.05", "eta 0.15"), loc="upper right")
    axes[2].legend(handles=[hollow("repeats itself")], loc="lower right")
    figure.legend(handles=methods(), loc="outside lower center", ncols=3)
    save(figure, out / "collapse.png")

    found = outcomes(read("methods.teams"))
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex="row", sharey=True)
    for row, (task, data) in zip(axes, TASKS.items(), strict=True):
        for axis, (outcome, title) in zip(row, OUTCOMES.items(), strict=True):
            plot_outcome(axis, found.loc[task, outcome].unstack("variant"))
            axis.set_title(f"{data}: {title}")
    axes[0, 0].invert_yaxis()                               # of all, since they share it
    save(figure, out / "methods.png")


if __name__ == "__main__":
    main()
