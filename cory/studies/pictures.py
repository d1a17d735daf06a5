"""Pictures of a study, as PNG and PDF: curves with intervals, the frontier, differences to the baseline."""
from pathlib import Path

import numpy as np

from cory.experiment.plots import BASE, COLORS, MARKERS, grid, legend, look, save
from cory.studies.definitions import Study
from cory.studies.results import NAMES, Groups, Result, by_variant, differences, same_runs
from cory.studies.statistics import interval


def draw(study: Study, results: list[Result], out: Path) -> list[Path]:
    """Every picture that the finished runs allow, for each task. Returns the PNG files."""
    written = []
    for old in [*out.glob("*.png"), *out.glob("*.pdf")]:
        old.unlink()                            # of tasks or variants that are not here now
    for task in dict.fromkeys(result.run.task for result in results):
        if study.measured.get(task) == "team":
            continue                            # `curves` has its runs' pictures
        groups = by_variant(results, task)
        pictures = {"curves": curves, "frontier": over_eta if study.sweeps else frontier}
        if compared(groups, study):
            pictures["differences"] = forest
        if study.measured.get(task) == "pass@k":
            pictures["pass_at_k"] = pass_at_k
        for name, picture in pictures.items():
            path = out / f"{name}_{task}.png"
            figure = picture(groups, study, task)
            save(figure, path, 130)
            save(figure, path.with_suffix(".pdf"), 130)
            written.append(path)
    return written


def label_of(variant: str, of_seed: dict[int, Result]) -> str:
    return f"{variant} (n = {len(of_seed)})"


def curves(groups: Groups, study: Study, task: str):
    """Held-out reward, KL and combined reward against iterations: mean of seeds, band of its 95% interval."""
    figure, axes = grid(3, 3, 4.2, 3.2, below=0.3 + 0.12 * len(groups))
    for i, of_seed in enumerate(groups.values()):
        pairs = [run.pair for run in of_seed.values()]
        shared = sorted(set.intersection(*({p.iteration for p in pair} for pair in pairs)))
        for axis, name in zip(axes, ("reward", "kl", "combined"), strict=True):
            table = np.array([[getattr(p, name) for p in pair if p.iteration in shared] for pair in pairs])
            axis.plot(shared, table.mean(0), **look(i), **MARKERS[""])
            low, high = zip(*(interval(column) for column in table.T), strict=True)
            axis.fill_between(shared, low, high, color=look(i)["color"], alpha=0.15, linewidth=0)
    for axis, title in zip(axes, (NAMES[task], "KL per response (nats)", "combined reward"), strict=True):
        axis.set(title=title, xlabel="iteration")
    figure.suptitle(f"{task}, held out, mean of a run's agents: mean of n seeds and its 95% interval")
    legend(figure, {label_of(*group): look(i) for i, group in enumerate(groups.items())})
    return figure


def frontier(groups: Groups, study: Study, task: str):
    """Held-out reward against KL: pale lines along training, one marked point at each variant's end."""
    figure, (axis,) = grid(1, 1, 7, 4.6, below=0.3 + 0.15 * len(groups))
    looks = {}
    for i, (variant, of_seed) in enumerate(groups.items()):
        for run in of_seed.values():
            axis.plot([p.kl for p in run.pair], [p.reward for p in run.pair], color=look(i)["color"],
                      alpha=0.2, linewidth=0.8)
        last = [run.pair[-1] for run in of_seed.values()]
        looks[label_of(variant, of_seed)] = {**look(i), "linestyle": "", "markersize": 9, **MARKERS[""]}
        axis.plot(np.mean([p.kl for p in last]), np.mean([p.reward for p in last]),
                  **looks[label_of(variant, of_seed)], zorder=3)
    axis.set(xlabel="KL per response (nats)", ylabel=NAMES[task],
             title=f"{task}, held out: along training, and where each variant ends")
    legend(figure, looks)
    return figure


def over_eta(groups: Groups, study: Study, task: str):
    """Held-out reward against KL at the end of training, a line over eta for each method; pale: each seed."""
    figure, (axis,) = grid(1, 1, 7, 4.6, below=0.5)
    looks = {}
    for i, (method, variants) in enumerate(study.sweeps.items()):
        ends = {v: [(run.last.kl, run.last.reward) for run in groups[v].values()]
                for v in variants if v in groups}
        means = np.array([np.mean(points, 0) for points in ends.values()]).reshape(-1, 2)
        label = f"{method} (n = {min(map(len, ends.values()), default=0)})"
        looks[label] = {**look(i), "markersize": 9, **MARKERS[""]}
        for points in ends.values():
            axis.plot(*zip(*points, strict=True), linestyle="", marker=look(i)["marker"], markersize=4,
                      color=look(i)["color"], alpha=0.35)
        axis.plot(*means.T, **looks[label], zorder=3)
        for variant, place in zip(ends, means, strict=True):
            axis.annotate(variant.removeprefix(f"{method}, "), place, xytext=(0, 12 - 26 * i),
                          textcoords="offset points", ha="center", fontsize=8, color=look(i)["color"])
    axis.set(xlabel="KL per response (nats)", ylabel=NAMES[task],
             title=f"{task}, held out, at the end of training: means over seeds, and each seed")
    legend(figure, looks)
    return figure


def pass_at_k(groups: Groups, study: Study, task: str):
    """Share of held-out queries solved by one of k answers: mean over seeds of agents' mean, 95% interval."""
    figure, (axis,) = grid(1, 1, 7, 4.6, below=0.5)
    base = next(iter(next(iter(groups.values())).values())).measured["base"]
    ks = sorted(int(key.removeprefix("pass@")) for key in base if key.startswith("pass@"))
    axis.plot(ks, [base[f"pass@{k}"] for k in ks], **BASE)
    for i, of_seed in enumerate(groups.values()):
        table = np.array([[np.mean([run.measured[name][f"pass@{k}"] for name in run.agents]) for k in ks]
                          for run in of_seed.values()])
        low, high = zip(*(interval(column) for column in table.T), strict=True)
        axis.plot(ks, table.mean(0), **look(i), **MARKERS[""])
        axis.fill_between(ks, low, high, color=look(i)["color"], alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, labels=ks)
    axis.set(xlabel="k answers to a query", ylabel="share of queries solved by one of k",
             title=f"{task}, held out: pass@k")
    legend(figure, {"base": BASE} | {label_of(*group): look(i) for i, group in enumerate(groups.items())})
    return figure


def compared(groups: Groups, study: Study) -> list[str]:
    """The variants that there is a baseline for, and that are other runs than it."""
    pairs = [(variant, study.baseline_of(variant)) for variant in groups]
    return [variant for variant, base in pairs
            if variant != base and base in groups and not same_runs(groups, variant, base)]


def forest(groups: Groups, study: Study, task: str):
    """Each variant less its baseline, paired by seed, with 95% intervals."""
    names = compared(groups, study)
    found = [differences(groups, study, variant) for variant in names]
    names = [f"{name}\n(less {study.pairs[name]})" if name in study.pairs and set(names) - set(study.pairs)
             else name for name in names]
    titles = {"reward": NAMES[task], "reward at equal KL": f"{NAMES[task]} at equal KL",
              "kl": "KL per response (nats)"}
    figure, axes = grid(3, 3, 4.2, 1.2 + 0.35 * len(names), below=0.3)
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for y, difference in enumerate(d[key] for d in found):
            decided = difference.verdict in ("higher", "lower")
            axis.plot([difference.low, difference.high], [y, y], color=COLORS[0], linewidth=2)
            axis.plot(difference.mean, y, marker="o", color=COLORS[0], markersize=7,
                      markerfacecolor=COLORS[0] if decided else "white")
        axis.axvline(0, color="gray", linewidth=1)
        axis.set(title=title, ylim=(len(names) - 0.5, -0.5))
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
    of_method = set(study.pairs) >= set(names)
    base = "PPO's of the same setting" if of_method else study.baseline
    figure.suptitle(f"{task}: less {base}, paired by seed, 95% intervals (hollow: not decided)")
    return figure
