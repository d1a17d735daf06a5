"""Pictures of whatever agents and metrics there are: runs, runs compared, pass@k."""
import math
from collections import defaultdict
from pathlib import Path
from typing import Collection, Sequence

import numpy as np

from cory.experiment.limit import Limit, limit_of
from cory.experiment.saved_config import read_config
from cory.experiment.tables import grouped, shown
from cory.names import short_name
from cory.system.files import read_log, replaced

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")  # Okabe and Ito's
LINES = (("-", "o"), ("--", "s"), ("-.", "^"))
LIMIT = {"color": "gray", "linewidth": 3, "alpha": 0.5}
BEST_OF = {"color": "gray", "linestyle": "", "marker": "x", "markersize": 7}
BASE = {"color": "gray", "linestyle": ":", "linewidth": 1.2}
MARKERS = {"": {"markeredgecolor": "white"}, "greedy_": {"markerfacecolor": "white"}}       # filled, hollow
FIRST = {"task_reward": "task reward", "kl": "KL per response (nats)", "combined_reward": "combined reward",
         "repeated_tokens": "repeated tokens", "entropy": "entropy per token (nats)",
         "explained_variance": "explained variance"}
# The other metrics of every update and evaluation. A metric that stands neither here nor above has a panel.
WITHOUT_PANEL = {"task_reward_std", "length", "sampling_gap", "policy_loss", "value_loss", "value_error",
                 "clip_fraction", "approx_kl", "kl_loss", "grad_norm", "kl_coef", "learning_rate",
                 "distinct_1", "distinct_2", "base_perplexity"}


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def series(rows: list[dict], key: str) -> dict[int, float]:
    """Iteration -> value of a metric, where it is a finite number."""
    return {row["iteration"]: row[key] for row in rows if is_number(row.get(key))}


def held_out(rows: list[dict], agent: str, name: str) -> dict[int, float]:
    """`series` of a held-out metric, from the base at iteration 0 on, which every agent equals there."""
    return series(rows, f"eval/base/{name}") | series(rows, f"eval/{agent}/{name}")


def smooth(values: dict[int, float]) -> dict[int, float]:
    """Centred mean over a tenth of the values, and at least three; over fewer of them near the ends."""
    y, half = list(values.values()), max(1, len(values) // 20)
    return {x: np.mean(y[max(0, i - half):i + half + 1]) for i, x in enumerate(values)}


def metric_names(rows: list[dict], agents: Collection[str]) -> tuple[list[str], list[str]]:
    """The metrics of agents that have a panel, and those of the loop. Held-out greedy_X shares X's panel."""
    keys = dict.fromkeys(key for row in rows for key in row if is_number(row[key]))
    trained = [key.partition("/")[2] for key in keys if key.partition("/")[0] in agents]
    measured = dict.fromkeys(trained + [key.split("/", 2)[2] for key in keys if key.startswith("eval/")])
    without = WITHOUT_PANEL | {f"greedy_{name}" for name in measured} - {*trained}
    of_loop = [key for key in keys if "/" not in key and key not in ("iteration", "seconds")]
    return [name for name in FIRST | measured if name in measured and name not in without], of_loop


def look(index: int) -> dict:
    """Colour, line and marker of the index-th agent or group; colours come again with another line."""
    line, marker = LINES[index // len(COLORS) % len(LINES)]
    color = COLORS[index % len(COLORS)]
    return {"color": color, "linestyle": line, "marker": marker, "markersize": 6, "linewidth": 1.6}


def band(ax, seeds: list[dict[int, float]], **style) -> None:
    """The mean of one line for each seed, in a band of one sample standard deviation."""
    x = sorted(set.intersection(*map(set, seeds)))                  # where every seed has a value
    y = np.array([[values[i] for i in x] for values in seeds])
    ax.plot(x, y.mean(0), **style)
    if len(y) > 1:
        low, high = y.mean(0) - y.std(0, ddof=1), y.mean(0) + y.std(0, ddof=1)
        ax.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)


def grid(panels: int, columns: int, width: float, height: float, below: float = 0.0):
    """A figure, without a window, and its axes: panels of `width` x `height` inches, room `below` them."""
    from matplotlib.figure import Figure
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(width * columns, height * rows + below), layout="constrained")
    for place in range(panels):
        figure.add_subplot(rows, columns, place + 1).grid(alpha=0.3)
    return figure, figure.axes


def save(figure, path: Path, dpi: int = 110) -> None:
    """Whole or not at all."""
    with replaced(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format=path.suffix[1:])


def draw_limits(ax, limits: Collection[Limit | None]) -> dict[str, dict]:
    """What the base's own answers reach, in a panel of reward against KL. Returns the legend's looks."""
    looks = {}
    for limit in {tuple(limit.tilts): limit for limit in limits if limit}.values():
        ax.plot(*zip(*limit.tilts, strict=True), **LIMIT, zorder=1)
        ax.plot(*zip(*limit.best_of.values(), strict=True), **BEST_OF, zorder=1)
        looks["limit: the base tilted by reward"] = LIMIT
        looks[f"the base's best of {', '.join(map(str, limit.best_of))}"] = BEST_OF
    return looks


def legend(figure, looks: dict[str, dict]) -> None:
    """Under the panels, where it covers nothing."""
    from matplotlib.lines import Line2D
    handles = [Line2D([], [], label=label, **style) for label, style in looks.items()]
    columns = max(1, int(12 * figure.get_figwidth() / (max(map(len, looks)) + 7)))  # about 12 letters an inch
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def draw_training(ax, seeds: list[dict[int, float]], color: str, linestyle: str = "-", **_) -> None:
    """Smoothed training batches; of a single seed every batch too, thin and pale."""
    if len(seeds) == 1:
        ax.plot(list(seeds[0]), list(seeds[0].values()), color=color, linewidth=0.7, alpha=0.3)
    band(ax, [smooth(values) for values in seeds], color=color, linestyle=linestyle, linewidth=1.2, alpha=0.6)


def draw_agent(axes, names: list[str], seeds: list[tuple[list[dict], str]], style: dict) -> None:
    """A group, given as (rows, agent) of each seed: its metrics `names`, and its reward against KL."""
    for ax, name in zip(axes, names, strict=False):
        draw_training(ax, [series(rows, f"{agent}/{name}") for rows, agent in seeds], **style)
        for kind, marker in MARKERS.items():
            points = [held_out(rows, agent, kind + name) for rows, agent in seeds]
            band(ax, points, **style, **marker, zorder=3)
    for rows, agent in seeds:
        kl, reward = held_out(rows, agent, "kl"), held_out(rows, agent, "task_reward")
        both = [i for i in kl if i in reward]
        axes[-1].plot([kl[i] for i in both], [reward[i] for i in both], **style, **MARKERS[""])


def draw_curves(run_dir: Path):
    """curves.png of one run, in its folder."""
    run = read_config(run_dir), read_log(run_dir / "metrics.jsonl")
    return draw_runs([run], run_dir / "curves.png", limits=[limit_of(run_dir)])


def draw_runs(runs: list[tuple[dict, list[dict]]], out: Path, by: Sequence[str] = (),
              limits: Collection[Limit | None] = ()):
    """Groups of runs, each (config.json, rows of metrics.jsonl): a panel for each metric of the agents and of
    the loops, and one of reward against KL. A run alone is drawn on the colour of who plays its first role.
    """
    config, alone = runs[0][0], len(runs) == 1
    all_rows = [row for _, rows in runs for row in rows]
    names, of_loop = metric_names(all_rows, {agent for config, _ in runs for agent in config["agents"]})
    if alone:
        names = [name for name in names if name != "repeated_tokens"]
    count = len(names) + len(of_loop) + 1
    figure, axes = grid(count, 3 if count <= 6 or count == 9 else 4, 4.2, 3.2, below=0.9)
    axes[-1].set(title="held-out reward against KL", xlabel=FIRST["kl"], ylabel=FIRST["task_reward"])
    for ax, name in zip(axes, names + of_loop, strict=False):
        ax.set(title=FIRST.get(name, name.replace("_", " ")), xlabel="iteration")
        ax.xaxis.get_major_locator().set_params(integer=True)
        at_base = {series(rows, f"eval/base/{kind}{name}").get(0) for _, rows in runs for kind in MARKERS}
        for value in at_base - {None}:
            ax.axhline(value, **BASE)

    groups = grouped([(config, {agent: (rows, agent) for agent in config["agents"]})
                      for config, rows in runs], by)
    first_agents = {id(rows): config["agents"][0] for config, rows in runs}
    looks = {"base": BASE}
    for i, (label, seeds) in enumerate(groups.items()):
        draw_agent(axes, names, seeds, look(i))
        of_first = [rows for rows, agent in seeds if agent == first_agents[id(rows)]]
        for ax, name in zip(axes[len(names):], of_loop if of_first else [], strict=False):   # each run once
            style = {"color": "black"} if alone else look(i)
            draw_training(ax, [series(rows, name) for rows in of_first], **style)
        looks[seeds[0][1] if alone else f"{label} (n = {len(seeds)})"] = look(i)
    if alone and len(groups) > 1:
        looks |= draw_first_role(axes[:-1], all_rows, looks)
    looks |= draw_limits(axes[-1], limits)
    if any(key.startswith("eval/base/greedy_") for row in all_rows for key in row):
        looks["greedy answers"] = {**BASE, "linestyle": "", "marker": "o", **MARKERS["greedy_"]}
    legend(figure, looks)
    task, preset = values_of(runs, "task"), values_of(runs, "preset")
    title = f"{task}, preset {preset}: mean and sample std over n seeds"
    if alone:
        title = f"{short_name(config['method']).upper()} on {task}, preset {preset}, seed {config['seed']}"
    lines = "lines: training batches, mean over a tenth of the run; points: held-out queries"
    figure.suptitle(f"{title}\n{lines}")
    save(figure, out)
    return figure


def draw_first_role(axes, rows: list[dict], looks: dict[str, dict]) -> dict[str, dict]:
    """Of several agents, who plays the first role: the colour behind each iteration. Returns the legend's
    looks.
    """
    iterations = defaultdict(list)
    for row in rows:
        if row.get("roles"):
            role, agent = next(iter(row["roles"].items()))
            iterations[role, agent].append((row["iteration"] - 0.5, 1))
    leads = {}
    for (role, agent), bars in iterations.items():
        color = looks[agent]["color"]
        leads[f"{agent} is {role}"] = {"color": color, "alpha": 0.15, "linewidth": 8}
        for ax in axes:
            ax.broken_barh(bars, (0, 1), transform=ax.get_xaxis_transform(), color=color, alpha=0.1,
                           linewidth=0, zorder=0, antialiased=False)
    return leads


def values_of(runs: list[tuple], setting: str) -> str:
    """A setting's value in all runs, or its values with strokes between them."""
    return "/".join(dict.fromkeys(short_name(shown(config[setting])) for config, _ in runs))


def draw_pass_at_k(runs: list[tuple[dict, dict]], ks: list[int], out: Path, by: Sequence[str] = ()) -> None:
    """pass@k against k, mean and sample std, of groups of runs (config.json, {agent or "base": metrics})."""
    groups, ks, looks = grouped(runs, by), sorted(set(ks)), {}
    figure, (ax,) = grid(1, 1, 8, 4.6, below=0.1 * len(groups))
    for i, (label, members) in enumerate(groups.items()):
        is_base = label.startswith("base")
        style = look(i - 1) | (BASE if is_base else {})
        band(ax, [{k: metrics[f"pass@{k}"] for k in ks} for metrics in members], **style, **MARKERS[""])
        looks[label if is_base else f"{label} (n = {len(members)})"] = style
    ax.set_xscale("log", base=2)
    ax.set_xticks(ks, labels=ks)
    task, queries, heat = (values_of(runs, setting) for setting in ("task", "eval_queries", "temperature"))
    ax.set(title=f"{task}: pass@k on {queries} held-out queries, temperature {heat}",
           xlabel="k responses per query", ylabel="share of queries solved by one of k")
    legend(figure, looks)
    save(figure, out)
