"""How far the objective `E[r] - eta KL(pi || pi0)` can rise, from the base's own answers (docs/learning.md).

Its maximum is at `pi*(a|s) = pi0(a|s) exp(r(s, a) / eta) / Z(s)`. The estimates below need no training.
Shapes: Q held-out queries, n answers of the base to each. Rewards are the task's, KL is in nats.
"""
import math
import zlib
from pathlib import Path
from typing import Collection

import numpy as np

from cory.config import ASSETS, Config
from cory.experiment.saved_config import read_config
from cory.system.files import read_json, readable
from cory.tasks.task import Task

LEAST_ESS = 8.0         # effective samples per query, below which a tilt is not trusted


def best_of(reward_Qn: np.ndarray, m: int) -> tuple[float, float]:
    """(KL, reward) of the best of m answers: a bound of its KL (Beirami et al., arXiv:2401.01879), and its
    expected reward over all subsets of m of the n. Means over queries.

        E[max] = sum_i C(i - 1, m - 1) / C(n, m) r_(i), r_(1) <= ... <= r_(n)        KL <= log m - (m - 1) / m
    """
    n = reward_Qn.shape[1]
    weight_n = np.array([math.comb(i, m - 1) / math.comb(n, m) for i in range(n)])
    return math.log(m) - (m - 1) / m, float((np.sort(reward_Qn, 1) @ weight_n).mean())


def tilted(reward_Qn: np.ndarray, temperature: float) -> tuple[float, float, float]:
    """(KL, reward, effective samples) of the base tilted by its rewards. Means over queries.

        w_i = exp(r_i / temperature) / sum_j exp(r_j / temperature)        over the n answers to a query
        KL = sum_i w_i log(n w_i)        reward = sum_i w_i r_i        effective samples = 1 / sum_i w_i^2
    """
    weight_Qn = np.exp((reward_Qn - reward_Qn.max(1, keepdims=True)) / temperature)
    weight_Qn /= weight_Qn.sum(1, keepdims=True)
    log_Qn = np.log(np.maximum(weight_Qn, 1e-300) * reward_Qn.shape[1])
    sums = (weight_Qn * log_Qn).sum(1), (weight_Qn * reward_Qn).sum(1), 1 / (weight_Qn**2).sum(1)
    return tuple(float(x_Q.mean()) for x_Q in sums)


class Limit:
    """What the objective can reach: a lower bound, since nothing outside the n answers is seen.

    `tilts` lead, as (KL, reward), from the base to the strongest tilt, at a temperature of eta or more, that
    has `LEAST_ESS` effective samples. `metrics` are those of base, best of n and tilt, as eval.json has them.
    """

    def __init__(self, rewards: list[list[float]], eta: float):
        reward_Qn = np.array(rewards, dtype=np.float64)
        coldest, n = max(eta, 1e-3 * float(reward_Qn.std()), 1e-9), reward_Qn.shape[1]
        tilts = [tilted(reward_Qn, coldest * 2 ** (i / 8)) for i in reversed(range(120))]
        base = 0.0, float(reward_Qn.mean())
        self.tilts = [base, *((kl, reward) for kl, reward, ess in tilts if ess >= LEAST_ESS)]
        self.best_of = {m: best_of(reward_Qn, m) for m in (4, 16, 32) if m <= n / 2}
        best = {f"best of {m}": point for m, point in self.best_of.items()}
        self.metrics = {name: {"task_reward": reward, "kl": kl, "combined_reward": reward - eta * kl}
                        for name, (kl, reward) in {"base": base, **best, "tilt": self.tilts[-1]}.items()}

    def with_shares(self, held_out: dict, names: Collection[str]) -> dict:
        """What eval.json holds, with the `share_of_limit` of these: 0 is the base, 1 the tilt.

            (combined - base) / (tilt - base)        0 where all answers score alike
        """
        base, tilt = (self.metrics[name]["combined_reward"] for name in ("base", "tilt"))
        room = tilt - base if tilt - base > 1e-9 else math.inf
        shares = {name: {"share_of_limit": (metrics["combined_reward"] - base) / room + 0.0}
                  for name, metrics in held_out.items() if name in names}
        return held_out | {name: held_out[name] | share for name, share in shares.items()}


def on_limit(cfg: Config, agents: list[str]) -> list[str]:
    """The base, and the agents whose base and objective are those of the limit."""
    columns = cfg.base_columns(agents)
    return ["base", *(name for name in agents
                      if columns[name] == "base" and cfg.of_agent(name).init_kl_coef == cfg.init_kl_coef)]


def made_with(cfg: Config, task: Task, model: str) -> dict:
    """All that a base's rewards depend on but the reward itself. `model`: the fingerprint of its weights."""
    prompts = task.pioneer_prompts(task.held_out_queries)
    return {"model": model, "temperature": cfg.temperature, "max_response_length": cfg.max_response_length,
            "prompts": [f"{zlib.crc32(prompt.encode('utf-8', 'replace')):08x}" for prompt in prompts]}


def embedded_rewards(cfg: Config, task: Task, model: str) -> dict | None:
    """What limit.json holds, of an embedded base that answers as this run's does, on its queries; else None.

    One answer to each query is scored again: an edited reward has no limit rather than a wrong one.
    """
    queries, wanted = task.held_out_queries, made_with(cfg, task, model)
    for path in ASSETS.glob(f"*/limit-{cfg.eval_split}.json"):
        known = read_json(path)
        known["made_with"]["prompts"] = known["made_with"]["prompts"][:len(queries)]
        examples, rewards = known["examples"][:len(queries)], known["rewards"][:len(queries)]
        if known["made_with"] == wanted and np.allclose(
                task.checked(queries, examples), [row[0] for row in rewards], atol=5e-3):
            return {"made_with": wanted, "examples": examples, "rewards": rewards}
    return None


def limit_of(run_dir: Path) -> Limit | None:
    """The limit of a run whose folder holds a limit.json, at the run's eta; else None. Raises `UserError`."""
    path = run_dir / "limit.json"
    if not path.exists():
        return None
    with readable(path):
        return Limit(read_json(path)["rewards"], read_config(run_dir)["init_kl_coef"])
