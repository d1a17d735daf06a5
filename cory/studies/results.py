"""From the finished runs of a study to figures: what each run reached, and how variants differ."""
import math
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import fmean

from cory.config import METHODS, read_config
from cory.errors import UserError
from cory.experiment.checkpoint import checkpoints_of
from cory.experiment.files import read_json, read_log
from cory.names import find
from cory.studies.definitions import Study
from cory.studies.runs import MEASURES, StudyRun
from cory.studies.statistics import Curve, Difference, at, difference, frontier_height

REWARD = {"imdb": "task_reward", "gsm8k": "greedy_accuracy"}        # of held-out bare queries
NAMES = {"imdb": "task reward", "gsm8k": "greedy accuracy"}
# What is alike in runs that are alike in these flags. The fingerprint of the weights is also of how the
# tokenizer reads some held-out queries.
ALIKE = {"data": ("--dataset", "--eval_queries"),
         "weights": ("--model", "--dataset", "--eval_queries", "--min_query_length", "--max_query_length",
                     "--lora", "--load_in_4bit", "--dtype"),
         "dtype": ("--dtype",), "head_precision": ("--head_precision",)}


@dataclass(frozen=True)
class Point:
    """Held-out figures of one agent, or the mean of a run's agents, after an iteration."""
    iteration: int
    reward: float               # REWARD of the task
    sampled_reward: float       # mean task reward of the sampled answers that KL is of; on IMDB the same
    kl: float                   # nats per response, on the bare query
    combined: float             # sampled reward - eta KL, with the run's own eta
    distinct_2: float           # different pairs of neighbouring tokens over all pairs
    repeated_tokens: float      # share of tokens that stood earlier in the same response


FIGURES = tuple(field.name for field in fields(Point))[1:]


@dataclass(frozen=True)
class Result:
    run: StudyRun
    agents: dict[str, list[Point]]          # with the base's figures as iteration 0
    roles: dict[str, dict[str, float]]      # role: means of its training metrics, last quarter of iterations
    unsteady: float                         # `unsteadiness` of its training rewards
    measured: dict                          # what was measured of the finished run, {} if nothing was
    responses: int = 0                      # sampled and trained on in an iteration, by all roles
    dtype: str = "float32"
    diverged: bool = False                  # it has no end, and nothing of the above

    @property
    def mean_of_agents(self) -> list[Point]:
        """Point by point; PPO's one agent is itself."""
        return [Point(points[0].iteration, *(fmean(getattr(p, name) for p in points) for name in FIGURES))
                for points in zip(*self.agents.values(), strict=True)]

    @property
    def last(self) -> Point:
        return self.mean_of_agents[-1]

    @property
    def base(self) -> Point:
        """The untrained model's figures, which all agents start from."""
        return next(iter(self.agents.values()))[0]

    @property
    def share_collapsed(self) -> float:
        """Of its agents. By our rule one has collapsed if at its end its reward is below the base's by more
        than a tenth of that or 0.05, whichever is more; or its answers say the same: pairs of neighbouring
        tokens are less than a third as varied as the base's, or of 100 tokens 20 more than of the base's
        stood earlier in the same answer; or if the run diverged.
        """
        def gone(base: Point, end: Point) -> bool:
            return (end.reward < base.reward - max(0.05, abs(base.reward) / 10)
                    or end.distinct_2 < base.distinct_2 / 3
                    or end.repeated_tokens > base.repeated_tokens + 0.2)

        if self.diverged:
            return 1.0
        return fmean(gone(points[0], points[-1]) for points in self.agents.values())

    @property
    def collapsed(self) -> bool:
        """One of its agents has."""
        return self.share_collapsed > 0


Groups = dict[str, dict[int, Result]]       # {variant: {seed: result}} of one task, in the study's order


def read(run: StudyRun) -> Result:
    """The figures of a finished run, or of one that diverged."""
    if not run.trained:
        return Result(run, {}, {}, float("nan"), {}, diverged=True)
    rows, cfg = rows_of(run), read_config(run.folder)

    def points(agent: str) -> list[Point]:
        evaluated = [row for row in rows[1:] if f"eval/{agent}/kl" in row]
        return [point("base", rows[0], run.task), *(point(agent, row, run.task) for row in evaluated)]

    trained = rows[1:]
    late = trained[-max(1, len(trained) // 4):]
    roles = {role: {name: fmean(row[f"{role}/{name}"] for row in late) for name in ("task_reward", "kl")}
             for role in trained[-1]["roles"]}
    halves = [[row[f"{role}/task_reward"] for row in trained[len(trained) // 2:]] for role in roles]
    unsteady = fmean(unsteadiness(half) for half in halves)
    measured = read_json(run.folder / MEASURES[run.measure][1]) if run.measure else {}
    responses = cfg["batch_size"] * len(find("method", cfg["method"], METHODS).agents)
    return Result(run, {name: points(name) for name in cfg["agents"]}, roles, unsteady, measured, responses,
                  cfg["dtype"])


def rows_of(run: StudyRun) -> list[dict]:
    """Of a finished run's metrics.jsonl, the base's first. Raises `UserError` where they are not whole."""
    path = run.folder / "metrics.jsonl"
    rows = read_log(path)
    if [row["iteration"] for row in rows] != [*range(read_config(run.folder)["iterations"] + 1)]:
        raise UserError("file", str(path), "lacks iterations; put back a copy of it, or delete the run")
    return rows


def point(agent: str, row: dict, task: str) -> Point:
    """Of a row of metrics.jsonl in which the agent, or the base, was evaluated."""
    keys = (REWARD[task], "task_reward", "kl", "combined_reward", "distinct_2", "repeated_tokens")
    return Point(row["iteration"], *(row[f"eval/{agent}/{key}"] for key in keys))


def require_alike(runs: list[StudyRun]) -> None:
    """The finished runs of a task were made of the same data and weights and in the same dtype, unless their
    flags ask for others, where their config.json names them; and those of one variant were rewarded and
    evaluated alike: the base has the same figures in each. Raises `UserError`.
    """
    first, first_base = {}, {}
    for run in runs:
        if not run.trained:
            continue
        cfg, given = read_config(run.folder), dict(pairwise(run.flags))
        prints = cfg["fingerprints"]
        found = cfg | {"data": prints.get("data"), "weights": prints.get("model")}
        for name, flags in ALIKE.items():
            value, asked = found[name], tuple(given.get(flag) for flag in flags)
            if value is None:                                   # a run of before fingerprints were kept
                continue
            other, folder = first.setdefault((run.task, name, asked), (value, run.folder))
            if value != other:
                raise UserError("run_dir", str(run.folder), f"was made with {name} {value}, {folder.name} "
                                f"with {other}; delete one of the two, or take another --out")
        base = point("base", rows_of(run)[0], run.task)
        other, folder = first_base.setdefault((run.task, run.variant), (base, run.folder))
        for name in unlike(base, other, cfg["dtype"]):
            values = f"{getattr(base, name):.2f} here and {getattr(other, name):.2f} in {folder.name}"
            way_out = (f"the untrained model's {name} is {values}: the reward or its evaluation was changed, "
                       "or another kind of GPU drew other answers; delete one of them, or take another --out")
            raise UserError("run_dir", str(run.folder), way_out)


def unlike(base: Point, other: Point, dtype: str) -> list[str]:
    """Figures of an untrained model that differ by more than the rounding of two processors makes them: in
    float32 few answers are drawn otherwise by it, in bfloat16 most.
    """
    most = 0.05 if dtype == "float32" else 0.15

    def differ(x: float, y: float) -> bool:
        return abs(x - y) > most * max(1, abs(y))

    return [name for name in ("reward", "sampled_reward", "distinct_2", "repeated_tokens")
            if differ(getattr(base, name), getattr(other, name))]


def other_yardstick(groups: Groups, variant: str, base: str) -> list[str]:
    """Figures that the untrained model has otherwise in one variant than in another: their runs are rewarded
    or evaluated in different ways, and not comparable. None between two models, which differ in themselves.
    """
    run, other = (next(iter(groups[name].values())) for name in (variant, base))
    models = [dict(pairwise(side.run.flags)).get("--model") for side in (run, other)]
    return unlike(run.base, other.base, run.dtype) if models[0] == models[1] else []


def unsteadiness(values: list[float]) -> float:
    """How far values jump from one iteration to the next: the standard deviation of the steps between
    neighbours over sqrt(2), which is the noise's own where it is independent. A trend does not count, nor do
    slow swings. NaN of two values or fewer.
    """
    steps = [y - x for x, y in pairwise(values)]
    if len(steps) < 2:
        return math.nan
    return (fmean((step - fmean(steps)) ** 2 for step in steps) / 2) ** 0.5


def by_variant(results: list[Result], task: str, diverged: bool = False) -> Groups:
    """With or without the runs that diverged, which have no figures."""
    found = {}
    for result in results:
        if result.run.task == task and (diverged or not result.diverged):
            found.setdefault(result.run.variant, {})[result.run.seed] = result
    return found


def made_by(run: StudyRun) -> dict[str, str]:
    """Commit and versions of packages by which a run was finished, out of its last checkpoint; its dtype."""
    if not (run.folder / "config.json").exists():           # of one that diverged the log may be all there is
        return {"commit": "unknown", "dtype": "unknown"}
    saved = checkpoints_of(run.folder)
    versions = read_json(saved[0] / "state.json")["versions"] if saved else {"commit": "unknown"}
    return {**versions, "dtype": read_config(run.folder)["dtype"]}


def of_last(of_seed: dict[int, Result], name: str) -> dict[int, float]:
    """{seed: a figure at the end of training, mean of the agents}."""
    return {seed: getattr(run.last, name) for seed, run in of_seed.items()}


def differences(groups: Groups, study: Study, variant: str) -> dict[str, Difference | None]:
    """{figure: variant less baseline, paired by seed}; KL in nats per response, its ratio as a logarithm.

    Figures are means over a run's agents. At equal KL, or compute, it is each agent's reward where it first
    reaches the x that all agents of both runs of a seed reach; `sampled reward at equal KL` is of the same
    answers as KL is. None where a figure cannot be compared.
    """
    base = study.baseline_of(variant)
    runs, base_runs = groups[variant], groups[base]

    def at_equal(x_of_variant, x_of_base, y: str = "reward") -> Difference:
        ys = {}, {}
        for seed in runs.keys() & base_runs.keys():
            sides = [[[(x(p), getattr(p, y)) for p in points] for points in of_seed[seed].agents.values()]
                     for of_seed, x in ((runs, x_of_variant), (base_runs, x_of_base))]
            x = min(max(point[0] for point in curve) for side in sides for curve in side)
            for found, side in zip(ys, sides, strict=True):
                found[seed] = fmean(at(curve, x) for curve in side)
        return difference(*ys)

    def responses(of_seed: dict[int, Result]):
        per_iteration = next(iter(of_seed.values())).responses
        return lambda p: p.iteration * per_iteration

    found = {name: difference(of_last(runs, name), of_last(base_runs, name)) for name in ("reward", "kl")}
    same_eta = eta(runs) == eta(base_runs)
    found["combined"] = None
    if same_eta:
        found["combined"] = difference(of_last(runs, "combined"), of_last(base_runs, "combined"))
    kl, base_kl = of_last(runs, "kl"), of_last(base_runs, "kl")
    times = {seed: log_ratio(kl[seed], base_kl[seed]) for seed in kl.keys() & base_kl.keys()}
    found["log KL ratio"] = difference(times, dict.fromkeys(times, 0.0))
    for name in ("reward", "sampled_reward"):
        found[f"{name.replace('_', ' ')} at equal KL"] = at_equal(lambda p: p.kl, lambda p: p.kl, name)
    found["reward at equal compute"] = at_equal(responses(runs), responses(base_runs))
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


def of_other_eta(groups: Groups, study: Study) -> dict[str, float]:
    """{variant: eta} of those whose combined reward is another quantity than the baseline's (the first's)."""
    of = {variant: eta(of_seed) for variant, of_seed in groups.items()}
    usual = of.get(study.baseline, next(iter(of.values()), None))
    return {variant: own for variant, own in of.items() if own != usual}


def frontier_gap(groups: Groups, study: Study) -> Difference:
    """Height of CORY's frontier above PPO's, paired by seed: `frontier_height` of the runs over eta, the mean
    of CORY's agents. Each by itself, since the best of many points favours whoever has the noisier ones, and
    a mean of two agents has less noise than one. Of no seeds where the runs are not comparable.
    """
    def curves(method: str, seed: int, agent: str) -> list[Curve]:
        runs = [groups[f"{method}, {eta}"][seed] for eta in sorted(shared)]
        return [[(p.kl, p.reward) for p in run.agents[agent]] for run in runs]

    def height(seed: int) -> float:
        agents = groups[f"cory, {min(shared)}"][seed].agents
        (alone,) = groups[f"ppo, {min(shared)}"][seed].agents
        return fmean(frontier_height(curves("cory", seed, agent), curves("ppo", seed, alone))
                     for agent in agents)

    def etas(method: str) -> set[str]:
        return {variant.removeprefix(f"{method}, ") for variant in study.sweeps[method] if variant in groups}

    shared = etas("cory") & etas("ppo")
    names = [f"{method}, {eta}" for method in study.sweeps for eta in shared]
    if not names or any(other_yardstick(groups, name, names[0]) for name in names):
        return difference({}, {})
    seeds = set.intersection(*(set(groups[name]) for name in names))
    heights = {seed: height(seed) for seed in sorted(seeds)}
    return difference(heights, dict.fromkeys(heights, 0.0))
