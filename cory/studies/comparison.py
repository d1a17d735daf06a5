"""How variants of a study differ: at the end, at equal KL and at equal compute, paired by seed."""
import math
from itertools import pairwise
from statistics import fmean

from cory.studies.definitions import Study
from cory.studies.results import Groups, Result, unlike
from cory.studies.statistics import Curve, Difference, at, difference, frontier_height


def other_yardstick(groups: Groups, variant: str, baseline: str) -> list[str]:
    """Figures that the untrained model has otherwise in one variant than in another: their runs are rewarded
    or evaluated in different ways, and not comparable. None between two models, which differ in themselves.
    """
    run, other = (next(iter(groups[name].values())) for name in (variant, baseline))
    models = [dict(pairwise(side.run.flags)).get("--model") for side in (run, other)]
    return unlike(run.base, other.base, run.dtype) if models[0] == models[1] else []


def why_not_compared(groups: Groups, variant: str, baseline: str) -> str:
    """Why no difference of two variants can be taken; '' if it can."""
    if baseline not in groups:
        return "no finished run of that"
    if same_runs(groups, variant, baseline):
        return "the same runs"
    others = other_yardstick(groups, variant, baseline)
    return f"other {', '.join(others)} of the untrained model" if others else ""


def of_last(of_seed: dict[int, Result], name: str) -> dict[int, float]:
    """{seed: a figure at the end of training, mean of the agents}."""
    return {seed: getattr(run.last, name) for seed, run in of_seed.items()}


def differences(groups: Groups, study: Study, variant: str) -> dict[str, Difference | None]:
    """{figure: variant less baseline, paired by seed}; KL in nats per response, its ratio as a logarithm.

    Figures are means over a run's agents. At equal KL, or compute, it is each agent's reward where it first
    reaches the x that all agents of both runs of a seed reach; `sampled reward at equal KL` is of the same
    answers as KL is. None where a figure cannot be compared.
    """
    baseline = study.baseline_of(variant)
    of_variant, of_baseline = groups[variant], groups[baseline]

    def at_equal(x_of_variant, x_of_baseline, y: str = "reward") -> Difference:
        ys = {}, {}
        for seed in of_variant.keys() & of_baseline.keys():
            sides = [[[(x(p), getattr(p, y)) for p in points] for points in of_seed[seed].agents.values()]
                     for of_seed, x in ((of_variant, x_of_variant), (of_baseline, x_of_baseline))]
            x = reached_by_all([curve for side in sides for curve in side])
            for found, side in zip(ys, sides, strict=True):
                found[seed] = fmean(at(curve, x) for curve in side)
        return difference(*ys)

    def responses(of_seed: dict[int, Result]):
        per_iteration = next(iter(of_seed.values())).responses
        return lambda p: p.iteration * per_iteration

    found = {name: difference(of_last(of_variant, name), of_last(of_baseline, name))
             for name in ("reward", "kl", "combined")}
    if eta_of(of_variant) != eta_of(of_baseline):
        found["combined"] = None
    kl, kl_of_baseline = of_last(of_variant, "kl"), of_last(of_baseline, "kl")
    times = {seed: log_ratio(kl[seed], kl_of_baseline[seed]) for seed in kl.keys() & kl_of_baseline.keys()}
    found["log KL ratio"] = difference(times, dict.fromkeys(times, 0.0))
    for name in ("reward", "sampled_reward"):
        found[f"{name.replace('_', ' ')} at equal KL"] = at_equal(lambda p: p.kl, lambda p: p.kl, name)
    found["reward at equal compute"] = at_equal(responses(of_variant), responses(of_baseline))
    return found


def reached_by_all(curves: list[Curve]) -> float:
    """The largest x that every curve reaches."""
    return min(max(x for x, _ in curve) for curve in curves)


def before_an_evaluation(groups: Groups, study: Study, variant: str) -> int:
    """Seeds whose equal KL lies before the first evaluation of one of the agents, where its reward is read
    off a straight line from the untrained model: too low for whoever learns fast at first.
    """
    of_variant, of_baseline = groups[variant], groups[study.baseline_of(variant)]
    found = 0
    for seed in of_variant.keys() & of_baseline.keys():
        curves = [[(p.kl, p.reward) for p in points]
                  for run in (of_variant[seed], of_baseline[seed]) for points in run.agents.values()]
        found += any(reached_by_all(curves) < curve[1][0] for curve in curves if len(curve) > 1)
    return found


def log_ratio(x: float, y: float) -> float:
    """Its mean over seeds is the log of the geometric mean, which no single large ratio drags along."""
    return math.log(x / y) if x > 0 and y > 0 else math.nan


def same_runs(groups: Groups, variant: str, baseline: str) -> bool:
    """Whether two variants are the same runs, under this preset."""
    folders = [{run.run.folder for run in groups[name].values()} for name in (variant, baseline)]
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


def etas_of(study: Study) -> list[str]:
    """`eta x 0.1`, ...: what the variants of a sweep are called behind their method."""
    return [variant.removeprefix("cory, ") for variant in study.sweeps["cory"]]


def etas_without_both(groups: Groups, study: Study) -> list[str]:
    return [eta for eta in etas_of(study) if any(f"{method}, {eta}" not in groups for method in study.sweeps)]


def frontier_gap(groups: Groups, study: Study) -> Difference:
    """Height of CORY's frontier above PPO's, paired by seed: `frontier_height` of the runs over eta, the mean
    of CORY's agents. Each by itself, since the best of many points favours whoever has the noisier ones, and
    a mean of two agents has less noise than one. Of no seeds where the runs are not comparable.
    """
    shared = [eta for eta in etas_of(study) if eta not in etas_without_both(groups, study)]
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
