"""The page of a study, `results.md`: what each variant reached, and how it differs from its baseline."""
from pathlib import Path

import numpy as np
import pandas as pd

from cory.experiment.tables import table
from cory.studies import pictures
from cory.studies.definitions import Study
from cory.studies.rows import REWARD
from cory.studies.statistics import collapsed, compared, differences, ends
from cory.system.files import replace_text

METRICS = {"reward": "reward", "accuracy": "sampled accuracy", "kl": "KL",
           "combined_reward": "combined reward", "share_of_limit": "share of limit",
           "distinct_2": "distinct-2", "repeated_tokens": "repeated tokens",
           "observer_copies": "observer copies", "observer_after_better": "observer after better",
           "observer_after_worse": "observer after worse"}
HOW = """Figures are of held-out bare queries at the end of training: means over seeds of the mean of a run's
agents. KL is in nats per response. Differences are paired by seed, with Student's 95% interval. Equal
KL, and equal reward, is the smallest that an agent of both runs of a seed ends at."""


def write(name: str, study: Study, rows: pd.DataFrame, failed: list[str], command: str, out: Path) -> str:
    """Writes the page, with its pictures, into `out`. Returns the page's text."""
    lines = [f"# {name}", "", study.question, "", f"    {command}", "", HOW, "", made_at(rows), ""]
    for task, of_task in rows.groupby("task", sort=False):
        drawn = pictures.draw(study, task, of_task, out)
        lines += [f"## {task}", "", f"Reward is {REWARD[task].replace('_', ' ')}.", "",
                  table(ends_table(of_task)), "", *differences_table(study, of_task),
                  *(line for path in drawn for line in (f"![{path.stem}]({path.name})", ""))]
    if failed:
        lines += ["## Failed", "", *(f"- {line}" for line in failed), ""]
    text = "\n".join(lines)
    replace_text(out / "results.md", text)
    return text


def made_at(rows: pd.DataFrame) -> str:
    """`20 runs, by the code of commit 0123456789 (18), 9876543210 (2).`"""
    runs = rows.drop_duplicates(["task", "variant", "seed"])
    commits = ", ".join(f"{commit} ({n})" for commit, n in runs.commit.value_counts().items())
    return f"{len(runs)} runs, by the code of commit {commits}."


def ends_table(rows: pd.DataFrame) -> list[list[str]]:
    """A line for the base and for each variant, of one task."""
    metrics = {name: title for name, title in METRICS.items() if name in rows and rows[name].notna().any()}
    per_run = ends(rows)
    gone = rows.groupby(["variant", "seed", "agent"]).apply(collapsed)
    hours = rows.drop_duplicates(["variant", "seed"]).groupby("variant").core_seconds.mean() / 3600
    base = rows[rows.iteration == 0]

    def means(of_rows: pd.DataFrame) -> list[str]:
        return ["–" if np.isnan(mean) else f"{mean:.2f}" for mean in of_rows[[*metrics]].mean()]

    lines = [["variant", "seeds", *metrics.values(), "collapsed agents", "core hours a run"],
             ["base", "", *means(base), "", ""]]
    for variant in rows.variant.unique():
        of_variant = per_run[per_run.index.get_level_values("variant") == variant]
        lines.append([variant, str(len(of_variant)), *means(of_variant),
                      f"{gone[variant].sum()} of {len(gone[variant])}", f"{hours[variant]:.2f}"])
    return lines


def differences_table(study: Study, rows: pd.DataFrame) -> list[str]:
    """A line for each variant that there is a baseline for; no table without one."""
    lines = [["variant", "less", "seeds", *pictures.TITLES.values()]]
    for variant, baseline in compared(study, rows).items():
        by_title = differences(rows, variant, baseline)
        cells = [str(by_title[name]) if name in by_title else "other eta" for name in pictures.TITLES]
        lines.append([variant, baseline, str(by_title["reward"].seeds), *cells])
    return [table(lines), ""] if len(lines) > 1 else []
