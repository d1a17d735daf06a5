"""From the finished runs of a study to figures: what each run reached, and how variants differ."""
import json
from dataclasses import dataclass
from statistics import fmean

from cory.config import read_config
from cory.experiment.files import read_jsonl
from cory.studies.definitions import Study
from cory.studies.runs import MEASURES, StudyRun
from cory.studies.statistics import Difference, at, difference, gap

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
    roles: dict[str, dict[str, float]]      # role: means of its training metrics, last quarter of iterations
    unsteady: float                         # sample std of the training reward over the last half
    measured: dict                          # what was measured of the finished run, {} if nothing was

    @property
    def pair(self) -> list[Point]:
        """The mean of the agents, point by point: PPO's one agent is itself."""
        columns = zip(*self.agents.values(), strict=True)
        return [Point(of_agents[0].iteration, *(fmean(getattr(p, name) for p in of_agents)
                                                for name in ("reward", "kl", "combined", "distinct_2")))
                for of_agents in columns]

    @property
    def last(self) -> Point:
        return self.pair[-1]

    @property
    def collapsed(self) -> bool:
        """By our rule: at the end an agent's reward is a tenth of the base's, or 0.05, below the base's, or
        its pairs of neighbouring tokens are less than half as varied as the base's.
        """
        return any(points[-1].reward < points[0].reward - max(0.05, abs(points[0].reward) / 10)
                   or points[-1].distinct_2 < points[0].distinct_2 / 2 for points in self.agents.values())


Groups = dict[str, dict[int, Result]]       # {variant: {seed: result}} of one task, in the study's order


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

    trained = rows[1:]
    late = trained[-max(1, len(trained) // 4):]
    roles = {role: {name: fmean(row[f"{role}/{name}"] for row in late) for name in ("task_reward", "kl")}
             for role in trained[-1]["roles"]}
    halves = [[row[f"{name}/task_reward"] for row in trained[len(trained) // 2:]] for name in names]
    unsteady = fmean(std(half) for half in halves)
    measured = json.loads((run.folder / MEASURES[run.measure][1]).read_text()) if run.measure else {}
    return Result(run, {name: points(name) for name in names}, roles, unsteady, measured)


def std(values: list[float]) -> float:
    """Sample standard deviation; NaN of one value."""
    mean, n = fmean(values), len(values)
    return (sum((x - mean) ** 2 for x in values) / (n - 1)) ** 0.5 if n > 1 else float("nan")


def by_variant(results: list[Result], task: str) -> Groups:
    found = {}
    for result in results:
        if result.run.task == task:
            found.setdefault(result.run.variant, {})[result.run.seed] = result
    return found


def made_by(run: StudyRun) -> dict[str, str]:
    """Commit and versions of packages by which a run was finished, out of its last checkpoint."""
    (state,) = run.folder.glob("checkpoints/iteration_*/state.json")
    return json.loads(state.read_text())["versions"]


def of_last(of_seed: dict[int, Result], name: str) -> dict[int, float]:
    """{seed: a figure at the end of training, mean of the agents}."""
    return {seed: getattr(run.last, name) for seed, run in of_seed.items()}


def differences(groups: Groups, study: Study, variant: str) -> dict[str, Difference | None]:
    """Of a variant to its baseline, paired by seed: what differs at what equal. "KL, times": a ratio less 1.

    Figures are means over a run's agents. At equal KL, or compute, it is each agent's reward where it first
    reaches the x that all agents of both runs of a seed reach. None where a figure cannot be compared.
    """
    base = study.baseline_of(variant)
    runs, base_runs = groups[variant], groups[base]

    def at_equal(x_of_variant, x_of_base) -> Difference:
        ys = {}, {}
        for seed in runs.keys() & base_runs.keys():
            sides = [[[(x(p), p.reward) for p in points] for points in of_seed[seed].agents.values()]
                     for of_seed, x in ((runs, x_of_variant), (base_runs, x_of_base))]
            x = min(max(point[0] for point in curve) for side in sides for curve in side)
            for found, side in zip(ys, sides, strict=True):
                found[seed] = fmean(at(curve, x) for curve in side)
        return difference(*ys)

    def responses(name: str):
        return lambda p: p.iteration * study.responses(name)

    found = {name: difference(of_last(runs, name), of_last(base_runs, name)) for name in ("reward", "kl")}
    same_eta = eta(runs) == eta(base_runs)
    found["combined"] = None
    if same_eta:
        found["combined"] = difference(of_last(runs, "combined"), of_last(base_runs, "combined"))
    kl, base_kl = of_last(runs, "kl"), of_last(base_runs, "kl")
    times = {seed: kl[seed] / base_kl[seed] - 1 for seed in kl.keys() & base_kl.keys()}
    found["KL, times"] = difference(times, dict.fromkeys(times, 0.0))
    found["reward at equal KL"] = at_equal(lambda p: p.kl, lambda p: p.kl)
    found["reward at equal compute"] = at_equal(responses(variant), responses(base))
    return found


def same_runs(groups: Groups, variant: str, base: str) -> bool:
    """Whether two variants are the same runs, under this preset."""
    folders = [{run.run.folder for run in groups[name].values()} for name in (variant, base)]
    return folders[0] == folders[1]


def eta(of_seed: dict[int, Result]) -> float:
    return read_config(next(iter(of_seed.values())).run.folder)["init_kl_coef"]


def frontier_gap(groups: Groups, study: Study) -> Difference:
    """Height of CORY's frontier over eta above PPO's, at equal KL, paired by seed: `gap` of the ends."""
    def ends(method: str, seed: int) -> list[tuple[float, float]]:
        runs = [groups[variant][seed] for variant in study.sweeps[method]]
        return [(run.last.kl, run.last.reward) for run in runs]

    variants = [variant for sweep in study.sweeps.values() for variant in sweep]
    if not set(variants) <= groups.keys():
        return difference({}, {})
    seeds = set.intersection(*(set(groups[variant]) for variant in variants))
    gaps = {seed: gap(ends("cory", seed), ends("ppo", seed)) for seed in sorted(seeds)}
    return difference(gaps, dict.fromkeys(gaps, 0.0))
