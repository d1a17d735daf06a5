"""How variants of a study differ: at the end, at equal KL and at equal compute, paired by seed."""
import math
from itertools import pairwise
from statistics import fmean

from cory.studies.definitions import Study
from cory.studies.results import Groups, Result, unlike
from cory.studies.statistics import Curve, Difference, at, difference, frontier_height


def other_yardstick(groups: Groups, variant: str, base: str) -> list[str]:
    """Figures that the untrained model has otherwise in one variant than in another: their runs are rewarded
    or evaluated in different ways, and not comparable. None between two models, which differ in themselves.
    """
    run, other = (next(iter(groups[name].values())) for name in (variant, base))
    models = [dict(pairwise(side.run.flags)).get("--model") for side in (run, other)]
    return unlike(run.base, other.base, run.dtype) if models[0] == models[1] else []


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
    same_eta = eta_of(runs) == eta_of(base_runs)
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


def eta_of(of_seed: dict[int, Result]) -> float:
    return next(iter(of_seed.values())).eta


def of_other_eta(groups: Groups, study: Study) -> dict[str, float]:
    """{variant: eta} of those whose combined reward is another quantity than the baseline's (the first's)."""
    of = {variant: eta_of(of_seed) for variant, of_seed in groups.items()}
    usual = of.get(study.baseline, next(iter(of.values()), None))
    return {variant: own for variant, own in of.items() if own != usual}


def curves_over_eta(groups: Groups, variants: list[str]) -> dict[int, dict[str, list[Curve]]]:
    """{seed: {agent: a curve of reward against KL for each variant}}, of the seeds that all of them have."""
    seeds = set.intersection(*(set(groups[variant]) for variant in variants))

    def curve(variant: str, seed: int, agent: str) -> Curve:
        return [(p.kl, p.reward) for p in groups[variant][seed].agents[agent]]

    return {seed: {agent: [curve(variant, seed, agent) for variant in variants]
                   for agent in groups[variants[0]][seed].agents} for seed in sorted(seeds)}


def frontier_gap(groups: Groups, study: Study) -> Difference:
    """Height of CORY's frontier above PPO's, paired by seed: `frontier_height` of the runs over eta, the mean
    of CORY's agents. Each by itself, since the best of many points favours whoever has the noisier ones, and
    a mean of two agents has less noise than one. Of no seeds where the runs are not comparable.
    """
    def etas(method: str) -> set[str]:
        return {variant.removeprefix(f"{method}, ") for variant in study.sweeps[method] if variant in groups}

    shared = sorted(etas("cory") & etas("ppo"))
    names = [f"{method}, {eta}" for method in study.sweeps for eta in shared]
    if not names or any(other_yardstick(groups, name, names[0]) for name in names):
        return difference({}, {})
    cory, ppo = (curves_over_eta(groups, [f"{method}, {eta}" for eta in shared])
                 for method in ("cory", "ppo"))

    def height(seed: int) -> float:
        (alone,) = ppo[seed].values()
        return fmean(frontier_height(curves, alone) for curves in cory[seed].values())

    heights = {seed: height(seed) for seed in cory if seed in ppo}
    return difference(heights, dict.fromkeys(heights, 0.0))
