"""From the finished runs of a study to its tables and verdicts, `results.md`, and `runs.jsonl`."""
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from cory.config import read_config
from cory.experiment.files import read_jsonl, replace_text
from cory.studies.definitions import Study
from cory.studies.runs import StudyRun
from cory.studies.statistics import Difference, at, difference, interval

REWARD = {"imdb": "task_reward", "gsm8k": "greedy_accuracy"}        # of held-out bare queries
NAMES = {"imdb": "task reward", "gsm8k": "greedy accuracy"}


@dataclass(frozen=True)
class Point:
    """Held-out figures of one agent, or the mean of a run's agents, after an iteration."""
    iteration: int
    reward: float
    kl: float                   # nats per response, on the bare query
    combined: float             # task reward - eta KL, with the run's own eta; on GSM8K of sampled answers
    distinct_2: float


@dataclass(frozen=True)
class Result:
    run: StudyRun
    agents: dict[str, list[Point]]          # with the base's figures as iteration 0

    @property
    def pair(self) -> list[Point]:
        """The mean of the agents, point by point: PPO's one agent is itself."""
        columns = zip(*self.agents.values(), strict=True)
        return [Point(of_agents[0].iteration, *(fmean(getattr(p, name) for p in of_agents)
                                                for name in ("reward", "kl", "combined", "distinct_2")))
                for of_agents in columns]

    @property
    def collapsed(self) -> bool:
        """By our rule: at the end an agent's reward is a tenth of the base's, or 0.05, below the base's, or
        its pairs of neighbouring tokens are less than half as varied as the base's.
        """
        return any(points[-1].reward < points[0].reward - max(0.05, abs(points[0].reward) / 10)
                   or points[-1].distinct_2 < points[0].distinct_2 / 2 for points in self.agents.values())


def read(run: StudyRun) -> Result:
    rows = read_jsonl(run.folder / "metrics.jsonl")
    names = read_config(run.folder)["agents"]

    def points(agent: str) -> list[Point]:
        found = []
        for row in rows:
            prefix = "eval/base/" if row["iteration"] == 0 else f"eval/{agent}/"
            keys = (REWARD[run.task], "kl", "combined_reward", "distinct_2")
            if prefix + "kl" in row:
                found.append(Point(row["iteration"], *(row[prefix + key] for key in keys)))
        return found

    return Result(run, {name: points(name) for name in names})


def by_variant(results: list[Result], task: str) -> dict[str, dict[int, Result]]:
    """{variant: {seed: result}}, in the order of the study."""
    found = {}
    for result in results:
        if result.run.task == task:
            found.setdefault(result.run.variant, {})[result.run.seed] = result
    return found


def mean_with_interval(values: list[float]) -> str:
    low, high = interval(np.array(values))
    return f"{np.mean(values):.2f}" + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def final_table(groups: dict[str, dict[int, Result]], task: str) -> list[str]:
    lines = [f"| variant | seeds | {NAMES[task]}, mean of agents | LLM1 | LLM2 | KL | combined reward | "
             "collapsed |", "|---|" + "--:|" * 7]
    for variant, of_seed in groups.items():
        runs = list(of_seed.values())
        last = [run.pair[-1] for run in runs]
        of_agents = [fmean(run.agents[name][-1].reward for run in runs) if name in runs[0].agents else None
                     for name in ("llm1", "llm2")]
        cells = [variant, str(len(runs)), mean_with_interval([p.reward for p in last]),
                 *("" if x is None else f"{x:.2f}" for x in of_agents),
                 mean_with_interval([p.kl for p in last]), mean_with_interval([p.combined for p in last]),
                 f"{sum(run.collapsed for run in runs)} of {len(runs)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def differences(groups: dict[str, dict[int, Result]], study: Study, variant: str) -> dict:
    """Of a variant to the study's baseline, paired by seed, mean of agents: what differs at what equal."""
    runs, base = groups[variant], groups[study.baseline]

    def last(of_seed: dict[int, Result], name: str) -> dict[int, float]:
        return {seed: getattr(run.pair[-1], name) for seed, run in of_seed.items()}

    def at_equal(x_of_variant, x_of_base) -> Difference:
        """Of each agent's reward where it first reaches the x that all agents of both runs reach."""
        ys = {}, {}
        for seed in runs.keys() & base.keys():
            sides = [[[(x(p), p.reward) for p in points] for points in of_seed[seed].agents.values()]
                     for of_seed, x in ((runs, x_of_variant), (base, x_of_base))]
            x = min(max(point[0] for point in curve) for side in sides for curve in side)
            for found, side in zip(ys, sides, strict=True):
                found[seed] = fmean(at(curve, x) for curve in side)
        return difference(*ys)

    def responses(name: str):
        return lambda p: p.iteration * study.responses(name)

    found = {name: difference(last(runs, name), last(base, name)) for name in ("reward", "kl")}
    same_eta = eta(runs) == eta(base)
    found["combined"] = difference(last(runs, "combined"), last(base, "combined")) if same_eta else None
    found["reward at equal KL"] = at_equal(lambda p: p.kl, lambda p: p.kl)
    found["reward at equal compute"] = at_equal(responses(variant), responses(study.baseline))
    return found


def eta(of_seed: dict[int, Result]) -> float:
    return read_config(next(iter(of_seed.values())).run.folder)["init_kl_coef"]


def difference_table(groups: dict[str, dict[int, Result]], study: Study) -> list[str]:
    base = study.baseline
    lines = [f"| less `{base}` | reward | at equal KL | at equal compute | KL | combined reward | seeds "
             "in which reward is higher | reward | KL |", "|---|" + "--:|" * 6 + "---|---|"]
    for variant in groups:
        if variant != base and base in groups:
            d = differences(groups, study, variant)
            order = ("reward", "reward at equal KL", "reward at equal compute", "kl", "combined")
            cells = [variant, *("other eta" if d[name] is None else str(d[name]) for name in order),
                     f"{d['reward'].improved:.0%} of {d['reward'].seeds}", d["reward"].verdict,
                     d["kl"].verdict]
            lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 2 else [f"No finished run of the baseline, `{base}`: no differences."]


def made_by(run: StudyRun) -> dict[str, str]:
    """Commit and versions of packages by which a run was finished, out of its last checkpoint."""
    (state,) = run.folder.glob("checkpoints/iteration_*/state.json")
    return json.loads(state.read_text())["versions"]


def write(name: str, study: Study, results: list[Result], failed: list[tuple[StudyRun, str]], command: str,
          out: Path) -> str:
    """Writes `results.md` and `runs.jsonl`; returns the text of the first."""
    made = Counter(", ".join(f"{k} {v}" for k, v in made_by(r.run).items()) for r in results)
    of_runs = "; ".join(f"{n} runs by {text}" for text, n in made.items())
    how = (f"{of_runs}. 95% intervals of the mean over seeds by the bootstrap; differences are "
           "paired by seed. Equal KL is the largest that every agent of both runs of a seed reaches, reward "
           "interpolated between evaluations; equal compute counts responses sampled and trained on.")
    lines = [f"# {name}", "", study.claim, "", f"    {command}", "", how, ""]
    for task in dict.fromkeys(result.run.task for result in results):
        groups = by_variant(results, task)
        lines += [f"## {task}", "", *final_table(groups, task), "", *difference_table(groups, study), ""]
    if failed:
        lines += ["## Failed", "", "Not in the tables; a run that diverged stands here.", ""]
        lines += [f"- {run.task}, {run.variant}, seed {run.seed}: {why}" for run, why in failed] + [""]
    text = "\n".join(lines)
    replace_text(out / "results.md", text)
    rows = [{"study": name, "task": r.run.task, "variant": r.run.variant, "seed": r.run.seed,
             "folder": r.run.folder.name, "flags": list(r.run.flags), "made_by": made_by(r.run),
             "agents": {agent: vars(points[-1]) for agent, points in r.agents.items()},
             "collapsed": r.collapsed} for r in results]
    replace_text(out / "runs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return text
