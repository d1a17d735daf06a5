"""Tables and plots of any agents and metrics, of one run or of several compared."""
import json
from collections import defaultdict
from pathlib import Path
from typing import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cory.config import read_config
from cory.errors import UserError, short_name
from cory.log import read_jsonl

# Runs may differ in these, and still be compared.
FREE = {"method", "seed", "device", "agents", "resume", "run_dir", "save_every", "shard", "wandb",
        "wandb_project"}
FORMATS = {"task_reward": ".2f", "kl": ".1f", "combined_reward": ".2f", "length": ".1f",
           "base_perplexity": ".0f"}                                # others: .3f
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")  # Okabe and Ito's
LINES = ("-", "--", "-.")               # colours repeat with another line style
TITLES = {"task_reward": "task reward", "kl": "KL per response (nats)", "combined_reward": "combined reward",
          "score": "score: what is trained on", "entropy": "entropy per token (nats)",
          "explained_variance": "explained variance", "kl_coef": "KL coefficient eta"}
# The other metrics of every update and evaluation. One listed neither here nor above gets a panel, too.
WITHOUT_PANEL = {
    "role", "task_reward_std", "length", "sampling_gap", "policy_loss", "value_loss",
    "approx_kl", "clip_fraction", "kl_loss", "grad_norm", "learning_rate", "distinct_1", "distinct_2",
    "repeated_tokens", "base_perplexity", "seconds"}
KEY = "^(?:(?P<kind>eval_greedy|eval)_)?(?P<metric>.+?)(?:/(?P<who>[^/]+))?$"
DOTS = {"linewidth": 1.6, "marker": "o", "markersize": 6, "zorder": 3}
KINDS = {"training": {"linewidth": 1.2, "alpha": 0.6},
         "eval": DOTS | {"markeredgecolor": "white"},
         "eval_greedy": DOTS | {"markerfacecolor": "white", "label": "hollow: greedy responses"}}


# --- tables ---
def held_out_parts(rows: list[dict]) -> dict[str, dict[str, float]]:
    """{base: metrics, agent: ..., "base_team": ..., "team": ...} of metrics.jsonl: bases and base_team from
    its first evaluation, which precedes training, the others from its last.
    """
    evaluations = []
    for row in rows:
        parts = defaultdict(dict)
        for key, value in row.items():
            if key.startswith("eval_"):
                name, _, who = key.removeprefix("eval_").rpartition("/")
                parts[who][name] = value
        evaluations += [parts] if parts else []
    first, last = evaluations[0], evaluations[-1]
    teams = {"base_team": first.pop("team", {}), "team": last.pop("team", {})}
    return first | last | {name: team for name, team in teams.items() if team}


def grouped(runs: list[tuple[dict, dict]], by: Sequence[str] = ()) -> dict[str, list]:
    """{label: [what belongs to it, for each seed]} of runs (config.json, {base, agent or "team": ...}).

    A group is an agent or the team, of one method, and of one value of each setting in `by`, e.g. `CORY LLM2,
    learning_rate 0.001`. Bases come first, once where all runs agree.
    """
    bases, groups = defaultdict(list), defaultdict(list)
    for config, parts in runs:
        method = short_name(config["method"]).upper()
        values = "".join(f", {name} {config[name]}" for name in by if name != "method")
        for name, part in parts.items():
            if name in config["agents"].values():
                agree = all(other.get(name, part) == part for _, other in runs)
                different = bases[name if agree else f"{name}{values}"]
                different += [] if part in different else [part]
            else:
                groups[f"{method} {name.upper()}{values}"].append(part)
    return bases | groups


def results_table(held_out: dict, corner: str = "held-out") -> str:
    """The tables of eval.json: every metric of the base and of each agent, then those of the team, before and
    after training.
    """
    columns = {name: [x] for name, x in held_out.items() if isinstance(x, dict) and x}
    team = {name: columns.pop(name) for name in ("base_team", "team") if name in columns}
    return "\n\n".join(groups_table(corner, groups) for groups in (columns, team) if groups)


def groups_table(corner: str, groups: dict[str, list[dict]]) -> str:
    """Mean ± sample std of every metric over each group's members; a dash where one of them has none."""
    def cell(name: str, values: list) -> str:
        if None in values:
            return "–"
        spec = FORMATS.get(name.removeprefix("greedy_"), ".3f")
        std = f" ± {np.std(values, ddof=1):{spec}}" if len(values) > 1 else ""
        return f"{np.mean(values):{spec}}{std}"

    names = dict.fromkeys(name for members in groups.values() for member in members for name in member)
    rows = [[name.replace("_", " "), *(cell(name, [member.get(name) for member in members])
                                       for members in groups.values())] for name in names]
    if any(len(members) > 1 for members in groups.values()):
        rows.insert(0, ["runs", *(str(len(members)) for members in groups.values())])
    rows.insert(0, [corner, *groups])
    return table(rows if len(groups) <= 6 else list(zip(*rows, strict=True)))       # many groups: one per row


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown, first column aligned left, the others right; rows[0] is the header."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in rows]
    head, *lines = [f"| {' | '.join(cells)} |" for cells in padded]
    rule = "|".join(["", "-" * (first + 2), *("-" * (width + 1) + ":" for width in others), ""])
    return "\n".join([head, rule, *lines])


# --- plots ---
def read_curves(run_dir: Path) -> dict[str, pd.DataFrame]:
    """For each agent of a run, and for the team, a row for each value: its iteration, its metric and its kind
    (training, eval, eval_greedy). An agent that was not evaluated at iteration 0 starts as its base.
    """
    values = pd.DataFrame(read_jsonl(run_dir / "metrics.jsonl")).melt("iteration").dropna()
    values = values.join(values.variable.str.extract(KEY).fillna({"kind": "training", "who": "team"}))
    values.metric = values.metric.replace({"kl_full": "kl", "kl_k1": "kl"})
    of = dict(iter(values[~values.metric.isin(WITHOUT_PANEL)].groupby("who", sort=False)))
    curves = {}
    for name, base in read_config(run_dir)["agents"].items():
        own = of.get(name, of[base][:0])
        curves[name] = own if (own.iteration == 0).any() else pd.concat([of[base], own])
    curves["team"] = of.get("team", values[:0])
    return {name: part for name, part in curves.items() if len(part)}


def draw_runs(run_dirs: list[Path], out: Path, by: Sequence[str] = ()) -> Figure:
    """A panel for each metric, of eta only if it varies, and one of held-out reward against KL; groups as in
    the tables.
    """
    config, several = read_config(run_dirs[0]), len(run_dirs) > 1
    groups = grouped([(read_config(run_dir), read_curves(run_dir)) for run_dir in run_dirs], by)
    curves = pd.concat([part.assign(group=group, seed=seed, n=len(seeds))
                        for group, seeds in groups.items() for seed, part in enumerate(seeds)],
                       ignore_index=True)
    styles = {group: {"label": group + f" (n = {len(seeds)})" * several, "color": COLORS[i % len(COLORS)],
                      "linestyle": LINES[i // len(COLORS) % len(LINES)]}
              for i, (group, seeds) in enumerate(groups.items())}
    if curves[curves.metric == "kl_coef"].value.nunique() == 1:
        curves = curves[curves.metric != "kl_coef"]
    names = sorted(curves.metric.unique(), key=lambda name: (*TITLES, name).index(name))

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
    start = curves[(curves.kind == "eval") & curves.who.str.startswith("base")]
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


# --- the command ---
def comparable(run_dirs: list[Path], by: list[str]) -> list[dict]:
    """config.json of finished runs, which may differ in method, `by` and seed alone."""
    configs = [read_config(run_dir) for run_dir in run_dirs]
    settings = pd.DataFrame(configs).astype(str)
    for name in {*by} - {*settings}:
        raise UserError("by", name, "is no setting; config.json lists them")
    differ = [name for name in settings.columns.difference([*by, *FREE])
              if settings[name].nunique(dropna=False) > 1]
    if differ:
        raise UserError("run_dirs", [*map(str, run_dirs)], f"differ in {', '.join(differ)}; make a group of "
                        f"each value with --by {' '.join([*by, *differ])}")
    for run_dir, again in zip(run_dirs, settings.duplicated(["method", *by, "seed"]), strict=True):
        if again:
            raise UserError("run_dirs", str(run_dir), "has the seed of another in its group; leave one out")
        if not (run_dir / "eval.json").exists():
            raise UserError("run_dirs", str(run_dir), "is no finished run (no eval.json); --resume it first")
    return configs


def compare(run_dirs: list[Path], by: list[str], out: Path) -> None:
    """Prints a table of means and standard deviations over seeds, and draws the runs into `out`."""
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise UserError("out", str(out), "must end in .png, .pdf or .svg")
    runs = []
    for run_dir, config in zip(run_dirs, comparable(run_dirs, by), strict=True):
        held_out = json.loads((run_dir / "eval.json").read_text())
        runs.append((config, {name: x for name, x in held_out.items() if isinstance(x, dict)}))
    print(groups_table("held-out", grouped(runs, by)))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_runs(run_dirs, out, by)
    print(f"written: {out}")
