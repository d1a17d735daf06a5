"""From the finished runs of a study to figures: what each run reached, and how variants differ."""
import math
from dataclasses import dataclass
from statistics import fmean

from cory.config import read_config
from cory.experiment.checkpoint import checkpoints_of
from cory.experiment.files import read_json, read_log
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
    unsteady: float                         # sample std of a role's training reward over the last half
    measured: dict                          # what was measured of the finished run, {} if nothing was
    diverged: bool = False                  # it has no end, and nothing of the above

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
        """By our rule: it diverged; or at its end an agent's reward is a tenth of the base's, or 0.05, below
        the base's, or its pairs of neighbouring tokens are less than a third as varied as the base's.
        """
        return self.diverged or any(
            points[-1].reward < points[0].reward - max(0.05, abs(points[0].reward) / 10)
            or points[-1].distinct_2 < points[0].distinct_2 / 3 for points in self.agents.values())


Groups = dict[str, dict[int, Result]]       # {variant: {seed: result}} of one task, in the study's order


def read(run: StudyRun) -> Result:
    """The figures of a finished run, or of one that diverged."""
    if not run.trained:
        return Result(run, {}, {}, float("nan"), {}, diverged=True)
    rows = read_log(run.folder / "metrics.jsonl")
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
    halves = [[row[f"{role}/task_reward"] for row in trained[len(trained) // 2:]] for role in roles]
    unsteady = fmean(std(half) for half in halves)
    measured = read_json(run.folder / MEASURES[run.measure][1]) if run.measure else {}
    return Result(run, {name: points(name) for name in names}, roles, unsteady, measured)


def std(values: list[float]) -> float:
    """Sample standard deviation; NaN of one value."""
    mean, n = fmean(values), len(values)
    return (sum((x - mean) ** 2 for x in values) / (n - 1)) ** 0.5 if n > 1 else float("nan")


def by_variant(results: list[Result], task: str, diverged: bool = False) -> Groups:
    """With or without the runs that diverged, which have no figures."""
    found = {}
    for result in results:
        if result.run.task == task and (diverged or not result.diverged):
            found.setdefault(result.run.variant, {})[result.run.seed] = result
    return found


def made_by(run: StudyRun) -> dict[str, str]:
    """Commit and versions of packages by which a run was finished, out of its last checkpoint."""
    saved = checkpoints_of(run.folder)
    return read_json(saved[0] / "state.json")["versions"] if saved else {"commit": "unknown"}


def of_last(of_seed: dict[int, Result], name: str) -> dict[int, float]:
    """{seed: a figure at the end of training, mean of the agents}."""
    return {seed: getattr(run.last, name) for seed, run in of_seed.items()}


def differences(groups: Groups, study: Study, variant: str) -> dict[str, Difference | None]:
    """Of a variant to its baseline, paired by seed: what differs at what equal. "KL, times": log of a ratio.

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
    times = {seed: log_ratio(kl[seed], base_kl[seed]) for seed in kl.keys() & base_kl.keys()}
    found["KL, times"] = difference(times, dict.fromkeys(times, 0.0))
    found["reward at equal KL"] = at_equal(lambda p: p.kl, lambda p: p.kl)
    found["reward at equal compute"] = at_equal(responses(variant), responses(base))
    return found


def log_ratio(x: float, y: float) -> float:
    """Its mean over seeds is the log of the geometric mean, which no single large ratio drags along."""
    return math.log(x / y) if x > 0 and y > 0 else math.nan


def same_runs(groups: Groups, variant: str, base: str) -> bool:
    """Whether two variants are the same runs, under this preset."""
    folders = [{run.run.folder for run in groups[name].values()} for name in (variant, base)]
    return folders[0] == folders[1]


def eta(of_seed: dict[int, Result]) -> float:
    return read_config(next(iter(of_seed.values())).run.folder)["init_kl_coef"]


def frontier_gap(groups: Groups, study: Study) -> Difference:
    """Height of CORY's frontier over eta above PPO's, at equal KL, paired by seed: `gap` of the ends."""
    def ends(method: str, seed: int) -> list[tuple[float, float]]:
        runs = [groups[f"{method}, {eta}"][seed] for eta in shared]
        return [(run.last.kl, run.last.reward) for run in runs]

    def etas(method: str) -> set[str]:
        return {variant.removeprefix(f"{method}, ") for variant in study.sweeps[method] if variant in groups}

    shared = etas("cory") & etas("ppo")
    if not shared:
        return difference({}, {})
    seeds = set.intersection(*(set(groups[f"{method}, {eta}"]) for method in study.sweeps for eta in shared))
    gaps = {seed: gap(ends("cory", seed), ends("ppo", seed)) for seed in sorted(seeds)}
    return difference(gaps, dict.fromkeys(gaps, 0.0))
