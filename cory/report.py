"""Tables and plots of any agents and metrics, of one run or of several compared."""
from collections import defaultdict
from math import inf, nan
from pathlib import Path
from typing import Collection, Sequence

import pandas as pd
from matplotlib.figure import Figure

from cory.config import FREE, read_config, short_name
from cory.errors import UserError
from cory.log import read_jsonl

FORMATS = {"task_reward": ".2f", "kl": ".1f", "combined_reward": ".2f", "length": ".1f",
           "base_perplexity": ".0f"}                                # others: .3f
TITLES = {"task_reward": "task reward", "kl": "KL per response (nats)", "combined_reward": "combined reward",
          "score": "score: what is trained on", "entropy": "entropy per token (nats)",
          "explained_variance": "explained variance", "kl_coef": "KL coefficient eta"}
WITHOUT_PANEL = """role task_reward_std length sampling_gap policy_loss value_loss approx_kl kl_loss grad_norm
    clip_fraction learning_rate distinct_1 distinct_2 repeated_tokens base_perplexity truncated
    reward_truncated optimizer_steps seconds seconds_sampling seconds_scoring seconds_update
    tokens_per_second""".split()
KEY = "^(?:(?P<kind>eval_greedy|eval)_)?(?P<metric>.+?)(?:/(?P<who>[^/]+))?$"
KINDS = {"training": (1, 1), "eval": "", "eval_greedy": (4, 2)}        # dotted, solid, dashed


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
    """Iteration, group, run, metric, kind and value: of training the running mean over a tenth of it."""
    config, rows = read_config(run_dir), pd.DataFrame(read_jsonl(run_dir / "metrics.jsonl"))
    bases = {*config["agents"].values(), "base_team"}
    of_bases = [key for key in rows if key.rpartition("/")[2] in bases]
    held_out = rows.filter(regex="^eval_").notna().any(axis=1)
    rows.loc[held_out, of_bases] = rows.loc[held_out, of_bases].ffill()     # those of iteration 0
    curves = rows.melt("iteration").replace([inf, -inf], nan).dropna()
    curves = curves.join(curves.variable.str.extract(KEY).fillna({"kind": "training", "who": "team"}))
    curves["group"], curves["run"] = [group_of(config, who, by) for who in curves.who], str(run_dir)
    tenth = 2 * max(1, len(rows) // 20) + 1
    training = curves[curves.kind == "training"].groupby("variable").value
    curves.update(training.transform(lambda x: x.rolling(tenth, center=True, min_periods=1).mean()))
    curves.metric = curves.metric.replace({"kl_full": "kl", "kl_k1": "kl"})
    return curves[~curves.metric.isin(WITHOUT_PANEL)]


def draw_runs(run_dirs: list[Path], out: Path, by: Sequence[str] = ()) -> Figure:
    """A panel for reward, KL and each metric that varies: means over seeds in a band of one sample standard
    deviation, where all runs of a group have a finite value, groups as in the tables. The last has held-out
    reward against KL, a line for each seed.
    """
    # here: the import takes 2 s
    import seaborn

    config = read_config(run_dirs[0])
    curves = pd.concat([read_curves(run_dir, by) for run_dir in run_dirs], ignore_index=True)
    runs = curves.groupby("group").run.transform("nunique")
    if len(run_dirs) > 1:
        curves.group += " (n = " + runs.astype(str) + ")"
    held_out = curves[curves.kind == "eval"].pivot(index=["group", "run", "iteration"], columns="metric")
    curves = curves[runs == curves.groupby(["group", "variable", "iteration"]).run.transform("nunique")]
    always = ("task_reward", "kl")
    curves = curves.groupby("metric").filter(lambda rows: rows.name in always or rows.value.nunique() > 1)
    groups = curves.group.unique()
    palette = seaborn.color_palette("colorblind" if len(groups) <= 10 else "husl", len(groups))
    hues = {"hue": "group", "hue_order": groups, "palette": palette}
    kinds = {"style": "kind", "style_order": KINDS, "dashes": [*KINDS.values()]}
    names = sorted(curves.metric.unique(), key=lambda name: (*TITLES, name).index(name))

    rows = len(names) // 4 + 1
    figure = Figure(figsize=(14, 2.7 * rows + 0.9), layout="constrained")
    bands = ", means over seeds with bands of one standard deviation" * (len(run_dirs) > 1)
    figure.suptitle(f"{short_name(config['task'])}, preset {config['preset']}; training smoothed{bands}")
    for place, name in enumerate(names, start=1):
        ax = figure.add_subplot(rows, 4, place)
        seaborn.lineplot(curves[curves.metric == name], x="iteration", y="value", errorbar="sd", ax=ax,
                         legend="full" if place == 1 else False, **hues, **kinds)
        ax.set(title=TITLES.get(name, name.replace("_", " ")), ylabel=None)
    ax = figure.add_subplot(rows, 4, len(names) + 1)
    seaborn.lineplot(held_out["value"], x="kl", y="task_reward", units="run", estimator=None, sort=False,
                     marker="o", legend=False, ax=ax, **hues)
    ax.set(title="held-out reward against KL", xlabel=TITLES["kl"], ylabel=TITLES["task_reward"])

    first = figure.axes[0]
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    first.get_legend().remove()
    figure.savefig(out, dpi=110, bbox_inches="tight")
    return figure


# --- the command ---
def require_comparable(run_dirs: list[Path], by: list[str]) -> None:
    """Runs must differ in method, `by` and seed alone."""
    names, settings = [*map(str, run_dirs)], pd.DataFrame(map(read_config, run_dirs)).astype(str)
    for name in {*by} - {*settings}:
        raise UserError("by", name, "is not a setting; config.json lists them")
    free = FREE | {"method", "agents", "commit", *by}
    differ = settings.columns[settings.nunique(dropna=False) > 1].difference([*free])
    if len(differ):
        raise UserError("run_dirs", names, f"differ in {', '.join(differ)}; make a group of each value with "
                        f"--by {' '.join([*by, *differ])}")
    if settings.duplicated(["method", *by, "seed"]).any():
        raise UserError("run_dirs", names, "have the same seed twice in a group; drop one")


def compare(run_dirs: list[Path], by: list[str], out: Path) -> None:
    """Prints a table of means and standard deviations over seeds, and draws the runs into `out`; says which
    runs are unfinished.
    """
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise UserError("out", str(out), "must be a file that ends in .png, .pdf or .svg")
    require_comparable(run_dirs, by)
    parts = []
    for run_dir in run_dirs:
        config, path = read_config(run_dir), run_dir / "metrics.jsonl"
        rows = read_jsonl(path) if path.exists() else []
        held_out = held_out_parts(rows)
        if not held_out:
            raise UserError("run_dirs", str(run_dir), "has no held-out metrics yet; wait, or leave it out")
        if not (run_dir / "eval.json").exists():
            evaluated = [row["iteration"] for row in rows if any(key.startswith("eval_") for key in row)]
            print(f"unfinished: {run_dir}, at iteration {rows[-1]['iteration']} of {config['iterations']}, "
                  f"last evaluated at {evaluated[-1]}")
        parts += [(group_of(config, who, by), metrics) for who, metrics in held_out.items()]
    print(table("held-out", parts))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_runs(run_dirs, out, by)
    print(f"written: {out}")


if __name__ == "__main__":
    raise SystemExit("this is no script: use `python -m cory report RUN_DIR`")
