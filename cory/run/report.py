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

# Panels of a run stand in this order, and those of other metrics after them.
TITLES = {"task_reward": "task reward", "kl": "KL from the base (nats per response)",
          "combined_reward": "combined reward: reward - eta KL", "score": "score: what agents are trained on",
          "entropy": "entropy (nats per token)", "explained_variance": "explained variance of the critic",
          "observer_reward": "observer's reward", "observer_copies": "share of copies by the observer"}
WITHOUT_PANEL = """role task_reward_std length truncated sampling_gap policy_loss value_loss kl_loss
    approx_kl clip_fraction grad_norm learning_rate distinct_1 distinct_2 repeated_tokens base_perplexity
    pioneer_reward seconds""".split()
MAIN = ["combined_reward", "task_reward", "kl"]         # what runs are compared by
PALETTE = {"ppo": "#08519c", "cory": "#d94801"}     # in every picture; others have matplotlib's from C2 on
MARKERS, LINES = "os^Dvp", ["-", "--", "-.", ":"]
BASE, DOTTED = dict(color="0.55", marker=".", linewidth=1.2), dict(linestyle=":", linewidth=1.8, marker="")
# Runs that differ in nothing else are one group, of several seeds. The method is in every group's name.
NOT_IN_NAMES = FREE_ON_RESUME | {"seed", "device", "config_class", "agents", "method"}


# --- tables ---
def held_out(rows: list[dict]) -> pd.DataFrame:
    """Rows of metrics.jsonl -> a row for each iteration and who, a column for each metric `eval_NAME/WHO`."""
    frame = pd.DataFrame(rows).set_index("iteration").filter(regex="^eval_")
    frame.columns = frame.columns.str.removeprefix("eval_").str.rsplit("/", n=1, expand=True)
    return frame.stack(1).dropna(how="all").rename_axis(["iteration", "who"])


def last_held_out(rows: list[dict]) -> dict[str, dict[str, float]]:
    """The last held-out metrics of each base, agent, team, and of `mean`, over the trained agents."""
    last = held_out(rows).groupby("who").tail(1).droplevel("iteration")
    return {who: metrics.dropna().to_dict() for who, metrics in last.iterrows()}


def tables(corner: str, frame: pd.DataFrame, labels: list[str] | None = None) -> str:
    """A table of models, and one of teams. The index says who each row is of; labels: what it is called."""
    is_team = frame.index.str.endswith("team")
    frame = frame.set_axis(labels or frame.index)
    return "\n\n".join(table(corner, part) for part in (frame[~is_team], frame[is_team]) if len(part))


def table(corner: str, frame: pd.DataFrame) -> str:
    """Mean ± sample std over rows of the same label, but no mean of one agent; three significant digits."""
    frame = frame[~(frame.duplicated(keep=False) & (frame.index == "mean"))].dropna(axis=1, how="all")
    frame = frame.loc[:, (frame.abs().max() >= 0.0005) | frame.columns.isin(MAIN)]
    decimals = (2 - np.floor(np.log10(frame.abs().max() + 1e-6))).clip(upper=3)

    def cell(x: pd.Series) -> str:
        spec = f".{decimals[x.name]:.0f}f" if decimals[x.name] >= 0 else ".3g"
        std = f" ± {x.std():{spec}}" if len(x) > 1 else ""
        return "–" if x.hasnans else f"{x.mean():{spec}}{std}"

    groups = frame.groupby(level=0, sort=False)
    cells = groups.agg(cell).rename_axis(columns=corner)
    if len(cells) < len(frame):
        cells.insert(0, "runs", groups.size().astype(str))
    text = cells.T.rename_axis(columns=corner, index=None).to_string()
    return text if text.index("\n") <= 100 else cells.to_string(line_width=100)


# --- one run ---
def read_curves(rows: list[dict]) -> pd.DataFrame:
    """A row for each value to draw: in training, the mean over a twentieth of the run (or 3 iterations)."""
    frame = pd.DataFrame(rows).replace([np.inf, -np.inf], np.nan).groupby("iteration").first()
    in_training = frame.columns[~frame.columns.str.startswith("eval_")]
    window = frame[in_training].rolling(2 * math.ceil(frame.index.max() / 60) + 1, center=True, min_periods=1)
    frame[in_training] = window.mean().where(frame[in_training].notna())
    score = frame.filter(regex="^score/").round(6)
    # all agents have the same, as in CORY
    if "score" not in frame and score.shape[1] > 1 and score.nunique(axis=1, dropna=False).max() == 1:
        frame = frame.rename(columns={score.columns[0]: "score"}).drop(columns=score.columns[1:])
    curves = frame.reset_index().melt("iteration").dropna()
    key = curves.variable.str.extract("^(?P<kind>eval_)?(?P<metric>.+?)(?:/(?P<who>[^/]+))?$")
    curves = curves.join(key.fillna({"kind": "training", "who": "team"}).replace("eval_", "held out"))
    curves["panel"] = curves.metric.str.removeprefix("greedy_").str.replace(
        "after_(?:better|worse)$", "reward", regex=True)
    return curves[~curves.panel.isin(WITHOUT_PANEL)].groupby("panel").filter(
        lambda panel: panel.name in ("task_reward", "kl") or panel.value.nunique() > 1)


def draw_run(run_dir: Path, out: Path) -> Figure:
    """Dotted: agents in their roles, in training. Solid: held out, each agent alone; the team in roles."""
    config, rows = read_config(run_dir), read_jsonl(run_dir / "metrics.jsonl")
    agents, method, curves = config["agents"], config["method"], read_curves(rows)
    looks = {"base_team": BASE | dict(linestyle="--"), "team": dict(color="black", marker="D")}
    for i, base in enumerate(dict.fromkeys(agents.values())):
        looks[base] = BASE | dict(linestyle=["-", "-.", ":"][i % 3])
    darkest = np.array(to_rgb(PALETTE.get(method, "C2")))
    for i, agent in enumerate(agents):
        looks[agent] = dict(color=1 - (1 - darkest) * 0.6**i, marker=MARKERS[i % 6])
    panels = sorted(curves.panel.unique(), key=lambda name: (*TITLES, name).index(name))
    count = len(panels) + 1
    columns = min((3, 4, 5), key=lambda columns: -count % columns)      # with the fewest empty places
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(3.5 * columns, 2.8 * lines + 0.8), layout="constrained")
    figure.suptitle(f"{method} on {config['task']}, preset {config['preset']}, seed {config['seed']}")
    *over_iterations, against_kl = [figure.add_subplot(lines, columns, i + 1) for i in range(count)]
    roles = pd.DataFrame(rows).set_index("iteration").filter(regex="^role/").dropna(how="all")
    for ax, panel in zip(over_iterations, panels, strict=True):
        of_panel = curves[(curves.panel == panel) & curves.who.isin([*looks])]
        others = sorted({*of_panel.metric} - {panel})
        names = [metric.removeprefix(panel.removesuffix("reward")).replace("_", " ") for metric in others]
        marks = ", ".join(map(" ".join, zip("△▽", names, strict=False)))
        ax.set(title=f"{TITLES.get(panel, panel.replace('_', ' '))}\n{marks}".strip(), xlabel="iteration")
        for iteration in roles.index[(roles.fillna(-1).diff().fillna(0) != 0).any(axis=1)]:
            ax.axvline(iteration - 0.5, color="0.8", linewidth=0.8, zorder=0, label="exchange of roles")
        for (metric, kind, who), curve in of_panel.groupby(["metric", "kind", "who"]):
            look = looks[who] | (DOTTED if kind == "training" else {})
            label = who if who.startswith("base") else f"{who}, {kind}"
            if metric in others and kind != "training":                     # not in the legend
                look, label = look | {"marker": "^v"[others.index(metric)], "markerfacecolor": "w"}, "_"
            ax.plot(curve.iteration, curve.value, label=label, **look)
    for who, points in held_out(rows).dropna(subset="kl").query("who in @looks").groupby("who"):
        against_kl.plot(points.kl, points.task_reward, **looks[who])
    against_kl.set(title="held-out reward against KL", xlabel=TITLES["kl"])
    return finished(figure, out, ncols=3)


def finished(figure: Figure, out: Path, ncols: int) -> Figure:
    """Saves the figure with one legend: held out first, then training, then the rest."""
    lines = {}
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_size(10)
        for line, name in zip(*ax.get_legend_handles_labels(), strict=True):
            lines.setdefault(name, line)
    names = sorted(lines, key=lambda name: ("held out" not in name, "training" not in name))
    figure.legend([*map(lines.get, names)], names, ncols=ncols, loc="outside lower center", frameon=False)
    figure.savefig(out, dpi=110)
    return figure


# --- several runs compared ---
def groups_of(run_dirs: list[Path]) -> pd.DataFrame:
    """By run: its method; `settings`, the other ones in which the runs differ; `group`, which names both."""
    configs = pd.DataFrame([read_config(run_dir) for run_dir in run_dirs], index=run_dirs)
    configs["run_dir"] = [*map(str, run_dirs)]                      # where a run lies now
    differ = [name for name in configs if name not in NOT_IN_NAMES and configs[name].map(str).nunique() > 1]
    if configs.duplicated(["method", *differ, "seed"]).any():       # alike, seed included: say, by other code
        differ.append("run_dir")
    groups = configs[["method"]].copy()
    groups["settings"] = ["".join(f", {name} {x}" for name, x in run.dropna().items())
                          for _, run in configs[differ].astype(object).iterrows()]
    in_order = configs.sort_values(["method", *differ, "seed"]).index
    return groups.assign(group=groups.method + groups.settings).loc[in_order]


def looks_of(groups: pd.DataFrame) -> dict[str, dict]:
    """How each group is drawn: the settings give its colour and marker, the method its line; if only methods
    differ, they have their own colours, and if only settings do, every sixth begins another line.
    """
    settings, methods = groups.settings.unique().tolist(), groups.method.unique().tolist()
    looks = {}
    for method, of_settings, group in groups.drop_duplicates().itertuples(index=False):
        line, place = methods.index(method), settings.index(of_settings)
        color = PALETTE.get(method, f"C{line + 2}")
        if len(settings) > 1:
            color = colormaps["viridis"](0.9 * (place % 6) / min(5, len(settings) - 1))
        style = LINES[(line + place // 6) % 4]
        looks[group] = dict(color=color, marker=MARKERS[(line + place) % 6], linestyle=style)
    return looks


def draw_comparison(rows: pd.DataFrame, groups: pd.DataFrame, out: Path) -> Figure:
    """A curve is the mean over a group's runs, at iterations that all have, of the mean over agents."""
    from scipy.stats import t  # a run, which draws no comparison, would hold 25 MiB for it

    looks = looks_of(groups)
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    figure.suptitle("held out: means over runs, with 95% t-intervals")
    axes = figure.subplot_mosaic([MAIN[:1] * 3, [*MAIN[1:], "against_kl"]], height_ratios=(3, 2))
    for (label, who), of_group in rows.groupby(["label", "who"], sort=False):
        by_iteration, look = of_group.groupby("iteration")[MAIN], looks[label] if who == "mean" else BASE
        runs = by_iteration.size()
        mean = by_iteration.mean()[runs == runs.max()]
        half = by_iteration.sem().mul(t.ppf(0.975, runs - 1), axis=0).loc[mean.index]       # NaN of one run
        for metric in MAIN:
            ax = axes[metric]
            ax.set(title=TITLES[metric], xlabel="iteration")
            ax.plot(mean[metric], label=label if who == "mean" else f"_{label}", **look)
            ax.fill_between(mean.index, (mean - half)[metric], (mean + half)[metric], linewidth=0,
                            color=look["color"], alpha=0.5 / max(3, len(looks)))
        axes["against_kl"].plot(mean.kl, mean.task_reward, **look)
        if who != "mean":
            end = mean.index[-1], mean.combined_reward.iloc[-1]
            axes["combined_reward"].annotate(label, end, ha="right", va="bottom")
    axes["against_kl"].set(title="reward against KL", xlabel=TITLES["kl"])
    return finished(figure, out, ncols=max(2, groups.method.nunique()) if max(map(len, looks)) < 60 else 1)


def compare(run_dirs: list[Path], out: Path) -> None:
    """Prints tables of each group's last held-out metrics, and draws the groups into `out`."""
    groups = groups_of(run_dirs)
    of_runs = {group: held_out(read_jsonl(group[0] / "metrics.jsonl")) for group in groups.group.items()}
    rows = pd.concat(of_runs, names=["run", "group"]).query("who.str.match('mean$|team$|base')")
    is_last = ~rows.index.droplevel("iteration").duplicated(keep="last")
    is_shared = rows[is_last].round(3).groupby("who").nunique(dropna=False).max(axis=1) <= 1
    rows["label"] = [group if who in ("mean", "team") else who if is_shared[who] else f"{group} {who}"
                     for _, group, _, who in rows.index]
    last = rows[is_last].droplevel(["run", "group", "iteration"])
    print(tables("held-out", last.drop(columns="label"), [*last.label]))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_comparison(rows.query("not who.str.endswith('team')"), groups, out)
    print(f"written: {out}")
