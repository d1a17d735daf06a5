"""Tables and plots of one run, and of several compared."""
from collections import defaultdict
from math import ceil, inf, nan
from pathlib import Path
from typing import Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from cory.config import FREE, read_config, short_name
from cory.errors import UserError
from cory.log import read_jsonl

FORMATS = {"task_reward": ".2f", "kl": ".1f", "combined_reward": ".2f", "length": ".1f",
           "base_perplexity": ".0f"}                                # others: .3f
TITLES = {"task_reward": "task reward", "kl": "KL from the base (nats per response)",
          "combined_reward": "combined reward: reward - eta KL",
          "score": "score: what an agent is trained on",
          "entropy": "entropy (nats per token)", "explained_variance": "explained variance of the critic",
          "kl_coef": "KL coefficient eta", "accuracy": "accuracy", "unparsed": "responses without an answer",
          "observer_copies": "share of copies by the observer",
          "observer_after_better": "observer's reward after better responses",
          "observer_after_worse": "observer's reward after worse responses"}
WITHOUT_PANEL = """role task_reward_std length sampling_gap policy_loss value_loss approx_kl kl_loss grad_norm
    clip_fraction learning_rate distinct_1 distinct_2 repeated_tokens base_perplexity truncated
    reward_truncated optimizer_steps seconds seconds_sampling seconds_scoring seconds_update
    tokens_per_second""".split()
KEY = "^(?:(?P<kind>eval_greedy|eval)_)?(?P<metric>.+?)(?:/(?P<who>[^/]+))?$"
# How training and held-out curves are drawn, and what the legend calls them.
KINDS = {"training": ("training", dict(linewidth=1, linestyle=":")),
         "eval": ("held out", dict(linewidth=1.8, marker="o", markersize=4)),
         "eval_greedy": ("held out, greedy", dict(linewidth=1.2, linestyle="--", marker="s", markersize=4))}
# PPO and CORY have the same colours in every picture; other methods have those that follow.
PALETTE = {"ppo": "#08519c", "cory": "#d94801", 0: "#238b45", 1: "#6a51a3", 2: "#525252", 3: "#c51b8a"}
GREY = "0.5"
WIDTH = 100         # of tables, in columns


# --- tables ---
def last_held_out(rows: list[dict]) -> dict[str, dict[str, float]]:
    """{base: metrics, agent: ..., "base_team": ..., "team": ...}: the last in metrics.jsonl of each."""
    last = {}
    for row in rows:
        last |= of_evaluation(row)
    return last


def of_evaluation(row: dict) -> dict[str, dict[str, float]]:
    """The held-out metrics of a row of metrics.jsonl, by whom they are of."""
    found = defaultdict(dict)
    for key, value in row.items():
        if key.startswith("eval_"):
            name, _, who = key.removeprefix("eval_").rpartition("/")
            found[who][name] = value
    return found


def tables(corner: str, frame: pd.DataFrame) -> str:
    """A table of models, and one of teams, which have no task reward. The index has a label for each row."""
    is_model = frame.task_reward.notna()
    return "\n\n".join(table(corner, part) for part in (frame[is_model], frame[~is_model]) if len(part))


def table(corner: str, frame: pd.DataFrame) -> str:
    """Mean ± sample std of every metric over the rows with the same label; a dash where a row has none.
    A line for each metric, or, where that would exceed 100 columns, for each label.
    """
    def cell(values: pd.Series) -> str:
        spec = FORMATS.get(values.name.removeprefix("greedy_"), ".3f")
        std = f" ± {values.std():{spec}}" if len(values) > 1 else ""
        return "–" if values.hasnans else f"{values.mean():{spec}}{std}"

    groups = frame.dropna(axis=1, how="all").groupby(level=0, sort=False)
    cells = groups.agg(cell).rename(columns=lambda name: name.replace("_", " "))
    if len(cells) < len(frame):
        cells.insert(0, "runs", groups.size())
    text = cells.T.rename_axis(index=None, columns=corner).to_string()
    if text.index("\n") <= WIDTH:
        return text
    return cells.rename_axis(index=None, columns=corner).to_string(line_width=WIDTH)


# --- the curves of one run ---
def read_curves(run_dir: Path) -> pd.DataFrame:
    """Metric, kind (of KINDS), who, iteration and value; of training running means over a twentieth of it."""
    rows = pd.DataFrame(read_jsonl(run_dir / "metrics.jsonl"))
    curves = rows.melt("iteration").replace([inf, -inf], nan).dropna()
    curves = curves.join(curves.variable.str.extract(KEY).fillna({"kind": "training", "who": "team"}))
    width = 2 * (len(rows) // 40) + 1
    training = curves[curves.kind == "training"].groupby("variable").value
    curves.update(training.transform(lambda x: x.rolling(width, center=True, min_periods=1).mean()))
    return curves[~curves.metric.isin(WITHOUT_PANEL)]


def draw_run(run_dir: Path, out: Path) -> Figure:
    """A panel for reward, KL and each metric that varies, with the agents' and the team's curves in training
    and held out; the last panel has held-out reward against KL.
    """
    config, curves = read_config(run_dir), read_curves(run_dir)
    agents, method = config["agents"], short_name(config["method"])
    shades = light_palette(PALETTE.get(method.lower(), PALETTE["cory"]), len(agents))
    colors = {**dict(zip(agents, shades, strict=True)), "team": "black"}
    varying = curves.groupby("metric").filter(
        lambda rows: rows.name in ("task_reward", "kl") or rows.value.nunique() > 1)
    metrics = sorted(varying.metric.unique(), key=lambda name: (*TITLES, name).index(name))

    count = len(metrics) + 1
    columns = min((5, 4, 3), key=lambda columns: -count % columns)          # with the fewest empty places
    lines = ceil(count / columns)
    figure = Figure(figsize=(3.5 * columns, 2.8 * lines + 0.6), layout="constrained")
    figure.suptitle(f"{method.upper()} on {short_name(config['task'])}, preset {config['preset']}, "
                    f"seed {config['seed']}")
    panels = [figure.add_subplot(lines, columns, place + 1) for place in range(count)]
    for ax, metric in zip(panels, metrics, strict=False):
        for (kind, who), curve in varying[varying.metric == metric].groupby(["kind", "who"], sort=False):
            name, style = KINDS[kind]
            if who in colors:
                label = f"{who.upper() if who in agents else who}, {name}"
                ax.plot(curve.iteration, curve.value, color=colors[who], label=label, **style)
            elif kind == "eval":                        # a base has not changed since iteration 0
                ax.axhline(curve.value.iloc[0], color=GREY, linewidth=1,
                           linestyle="--" if who == "base_team" else "-", label=who.replace("_", " "))
        ax.set_title(TITLES.get(metric, metric.replace("_", " ")), fontsize=10)
        ax.set_xlabel("iteration")

    held_out = varying[varying.kind == "eval"].pivot(index=["who", "iteration"], columns="metric",
                                                     values="value")
    for agent in agents:
        points = held_out.loc[agent]
        panels[-1].plot(points.kl, points.task_reward, color=colors[agent], **KINDS["eval"][1])
    panels[-1].set_title("held-out reward against KL", fontsize=10)
    panels[-1].set_xlabel(TITLES["kl"])
    finish(figure, panels, out)
    return figure


def light_palette(color: str, n: int) -> list[np.ndarray]:
    """n colours, from this one to half of the way to white."""
    rgb = np.array(to_rgb(color))
    return [rgb + (1 - rgb) * step for step in np.linspace(0, 0.5, n)]


def finish(figure: Figure, panels: Sequence, out: Path) -> None:
    """Adds a legend, with each label once, and writes the picture."""
    handles = {}
    for ax in panels:
        ax.spines[["top", "right"]].set_visible(False)
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fit = int(11 * figure.get_figwidth() / (8 + max(map(len, handles))))    # columns
    ncols = max(1, min(4, fit))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=ncols, frameon=False)
    figure.savefig(out, dpi=110)


# --- several runs compared ---
def read_held_out(run_dir: Path, by: Sequence[str] = ()) -> pd.DataFrame:
    """A row for each held-out evaluation of each model or team; `part` is base, agent or team."""
    config, path = read_config(run_dir), run_dir / "metrics.jsonl"
    bases, settings = config["agents"].values(), {name: config[name] for name in by}
    rows = []
    for row in read_jsonl(path) if path.exists() else []:
        for who, metrics in of_evaluation(row).items():
            part = "base" if who in bases else "agent" if who in config["agents"] else "team"
            about = {"run": str(run_dir), "method": short_name(config["method"]), "seed": config["seed"]}
            about |= settings | {"iteration": row["iteration"], "part": part, "who": who}
            rows.append(about | metrics)
    return pd.DataFrame(rows)


def labels_of(rows: pd.DataFrame, by: Sequence[str]) -> list[str]:
    """What tables call each row: `CORY LLM2, learning_rate 0.001`; `base` alone if all runs have the same."""
    is_base = rows.part == "base"
    one_base = rows[is_base].groupby("who")[["task_reward", "kl"]].nunique().le(1).all(axis=None)
    labels = []
    for row in rows.to_dict("records"):
        settings = [] if row["part"] == "base" and one_base else [f"{name} {row[name]}" for name in by]
        name = f"{row['method']} {row['who']}".upper().replace("_", " ")
        labels.append(", ".join([row["who"] if row["part"] == "base" else name, *settings]))
    return labels


def draw_comparison(rows: pd.DataFrame, by: Sequence[str], out: Path) -> Figure:
    """Held-out reward, KL and combined reward over iterations, and reward against KL, of methods.

    A curve is a mean over seeds of the mean over a run's agents, at iterations that all seeds have; its band
    is a 95% t-interval. A method has its own line and marker, and with `by` each value a colour.
    """
    # imported here because a run, which draws no comparison, would hold 25 MiB for it
    from scipy.stats import t

    metrics, settings = ["task_reward", "kl", "combined_reward"], ["method", *by]
    agents, bases = rows[rows.part == "agent"], rows[rows.part == "base"][metrics].drop_duplicates()
    of_runs = agents.groupby([*settings, "run", "iteration"], sort=False)[metrics].mean()
    methods, values = [*agents.method.unique()], agents[[*by]].drop_duplicates().to_numpy().tolist()
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    *over_iterations, against_kl = figure.subplots(2, 2).ravel()
    for (method, *value), of_group in of_runs.groupby(level=settings, sort=False):
        place, seeds = methods.index(method), of_group.index.get_level_values("run").nunique()
        color = PALETTE.get(method.lower(), PALETTE.get(place, "black"))
        if by:
            color = colormaps["viridis"](0.9 * values.index(value) / max(1, len(values) - 1))
        style = dict(color=color, linestyle=("-", "--", ":", "-.")[place % 4], marker="os^D"[place % 4],
                     markersize=4)
        label = ", ".join([method.upper(), *(f"{name} {x}" for name, x in zip(by, value, strict=True))])
        by_iteration = of_group.groupby(level="iteration")
        complete = by_iteration.size() == seeds
        mean, std = by_iteration.mean()[complete], by_iteration.std()[complete]
        half = t.ppf(0.975, seeds - 1) * std / seeds**0.5           # NaN, and not drawn, for one seed
        for ax, metric in zip(over_iterations, metrics, strict=True):
            ax.plot(mean.index, mean[metric], label=f"{label} ({seeds} seed{'s' * (seeds > 1)})", **style)
            ax.fill_between(mean.index, (mean - half)[metric], (mean + half)[metric], color=color, alpha=0.15,
                            linewidth=0)
        against_kl.plot(mean.kl, mean.task_reward, **style)
    for ax, metric in zip(over_iterations, metrics, strict=True):
        ax.set(title=f"{TITLES[metric]}, held out", xlabel="iteration")
        for value in bases[metric].dropna():
            ax.axhline(value, color=GREY, linewidth=1, label="base")
    against_kl.set(title="held-out reward against KL", xlabel=TITLES["kl"])
    finish(figure, [*over_iterations, against_kl], out)
    return figure


def require_comparable(run_dirs: list[Path], by: list[str]) -> None:
    """Runs must differ in method, `by` and seed alone."""
    names, settings = [*map(str, run_dirs)], pd.DataFrame(map(read_config, run_dirs)).astype(str)
    of_run = {"agents", "agent_settings", "commit"}
    for name in {*by} - ({*settings} - of_run - {"config_class"}):
        raise UserError("by", name, "is not a setting; config.json lists them")
    free = FREE | of_run | {"method", *by}
    differ = settings.columns[settings.nunique(dropna=False) > 1].difference([*free])
    if len(differ):
        raise UserError("run_dirs", names, f"differ in {', '.join(differ)}; make a group of each value with "
                        f"--by {' '.join([*by, *differ])}")
    if settings.groupby(["method", *by]).agent_settings.nunique().max() > 1:
        raise UserError("run_dirs", names, "differ in their agents' own settings: see agent_settings in "
                        "config.json")
    if settings.duplicated(["method", *by, "seed"]).any():
        raise UserError("run_dirs", names, "have the same seed twice in a group; drop one")


def compare(run_dirs: list[Path], by: list[str], out: Path, csv: Path | None = None) -> None:
    """Prints tables of means and standard deviations over seeds, and draws the runs into `out`; says which
    runs are unfinished. All held-out metrics go into `csv`.
    """
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise UserError("out", str(out), "must be a file that ends in .png, .pdf or .svg")
    require_comparable(run_dirs, by)
    of_runs = [read_held_out(run_dir, by) for run_dir in run_dirs]
    for run_dir, rows in zip(run_dirs, of_runs, strict=True):
        if rows.empty:
            raise UserError("run_dirs", str(run_dir), "has no held-out metrics yet; wait, or leave it out")
        if not (run_dir / "eval.json").exists():
            done = read_jsonl(run_dir / "metrics.jsonl")[-1]["iteration"]
            print(f"unfinished: {run_dir}, at iteration {done} of {read_config(run_dir)['iterations']}, "
                  f"last evaluated at {rows.iteration.max()}")
    rows = pd.concat(of_runs, ignore_index=True)
    last = rows.groupby(["run", "who"], sort=False).tail(1)
    about = ["run", "method", "seed", *by, "iteration", "part", "who"]
    print(tables("held-out", last.drop(columns=about).set_axis(labels_of(last, by))))
    for path in filter(None, (out, csv)):
        path.parent.mkdir(parents=True, exist_ok=True)
    draw_comparison(rows, by, out)
    if csv:
        rows.to_csv(csv, index=False)
    print("written:", *filter(None, (out, csv)))


if __name__ == "__main__":
    raise SystemExit("this is no script: use `python -m cory report RUN_DIR`")
