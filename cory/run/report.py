"""Tables and plots of one run, and of several compared."""
from collections import defaultdict
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cory.config import read_config
from cory.run.log import read_jsonl

# Runs that differ in nothing else are one group, of several seeds; methods have names of their own.
FREE = {"seed", "device", "resume", "run_dir", "save_every", "shard", "wandb", "wandb_project",
        "config_class", "agents", "method"}
TITLES = {"task_reward": "task reward", "kl": "KL from the base (nats per response)",
          "combined_reward": "combined reward: reward - eta KL"}


# --- tables ---
def of_evaluation(row: dict) -> dict[str, dict[str, float]]:
    """The held-out metrics of a row of metrics.jsonl, by whom they are of: a base, an agent, a team."""
    found = defaultdict(dict)
    for key, value in row.items():
        if key.startswith("eval_"):
            name, _, who = key.removeprefix("eval_").rpartition("/")
            found[who][name] = value
    return found


def last_held_out(rows: list[dict]) -> dict[str, dict[str, float]]:
    """The last held-out metrics of each, by whom they are of."""
    last = {}
    for row in rows:
        last |= of_evaluation(row)
    return last


def tables(corner: str, frame: pd.DataFrame) -> str:
    """Mean ± sample std of every metric over the rows with the same label: a table of models, and one of
    teams, which have no task reward.
    """
    def cell(x: pd.Series) -> str:
        return f"{x.mean():.4g}" + f" ± {x.std():.2g}" * (len(x) > 1)

    is_model = frame.task_reward.notna()
    parts = [part.dropna(axis=1, how="all") for part in (frame[is_model], frame[~is_model]) if len(part)]
    cells = [part.groupby(level=0, sort=False).agg(cell).T.rename_axis(index=None, columns=corner)
             for part in parts]
    return "\n\n".join(part.to_string() for part in cells)


# --- pictures ---
def draw_run(run_dir: Path, out: Path) -> Figure:
    """A panel for each metric: dotted lines in training, solid ones held out."""
    rows = pd.DataFrame(read_jsonl(run_dir / "metrics.jsonl")).set_index("iteration")
    panels = defaultdict(list)
    for key in rows:
        name, _, who = key.removeprefix("eval_").partition("/")
        panels[name].append((key, who or "team"))
    everyone = dict.fromkeys(who for curves in panels.values() for _, who in curves)
    color = {who: f"C{i}" for i, who in enumerate(everyone)}
    figure = Figure(figsize=(14, 0.6 + 2.5 * -(-len(panels) // 4)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 4), 4, squeeze=False).ravel()
    for ax, (name, curves) in zip(axes, panels.items(), strict=False):
        for key, who in curves:
            values, style = rows[key].dropna(), "o-" if key.startswith("eval_") else ":"
            ax.plot(values.index, values, style, color=color[who], markersize=3, linewidth=1, label=who)
        ax.set(title=TITLES.get(name, name.replace("_", " ")), xlabel="iteration")
    for ax in axes[len(panels):]:
        ax.remove()
    return saved(figure, axes[:len(panels)], out)


def saved(figure: Figure, axes: list[Axes], out: Path) -> Figure:
    """The figure, with a legend that has each label once, as it is written."""
    handles = {}
    for ax in axes:
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out, dpi=110)
    return figure


def draw_comparison(rows: pd.DataFrame, out: Path) -> Figure:
    """Held-out reward, KL and combined reward over iterations, and reward against KL. A curve is a mean over
    a group's runs of the mean over their trained agents; its band is a standard deviation over runs.
    """
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    *over_iterations, against_kl = figure.subplots(2, 2).ravel()
    for place, (group, of_group) in enumerate(rows[rows.who == "mean"].groupby("group", sort=False)):
        of_runs = of_group.groupby("iteration")[[*TITLES]]
        mean, std, color = of_runs.mean(), of_runs.std(), f"C{place}"
        label = f"{group} ({of_group.run.nunique()} runs)"
        for ax, metric in zip(over_iterations, TITLES, strict=True):
            ax.plot(mean.index, mean[metric], "o-", color=color, markersize=4, label=label)
            ax.fill_between(mean.index, (mean - std)[metric], (mean + std)[metric], color=color, alpha=0.15)
        against_kl.plot(mean.kl, mean.task_reward, "o-", color=color, markersize=4)
    for ax, title in zip(over_iterations, TITLES.values(), strict=True):
        ax.set(title=f"{title}, held out", xlabel="iteration")
    against_kl.set(title="held-out reward against KL", xlabel=TITLES["kl"])
    return saved(figure, over_iterations, out)


# --- several runs compared ---
def read_held_out(run_dirs: list[Path]) -> pd.DataFrame:
    """A row for each held-out evaluation of each base, agent and team, and one for the mean over agents.
    `group`: the method, and each setting that differs between the runs, but for `FREE` ones.
    """
    configs = [read_config(run_dir) for run_dir in run_dirs]
    differ = [name for name in dict.fromkeys(name for config in configs for name in config)
              if name not in FREE and any(config.get(name) != configs[0].get(name) for config in configs)]
    rows = []
    for run_dir, config in zip(run_dirs, configs, strict=True):
        method = config["method"] if ":" in config["method"] else config["method"].upper()
        group = ", ".join([method, *(f"{x} {config.get(x)}" for x in differ)])
        logged = read_jsonl(run_dir / "metrics.jsonl")
        for row in logged:
            for who, metrics in of_evaluation(row).items():
                about = {"run": str(run_dir), "group": group, "who": who}
                rows.append(about | {"iteration": row["iteration"]} | metrics)
    return pd.DataFrame(rows)


def compare(run_dirs: list[Path], out: Path) -> None:
    """Prints tables of each group's last held-out metrics, and draws the groups into `out`."""
    rows = read_held_out(run_dirs)
    last = rows.groupby(["run", "who"], sort=False).tail(1)
    print(tables("held-out", last.drop(columns=["run", "group", "who"])
                 .set_axis(last.group + " " + last.who)))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_comparison(rows, out)
    print(f"written: {out}")
