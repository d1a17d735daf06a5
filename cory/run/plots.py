"""Plots of whatever agents and metrics there are: one run, several compared, pass@k."""
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Sequence

import numpy as np

from cory.config import ASSETS
from cory.flags import read_config
from cory.names import short_name
from cory.run.tables import grouped
from cory.system.files import put_in_place, read_jsonl

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")  # Okabe and Ito's
LINES = ("-", "--", "-.")               # colours come again with another line
BASE = {"color": "gray", "linestyle": ":", "linewidth": 1.2}
TITLES = {"task_reward": "task reward", "kl": "KL per response (nats)", "combined_reward": "combined reward",
          "entropy": "entropy per token (nats)", "explained_variance": "explained variance"}
# The other metrics of every update and evaluation. What stands neither here nor above has a panel, too.
WITHOUT_PANEL = {
    "task_reward_std", "length", "sampling_gap", "score", "policy_loss", "value_loss", "value_mse",
    "approx_kl", "clip_fraction", "kl_loss", "grad_norm", "kl_coef", "learning_rate", "distinct_1",
    "distinct_2", "repeated_tokens", "base_perplexity", "iteration", "seconds", "sampling_seconds",
    "scoring_seconds", "update_seconds", "tokens_per_second"}

Curves = dict[str, dict[int, float]]    # {metric: {iteration: value}}; held-out metrics are `eval/NAME`


def curves_of(rows: list[dict], training: str | None, held_out: Sequence[str] = ()) -> Curves:
    """Finite values of keys `training/NAME`, and of keys `eval/X/NAME` for each X in `held_out`."""
    kinds = {training: ""} | {f"eval/{name}": "eval/" for name in held_out}
    curves = defaultdict(dict)
    for row in rows:
        for key, value in row.items():
            who, _, name = key.rpartition("/")
            if who in kinds and isinstance(value, (int, float)) and math.isfinite(value):
                curves[kinds[who] + name][row["iteration"]] = value
    return curves


def read_curves(run_dir: Path, roles: bool = False) -> dict[str, Curves]:
    """Of the bases, of each agent of a run, or of each role, and of the team: what the method measures."""
    columns, rows = read_config(run_dir)["agents"], read_jsonl(run_dir / "metrics.jsonl")
    parts = {base: curves_of(rows, None, [base]) for base in columns.values()}
    if roles:
        parts |= {role: curves_of(rows, role) for row in rows for role in row.get("roles", {})}
    else:
        parts |= {name: curves_of(rows, name, [name, base]) for name, base in columns.items()}
    team = curves_of(rows, "", ["team"])
    return parts | ({"team": team} if team.keys() - WITHOUT_PANEL else {})


def metric_names(parts: list[Curves]) -> list[str]:
    """The metrics that have a panel. Held-out `greedy_X` shares that of X."""
    keys = [key.removeprefix("eval/greedy_").removeprefix("eval/") for curves in parts for key in curves]
    return [name for name in TITLES | dict.fromkeys(keys) if name in keys and name not in WITHOUT_PANEL]


def smooth(values: dict[int, float]) -> dict[int, float]:
    """Centred mean over a tenth of the values, and at least three; over fewer of them near the ends."""
    y, half = list(values.values()), max(1, len(values) // 20)
    return {x: np.mean(y[max(0, i - half):i + half + 1]) for i, x in enumerate(values)}


def look(index: int) -> dict:
    """Colour, line and dots of the index-th group."""
    line, color = LINES[index // len(COLORS) % len(LINES)], COLORS[index % len(COLORS)]
    return {"color": color, "linestyle": line, "linewidth": 1.6, "marker": "o", "markersize": 6,
            "markeredgecolor": "white"}


def band(ax, seeds: list[dict[int, float]], **style) -> None:
    """The mean of one line for each seed, in a band of one sample standard deviation."""
    x = sorted(set.intersection(*map(set, seeds)))                  # where every seed has a value
    y = np.array([[values[i] for i in x] for values in seeds])
    ax.plot(x, y.mean(0), **style)
    if len(y) > 1:
        mean, std = y.mean(0), y.std(0, ddof=1)
        ax.fill_between(x, mean - std, mean + std, color=style["color"], alpha=0.12, linewidth=0)


def grid(panels: int, width: float, height: float, columns: int = 3, below: float = 0.0):
    """A figure, without a window, and its axes: panels of `width` x `height` inches, room `below` them."""
    from matplotlib.figure import Figure
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(width * columns, height * rows + below), layout="constrained")
    for place in range(panels):
        figure.add_subplot(rows, columns, place + 1).grid(alpha=0.3)
    return figure, figure.axes


def save(figure, path: Path) -> None:
    """With a legend of all labels under the panels."""
    handles = {}
    for ax in figure.axes:
        handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True)) | handles
    columns = int(figure.get_figwidth() / (0.7 + 0.085 * max(map(len, handles))))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=max(1, columns), frameon=False)
    temporary = path.with_name(f"{path.name}.writing")
    figure.savefig(temporary, dpi=110, format=path.suffix[1:])
    put_in_place(temporary, path)


def draw_runs(run_dirs: list[Path], out: Path, by: Sequence[str] = (), roles: bool = False):
    """A panel for each metric, and one of held-out reward against KL, of groups as in the tables. Returns the
    figure.
    """
    runs = [(read_config(run_dir), read_curves(run_dir, roles)) for run_dir in run_dirs]
    names = metric_names([curves for _, parts in runs for curves in parts.values()])
    groups = grouped(runs, by)
    bases = {label: groups.pop(label) for label in [*groups] if label.startswith("base")}
    counts = {label: f" (n = {len(seeds)})" * (len(runs) > 1) for label, seeds in groups.items()}
    styles = {label: look(i) | {"label": label + counts[label]} for i, label in enumerate(groups)}

    figure, axes = grid(len(names) + (not roles), 4.2, 3.2, below=0.9)
    for name, ax in zip(names, axes, strict=False):
        ax.set(title=TITLES.get(name, name.replace("_", " ")), xlabel="iteration")
        ax.xaxis.get_major_locator().set_params(integer=True)
        for label, (curves,) in bases.items():
            for value in curves[f"eval/{name}"].values():
                ax.axhline(value, label=label, **BASE)
        for label, seeds in groups.items():
            draw_metric(ax, name, seeds, styles[label])
    for ax in axes[len(names):]:
        draw_frontier(ax, groups, styles, embedded_best_of_n(runs[0][0]))

    config, bands = runs[0][0], "; bands: sample std over n seeds" * (len(runs) > 1)
    figure.suptitle(f"{short_name(config['task'])}, preset {config['preset']}\n"
                    f"dots: held-out evaluation; thin lines: training batches, and their running mean{bands}")
    save(figure, out)
    return figure


def draw_metric(ax, name: str, seeds: list[Curves], style: dict) -> None:
    """Held-out metrics, and training batches smoothed; of a single seed every batch too, thin and pale."""
    training, color = [curves[name] for curves in seeds], style["color"]
    if len(seeds) == 1:
        ax.plot(*zip(*training[0].items(), strict=True), color=color, linewidth=0.7, alpha=0.3)
    smoothed = [smooth(values) for values in training]
    band(ax, smoothed, color=color, linestyle=style["linestyle"], linewidth=1.2, alpha=0.6)
    band(ax, [curves[f"eval/{name}"] for curves in seeds], **style, zorder=3)
    greedy = [curves[f"eval/greedy_{name}"] for curves in seeds]
    if any(greedy):
        hollow = {"markerfacecolor": "white", "markeredgecolor": color, "label": "hollow: greedy responses"}
        band(ax, greedy, **style | hollow, zorder=3)


def draw_frontier(ax, groups: dict[str, list[Curves]], styles: dict[str, dict], best_of_n: dict) -> None:
    """Held-out reward against KL: a line for each seed, a dot for each evaluation; the base's best of n."""
    ax.set(title="held-out reward against KL", xlabel=TITLES["kl"], ylabel=TITLES["task_reward"])
    ax.margins(0.1)
    for label, seeds in groups.items():
        for curves in seeds:
            kl, reward = curves["eval/kl"], curves["eval/task_reward"]
            ax.plot(list(kl.values()), [reward[iteration] for iteration in kl], **styles[label])
    for n, (kl, reward) in best_of_n.items():
        ax.plot(kl, reward, "x", color="gray", zorder=1, label="best of n responses of the base")
        ax.annotate(f"n = {n}", (kl, reward), (0, -13), textcoords="offset points", ha="center", color="gray")


def embedded_best_of_n(config: dict) -> dict[str, list[float]]:
    """{n: (KL, reward)} of an embedded base on the test queries of its embedded data; else nothing."""
    path = ASSETS / config["task"] / "best_of_n.json"
    if not path.exists():
        return {}
    known = json.loads(path.read_text())
    settings = {name: str(value).removeprefix(f"{ASSETS}/") for name, value in config.items()}
    return known["best_of_n"] if known["settings"].items() <= settings.items() else {}


def draw_pass_at_k(runs: list[tuple[dict, dict]], ks: list[int], out: Path, by: Sequence[str] = ()) -> None:
    """pass@k against k, mean and sample std, of groups of runs (config.json, {agent or "base": metrics})."""
    groups, ks = grouped(runs, by), sorted(set(ks))
    figure, (ax,) = grid(1, 8, 4.6, columns=1, below=0.1 * len(groups))
    for i, (label, members) in enumerate(groups.items()):
        style = look(i - 1) | (BASE if label.startswith("base") else {})
        points = [{k: metrics[f"pass@{k}"] for k in ks} for metrics in members]
        band(ax, points, **style, label=label if len(runs) == 1 else f"{label} (n = {len(members)})")
    ax.set_xscale("log", base=2)
    ax.set_xticks(ks, labels=ks)
    ax.set(title=f"{short_name(runs[0][0]['task'])}: pass@k on held-out queries",
           xlabel="k responses per query", ylabel="share of queries solved by one of k")
    save(figure, out)
