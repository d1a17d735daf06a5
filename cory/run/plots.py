"""Plots of any agents and metrics, of one run or of several compared."""
from pathlib import Path
from typing import Sequence

import pandas as pd
from matplotlib.figure import Figure

from cory.flags import read_config
from cory.names import short_name
from cory.run.tables import grouped
from cory.system.files import read_jsonl

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")  # Okabe and Ito's
LINES = ("-", "--", "-.")               # colours repeat with another line style
TITLES = {"task_reward": "task reward", "kl": "KL per response (nats)", "combined_reward": "combined reward",
          "score": "score: what is trained on", "entropy": "entropy per token (nats)",
          "explained_variance": "explained variance", "kl_coef": "KL coefficient eta"}
# The other metrics of every update and evaluation. One listed neither here nor above gets a panel, too.
WITHOUT_PANEL = {
    "task_reward_std", "length", "sampling_gap", "policy_loss", "value_loss", "value_mse", "approx_kl",
    "clip_fraction", "kl_loss", "grad_norm", "learning_rate", "distinct_1", "distinct_2", "repeated_tokens",
    "base_perplexity", "seconds", "sampling_seconds", "logprob_seconds", "update_seconds",
    "tokens_per_second"}
KEY = "(?:(?P<kind>eval|greedy)/)?(?:(?P<who>.+)/)?(?P<metric>.+)"
DOTS = {"linewidth": 1.6, "marker": "o", "markersize": 6, "zorder": 3}
KINDS = {"training": {"linewidth": 1.2, "alpha": 0.6},
         "eval": DOTS | {"markeredgecolor": "white"},
         "greedy": DOTS | {"markerfacecolor": "white", "label": "hollow: greedy responses"}}


def read_curves(run_dir: Path) -> dict[str, pd.DataFrame]:
    """For each agent of a run, and for the team, a row for each value: its iteration, its metric and its kind
    (training, eval, greedy). An agent's iteration 0 is its base's.
    """
    rows = pd.DataFrame(read_jsonl(run_dir / "metrics.jsonl")).drop(columns="roles", errors="ignore")
    values = rows.melt("iteration").dropna()
    keys = values.variable.str.replace("eval/(.+)/greedy_", r"greedy/\1/", regex=True)
    values = values.join(keys.str.extract(KEY).fillna({"kind": "training", "who": "team"}))
    values = values[~values.metric.isin(WITHOUT_PANEL)]
    agents = read_config(run_dir)["agents"]
    curves = {name: values[values.who.isin([name, base])] for name, base in agents.items()}
    curves["team"] = values[values.who == "team"]
    return {name: part for name, part in curves.items() if len(part)}


def redundant(curves: pd.DataFrame) -> set[str]:
    """`score` if it is the task reward everywhere, and `kl_coef` if it is constant in each run."""
    metrics = curves[curves.kind == "training"].pivot_table(
        index=["group", "seed", "who", "iteration"], columns="metric", values="value")
    found = set()
    if "score" in metrics and metrics.score.equals(metrics.task_reward):
        found.add("score")
    if "kl_coef" in metrics and metrics.kl_coef.groupby(["group", "seed", "who"]).nunique().max() == 1:
        found.add("kl_coef")
    return found


def draw_runs(run_dirs: list[Path], out: Path, by: Sequence[str] = ()) -> Figure:
    """A panel for each metric, and one of held-out reward against KL, of groups as in the tables."""
    config, several = read_config(run_dirs[0]), len(run_dirs) > 1
    groups = grouped([(read_config(run_dir), read_curves(run_dir)) for run_dir in run_dirs], by)
    curves = pd.concat([part.assign(group=group, seed=seed, n=len(seeds))
                        for group, seeds in groups.items() for seed, part in enumerate(seeds)],
                       ignore_index=True)
    styles = {group: {"label": group + f" (n = {len(seeds)})" * several, "color": COLORS[i % len(COLORS)],
                      "linestyle": LINES[i // len(COLORS) % len(LINES)]}
              for i, (group, seeds) in enumerate(groups.items())}
    names = [name for name in curves.metric.unique() if name not in redundant(curves)]
    names.sort(key=lambda name: [*TITLES, name].index(name))

    rows = len(names) // 3 + 1
    figure = Figure(figsize=(12.6, 3.2 * rows + 0.9), layout="constrained")
    for place, name in enumerate(names, 1):
        draw_metric(figure.add_subplot(rows, 3, place), name, curves[curves.metric == name], styles)
    draw_frontier(figure.add_subplot(rows, 3, len(names) + 1), curves[curves.kind == "eval"], styles)

    bands = "; bands: sample std over n seeds" * several
    figure.suptitle(f"{short_name(config['task'])}, preset {config['preset']}\n"
                    f"dots: held-out evaluation; thin lines: training batches, and their running mean{bands}")
    handles = {}
    for ax in figure.axes:
        ax.grid(alpha=0.3)
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out, dpi=110, bbox_inches="tight")
    return figure


def draw_metric(ax, name: str, curves: pd.DataFrame, styles: dict[str, dict]) -> None:
    """The base, held-out values and smoothed training batches; for a single seed also each batch, pale."""
    ax.set(title=TITLES.get(name, name.replace("_", " ")), xlabel="iteration")
    ax.xaxis.get_major_locator().set_params(integer=True)
    start = curves[(curves.kind == "eval") & (curves.iteration == 0) & (curves.who != "team")]
    for value in start.value.unique():
        ax.axhline(value, color="gray", linestyle=":", linewidth=1.2, label="base")
    for (group, n, kind), rows in curves.groupby(["group", "n", "kind"], sort=False):
        if kind == "training":
            if n == 1:
                ax.plot(rows.iteration, rows.value, color=styles[group]["color"], linewidth=0.7, alpha=0.3)
            rows = rows.assign(value=rows.groupby("seed").value.transform(smooth))
        band(ax, rows, n, **styles[group] | KINDS[kind])


def smooth(values: pd.Series) -> pd.Series:
    """Centred mean over a tenth of the values, at least three; over fewer near the ends."""
    return values.rolling(2 * max(1, len(values) // 20) + 1, center=True, min_periods=1).mean()


def band(ax, rows: pd.DataFrame, n: int, **style) -> None:
    """The mean of n seeds, where all have a value, in a band of one sample standard deviation."""
    seeds = rows.groupby("iteration").value.agg(["mean", "std", "count"]).query("count == @n")
    ax.plot(seeds.index, seeds["mean"], **style)
    low, high = seeds["mean"] - seeds["std"], seeds["mean"] + seeds["std"]
    ax.fill_between(seeds.index, low, high, color=style["color"], alpha=0.12, linewidth=0)


def draw_frontier(ax, held_out: pd.DataFrame, styles: dict[str, dict]) -> None:
    """Held-out reward against KL: a line for each seed, a dot for each evaluation."""
    ax.set(title="held-out reward against KL", xlabel=TITLES["kl"], ylabel=TITLES["task_reward"])
    ax.margins(0.1)
    points = held_out.pivot(index=["group", "seed", "iteration"], columns="metric", values="value")
    for (group, _), seed in points.groupby(["group", "seed"]):
        ax.plot(seed["kl"], seed["task_reward"], **styles[group] | KINDS["eval"])
