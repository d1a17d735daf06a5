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
LINES = ("-", "--", "-.")
BASE = {"color": "gray", "linestyle": ":", "linewidth": 1.2}
BEST_OF_N = {"color": "gray", "linestyle": "", "marker": "x", "markersize": 7, "zorder": 1}
FIRST = {"task_reward": "task reward", "kl": "KL per response (nats)", "combined_reward": "combined reward",
         "entropy": "entropy per token (nats)", "explained_variance": "explained variance"}
# The other metrics of every update and evaluation. A metric that stands neither here nor above has a panel.
WITHOUT_PANEL = {"task_reward_std", "length", "sampling_gap", "score", "policy_loss", "value_loss", "value_mse",
                 "clip_fraction", "approx_kl", "kl_loss", "grad_norm", "kl_coef", "learning_rate", "distinct_1",
                 "distinct_2", "repeated_tokens", "base_perplexity", "iteration", "seconds", "sampling_seconds",
                 "scoring_seconds", "update_seconds", "tokens_per_second"}


def curves_of(rows: list[dict], training: str, held_out: Sequence[str]) -> dict[str, dict[int, float]]:
    """{metric: {iteration: value}} where the value is a finite number, of keys `training/NAME`, and as `eval/NAME`
    of keys `eval/X/NAME` for each X in `held_out`.
    """
    kinds = {training: ""} | {f"eval/{name}": "eval/" for name in held_out}
    curves = defaultdict(dict)
    for row in rows:
        for key, value in row.items():
            who, _, name = key.rpartition("/")
            if who in kinds and isinstance(value, (int, float)) and math.isfinite(value):
                curves[kinds[who] + name][row["iteration"]] = value
    return curves


def read_curves(run_dir: Path, roles: bool = False) -> dict[str, dict]:
    """`curves_of` each agent of a run, or of each role, and of the team: what the method measures."""
    config, rows = read_config(run_dir), read_jsonl(run_dir / "metrics.jsonl")
    names = config["agents"]
    if roles:
        names = list(dict.fromkeys(role for row in rows for role in row.get("roles", {})))
    base = "base"
    parts = {}
    for name in names:
        base = f"base_{name}" if f"eval/base_{name}/kl" in rows[0] else base
        parts[name] = curves_of(rows, name, [name, base])
    team = curves_of(rows, "", ["team"])
    return parts | ({"team": team} if {*team} - WITHOUT_PANEL else {})


def metric_names(parts: list[dict[str, dict]]) -> list[str]:
    """The metrics that have a panel. Held-out `greedy_X` shares that of X."""
    keys = [key.removeprefix("eval/greedy_").removeprefix("eval/") for curves in parts for key in curves]
    return [name for name in FIRST | dict.fromkeys(keys) if name in keys and name not in WITHOUT_PANEL]


def smooth(values: dict[int, float]) -> dict[int, float]:
    """Centred mean over a tenth of the values, and at least three; over fewer of them near the ends."""
    y, half = list(values.values()), max(1, len(values) // 20)
    return {x: np.mean(y[max(0, i - half):i + half + 1]) for i, x in enumerate(values)}


def look(index: int) -> dict:
    """Colour and line of the index-th group; colours come again with another line."""
    line, color = LINES[index // len(COLORS) % len(LINES)], COLORS[index % len(COLORS)]
    return {"color": color, "linestyle": line, "linewidth": 1.6, "marker": "o", "markersize": 6}


def band(ax, seeds: list[dict[int, float]], **style) -> None:
    """The mean of one line for each seed, in a band of one sample standard deviation."""
    x = sorted(set.intersection(*map(set, seeds)))                  # where every seed has a value
    y = np.array([[values[i] for i in x] for values in seeds])
    ax.plot(x, y.mean(0), **style)
    if len(y) > 1:
        low, high = y.mean(0) - y.std(0, ddof=1), y.mean(0) + y.std(0, ddof=1)
        ax.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)


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
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = max(1, int(figure.get_figwidth() // 4))
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False)
    temporary = path.with_name(f"{path.name}.writing")
    figure.savefig(temporary, dpi=110, format=path.suffix[1:])
    put_in_place(temporary, path)


def draw_runs(run_dirs: list[Path], out: Path, by: Sequence[str] = (), roles: bool = False):
    """A panel for each metric, and one of held-out reward against KL, of groups as in the tables. Returns the
    figure.
    """
    runs = [(read_config(run_dir), read_curves(run_dir, roles)) for run_dir in run_dirs]
    parts = [curves for _, of_run in runs for curves in of_run.values()]
    names = metric_names(parts)
    figure, (*panels, frontier) = grid(len(names) + 1, 4.2, 3.2, below=0.9)
    for ax, name in zip(panels, names, strict=True):
        ax.set(title=FIRST.get(name, name.replace("_", " ")), xlabel="iteration")
        ax.xaxis.get_major_locator().set_params(integer=True)
        for value in {curves[f"eval/{name}"].get(0) for curves in parts} - {None}:
            ax.axhline(value, label="base", **BASE)
    frontier.set(title="held-out reward against KL", xlabel=FIRST["kl"], ylabel=FIRST["task_reward"])

    for i, (label, seeds) in enumerate(grouped(runs, by).items()):
        style = look(i) | {"label": label if len(runs) == 1 else f"{label} (n = {len(seeds)})"}
        for ax, name in zip(panels, names, strict=True):
            draw_training(ax, [curves[name] for curves in seeds], style)
            band(ax, [curves[f"eval/{name}"] for curves in seeds], **style, markeredgecolor="white", zorder=3)
            greedy = [curves[f"eval/greedy_{name}"] for curves in seeds]
            if any(greedy):
                hollow = style | {"markerfacecolor": "white", "label": "hollow: greedy responses"}
                band(ax, greedy, **hollow, zorder=3)
        for curves in seeds:
            kl, reward = curves["eval/kl"], curves["eval/task_reward"]
            both = [iteration for iteration in kl if iteration in reward]
            frontier.plot([kl[i] for i in both], [reward[i] for i in both], **style, markeredgecolor="white")
    for points in filter(None, (embedded_best_of_n(config) for config, _ in runs[:1])):
        label = f"the base's best of {', '.join(points)}"
        frontier.plot(*zip(*points.values(), strict=True), label=label, **BEST_OF_N)

    task, preset, seed = (values_of(runs, setting) for setting in ("task", "preset", "seed"))
    bands = "; bands: sample std over n seeds" if len(runs) > 1 else ""
    figure.suptitle(f"{task}, preset {preset}, seed {seed}\n"
                    f"dots: held-out evaluation; thin lines: training batches, and their running mean{bands}")
    save(figure, out)
    return figure


def draw_training(ax, seeds: list[dict[int, float]], style: dict) -> None:
    """Smoothed training batches; of a single seed every batch too, thin and pale."""
    color = style["color"]
    if len(seeds) == 1:
        ax.plot(list(seeds[0]), list(seeds[0].values()), color=color, linewidth=0.7, alpha=0.3)
    smoothed = [smooth(values) for values in seeds]
    band(ax, smoothed, color=color, linestyle=style["linestyle"], linewidth=1.2, alpha=0.6)


def embedded_best_of_n(config: dict) -> dict[str, list[float]]:
    """{n: (KL, reward)} of an embedded base on the test queries of its embedded data; else nothing."""
    path = ASSETS / config["task"] / "best_of_n.json"
    if not path.exists():
        return {}
    known = json.loads(path.read_text())
    same = all(str(config.get(name)).removeprefix(f"{ASSETS}/") == str(x) for name, x in known["settings"].items())
    return known["best_of_n"] if same else {}


def values_of(runs: list[tuple], setting: str) -> str:
    """A setting's value in all runs, or its values with strokes between them."""
    return "/".join(dict.fromkeys(short_name(str(config[setting])) for config, _ in runs))


def draw_pass_at_k(runs: list[tuple[dict, dict]], ks: list[int], out: Path, by: Sequence[str] = ()) -> None:
    """pass@k against k, mean and sample std, of groups of runs (config.json, {agent or "base": metrics})."""
    groups, ks = grouped(runs, by), sorted(set(ks))
    figure, (ax,) = grid(1, 8, 4.6, columns=1, below=0.1 * len(groups))
    for i, (label, members) in enumerate(groups.items()):
        style = look(i - 1) | (BASE if label.startswith("base") else {})
        points = [{k: metrics[f"pass@{k}"] for k in ks} for metrics in members]
        band(ax, points, **style, label=f"{label} (n = {len(members)})")
    ax.set_xscale("log", base=2)
    ax.set_xticks(ks, labels=ks)
    task, queries = (values_of(runs, setting) for setting in ("task", "eval_queries"))
    ax.set(title=f"{task}: pass@k on {queries} held-out queries", xlabel="k responses per query",
           ylabel="share of queries solved by one of k")
    save(figure, out)
