"""Tables and plots of one run, and of several compared."""
import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from cory.config import FREE_ON_RESUME, read_config
from cory.run.log import read_jsonl

# The panels of a run. Those of metrics that are in neither list follow, under the names of the metrics.
PANELS = {
    "task_reward": "task reward",
    "kl": "KL from the base (nats per response)",
    "combined_reward": "combined reward: reward - eta KL",
    "score": "score: what agents are trained on",
    "entropy": "entropy (nats per token)",
    "explained_variance": "explained variance of the critic",
    "observer_reward": "observer's reward",
    "observer_copies": "share of copies by the observer",
}
WITHOUT_PANEL = """role task_reward_std length truncated sampling_gap policy_loss value_loss kl_loss
    approx_kl clip_fraction grad_norm learning_rate distinct_1 distinct_2 repeated_tokens base_perplexity
    pioneer_reward seconds""".split()
MAIN = ["combined_reward", "task_reward", "kl"]         # what runs are compared by

PALETTE = {"ppo": "#08519c", "cory": "#d94801"}     # in every picture; others have matplotlib's from C2 on
MARKERS = "os^Dvp"
LINES = ["-", "--", "-.", ":"]
BASE = dict(color="0.55", marker=".", linewidth=1.2)
DOTTED = dict(linestyle=":", linewidth=1.8, marker="")
KINDS = {"held out": {}, "greedy": dict(linestyle="--"), "training": DOTTED}

# Runs that differ in nothing else are one group, of several seeds. The method is in every group's name.
NOT_IN_NAMES = FREE_ON_RESUME | {"seed", "device", "config_class", "agents", "method"}


# --- tables ---
def held_out(rows: list[dict]) -> pd.DataFrame:
    """Rows of metrics.jsonl -> a row for each iteration and who, a column for each metric `eval_NAME/WHO`."""
    found = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("eval_"):
                name, who = key.removeprefix("eval_").rsplit("/", 1)
                found.setdefault((row["iteration"], who), {})[name] = value
    index = pd.MultiIndex.from_tuples(found, names=["iteration", "who"])
    return pd.DataFrame([*found.values()], index)


def last_held_out(rows: list[dict]) -> dict[str, dict[str, float]]:
    """The last held-out metrics of each base, agent, team, and of `mean`, over the trained agents."""
    last = held_out(rows).groupby("who").tail(1).droplevel("iteration")
    return {who: metrics.dropna().to_dict() for who, metrics in last.iterrows()}


def tables(corner: str, frame: pd.DataFrame, labels: list[str] | None = None) -> str:
    """A table of models, and one of teams. The index says who each row is of; labels: what it is called."""
    is_team = frame.index.str.endswith("team")
    if labels:
        frame = frame.set_axis(labels)
    parts = frame[~is_team], frame[is_team]
    return "\n\n".join(table(corner, part) for part in parts if len(part))


def table(corner: str, frame: pd.DataFrame) -> str:
    """Mean ± sample std over rows of the same label. Left out are the mean of one agent, and, unless all
    would be, metrics that are 0.
    """
    is_mean_of_one = (frame.index == "mean") & frame.duplicated(keep=False)
    frame = frame[~is_mean_of_one].dropna(axis=1, how="all")
    largest = frame.abs().max()
    is_shown = (largest >= 0.0005) | frame.columns.isin(MAIN)
    if is_shown.any():
        frame = frame.loc[:, is_shown]
    groups = frame.groupby(level=0, sort=False)
    cells = groups.agg(lambda values: cell(values, largest[values.name]))
    if len(cells) < len(frame):
        cells.insert(0, "runs", groups.size().astype(str))
    upright = cells.T.rename_axis(columns=corner).to_string()
    width = upright.index("\n")
    if width <= 100:
        return upright
    return cells.rename_axis(columns=corner).to_string(line_width=100)


def cell(values: pd.Series, largest: float) -> str:
    """To three significant digits of the largest number in the row, but at most three decimals."""
    if values.hasnans:
        return "–"
    decimals = 2 - np.floor(np.log10(largest + 1e-6))
    digits = ".3g"
    if decimals >= 0:
        digits = f".{min(int(decimals), 3)}f"
    text = f"{values.mean():{digits}}"
    if len(values) > 1:
        text += f" ± {values.std():{digits}}"
    return text


# --- one run ---
Curves = dict[tuple[str, str, str], pd.Series]         # by metric, kind, who; over iterations


def read_curves(rows: list[dict]) -> Curves:
    """Of metrics that may have a panel. In training: means over a twentieth of the run (or 3 iterations)."""
    frame = pd.DataFrame(rows).groupby("iteration").first()
    frame = frame.replace([np.inf, -np.inf], np.nan)
    scores = [key for key in frame if key.startswith("score/")]
    if len(scores) > 1 and "score" not in frame:
        first, *others = scores
        if np.allclose(frame[others], frame[[first]], equal_nan=True):      # one for all, as in CORY
            frame = frame.drop(columns=others).rename(columns={first: "score"})
    window = 2 * math.ceil(frame.index.max() / 60) + 1
    curves = {}
    for key, curve in frame.items():
        if "/" not in key:
            key += "/team"
        metric, who = key.rsplit("/", 1)
        kind = "training"
        if metric.startswith("eval_"):
            kind = "held out"
            metric = metric.removeprefix("eval_")
        if metric.startswith("greedy_"):
            kind = "greedy"
            metric = metric.removeprefix("greedy_")
        if kind == "training":
            mean = curve.rolling(window, center=True, min_periods=1).mean()
            curve = mean.where(curve.notna())
        if metric not in WITHOUT_PANEL:
            curves[metric, kind, who] = curve.dropna()
    return curves


def panels_of(curves: Curves) -> list[str]:
    """The metrics that vary, in order. Reward and KL have a panel in any case."""
    values = {metric: set() for metric in PANELS}
    for (metric, _, _), curve in curves.items():
        values.setdefault(metric, set()).update(curve)
    always = ["task_reward", "kl"]
    return [metric for metric in values if metric in always or len(values[metric]) > 1]


def exchanges(rows: list[dict]) -> list[int]:
    """Iterations whose roles are not those of the iteration before."""
    found = []
    before = None
    for row in rows:
        roles = {key: x for key, x in row.items() if key.startswith("role/")}
        if not roles:                                   # a row of held-out metrics
            continue
        if before and roles != before:
            found.append(row["iteration"])
        before = roles
    return found


def styles_of_run(config: dict) -> dict[str, dict]:
    """How bases, agents and teams are drawn; means over agents are not."""
    styles = {"team": dict(color="black", marker="D"), "base_team": BASE | dict(linestyle="--")}
    bases = sorted({*config["agents"].values()})
    for i, base in enumerate(bases):
        styles[base] = BASE | dict(linestyle=["-", "-.", ":"][i % 3])
    darkest = np.array(to_rgb(PALETTE.get(config["method"], "C2")))
    for i, agent in enumerate(config["agents"]):
        lighter = 1 - (1 - darkest) * 0.6**i
        styles[agent] = dict(color=lighter, marker=MARKERS[i % 6])
    return styles


def draw_panel(ax, metric: str, curves: Curves, styles: dict[str, dict]) -> None:
    """Dotted: agents in their roles, in training. Solid: held out, each agent alone; the team in roles.
    Dashed: greedy; the team of bases.
    """
    title = PANELS.get(metric, metric.replace("_", " "))
    ax.set(title=title, xlabel="iteration")
    for (name, kind, who), curve in curves.items():
        if name == metric and who in styles:
            label = who if who.startswith("base") else f"{who}, {kind}"
            ax.plot(curve, label=label, **styles[who] | KINDS[kind])


def draw_run(run_dir: Path, out: Path) -> Figure:
    """A panel of each metric over iterations, and one of held-out reward against KL."""
    config = read_config(run_dir)
    rows = read_jsonl(run_dir / "metrics.jsonl")
    styles = styles_of_run(config)
    curves = read_curves(rows)
    panels = panels_of(curves)
    count = len(panels) + 1
    height = math.ceil(count / 4)
    figure = Figure(figsize=(14, 2.8 * height + 0.8), layout="constrained")
    figure.suptitle("{method} on {task}, preset {preset}, seed {seed}".format(**config))
    axes = [figure.add_subplot(height, 4, i + 1) for i in range(count)]
    *over_iterations, against_kl = axes
    for ax, metric in zip(over_iterations, panels, strict=True):
        for iteration in exchanges(rows):
            ax.axvline(iteration - 0.5, color="0.8", linewidth=0.8, zorder=0, label="exchange of roles")
        draw_panel(ax, metric, curves, styles)
    for who, points in held_out(rows).dropna(subset="kl").groupby("who"):
        if who in styles:
            against_kl.plot(points.kl, points.task_reward, **styles[who])
    against_kl.set(title="held-out reward against KL", xlabel=PANELS["kl"])
    return save_figure(figure, out, ncols=3)


def save_figure(figure: Figure, out: Path, ncols: int) -> Figure:
    """With one legend for all panels: held out first, then training, then the rest."""
    lines = {}
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_size(10)
        for line, name in zip(*ax.get_legend_handles_labels(), strict=True):
            lines.setdefault(name, line)
    names = sorted(lines, key=lambda name: ("held out" not in name, "training" not in name))
    in_order = [lines[name] for name in names]
    figure.legend(in_order, names, ncols=ncols, loc="outside lower center", frameon=False)
    figure.savefig(out, dpi=110)
    return figure


# --- several runs compared ---
def groups_of(run_dirs: list[Path]) -> pd.DataFrame:
    """By run: its method; `settings`, the other ones in which the runs differ; `group`, which names both."""
    configs = pd.DataFrame([read_config(run_dir) for run_dir in run_dirs], index=run_dirs)
    configs["run_dir"] = [str(run_dir) for run_dir in run_dirs]     # where a run lies now
    differ = []
    for name in configs:
        values = configs[name].map(str).unique()
        if len(values) > 1 and name not in NOT_IN_NAMES:
            differ.append(name)
    if configs.duplicated(["method", *differ, "seed"]).any():       # alike, seed included: say, by other code
        differ.append("run_dir")
    configs = configs.sort_values(["method", *differ, "seed"])
    settings = []
    for _, run in configs[differ].astype(object).iterrows():
        settings.append("".join(f", {name} {value}" for name, value in run.dropna().items()))
    groups = configs[["method"]].assign(settings=settings)
    return groups.assign(group=groups.method + groups.settings)


def styles_of_groups(groups: pd.DataFrame) -> dict[str, dict]:
    """How each group is drawn: the settings give its colour, the method its line; if only methods differ,
    they have their own colours.
    """
    methods = groups.method.unique().tolist()
    settings = groups.settings.unique().tolist()
    styles = {}
    for method, setting, group in groups.drop_duplicates().itertuples(index=False):
        i = methods.index(method)
        j = settings.index(setting)
        color = PALETTE.get(method, f"C{i + 2}")
        if len(settings) > 1:
            color = colormaps["viridis"](0.9 * j / (len(settings) - 1))
        marker = MARKERS[(i + j) % 6]
        styles[group] = dict(color=color, marker=marker, linestyle=LINES[i % 4])
    return styles


def mean_over_runs(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(mean, half the width of its 95% t-interval), at the iterations that all runs have; no width of one."""
    from scipy.stats import t  # a run, which draws no comparison, would hold 25 MiB for it

    by_iteration = rows.groupby("iteration")[MAIN]
    runs = by_iteration.size()
    quantile = t.ppf(0.975, runs - 1)
    half = by_iteration.sem().mul(quantile, axis=0)
    has_all = runs == runs.max()
    return by_iteration.mean()[has_all], half[has_all]


def draw_comparison(rows: pd.DataFrame, groups: pd.DataFrame, out: Path) -> Figure:
    """A curve is the mean over a group's runs of the mean over agents."""
    styles = styles_of_groups(groups)
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    figure.suptitle("held out: means over runs, with 95% t-intervals")
    places = [["combined_reward"] * 3, ["task_reward", "kl", "against_kl"]]
    axes = figure.subplot_mosaic(places, height_ratios=(3, 2))
    for metric in MAIN:
        axes[metric].set(title=PANELS[metric], xlabel="iteration")
    axes["against_kl"].set(title="reward against KL", xlabel=PANELS["kl"])
    for (label, who), group_rows in rows.groupby(["label", "who"], sort=False):
        is_base = who != "mean"
        style = BASE if is_base else styles[label]
        name = f"_{label}" if is_base else label        # matplotlib's legend leaves out names with _
        mean, half = mean_over_runs(group_rows)
        low = mean - half
        high = mean + half
        for metric in MAIN:
            axes[metric].plot(mean[metric], label=name, **style)
            axes[metric].fill_between(mean.index, low[metric], high[metric], linewidth=0,
                                      color=style["color"], alpha=0.5 / max(3, len(styles)))
        axes["against_kl"].plot(mean.kl, mean.task_reward, **style)
        if is_base:
            end = mean.index[-1], mean.combined_reward.iloc[-1]
            axes["combined_reward"].annotate(label, end, ha="right", va="bottom")
    columns = max(2, groups.method.nunique())
    if max(len(group) for group in styles) >= 60:
        columns = 1
    return save_figure(figure, out, columns)


def compare(run_dirs: list[Path], out: Path) -> None:
    """Prints tables of each group's last held-out metrics, and draws the groups into `out`."""
    groups = groups_of(run_dirs)
    frames = {}
    for run_dir, group in groups.group.items():
        frames[run_dir, group] = held_out(read_jsonl(run_dir / "metrics.jsonl"))
    rows = pd.concat(frames, names=["run", "group"]).query("who.str.match('mean$|team$|base')")
    last = rows[~rows.index.droplevel("iteration").duplicated(keep="last")]
    by_who = last.round(3).groupby("who")
    distinct = by_who.nunique(dropna=False).max(axis=1)

    def label(group: str, who: str) -> str:
        if who in ("mean", "team"):
            return group
        if distinct[who] == 1:                          # the base of all runs
            return who
        return f"{group} {who}"

    rows["label"] = [label(group, who) for _, group, _, who in rows.index]
    labels = rows.label[last.index]
    print(tables("held-out", last.droplevel(["run", "group", "iteration"]), [*labels]))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_comparison(rows.query("not who.str.endswith('team')"), groups, out)
    print(f"written: {out}")
