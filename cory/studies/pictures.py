"""Pictures of a study, as PNG and PDF: curves with intervals, the frontier, differences to the baseline."""
import math
from itertools import count
from pathlib import Path
from typing import Iterable, Iterator

import numpy as np

from cory.experiment.limit import Limit, limit_of
from cory.experiment.plots import BASE, COLORS, LINES, MARKERS, draw_limits, grid, legend, look, save
from cory.studies.comparison import (
    curves_over_eta,
    differences,
    eta_of,
    of_other_eta,
    other_yardstick,
    same_runs,
    why_not_compared,
)
from cory.studies.definitions import CORY, PPO, Study
from cory.studies.results import NAMES, Groups, Result, by_variant
from cory.studies.runs import MEASURES
from cory.studies.statistics import best_within, interval, shared_kls

SHAPES = (*LINES, (":", "D"), ("-", "v"), ("--", "P"))
PICTURES = ("curves", "frontier", "differences", "pass_at_k")


def draw(study: Study, results: list[Result], out: Path) -> list[Path]:
    """Every picture that the finished runs allow, for each task. Returns the PNG files."""
    written = []
    for old in (path for name in PICTURES for path in out.glob(f"{name}_*.p[nd][gf]")):
        old.unlink()                            # of tasks or variants that are not here now
    for task in dict.fromkeys(result.run.task for result in results):
        if study.measure.get(task) == "team":
            continue                            # `curves` has its runs' pictures
        groups = drawn(by_variant(results, task), study)
        pictures = {"curves": curves, "frontier": over_eta if study.sweeps else frontier}
        if compared(groups, study):
            pictures["differences"] = forest
        if study.measure.get(task) == "pass@k":
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


def looks_of(names: Iterable[str], study: Study) -> dict[str, dict]:
    """{variant: colour, dashes, marker}. PPO is blue and CORY orange, wherever they stand; others that are
    neighbours differ in each, so that of lines which lie on one another all show. Of `METHOD, SETTING`
    throughout, a colour for each method and a marker for each setting.
    """
    names = list(names)
    if all(name.startswith(("ppo, ", "cory, ")) for name in names):
        methods = ["ppo", "cory"]
        settings = list(dict.fromkeys(name.partition(", ")[2] for name in names))
        places = [(methods.index(method), settings.index(setting))
                  for method, _, setting in (name.partition(", ") for name in names)]
    else:
        plain = {PPO: (0, 0), CORY: (1, 1)}
        others = ((2 + i % (len(COLORS) - 2), (2 + i) % len(LINES)) for i in count())
        places = [plain.get(study.variants[name]) or next(others) for name in names]
    found = {}
    for name, (color, shape) in zip(names, places, strict=True):
        dashes, marker = SHAPES[shape % len(SHAPES)]
        found[name] = look(color) | {"linestyle": dashes, "marker": marker}
    return found


def kl_scale(groups: Groups) -> dict:
    """Of an axis of KL: linear; where a run ends at ten times the median, as collapsed ones do, logarithmic
    above the power of ten that follows the median.
    """
    ends = [run.last.kl for of_seed in groups.values() for run in of_seed.values()]
    median = float(np.median(ends))
    if max(ends) <= 10 * median or median <= 0:
        return {"value": "linear"}
    return {"value": "symlog", "linthresh": 10.0 ** math.ceil(math.log10(median))}


def mostly_collapsed(groups: Groups) -> list[str]:
    """Variants most of whose agents have collapsed, where those are a quarter of all at most: pictures are
    scaled for the others, and these may run out of the frame.
    """
    found = [variant for variant, of_seed in groups.items()
             if np.mean([run.share_collapsed for run in of_seed.values()]) > 0.5]
    return found if len(found) <= len(groups) / 4 else []


def drawn_last(groups: Groups, outside: list[str], axes) -> Iterator[tuple[str, dict[int, Result]]]:
    """The variants and their runs, those `outside` last, for which no axis grows."""
    yield from ((variant, of_seed) for variant, of_seed in groups.items() if variant not in outside)
    for axis in axes:
        axis.autoscale_view()
        axis.autoscale(not outside)
    yield from ((variant, groups[variant]) for variant in outside)


def note_of(outside: list[str]) -> str:
    return f"\nscaled without {', '.join(outside)}: most agents collapsed" if outside else ""


def curves(groups: Groups, study: Study, task: str):
    """Held-out reward, KL and combined reward against iterations: mean of seeds, band of its 95% interval; of
    more variants than there are colours, the baseline's band alone. Combined rewards are those with one eta.
    """
    figure, axes = grid(3, 3, 3.2, 2.9, below=0.3 + 0.12 * len(groups))
    others, looks = of_other_eta(groups, study), looks_of(groups, study)
    outside = mostly_collapsed(groups)
    crowded = len(groups) > len(COLORS) and study.baseline in groups
    banded = {study.baseline} if crowded else groups
    for variant, of_seed in drawn_last(groups, outside, axes):
        runs = [run.mean_of_agents for run in of_seed.values()]
        shared = sorted(set.intersection(*({p.iteration for p in points} for points in runs)))
        for axis, name in zip(axes, ("reward", "kl", "combined"), strict=True):
            if name == "combined" and variant in others:
                continue
            table = np.array([[getattr(p, name) for p in points if p.iteration in shared] for points in runs])
            axis.plot(shared, table.mean(0), **looks[variant], **MARKERS[""], zorder=2 + 1 / (1 + shared[-1]))
            if variant in banded:
                low, high = zip(*(interval(column) for column in table.T), strict=True)
                axis.fill_between(shared, low, high, color=looks[variant]["color"], alpha=0.15, linewidth=0)
    with_eta = next(eta_of(of_seed) for variant, of_seed in groups.items() if variant not in others)
    titles = (NAMES[task], "KL per response (nats)", f"combined reward, eta {with_eta:g}")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="iteration")
    axes[1].set_yscale(**kl_scale({name: groups[name] for name in groups if name not in outside}))
    whose = f"{study.baseline}'s 95% interval" if crowded else "its 95% interval"
    figure.suptitle(f"{task}, held out, mean of a run's agents: mean of n seeds, and {whose}"
                    + note_of(outside))
    legend(figure, {label_of(*group): looks[group[0]] for group in groups.items()})
    return figure


def frontier(groups: Groups, study: Study, task: str):
    """Held-out reward against KL: pale lines along training, one marked point at each variant's end."""
    figure, (axis,) = grid(1, 1, 7, 4.6, below=0.3 + 0.15 * len(groups))
    ends = {variant: style | {"linestyle": "", "markersize": 9, **MARKERS[""]}
            for variant, style in looks_of(groups, study).items()}
    if ring := ends.get(study.baseline):                            # hides nothing that ends where it does
        ring |= {"markersize": 12, "markerfacecolor": "none", "markeredgecolor": ring["color"],
                 "markeredgewidth": 2}
    outside = mostly_collapsed(groups)
    for variant, of_seed in drawn_last(groups, outside, [axis]):
        for run in of_seed.values():
            points = run.mean_of_agents
            axis.plot([p.kl for p in points], [p.reward for p in points], color=ends[variant]["color"],
                      alpha=0.2, linewidth=0.8)
        last = [run.last for run in of_seed.values()]
        axis.plot(np.mean([p.kl for p in last]), np.mean([p.reward for p in last]), **ends[variant],
                  zorder=4 if variant == study.baseline else 3)
    axis.set(xlabel="KL per response (nats)", ylabel=NAMES[task],
             title=f"{task}, held out: along training, and where each variant ends" + note_of(outside))
    axis.set_xscale(**kl_scale({name: groups[name] for name in groups if name not in outside}))
    looks = {label_of(*group): ends[group[0]] for group in groups.items()}
    legend(figure, looks | draw_limits(axis, limits_of(groups)))
    return figure


def limits_of(groups: Groups) -> list[Limit | None]:
    """The limit of a run of each variant, where its folder is here and has one."""
    return [limit_of(next(iter(of_seed.values())).run.folder) for of_seed in groups.values()]


def over_eta(groups: Groups, study: Study, task: str):
    """Held-out reward against KL. A line for each method: its frontier, the best of any eta within a KL, mean
    over seeds and agents, with its 95% interval. A marker for each eta: the mean end; small: of each seed.
    """
    figure, (axis,) = grid(1, 1, 7, 4.6, below=0.6)
    styles = looks_of((name for names in study.sweeps.values() for name in names), study)
    methods, etas = {}, {}                                          # what the legend shows
    for method, variants in study.sweeps.items():
        there = [variant for variant in variants if variant in groups]
        if not there:
            continue
        color = styles[there[0]]["color"]
        of_seeds = curves_over_eta(groups, there)
        if of_seeds:
            kls = shared_kls([side for of_seed in of_seeds.values() for side in of_seed.values()], 101)
            table = np.array([np.mean([best_within(side, kls) for side in of_seed.values()], 0)
                              for of_seed in of_seeds.values()])
            axis.plot(kls, table.mean(0), color=color, linewidth=2)
            low, high = zip(*(interval(column) for column in table.T), strict=True)
            axis.fill_between(kls, low, high, color=color, alpha=0.15, linewidth=0)
        methods[f"{method} (n = {len(of_seeds)})"] = {"color": color, "linewidth": 2}
        for variant in there:
            ends = np.array([(run.last.kl, run.last.reward) for run in groups[variant].values()])
            end = styles[variant] | {"linestyle": ""}
            axis.plot(*ends.T, **end | {"markersize": 4}, alpha=0.35)
            axis.plot(*ends.mean(0), **end | {"markersize": 9}, **MARKERS[""], zorder=3)
            etas[variant.removeprefix(f"{method}, ")] = end | {"color": "gray"}
    axis.set(xlabel="KL per response (nats)", ylabel=NAMES[task],
             title=f"{task}, held out: the best of any eta within a KL,\n"
                   "and where runs of each eta end (small: each seed)")
    legend(figure, methods | etas | draw_limits(axis, limits_of(groups)))
    return figure


def pass_at_k(groups: Groups, study: Study, task: str):
    """Share of held-out queries solved by one of k answers: mean over seeds of agents' mean, 95% interval."""
    figure, (axis,) = grid(1, 1, 7, 4.6, below=0.5)
    base = next(iter(next(iter(groups.values())).values())).measured["base"]
    ks = [int(name.removeprefix("pass@")) for name in MEASURES["pass@k"].figures]
    axis.plot(ks, [base[f"pass@{k}"] for k in ks], **BASE)
    looks = looks_of(groups, study)
    for variant, of_seed in groups.items():
        table = np.array([[np.mean([run.measured[name][f"pass@{k}"] for name in run.agents]) for k in ks]
                          for run in of_seed.values()])
        low, high = zip(*(interval(column) for column in table.T), strict=True)
        axis.plot(ks, table.mean(0), **looks[variant], **MARKERS[""])
        axis.fill_between(ks, low, high, color=looks[variant]["color"], alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, labels=ks)
    axis.set(xlabel="k answers to a query", ylabel="share of queries solved by one of k",
             title=f"{task}, held out: pass@k")
    legend(figure, {"base": BASE} | {label_of(*group): looks[group[0]] for group in groups.items()})
    return figure


def drawn(groups: Groups, study: Study) -> Groups:
    """Without the variants that are the very runs of their baseline, which would hide it, and those that are
    rewarded or evaluated otherwise than the first: the tables say which these are.
    """
    def hides(variant: str, baseline: str) -> bool:
        return variant != baseline and baseline in groups and same_runs(groups, variant, baseline)

    first = study.baseline if study.baseline in groups else next(iter(groups), "")
    return {variant: of_seed for variant, of_seed in groups.items()
            if not hides(variant, study.baseline_of(variant)) and not other_yardstick(groups, variant, first)}


def compared(groups: Groups, study: Study) -> list[str]:
    """The variants that there is a baseline for, and that can be compared with it."""
    return [variant for variant in groups if variant != study.baseline_of(variant)
            and not why_not_compared(groups, variant, study.baseline_of(variant))]


def forest(groups: Groups, study: Study, task: str):
    """Each variant less its baseline, paired by seed, with 95% intervals. Blue: one role, as in PPO; orange:
    two. Below a line: variants with a baseline of their own.
    """
    from matplotlib.ticker import MaxNLocator
    names, baseline_of = compared(groups, study), study.baseline_of
    of_method = names and all(f"cory, {baseline_of(name).removeprefix('ppo, ')}" == name for name in names)
    bases = {baseline_of(name) for name in names}
    common = baseline_of(names[0]) if len(bases) == 1 else study.baseline       # what the title names
    others = [] if of_method or len(bases) == 1 else [name for name in names if name in study.pairs]
    names = [name for name in names if name not in others] + others
    labels = [f"{name}\n(less {baseline_of(name)})" if name in others else name for name in names]
    titles = {"reward": NAMES[task], "reward at equal KL": f"{NAMES[task]} at equal KL",
              "kl": "KL per response (nats)"}
    figure, axes = grid(3, 3, 3.2, 1.2 + 0.35 * len(names), below=0.3)
    found = {name: differences(groups, study, name) for name in names}
    colors = {name: COLORS[len(next(iter(groups[name].values())).roles) > 1] for name in names}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for y, name in enumerate(names):
            difference, color = found[name][key], colors[name]
            decided = difference.verdict in ("higher", "lower")
            axis.plot([difference.low, difference.high], [y, y], color=color, linewidth=2)
            axis.plot(difference.mean, y, marker="o", color=color, markersize=7,
                      markerfacecolor=color if decided else "white")
        axis.axvline(0, color="gray", linewidth=1)
        if 0 < len(others) < len(names):
            axis.axhline(len(names) - len(others) - 0.5, color="gray", linewidth=1)
        axis.set(title=title, ylim=(len(names) - 0.5, -0.5))
        axis.set_yticks(range(len(names)), labels if axis is axes[0] else [""] * len(names))
        if key == "kl" and kl_scale(groups)["value"] != "linear":
            axis.set_xscale(**kl_scale(groups))
            axis.set_xlim(*(1.6 * end for end in axis.get_xlim()))
        else:
            axis.xaxis.set_major_locator(MaxNLocator(5))
    seeds = sorted({of["reward"].seeds for of in found.values()})
    n = " to ".join(map(str, dict.fromkeys([seeds[0], seeds[-1]])))
    figure.suptitle(f"{task}: difference to {'PPO of the same setting' if of_method else common}, paired by "
                    f"seed (n = {n}), 95% intervals; hollow: not decided")
    return figure
