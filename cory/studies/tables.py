"""The page of a study, `results.md`: tables, verdicts and answers side by side; and its figures as JSON."""
import json
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Iterable

import numpy as np

from cory.studies.comparison import (
    before_an_evaluation,
    differences,
    etas_without_both,
    frontier_gap,
    of_last,
    of_other_eta,
    why_not_compared,
)
from cory.studies.definitions import Study
from cory.studies.results import NAMES, REWARD, Groups, Result, by_variant, row_of
from cory.studies.runs import MEASURES, StudyRun
from cory.studies.statistics import Difference, difference, interval
from cory.system.files import replace_text

NOTES = {"gsm8k": ("Reward is the accuracy of greedy answers; KL and combined reward are of sampled ones.",
                   "")}


def markdown(head: list[str], rows: Iterable[list[str]], texts: int = 1) -> list[str]:
    """The first `texts` columns to the left, the others, which hold figures, to the right."""
    rule = "|" + "---|" * texts + "--:|" * (len(head) - texts)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows), ""]


def mean_with_interval(values: Iterable[float]) -> str:
    values = np.array([x for x in values if np.isfinite(x)])
    if not len(values):
        return ""
    low, high = interval(values)
    return f"{values.mean():.2f}" + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def final_table(groups: Groups, all_runs: Groups, study: Study, task: str) -> list[str]:
    """`all_runs` are those of `groups`, and those that diverged."""
    etas = of_other_eta(groups, study)
    agents = list(dict.fromkeys(
        name for of_seed in groups.values() for run in of_seed.values() for name in run.agents))
    head = ["variant", "seeds", f"{NAMES[task]}, mean of agents", *map(str.upper, agents), "KL",
            "combined reward", "collapsed runs", "agents"]
    rows = []
    for variant, every in all_runs.items():
        of_seed = groups.get(variant, {})
        of_agents = []
        for name in agents:
            ends = [run.agents[name][-1].reward for run in of_seed.values() if name in run.agents]
            of_agents.append(f"{fmean(ends):.2f}" if ends else "")
        means = [mean_with_interval(of_last(of_seed, name).values()) for name in ("reward", "kl", "combined")]
        if variant in etas:
            means[-1] += f" (eta {etas[variant]:g})"
        collapsed = sum(run.collapsed for run in every.values())
        of_all_agents = fmean(run.share_collapsed for run in every.values())
        rows.append([variant, str(len(of_seed)), means[0], *of_agents, *means[1:],
                     f"{collapsed} of {len(every)}", f"{of_all_agents:.0%}"])
    return markdown(head, rows)


def difference_table(groups: Groups, study: Study, task: str) -> list[str]:
    """Every variant against its baseline."""
    columns = {"reward": "reward", "reward at equal KL": "at equal KL",
               "sampled reward at equal KL": "sampled, at equal KL",
               "reward at equal compute": "at equal compute", "kl": "KL", "log KL ratio": "KL ratio",
               "combined": "combined reward"}
    if REWARD[task] == "task_reward":                               # is of sampled answers itself
        del columns["sampled reward at equal KL"]
    head = ["variant", "less", "seeds", *columns.values(), "equal KL before the first evaluation",
            "verdict: reward", "verdict: KL"]
    rows = []
    for variant in groups:
        baseline = study.baseline_of(variant)
        if variant == baseline:
            continue
        if why := why_not_compared(groups, variant, baseline):
            rows.append([variant, baseline, why, *[""] * (len(head) - 3)])
            continue
        d = differences(groups, study, variant)
        cells = {name: "other eta" if d[name] is None else with_share(d[name]) for name in columns}
        cells["log KL ratio"] = as_times(d["log KL ratio"])
        seeds, early = d["reward"].seeds, before_an_evaluation(groups, study, variant)
        rows.append([variant, baseline, str(seeds), *cells.values(), f"{early} of {seeds}",
                     d["reward"].verdict, d["kl"].verdict])
    if not rows:
        return []
    return ["Differences, in brackets behind them the share of seeds in which the variant is higher:", "",
            *markdown(head, rows, texts=2)]


def with_share(d: Difference) -> str:
    """`+0.10 [-0.03, +0.24] (80%)`."""
    return f"{d} ({d.improved:.0%})" if d.seeds else str(d)


def as_times(d: Difference) -> str:
    """A ratio that is kept as its logarithm: `1.25 [1.10, 1.40]`."""
    if np.isnan(d.mean):
        return ""
    mean, low, high = np.exp([d.mean, d.low, d.high])
    return f"{mean:.2f}" + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def agents_table(groups: Groups) -> list[str]:
    """Of two agents: how they differ at the end, and what they do in each role while training."""
    head = ["variant", "LLM1 less LLM2: reward", "KL", "pioneer's training KL", "observer's",
            "observer less pioneer: training reward", "KL", "held-out KL on the bare query"]
    rows = []
    for variant, of_seed in groups.items():
        runs = [run for run in of_seed.values() if {"pioneer", "observer"} <= run.roles.keys()]
        if not runs:
            continue

        def less(name: str, of_runs=runs) -> str:
            if len(of_runs[0].agents) < 2:
                return ""
            first, second = ({run.run.seed: getattr(run.agents[agent][-1], name) for run in of_runs}
                             for agent in list(of_runs[0].agents)[:2])
            return str(difference(first, second))

        def of_role(role: str, name: str, of_runs=runs) -> dict[int, float]:
            return {run.run.seed: run.roles[role][name] for run in of_runs}

        observer_less = [str(difference(of_role("observer", name), of_role("pioneer", name)))
                         for name in ("task_reward", "kl")]
        rows.append([variant, less("reward"), less("kl"),
                     *(mean_with_interval(of_role(role, "kl").values()) for role in ("pioneer", "observer")),
                     *observer_less, mean_with_interval(of_last(of_seed, "kl").values())])
    if not rows:
        return []
    return ["Two agents: their difference at the end, and training by role, mean of the last quarter of "
            "iterations. The observer's KL is against the reference that reads the same prompt. Training "
            "draws its length limits and its estimate of KL; held-out KL is exact, at the largest limit.", "",
            *markdown(head, rows)]


TEAM = {"first": "first answer", "second": "second, having seen the first", "team": "better of these two",
        "alone": "better of two to the bare query"}


def measured_table(groups: Groups, study: Study, task: str) -> list[str]:
    """What was measured of finished runs, mean of the agents: pass@k, or two answers together."""
    kind = study.measure.get(task)
    if not kind or not groups:
        return []
    some = next(iter(next(iter(groups.values())).values()))
    names = MEASURES[kind].figures
    if kind == "team":
        what = "reward" if task == "imdb" else "share solved; the better of two is pass@2"
        title = f"Two answers together, held out, sampled ({what}):"
        head = [TEAM[name] for name in names]
        found = {variant: {seed: run.measured["agents"] for seed, run in of_seed.items()}
                 for variant, of_seed in groups.items()}
    else:
        title = "pass@k of held-out bare queries, mean of agents:"
        head = names
        found = {variant: {seed: measured_mean(run, names) for seed, run in of_seed.items()}
                 for variant, of_seed in groups.items()}
    rows = [["base", *(f"{some.measured['base'][name]:.2f}" for name in names)]]
    for variant, of_seed in found.items():
        means = [mean_with_interval(row[name] for row in of_seed.values()) for name in names]
        rows.append([variant, *means])
        baseline = study.baseline_of(variant)
        if variant == baseline:
            continue
        if why := why_not_compared(groups, variant, baseline):
            rows.append([f"{variant} less {baseline}", why, *[""] * (len(names) - 1)])
            continue
        less = [difference(*({seed: row[name] for seed, row in found[side].items()}
                             for side in (variant, baseline))) for name in names]
        rows.append([f"{variant} less {baseline}", *map(with_share, less)])
        if kind == "team":
            pair, two = ({seed: row[name] for seed, row in found[side].items()}
                         for side, name in ((variant, "team"), (baseline, "alone")))
            rows.append([f"{variant}'s pair less {baseline}'s two to the bare query", "", "",
                         with_share(difference(pair, two)), ""])
    return [title, "", *markdown(["", *head], rows)]


def measured_mean(run: Result, names: Iterable[str]) -> dict[str, float]:
    return {name: fmean(run.measured[agent][name] for agent in run.agents) for name in names}


def answers(groups: Groups) -> list[str]:
    """What variants answered last, as pioneers, to queries they share: of the first seed that most have."""
    have = Counter(seed for of_seed in groups.values() for seed, run in of_seed.items() if run.answers)
    if not have:
        return []
    seed = min(have, key=lambda seed: (-have[seed], seed))
    asked: dict[str, dict[str, dict]] = {}                  # query: variant: row
    for variant, of_seed in groups.items():
        for row in of_seed[seed].answers if seed in of_seed else ():
            asked.setdefault(row["query"], {})[variant] = row
    lines = [f"Answers of the last iteration, seed {seed}:", ""]
    most = max(map(len, asked.values()))
    for query, rows in [(query, rows) for query, rows in asked.items() if len(rows) == most][:2]:
        base = next(iter(rows.values()))
        lines += markdown([cell(query), "answer", "reward"],
                          [["base", cell(base["base"]), f"{base['base_reward']:.2f}"],
                           *([variant, cell(row["answer"]), f"{row['reward']:.2f}"]
                             for variant, row in rows.items())], texts=2)
    return lines


def cell(text: str) -> str:
    """One line of a Markdown table, and nothing in it that Markdown would read."""
    text = " ".join(text.split())
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#" else c for c in text)


def pictures(names: list[str], task: str) -> list[str]:
    return [line for name in names if name.endswith(f"_{task}.png") for line in (f"![{name}]({name})", "")]


def made_with(results: list[Result]) -> str:
    """`2 runs by python 3.11.7, torch 2.13.0, dtype float32; commit 0123456789: 2`."""
    commits = {}
    for result in results:
        versions = result.made_by
        what = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "commit")
        commits.setdefault(what, Counter())[versions["commit"]] += 1
    return ". ".join(
        f"{of.total()} runs by {what}; commit {', '.join(f'{commit}: {n}' for commit, n in of.items())}"
        for what, of in commits.items())


def write(name: str, study: Study, results: list[Result], failed: list[tuple[StudyRun, str]], command: str,
          drawn: list[str], out: Path) -> str:
    """Writes `results.md`, with the pictures `drawn`, and `runs.jsonl`; returns the text of the first."""
    ended = [r for r in results if not r.diverged]
    published = sum(result.run.row is not None for result in ended)
    before = f" Published before: {published}." if published else ""
    how = (f"{made_with(ended) or 'No finished runs'}.{before} 95% intervals of the mean over seeds by the "
           "bootstrap; differences are paired by seed. Equal KL is the largest that every agent of both runs "
           "of a seed reaches, reward interpolated between evaluations; equal compute counts responses "
           "sampled and trained on.")
    lines = [f"# {name}", "", study.claim, "", f"    {command}", "", how, ""]
    for task in dict.fromkeys(result.run.task for result in results):
        groups = by_variant(results, task)
        all_runs = by_variant(results, task, diverged=True)
        lines += [f"## {task}", "", *NOTES.get(task, ()), *final_table(groups, all_runs, study, task),
                  *difference_table(groups, study, task)]
        if study.sweeps:
            height = frontier_gap(groups, study)
            lines += ["Height of CORY's frontier above PPO's, the best reward of any eta within a KL, mean "
                      "from the smallest KL evaluated to the largest that both reach: "
                      f"{with_share(height)}, {height.verdict}.", ""]
            if left_out := etas_without_both(groups, study):
                lines[-2] += f" Without {', '.join(left_out)}, of which not both methods have finished runs."
        lines += [*measured_table(groups, study, task), *agents_table(groups), *pictures(drawn, task),
                  *answers(groups)]
    if failed:
        lines += ["## Failed", "", "Not in the means; a run that diverged counts as collapsed.", ""]
        lines += [f"- {run.task}, {run.variant}, seed {run.seed}: {why}" for run, why in failed] + [""]
    text = "\n".join(lines)
    replace_text(out / "results.md", text)
    replace_text(out / "runs.jsonl", "".join(json.dumps(row_of(name, result)) + "\n" for result in results))
    return text
