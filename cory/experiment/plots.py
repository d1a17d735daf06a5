"""Pictures of whatever agents and metrics there are: runs, runs compared, pass@k, what an iteration costs."""
import math
from pathlib import Path
from typing import Collection, Sequence

import numpy as np

from cory.experiment.groups import grouped, shown
from cory.experiment.limit import Limit, limit_of
from cory.experiment.saved_config import read_config
from cory.names import short_name
from cory.system.files import read_log, replaced

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")  # Okabe and Ito's
LINES = (("-", "o"), ("--", "s"), ("-.", "^"))
LIMIT = {"color": "gray", "linewidth": 3, "alpha": 0.5}
BEST_OF = {"color": "gray", "linestyle": "", "marker": "x", "markersize": 7}
BASE = {"color": "gray", "linestyle": ":", "linewidth": 1.2}
MARKERS = {"": {"markeredgecolor": "white"}, "greedy_": {"markerfacecolor": "white"}}       # filled, hollow
FIRST = {"task_reward": "task reward", "kl": "KL per response (nats)", "combined_reward": "combined reward",
         "entropy": "entropy per token (nats)", "explained_variance": "explained variance"}
# The other metrics of every update and evaluation. A metric that stands neither here nor above has a panel.
WITHOUT_PANEL = {"task_reward_std", "length", "sampling_gap", "policy_loss", "value_loss", "value_error",
                 "clip_fraction", "approx_kl", "kl_loss", "grad_norm", "kl_coef", "learning_rate",
                 "distinct_1", "distinct_2", "repeated_tokens", "base_perplexity"}


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def series(rows: list[dict], key: str) -> dict[int, float]:
    """Iteration -> value of a metric, where it is a finite number."""
    return {row["iteration"]: row[key] for row in rows if is_number(row.get(key))}


def held_out(rows: list[dict], agent: str, name: str) -> dict[int, float]:
    """`series` of a held-out metric, from the base at iteration 0 on, which every agent equals there."""
    return series(rows, f"eval/base/{name}") | series(rows, f"eval/{agent}/{name}")


def smooth(values: dict[int, float], half: int) -> dict[int, float]:
    """Centred mean over 2 half + 1 values, over fewer of them near the ends."""
    y = list(values.values())
    return {x: np.mean(y[max(0, i - half):i + half + 1]) for i, x in enumerate(values)}


def half_window(rows: list[dict]) -> int:
    """Training lines are means over 2 half + 1 iterations: a tenth of the run, and at least three."""
    return max(1, len(rows) // 20)


def metric_names(rows: list[dict], agents: Collection[str]) -> tuple[list[str], list[str]]:
    """The metrics of agents that have a panel, and those of the loop. Held-out greedy_X shares X's panel."""
    keys = list(dict.fromkeys(key for row in rows for key in row if is_number(row[key])))
    of_loop = [key for key in keys if "/" not in key and key not in ("iteration", "seconds")]
    trained = [key.partition("/")[2] for key in keys if key.startswith(tuple(f"{name}/" for name in agents))]
    found = dict.fromkeys(trained + [key.split("/", 2)[2] for key in keys if key.startswith("eval/")])
    left_out = WITHOUT_PANEL | {f"greedy_{name}" for name in found} - {*trained}
    return [name for name in FIRST | found if name in found and name not in left_out], of_loop


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


def draw_limits(ax, limits: Collection[Limit | None]) -> dict[str, dict]:
    """What the base's own answers reach, in a panel of reward against KL. Returns the legend's looks."""
    looks = {}
    for limit in {tuple(limit.tilts): limit for limit in limits if limit}.values():
        ax.plot([p.kl for p in limit.tilts], [p.reward for p in limit.tilts], **LIMIT, zorder=1)
        best = limit.best_of.values()
        ax.plot([p.kl for p in best], [p.reward for p in best], **BEST_OF, zorder=1)
        looks["limit: the base tilted by reward"] = LIMIT
        looks[f"the base's best of {', '.join(map(str, limit.best_of))}"] = BEST_OF
    return looks


def legend(figure, looks: dict[str, dict], rows: Sequence[dict] = ()) -> None:
    """Under the panels, where it covers nothing: `looks`, and the base and greedy answers of `rows`."""
    from matplotlib.lines import Line2D
    if rows:
        looks = {"base": BASE} | looks
    if any(key.startswith("eval/base/greedy_") for row in rows for key in row):
        looks = looks | {"greedy answers": {**BASE, "linestyle": "", "marker": "o", **MARKERS["greedy_"]}}
    handles = [Line2D([], [], label=label, **style) for label, style in looks.items()]
    columns = max(1, int(12 * figure.get_figwidth() / (max(map(len, looks)) + 7)))  # about 12 letters an inch
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def panels(groups: dict, of_runs: dict, names: list[str], of_loop: list[str], half: int):
    """Figure, axes and looks of groups {label: [(rows, agent) of each seed]}.

    A panel for each of the agents' metrics `names`: training batches smoothed, held-out points, the base. One
    for each metric `of_loop`, in groups `of_runs` that hold each run once. Bands: one sample std over seeds.
    """
    looks = {label: look(i) for i, label in enumerate(groups)}
    titles = [FIRST.get(name, name.replace("_", " ")) for name in names + of_loop]
    count = len(titles) + 1
    figure, axes = grid(count, 3 if count <= 6 or count == 9 else 4, 4.2, 3.2, below=0.9)
    for ax, title in zip(axes, titles, strict=False):
        ax.set(title=title, xlabel="iteration")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set(title="held-out reward against KL", xlabel=FIRST["kl"], ylabel=FIRST["task_reward"])

    def training(ax, seeds: list[dict], color: str = "black", linestyle: str = "-", **_) -> None:
        if len(seeds) == 1:                                         # every batch, thin and pale
            ax.plot(list(seeds[0]), list(seeds[0].values()), color=color, linewidth=0.7, alpha=0.3)
        smoothed = [smooth(values, half) for values in seeds]
        band(ax, smoothed, color=color, linestyle=linestyle, linewidth=1.2, alpha=0.6)

    for ax, name in zip(axes, names, strict=False):
        at_base = set()
        for label, members in groups.items():
            training(ax, [series(rows, f"{agent}/{name}") for rows, agent in members], **looks[label])
            for kind, marker in MARKERS.items():
                points = [held_out(rows, agent, kind + name) for rows, agent in members]
                band(ax, points, **looks[label], **marker, zorder=3)
                at_base.update(values[0] for values in points if 0 in values)
        for value in at_base:
            ax.axhline(value, **BASE)
    for ax, name in zip(axes[len(names):-1], of_loop, strict=True):
        for label, members in of_runs.items():
            training(ax, [series(rows, name) for rows, _ in members], **looks.get(label, {}))
    for label, members in groups.items():
        for rows, agent in members:
            kl, reward = held_out(rows, agent, "kl"), held_out(rows, agent, "task_reward")
            both = [i for i in kl if i in reward]
            axes[-1].plot([kl[i] for i in both], [reward[i] for i in both], **looks[label], **MARKERS[""])
    return figure, axes, looks


def save(figure, path: Path, dpi: int) -> None:
    """Whole or not at all."""
    with replaced(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format=path.suffix[1:])


def draw_curves(run_dir: Path):
    """`panels` of one run as curves.png in its folder, on the colour of who plays the first role."""
    config, rows = read_config(run_dir), read_log(run_dir / "metrics.jsonl")
    agents, half, last = config["agents"], half_window(rows), rows[-1]["iteration"]
    groups = {agent: [(rows, agent)] for agent in agents}
    figure, axes, looks = panels(groups, {"": [(rows, "")]}, *metric_names(rows, agents), half)
    spans = {}                                                      # (agent, role) -> its iterations
    for row in rows if len(agents) > 1 else []:
        for role, agent in list(row.get("roles", {}).items())[:1]:
            spans.setdefault((agent, role), []).append((row["iteration"] - 0.5, 1))
    for ax in axes[:-1]:
        ax.set_xlim(-0.03 * last, 1.03 * last)
        for (agent, _), iterations in spans.items():
            style = {"color": looks[agent]["color"], "alpha": 0.1, "linewidth": 0, "zorder": 0}
            ax.broken_barh(iterations, (0, 1), transform=ax.get_xaxis_transform(), **style, antialiased=False)
    leads = {f"{agent} is {role}": {"color": looks[agent]["color"], "alpha": 0.15, "linewidth": 8}
             for agent, role in spans}
    limits = draw_limits(axes[-1], [limit_of(run_dir)])
    legend(figure, looks | leads | limits, rows)
    method, task = short_name(config["method"]).upper(), short_name(config["task"])
    figure.suptitle(f"{method} on {task}, preset {config['preset']}, seed {config['seed']}\nlines: training "
                    f"batches, and their mean over {2 * half + 1} iterations; points: held-out queries")
    save(figure, run_dir / "curves.png", 110)
    return figure


def draw_comparison(runs: list[tuple[dict, list[dict]]], out: Path, by: Sequence[str] = (),
                    limits: Collection[Limit | None] = ()):
    """`panels` of the groups of runs, each (config.json as a dict, rows of metrics.jsonl), with their limits.
    """
    of_agents = [(config, {agent: (rows, agent) for agent in config["agents"]}) for config, rows in runs]
    once = [({**config, "agents": config["agents"][:1]}, of_agent) for config, of_agent in of_agents]
    all_rows = [row for _, rows in runs for row in rows]
    names, of_loop = metric_names(all_rows, {agent for config, _ in runs for agent in config["agents"]})
    if any("eval/base/repeated_tokens" in row for row in all_rows):
        names.insert(3, "repeated_tokens")                          # the collapse that the paper warns of
    groups, half = grouped(of_agents, by), max(half_window(rows) for _, rows in runs)
    figure, axes, looks = panels(groups, grouped(once, by), names, of_loop, half)
    looks = {f"{label} (n = {len(groups[label])})": looks[label] for label in groups}
    legend(figure, looks | draw_limits(axes[-1], limits), all_rows)
    task, preset = values_of(runs, "task"), values_of(runs, "preset")
    figure.suptitle(f"{task}, preset {preset}: mean and sample std over n seeds\nlines: training batches, "
                    f"mean over {2 * half + 1} iterations; points: held-out queries")
    save(figure, out, 110)
    return figure


def values_of(runs: list[tuple], setting: str) -> str:
    """A setting's value in all runs, or its values with strokes between them."""
    return "/".join(dict.fromkeys(short_name(shown(config[setting])) for config, _ in runs))


def draw_pass_at_k(runs: list[tuple[dict, dict]], ks: list[int], out: Path, by: Sequence[str] = ()) -> None:
    """pass@k against k, mean and sample std, of groups of runs (config.json, {agent or "base": metrics})."""
    groups, ks, looks = grouped(runs, by), sorted(set(ks)), {}
    figure, (ax,) = grid(1, 1, 8, 4.6, below=0.1 * len(groups))
    for i, (label, members) in enumerate(groups.items()):
        style = look(i - 1) | (BASE if label.startswith("base") else {})
        band(ax, [{k: found[f"pass@{k}"] for k in ks} for found in members], **style, **MARKERS[""])
        looks[label if label.startswith("base") else f"{label} (n = {len(members)})"] = style
    ax.set_xscale("log", base=2)
    ax.set_xticks(ks, labels=ks)
    task, queries, heat = (values_of(runs, setting) for setting in ("task", "eval_queries", "temperature"))
    ax.set(title=f"{task}: pass@k on {queries} held-out queries, temperature {heat}",
           xlabel="k responses per query", ylabel="share of queries solved by one of k")
    legend(figure, looks)
    save(figure, out, 110)


def draw_costs(rows: list[dict], out: Path) -> None:
    """Seconds and peak memory of an iteration against each size varied. Dashed: in proportion to the last."""
    sizes = {"batch": "queries per iteration", "response": "tokens per response"}
    varied = [size for size in sizes if len({row[size] for row in rows}) > 1]
    figure, axes = grid(2 * len(varied), 2, 5, 3.8)
    for left, right, size in zip(axes[::2], axes[1::2], varied, strict=True):
        fixed = "response" if size == "batch" else "batch"
        for i, value in enumerate(sorted({row[fixed] for row in rows})):
            line = sorted((row for row in rows if row[fixed] == value), key=lambda row: row[size])
            x, seconds = [row[size] for row in line], [row["seconds"]["total"] for row in line]
            left.plot(x, seconds, **look(i), label=f"{fixed} {value}")
            left.plot([0, x[-1]], [0, seconds[-1]], color=look(i)["color"], linestyle="--", linewidth=0.8)
            right.plot(x, [row.get("peak_cuda_gib", row["peak_rss_gib"]) for row in line], **look(i))
        for ax, label in ((left, "seconds per iteration"), (right, "peak memory, GiB")):
            ax.set(xlabel=sizes[size], ylabel=label, xlim=(0, None), ylim=(0, 1.05 * ax.get_ylim()[1]))
        left.legend(fontsize=8)
    save(figure, out, 110)
