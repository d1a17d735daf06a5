"""Held-out evaluation: responses to the bare queries of held-out rows, with fixed random numbers."""
import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import set_seed

from cory.config import Config, load_config
from cory.machine.distributed import processes
from cory.machine.sharding import unsharded
from cory.ppo.model import LanguageModel, Policy
from cory.ppo.rollout import Rollout, real_ids, require_queries
from cory.ppo.sampling import generate, score_rollout
from cory.run.experiment import Experiment
from cory.run.log import write_text
from cory.run.report import tables
from cory.tasks.task import Task

EVALUATION_SEED = 20_241_006    # on one device, the same random numbers for all models, seeds, iterations


class Player(NamedTuple):
    """A policy to evaluate; an `Agent` has these attributes, too."""
    name: str
    policy: LanguageModel
    base: LanguageModel
    cfg: Config


def finished_run(run_dir: Path, **changes) -> tuple[Experiment, list[Player]]:
    """A finished run as it was in the end, with `changes` to its settings, and its final policies."""
    run = Experiment(replace(load_config(run_dir), **changes), run_dir, free=changes)
    memory = torch.load(run_dir / "final/state.pt", weights_only=True,
                        map_location={"cuda:0": str(run.device)})
    run.method.memory, run.task.memory = memory["method"], memory["task"]
    run.method.iteration = run.task.iteration = json.loads((run_dir / "eval.json").read_text())["iteration"]
    return run, [Player(name, run.final_model(name), run.bases[run.base_of[name]], own)
                 for name, own in run.configs.items()]


def evaluate_run(run_dir: Path, samples: int, queries: int) -> None:
    """Evaluates base, agents and team of a finished run into RUN_DIR/evaluation, and prints the tables."""
    of_run = {"eval_queries": queries} if queries else {}
    run, players = finished_run(run_dir, eval_samples=samples, **of_run)
    iteration, folder = run.method.iteration, run_dir / "evaluation"
    folder.mkdir(exist_ok=True)
    metrics = held_out_metrics(run.method, players, run.bases, iteration, folder)
    if processes().is_main:
        results = {"iteration": iteration, "queries": run.cfg.eval_queries, "samples": samples, **metrics}
        write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    print(f"{tables(run_dir.name, pd.DataFrame(metrics).T)}\nresponses and metrics: {folder}", flush=True)


def held_out_metrics(method, players: Sequence[Player], bases: dict[str, LanguageModel], iteration: int,
                     out: Path | None = None) -> dict[str, dict[str, float]]:
    """Metrics of the bases; of each player's policy; the mean over the players that the method trains; of the
    team that plays in an iteration, and of the same team of bases. `out`: a folder for the responses.
    """
    task, cfg = method.task, method.cfg
    for hooked in (method, task):
        hooked.iteration, hooked.training = iteration, False
    of_bases = [Player(name, base, base, cfg) for name, base in bases.items()]
    metrics = {x.name: evaluate(x.policy, x.base, x.cfg, task, out and out / f"{x.name}.jsonl")
               for x in (*of_bases, *players)}
    trained = [metrics[player.name] for player in players if player.name not in method.frozen]
    metrics["mean"] = pd.DataFrame(trained).mean().to_dict()
    cast = method.cast(players, max(iteration, 1))
    if len(cast) > 1:
        metrics["base_team"] = evaluate_team(method, [player.base for player in cast])
        metrics["team"] = evaluate_team(method, [player.policy for player in cast])
    return {who: {name: float(x) for name, x in of_who.items()} for who, of_who in metrics.items()}


def sample_responses(model: LanguageModel, prompts: list[str], queries: list[str], length: int,
                     seed: int | None, reference: LanguageModel | None = None) -> Rollout:
    """A sampled response of at most `length` tokens to each prompt, greedy if `seed` is None; with the same
    seed from the same random numbers, whatever the model. With a reference, also with log-probabilities and
    the exact KL. A base, which is frozen, is asked the same only once: its responses are kept.
    """
    asked = (*prompts, *queries, length, seed, reference is None)
    if asked in model.kept:
        return model.kept[asked]
    rng = np.random.default_rng((EVALUATION_SEED, seed or 0))
    uniform_TB = None if seed is None else torch.from_numpy(rng.random((length, len(prompts))))

    def add_logprobs(rollout: Rollout) -> Rollout:
        return score_rollout(rollout, model, reference, "full", len(prompts)) if reference else rollout

    with unsharded(*filter(None, (model, reference))):
        rollout = generate(model, prompts, queries, length, uniform_TB, add_logprobs)
    if not isinstance(model, Policy):
        model.kept[asked] = rollout
    return rollout


def response_metrics(rollout: Rollout, reward_B: Tensor, parts: dict, task: Task, cfg: Config) -> dict:
    """Means over responses, in training and held out: KL in nats, length in tokens; a name twice raises."""
    reward, kl = reward_B.mean().item(), rollout.kl_B.mean().item()
    return dict(task_reward=reward, kl=kl, combined_reward=reward - cfg.init_kl_coef * kl,
                length=rollout.mask_BT.sum(1).mean().item(), sampling_gap=rollout.sampling_gap,
                truncated=rollout.truncated_B.double().mean().item(),
                **parts, **task.metrics(rollout.query, rollout.text))


def evaluate(model: LanguageModel, reference: LanguageModel, cfg: Config, task: Task,
             out: Path | None = None) -> dict[str, float]:
    """Metrics of `eval_samples` responses to each held-out query; of greedy ones as greedy_NAME, if the task
    asks for them. With `out`, a file for responses, also for greedy ones; pass@k for k = 1, 2, 4 ... (solved:
    a reward above 0), and the reward of the best of k.
    """
    set_seed(EVALUATION_SEED)               # for tasks that draw
    queries, samples, length = task.held_out_queries, cfg.eval_samples, cfg.max_response_length
    asked = [query for query in queries for _ in range(samples)]
    responses = sample_responses(model, task.pioneer_prompts(asked), asked, length, 0, reference)
    ids = real_ids(responses.response_BT, responses.mask_BT)
    tokens = sum(map(len, ids))
    reward_B, parts = task.reward_and_parts(asked, responses.text)
    metrics = dict(**response_metrics(responses, reward_B, parts, task, cfg),
                   distinct_1=distinct(ids, 1), distinct_2=distinct(ids, 2),
                   repeated_tokens=1 - sum(len(set(row)) for row in ids) / tokens,
                   base_perplexity=math.exp(min(-responses.ref_logp_BT.sum().item() / tokens, 700)))
    if task.greedy or out:
        greedy = sample_responses(model, task.pioneer_prompts(queries), queries, length, None).text
        metrics |= {f"greedy_{name}": x for name, x in task.metrics(queries, greedy).items()}
    if out:
        greedy_Q, reward_Qm = task.reward(queries, greedy).tolist(), reward_B.view(-1, samples).cpu().numpy()
        metrics["greedy_task_reward"] = fmean(greedy_Q)
        for k in (2**i for i in range(samples.bit_length())):
            metrics |= {f"pass@{k}": best_of_n(reward_Qm > 0, k), f"best_of_{k}": best_of_n(reward_Qm, k)}
        rows = [{"query": query, "greedy": greedy[i], "greedy_reward": greedy_Q[i],
                 "sampled": responses.text[i * samples:(i + 1) * samples], "rewards": reward_Qm[i].tolist()}
                for i, query in enumerate(queries)]
        if processes().is_main:
            write_text(out, "".join(json.dumps(row) + "\n" for row in rows))
    return metrics


def evaluate_team(method, policies: list[LanguageModel]) -> dict[str, float]:
    """The mean task reward of each role, from the responses that policies in a method's roles give, one to
    each held-out query; and the method's metrics of these.
    """
    set_seed(EVALUATION_SEED)               # for tasks and methods that draw
    queries, length = method.task.held_out_queries, method.cfg.max_response_length
    seeds = count(1)                    # with one seed, identical agents would respond identically

    def sample(policy: LanguageModel, prompts: list[str], queries: list[str]) -> Rollout:
        return sample_responses(policy, prompts, queries, length, next(seeds))

    rollouts = method.respond(policies, queries, sample)
    require_queries(rollouts, queries)
    rewards = [method.task.reward(rollout.query, rollout.text) for rollout in rollouts]
    of_roles = {f"{role}_reward": reward_B.mean().item()
                for role, reward_B in zip(method.roles, rewards, strict=True)}
    return dict(**of_roles, **method.metrics(rollouts, rewards))


def distinct(ids: list[list[int]], n: int) -> float:
    """Distinct n-grams over all n-grams, pooled over responses; 0 if no response has n tokens."""
    grams = [tuple(row[i:i + n]) for row in ids for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def best_of_n(reward_Qm: np.ndarray, n: int) -> float:
    """The reward of the best of n responses, from m >= n responses to each query.

        E[max] = sum_i C(i - 1, n - 1) / C(m, n) r_(i),        r_(1) <= ... <= r_(m)

    The expectation over all subsets of n of the m, averaged over queries; of rewards of 0 and 1 it is pass@n
    (Chen et al., arXiv:2107.03374).
    """
    m = reward_Qm.shape[1]
    weight_m = np.array([math.comb(i, n - 1) / math.comb(m, n) for i in range(m)])
    return float((np.sort(reward_Qm, 1) @ weight_m).mean())
