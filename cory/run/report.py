"""Tables and plots of one run, and of several compared."""
import math
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from cory.config import FREE_ON_RESUME, read_config
from cory.errors import UserError
from cory.run.log import read_jsonl

# The panels of a run. Metrics that are in neither list follow, under their own names.
PANELS = {
    "task_reward": "task reward",
    "kl": "KL from the base (nats per response)",
    "combined_reward": "combined reward: reward - initial eta x KL",
    "entropy": "entropy (nats per token)",
    "explained_variance": "explained variance of the critic",
    "observer_task_reward": "observer's task reward",
}
WITHOUT_PANEL = """role score length truncated sampling_gap policy_loss value_loss kl_loss
    approx_kl clip_fraction grad_norm learning_rate distinct_2 repeated_tokens base_perplexity
    pioneer_task_reward pioneer_kl pioneer_combined_reward
    observer_kl observer_combined_reward sampled_tokens""".split()
MAIN = ["combined_reward", "task_reward", "kl"]         # what runs are compared by

MARKERS = "os^DvpP*X"
LINES = ["-", "--", "-.", ":"]
BASE = dict(color="0.55", marker=".", linewidth=1.2)
SPLITS = {"eval": {}, "train": dict(linestyle=":", linewidth=1.8, marker="")}

# Runs that differ in nothing else are one group, of several seeds. The method is in every group's name.
NOT_IN_NAMES = FREE_ON_RESUME | {"seed", "device", "config_class", "agents", "method"}


def read_metrics(run_dir: Path) -> pd.DataFrame:
    """metrics.jsonl as a table: a row for each value, with iteration, split (train, eval), metric and who."""
    rows = pd.DataFrame(read_jsonl(run_dir / "metrics.jsonl"))
    if rows.empty:
        raise UserError("run_dir", str(run_dir), "has no metrics yet")
    values = rows.melt("iteration", var_name="key")
    names = values.key.str.extract("(?P<split>train|eval)/(?P<metric>.+)/(?P<who>.+)")
    return names.join(values).dropna()


# --- tables ---
def held_out(metrics: pd.DataFrame) -> pd.DataFrame:
    """A row for each evaluation (iteration, who), a column for each held-out metric."""
    rows = metrics[metrics.split == "eval"]
    indexed = rows.set_index(["iteration", "who", "metric"])
    return indexed.value.unstack(sort=False).rename_axis(columns=None)


def last_held_out(metrics: pd.DataFrame) -> pd.DataFrame:
    """A row for each base, agent and team, and for `mean`, over the trained agents."""
    return held_out(metrics).groupby("who", sort=False).tail(1).droplevel("iteration")


def tables(frame: pd.DataFrame, labels: list[str] | None = None) -> str:
    """A table of models, and one of teams. The index says who each row is of; labels: what it is called."""
    is_team = frame.index.str.endswith("team")
    if labels:
        frame = frame.set_axis(labels)
    parts = frame[~is_team], frame[is_team]
    return "\n\n".join(table(part) for part in parts if len(part))


def table(frame: pd.DataFrame) -> str:
    """Mean ± sample std over rows of the same label. Left out are metrics that are 0, unless all are, and
    the mean of one agent, which repeats the agent's row.
    """
    is_mean = frame.index == "mean"
    is_mean_of_one = is_mean & frame.duplicated(keep=False)
    frame = frame[~is_mean_of_one].dropna(axis=1, how="all")
    is_shown = (frame.abs().max() >= 0.0005) | frame.columns.isin(MAIN)
    if is_shown.any():
        frame = frame.loc[:, is_shown]
    groups = frame.groupby(level=0, sort=False)
    cells = groups.agg(cell)
    if len(cells) < len(frame):
        cells.insert(0, "runs", groups.size().astype(str))
    return cells.T.rename_axis(columns="held-out").to_string()


def cell(values: pd.Series) -> str:
    if values.hasnans:
        return "–"
    text = f"{values.mean():.3f}"
    if len(values) > 1:
        text += f" ± {values.std():.3f}"
    return text


# --- one run ---
def panels_of(metrics: pd.DataFrame) -> list[str]:
    """The metrics that vary, in order."""
    varies = metrics.groupby("metric").value.nunique() > 1
    panels = []
    for metric in dict.fromkeys([*PANELS, *metrics.metric]):
        is_hidden = metric in WITHOUT_PANEL or metric.startswith("greedy_")
        if varies.get(metric, False) and not is_hidden:
            panels.append(metric)
    return panels


def styles_of_run(config: dict) -> dict[str, dict]:
    """How bases, agents and teams are drawn; means over agents are not."""
    styles = {
        "team": dict(color="black", marker="D"),
        "base_team": BASE | dict(linestyle="--")}
    agents = config["agents"]
    for i, base in enumerate(sorted({*agents.values()})):
        styles[base] = BASE | dict(linestyle=LINES[i % 4])
    for i, agent in enumerate(agents):
        styles[agent] = dict(color=f"C{i}", marker=MARKERS[i % 9])
    return styles


def draw_run(run_dir: Path, out: Path) -> Figure:
    """A panel of each metric over iterations, and one of held-out reward against KL.

    Solid: held out (eval), each agent alone, the team in roles. Dashed: the team of bases. Dotted: in
    training, running means over a twentieth of the points, or over 3.
    """
    config = read_config(run_dir)
    metrics = read_metrics(run_dir)
    styles = styles_of_run(config)
    points = held_out(metrics).dropna(subset="kl")
    panels = panels_of(metrics)
    height = math.ceil((len(panels) + 1) / 4)
    figure = Figure(figsize=(14, 2.8 * height + 0.8), layout="constrained")
    figure.suptitle("{method} on {task}, preset {preset}, seed {seed}".format(**config))
    for place, metric in enumerate(panels, start=1):
        ax = figure.add_subplot(height, 4, place)
        title = PANELS.get(metric, metric.replace("_", " "))
        ax.set(title=title, xlabel="iteration")
        rows = metrics[metrics.metric == metric]
        for (who, split), line in rows.groupby(["who", "split"], sort=False):
            if who not in styles:
                continue
            curve = line.set_index("iteration").value
            if split == "train":
                curve = running_mean(curve)
            ax.plot(curve, label=f"{who}, {split}", **styles[who] | SPLITS[split])
    ax = figure.add_subplot(height, 4, len(panels) + 1)
    ax.set(title="held-out reward against KL", xlabel=PANELS["kl"])
    for who, line in points.groupby("who", sort=False):
        if who in styles:
            ax.plot(line.kl, line.task_reward, **styles[who])
    return save_figure(figure, out, ncols=3)


def running_mean(curve: pd.Series) -> pd.Series:
    window = max(3, len(curve) // 20)
    return curve.rolling(window, center=True, min_periods=1).mean()


def save_figure(figure: Figure, out: Path, ncols: int) -> Figure:
    """With one legend for all panels."""
    lines = {}
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_size(10)
        for line, name in zip(*ax.get_legend_handles_labels(), strict=True):
            lines.setdefault(name, line)
    figure.legend(lines.values(), lines, ncols=ncols, loc="outside lower center", frameon=False)
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
    if configs.duplicated(["method", *differ, "seed"]).any():       # the code may differ: named by folder
        differ.append("run_dir")
    configs = configs.sort_values(["method", *differ, "seed"])
    settings = []
    for _, run in configs[differ].astype(object).iterrows():
        settings.append("".join(f", {name} {value}" for name, value in run.dropna().items()))
    groups = configs[["method"]].assign(settings=settings)
    return groups.assign(group=groups.method + groups.settings)


def styles_of_groups(groups: pd.DataFrame) -> dict[str, dict]:
    """How each group is drawn: in a colour of its own, with the line of its method and the marker of its
    settings.
    """
    methods = groups.method.unique().tolist()
    settings = groups.settings.unique().tolist()
    styles = {}
    for method, setting, group in groups.drop_duplicates().itertuples(index=False):
        line = LINES[methods.index(method) % 4]
        marker = MARKERS[settings.index(setting) % 9]
        styles[group] = dict(color=f"C{len(styles)}", linestyle=line, marker=marker)
    return styles


def mean_over_runs(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(mean, half the width of its 95% t-interval), at the iterations that all runs have; no width of one."""
    from scipy.stats import t  # a run, which draws no comparison, would hold 25 MiB for it

    by_iteration = rows.groupby("iteration")[["tokens", *MAIN]]
    runs = by_iteration.size()
    half = by_iteration.sem().mul(t.ppf(0.975, runs - 1), axis=0)
    has_all = runs == runs.max()
    return by_iteration.mean()[has_all], half[has_all]


def draw_comparison(rows: pd.DataFrame, styles: dict[str, dict], over: str, out: Path) -> Figure:
    """The mean over the runs of each label, over iterations or tokens; labels without a style are bases'."""
    height = 7.5 + 0.2 * rows.label.nunique()
    figure = Figure(figsize=(11, height), layout="constrained")
    figure.suptitle("held out: means over runs, with 95% t-intervals where there are several")
    places = [["combined_reward"] * 3, ["task_reward", "kl", "against_kl"]]
    axes = figure.subplot_mosaic(places, height_ratios=(3, 2))
    for metric in MAIN:
        axes[metric].set(title=PANELS[metric], xlabel=over)
    axes["against_kl"].set(title="reward against KL", xlabel=PANELS["kl"])
    for i, (label, runs) in enumerate(rows.groupby("label", sort=False)):
        style = styles.get(label, BASE | dict(linestyle=LINES[i % 4]))
        mean, half = mean_over_runs(runs)
        mean["iteration"] = mean.index
        low = mean - half
        high = mean + half
        for metric in MAIN:
            axes[metric].plot(mean[over], mean[metric], label=label, **style)
            axes[metric].fill_between(mean[over], low[metric], high[metric], linewidth=0,
                                      color=style["color"], alpha=0.2)
        axes["against_kl"].plot(mean.kl, mean.task_reward, **style)
    return save_figure(figure, out, ncols=1)


def compare(run_dirs: list[Path], out: Path, over: str) -> None:
    """Prints tables of each group's last held-out metrics, and draws the groups into `out`, over `iteration`
    or over `tokens`: all that its agents have sampled in training.
    """
    groups = groups_of(run_dirs)
    frames = {}
    for run_dir, group in groups.group.items():
        metrics = read_metrics(run_dir)
        sampled = metrics[metrics.metric == "sampled_tokens"]
        tokens = sampled.groupby("iteration").value.sum().cumsum().rename("tokens")
        frames[run_dir, group] = held_out(metrics).join(tokens, on="iteration").fillna({"tokens": 0})
    rows = pd.concat(frames, names=["run", "group"])                # index: run, group, iteration, who
    rows = rows.query("who.str.match('mean$|team$|base')")          # not single agents
    last = rows.drop(columns="tokens").groupby(["run", "who"], sort=False).tail(1)
    values = last.round(3).groupby("who").nunique(dropna=False)
    is_shared = (values == 1).all(axis=1)                       # a base that all runs have

    def label(group: str, who: str) -> str:
        if who in ("mean", "team"):
            return group
        if is_shared[who]:
            return who
        return f"{group} {who}"

    rows["label"] = [label(group, who) for _, group, _, who in rows.index]
    labels = rows.label[last.index]
    print(tables(last.droplevel(["run", "group"]).reset_index("iteration"), [*labels]))
    out = out.with_suffix(out.suffix or ".png")
    out.parent.mkdir(parents=True, exist_ok=True)
    alone = rows.query("not who.str.endswith('team')")
    draw_comparison(alone, styles_of_groups(groups), over, out)
    print(f"written: {out}")
