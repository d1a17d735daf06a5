"""Pictures of a study, for one task: curves over training, and differences to the baseline."""
from pathlib import Path

import pandas as pd

from cory.experiment.plots import COLORS, band, grid, look, save
from cory.studies.definitions import Study
from cory.studies.statistics import compared, differences

TITLES = {"combined_reward": "combined reward", "reward": "reward",
          "reward at equal KL": "reward at equal KL", "kl": "KL (nats)",
          "KL at equal reward": "KL at equal reward", "distinct_2": "distinct-2",
          "distinct-2 at equal reward": "distinct-2 at equal reward"}


def draw(study: Study, task: str, rows: pd.DataFrame, out: Path) -> list[Path]:
    """Both as PNG, if there is something to draw. Returns the files."""
    rows = rows[~rows.diverged]
    figures = {"curves": curves(task, rows) if len(rows) else None,
               "differences": forest(study, task, rows) if compared(study, rows) else None}
    paths = {name: out / f"{name}_{task}.png" for name in figures}
    for name, figure in figures.items():
        paths[name].unlink(missing_ok=True)                         # of other variants than these
        if figure:
            save(figure, paths[name])
    return [path for path in paths.values() if path.exists()]


def curves(task: str, rows: pd.DataFrame):
    """Held-out figures, mean of agents: mean and sample standard deviation over seeds.

    They are drawn against iterations, or against the answers of one role so far if batches differ in size and
    all sizes are known.
    """
    variants, along = rows.variant.unique(), "iteration"
    if "batch_size" in rows and rows.batch_size.notna().all() and rows.batch_size.nunique() > 1:
        along = "thousand answers of a role"
        rows = rows.assign(**{along: rows.iteration * rows.batch_size / 1000})
    figure, axes = grid(4, 3.2, 3.0, columns=4, below=0.2 + 0.06 * len(variants))
    per_run = rows.groupby(["variant", "seed", along]).mean(numeric_only=True)
    seeds = rows.groupby("variant").seed.nunique()
    for axis, name in zip(axes, ("reward", "kl", "combined_reward", "distinct_2"), strict=True):
        for i, variant in enumerate(variants):
            of_seeds = per_run.loc[variant, name].groupby("seed")
            curves = [points.droplevel("seed").to_dict() for _, points in of_seeds]
            band(axis, curves, **look(i), label=f"{variant} (n = {seeds[variant]})")
        axis.set(title=TITLES[name], xlabel=along)
    figure.suptitle(f"{task}, held out, mean of a run's agents: mean and sample std over n seeds")
    return figure


def forest(study: Study, task: str, rows: pd.DataFrame):
    """Each variant less its baseline, with 95% intervals. Filled where the interval leaves 0 out."""
    pairs = compared(study, rows)
    names = ("combined_reward", "reward", "reward at equal KL", "kl", "distinct_2")
    figure, axes = grid(len(names), 2.6, 1.3 + 0.35 * len(pairs), columns=len(names))
    for y, (variant, baseline) in enumerate(pairs.items()):
        by_name = differences(rows, variant, baseline)
        for axis, name in zip(axes, names, strict=True):
            if name not in by_name:                                 # combined rewards of different eta
                continue
            color, found = COLORS[0], by_name[name]
            axis.plot([found.low, found.high], [y, y], color=color, linewidth=2)
            axis.plot(found.mean, y, marker="o", color=color,
                      markerfacecolor=color if found.decided else "white")
    for axis, name in zip(axes, names, strict=True):
        axis.axvline(0, color="gray", linewidth=1)
        axis.set(title=TITLES[name], ylim=(len(pairs) - 0.4, -0.6))
        axis.set_yticks(range(len(pairs)), labels=[])
    axes[0].set_yticks(range(len(pairs)), labels=[f"{name}\nless {less}" for name, less in pairs.items()])
    figure.suptitle(f"{task}: differences paired by seed, 95% intervals; hollow: the interval holds 0")
    return figure
