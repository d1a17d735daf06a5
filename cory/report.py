"""Tables and plots of any agents and metrics, of one run or of several compared."""
import json
from collections import defaultdict
from itertools import cycle, product
from pathlib import Path
from typing import Collection, Sequence

import pandas as pd
from matplotlib.figure import Figure

from cory.config import read_config
from cory.errors import UserError, short_name
from cory.log import read_jsonl

# Runs may differ in these, and still be compared.
FREE = ["method", "seed", "device", "agents", "resume", "run_dir", "save_every", "shard", "wandb",
        "wandb_project"]
FORMATS = {"task_reward": ".2f", "kl": ".1f", "combined_reward": ".2f", "length": ".1f",
           "base_perplexity": ".0f"}                                # others: .3f
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")  # Okabe and Ito's
LINES = ("-", "--", "-.")               # colours repeat with another line style
TITLES = {"task_reward": "task reward", "kl": "KL per response (nats)", "combined_reward": "combined reward",
          "score": "score: what is trained on", "entropy": "entropy per token (nats)",
          "explained_variance": "explained variance", "kl_coef": "KL coefficient eta"}
WITHOUT_PANEL = """role task_reward_std length sampling_gap policy_loss value_loss approx_kl kl_loss grad_norm
    clip_fraction learning_rate distinct_1 distinct_2 repeated_tokens base_perplexity seconds""".split()
KEY = "^(?:(?P<kind>eval_greedy|eval)_)?(?P<metric>.+?)(?:/(?P<who>[^/]+))?$"
DOTS = {"linewidth": 1.6, "marker": "o", "markersize": 6, "zorder": 3}
KINDS = {"training": {"linewidth": 1.2, "alpha": 0.6},
         "eval": DOTS | {"markeredgecolor": "white"},
         "eval_greedy": DOTS | {"markerfacecolor": "white", "label": "hollow: greedy responses"}}


def group_of(config: dict, who: str, by: Sequence[str] = ()) -> str:
    """What runs share that differ only in their seed: `CORY LLM2, learning_rate 0.001`, `base`."""
    name = who if who in config["agents"].values() else f"{config['method']} {who}".upper()
    return ", ".join([name, *(f"{setting} {config[setting]}" for setting in by)])


# --- tables ---
def held_out_parts(rows: list[dict]) -> dict[str, dict[str, float]]:
    """{base: metrics, agent: ..., "base_team": ..., "team": ...}: the last in metrics.jsonl of each."""
    parts = {}
    for row in rows:
        of_row = defaultdict(dict)
        for key, value in row.items():
            if key.startswith("eval_"):
                name, _, who = key.removeprefix("eval_").rpartition("/")
                of_row[who][name] = value
        parts |= of_row
    return parts


def table(corner: str, parts: Collection[tuple[str, dict[str, float]]]) -> str:
    """Mean ± sample std of every metric over the parts with the same label; a dash where one has none."""
    def cell(values: pd.Series) -> str:
        spec = FORMATS.get(values.name.removeprefix("greedy_"), ".3f")
        std = f" ± {values.std():{spec}}" if len(values) > 1 else ""
        return "–" if values.hasnans else f"{values.mean():{spec}}{std}"

    frame = pd.DataFrame([metrics for _, metrics in parts])
    groups = frame.groupby([label for label, _ in parts], sort=False)
    cells = groups.agg(cell).rename(columns=lambda name: name.replace("_", " "))
    if len(cells) < len(frame):
        cells.insert(0, "runs", groups.size())
    rows = cells.T if len(cells) <= 6 else cells            # many groups: one per row
    return rows.rename_axis(index=None, columns=corner).to_string()


# --- plots ---
def read_curves(run_dir: Path, by: Sequence[str] = ()) -> pd.DataFrame:
    """Iteration, who (base, agent, team), metric, kind and value, a row for each value of a panel."""
    config = read_config(run_dir)
    curves = pd.DataFrame(read_jsonl(run_dir / "metrics.jsonl")).melt("iteration").dropna()
    curves = curves.join(curves.variable.str.extract(KEY).fillna({"kind": "training", "who": "team"}))
    curves.metric = curves.metric.replace({"kl_full": "kl", "kl_k1": "kl"})
    curves["group"] = [group_of(config, who, by) for who in curves.who]
    bases = [*config["agents"].values(), "base_team"]
    curves["run"], curves["is_base"] = str(run_dir), curves.who.isin(bases)
    return curves[~curves.metric.isin(WITHOUT_PANEL)]


def draw_runs(run_dirs: list[Path], out: Path, by: Sequence[str] = ()) -> Figure:
    """A panel for each metric, of eta only if it varies, and one of held-out reward against KL; groups as in
    the tables.
    """
    config, several = read_config(run_dirs[0]), len(run_dirs) > 1
    curves = pd.concat([read_curves(run_dir, by) for run_dir in run_dirs], ignore_index=True)
    if curves[curves.metric == "kl_coef"].value.nunique() == 1:
        curves = curves[curves.metric != "kl_coef"]
    runs_of = curves[~curves.is_base].groupby("group", sort=False).run.nunique()
    styles = {group: {"label": group + f" (n = {n})" * several, "color": color, "linestyle": line}
              for (group, n), (line, color) in zip(runs_of.items(), cycle(product(LINES, COLORS)))}
    names = sorted(curves.metric.unique(), key=lambda name: (*TITLES, name).index(name))

    rows = len(names) // 4 + 1
    figure = Figure(figsize=(14, 2.7 * rows + 0.9), layout="constrained")
    for place, name in enumerate(names, 1):
        draw_metric(figure.add_subplot(rows, 4, place), name, curves[curves.metric == name], styles)
    held_out = curves[(curves.kind == "eval") & ~curves.is_base]
    draw_frontier(figure.add_subplot(rows, 4, len(names) + 1), held_out, styles)

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
    """The base, and means over seeds in a band of one sample standard deviation: of held-out values, and of
    training batches as running means over a tenth of them; of a single seed also each batch, pale.
    """
    ax.set(title=TITLES.get(name, name.replace("_", " ")), xlabel="iteration")
    ax.xaxis.get_major_locator().set_params(integer=True)
    for value in curves[curves.is_base & (curves.kind == "eval")].value.unique():
        ax.axhline(value, color="gray", linestyle=":", linewidth=1.2, label="base")
    for (group, kind), rows in curves[~curves.is_base].groupby(["group", "kind"], sort=False):
        color, seeds = styles[group]["color"], rows.pivot(index="iteration", columns="run", values="value")
        if kind == "training":
            if len(seeds.columns) == 1:
                ax.plot(seeds, color=color, linewidth=0.7, alpha=0.3)
            tenth = 2 * max(1, len(seeds) // 20) + 1
            seeds = seeds.rolling(tenth, center=True, min_periods=1).mean()
        seeds = seeds.dropna()                              # where all seeds have a value
        mean, std = seeds.mean(axis=1), seeds.std(axis=1)
        ax.plot(mean, **styles[group] | KINDS[kind])
        ax.fill_between(mean.index, mean - std, mean + std, color=color, alpha=0.12, linewidth=0)


def draw_frontier(ax, held_out: pd.DataFrame, styles: dict[str, dict]) -> None:
    """Held-out reward against KL: a line for each seed, a dot for each evaluation."""
    ax.set(title="held-out reward against KL", xlabel=TITLES["kl"], ylabel=TITLES["task_reward"])
    ax.margins(0.1)
    points = held_out.pivot(index=["group", "run", "iteration"], columns="metric", values="value")
    for (group, _), seed in points.groupby(["group", "run"]):
        ax.plot(seed["kl"], seed["task_reward"], **styles[group] | KINDS["eval"])


# --- the command ---
def require_comparable(run_dirs: list[Path], by: list[str]) -> None:
    """Runs must differ in method, `by` and seed alone."""
    names, settings = [*map(str, run_dirs)], pd.DataFrame(map(read_config, run_dirs)).astype(str)
    for name in {*by} - {*settings}:
        raise UserError("by", name, "is no setting; config.json lists them")
    differ = settings.columns[settings.nunique(dropna=False) > 1].difference([*by, *FREE])
    if len(differ):
        raise UserError("run_dirs", names, f"differ in {', '.join(differ)}; make a group of each value with "
                        f"--by {' '.join([*by, *differ])}")
    if settings.duplicated(["method", *by, "seed"]).any():
        raise UserError("run_dirs", names, "have a seed twice in a group; leave one out")


def compare(run_dirs: list[Path], by: list[str], out: Path) -> None:
    """Prints a table of means and standard deviations over seeds, and draws the runs into `out`."""
    require_comparable(run_dirs, by)
    parts = []
    for run_dir in run_dirs:
        config, held_out = read_config(run_dir), json.loads((run_dir / "eval.json").read_text())
        parts += [(group_of(config, who, by), x) for who, x in held_out.items() if isinstance(x, dict)]
    print(table("held-out", parts))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_runs(run_dirs, out, by)
    print(f"written: {out}")
