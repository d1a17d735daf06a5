"""Held-out evaluation: responses to the bare queries of held-out rows, with fixed random numbers."""
import json
import math
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import set_seed

from cory.config import Config, load_config
from cory.errors import UserError, merge_metrics
from cory.machine.distributed import processes
from cory.machine.sharding import unsharded
from cory.ppo.model import LanguageModel, Policy
from cory.ppo.rollout import Rollout, real_ids, require_queries
from cory.ppo.sampling import generate, sample_tokens
from cory.run.experiment import Experiment
from cory.run.log import Metrics, read_jsonl, write_jsonl, write_text
from cory.run.report import tables
from cory.tasks.task import Task

EVALUATION_SEED = 20_241_006    # the same random numbers for all models, run seeds and iterations


class EvaluatedAgent(NamedTuple):
    """An agent of a finished run, or a base as an agent. In a run, an `Agent` takes its place."""
    name: str
    policy: LanguageModel
    base: LanguageModel
    cfg: Config
    is_trained: bool = False


def finished_run(run_dir: Path, **changes) -> tuple[Experiment, list[EvaluatedAgent]]:
    """A finished run as it was in the end, with `changes` to its settings, and its agents."""
    cfg = replace(load_config(run_dir), device="auto", **changes)
    if not (run_dir / "eval.json").exists():
        raise UserError("run_dir", str(run_dir), "holds a run that is not finished")
    run = Experiment(cfg, run_dir, free={"device", *changes})
    state = torch.load(run_dir / "final/state.pt", weights_only=True,
                       map_location={"cuda:0": str(run.device)})
    run.method.memory = state["method"]
    run.task.memory = state["task"]
    run.task.iteration = json.loads((run_dir / "eval.json").read_text())["iteration"]
    agents = []
    for name, agent_cfg in run.configs.items():
        is_trained = name in state["trained"]
        agents.append(EvaluatedAgent(name, run.final_model(name), run.bases[name], agent_cfg, is_trained))
    return run, agents


def evaluate_run(run_dir: Path, samples: int, queries: int) -> None:
    """Evaluates base, agents and team of a finished run into RUN_DIR/evaluation, and prints the tables."""
    changes = {"eval_samples": samples}
    if queries:
        changes["eval_queries"] = queries
    run, agents = finished_run(run_dir, **changes)
    by_name = {agent.name: agent for agent in agents}
    last = read_jsonl(run_dir / "samples.jsonl")[-1]          # it names who played which role
    players = [by_name[last[f"{role}_agent"]] for role in run.method.roles]
    folder = run_dir / "evaluation"
    folder.mkdir(exist_ok=True)
    metrics = held_out_metrics(run.method, agents, players, folder)
    if processes().is_main:
        about = {"iteration": last["iteration"], "queries": run.cfg.eval_queries, "samples": samples}
        write_text(folder / "results.json", json.dumps(about | metrics, indent=1) + "\n")
    print(tables(pd.DataFrame(metrics).T))
    print(f"responses and metrics: {folder}", flush=True)


def held_out_metrics(method, agents: Sequence[EvaluatedAgent], players: Sequence[EvaluatedAgent],
                     out: Path | None = None) -> Metrics:
    """Metrics of the bases; of each agent alone; the mean over the agents that were trained, or over all
    before training; of the team, whose players are in the order of its roles; and of their bases as a team.
    `out`: a folder for the responses.
    """
    task = method.task
    bases = {agent.base.name: as_base(agent) for agent in agents}
    metrics = {}
    for agent in [*bases.values(), *agents]:
        metrics[agent.name] = evaluate(agent, task, out)
    trained = [agent for agent in agents if agent.is_trained] or agents
    metrics["mean"] = pd.DataFrame([metrics[agent.name] for agent in trained]).mean().to_dict()
    if len(players) > 1:
        metrics["base_team"] = evaluate_team(method, [as_base(player) for player in players])
        metrics["team"] = evaluate_team(method, players)
    return metrics


def as_base(agent: EvaluatedAgent) -> EvaluatedAgent:
    """The agent as it was before training."""
    return EvaluatedAgent(agent.base.name, agent.base, agent.base, agent.cfg)


def sample_responses(model: LanguageModel, prompts: list[str], queries: list[str], length: int,
                     seed: int | None, reference: LanguageModel) -> Rollout:
    """A sampled response of at most `length` tokens to each prompt. The same seed gives every model the same
    random numbers; without a seed, responses are greedy. With log-probabilities and the exact KL from the
    reference. A base is frozen: its responses are sampled once, and come from a cache from then on.
    """
    key = str(prompts), str(queries), length, seed, reference.name
    if key in model.response_cache:
        return model.response_cache[key]
    uniform_TB = None
    if seed is not None:
        rng = np.random.default_rng((EVALUATION_SEED, seed))
        uniform_TB = torch.from_numpy(rng.random((length, len(prompts))))
    with unsharded(model, reference):
        rollout = generate(sample_tokens, model, prompts, queries, length, uniform_TB, reference,
                           kl_penalty="full", max_rows=len(prompts))
    # for methods: each response is alone
    rollout = replace(rollout, group_B=torch.arange(len(prompts), device=model.device))
    if not isinstance(model, Policy):
        model.response_cache[key] = rollout
    return rollout


def response_metrics(rollout: Rollout, reward_B: Tensor, terms: dict, task: Task, cfg: Config) -> dict:
    """Means over responses, in training and held out: KL in nats, length in tokens."""
    reward = reward_B.mean().item()
    kl = rollout.kl_B.mean().item()
    metrics = {
        "task_reward": reward,
        "kl": kl,
        "combined_reward": reward - cfg.init_kl_coef * kl,
        "sampling_gap": rollout.sampling_gap,
        "length": rollout.mask_BT.sum(1).mean().item(),
        "truncated": rollout.truncated_B.double().mean().item(),
    }
    return merge_metrics(metrics, terms, task.metrics(rollout.query, rollout.text))


def respond_alone(agent: EvaluatedAgent, task: Task, queries: list[str],
                  seed: int | None) -> tuple[Rollout, Tensor, dict]:
    """Responses to the bare queries, by `sample_responses`: (rollout, task rewards (B,), metrics)."""
    prompts = task.pioneer_prompts(queries)
    length = agent.cfg.max_response_length
    rollout = sample_responses(agent.policy, prompts, queries, length, seed, agent.base)
    reward_B, terms = task.reward_and_terms(queries, rollout.text)
    return rollout, reward_B, response_metrics(rollout, reward_B, terms, task, agent.cfg)


def diversity_metrics(rollout: Rollout) -> dict[str, float]:
    """What shows a collapse: repetition, and the perplexity exp(-mean log pi0) under the base."""
    ids = real_ids(rollout.response_BT, rollout.mask_BT)
    tokens = sum(len(row) for row in ids)
    different = sum(len(set(row)) for row in ids)
    nats = -rollout.ref_logp_BT.sum().item() / tokens
    return {"distinct_2": distinct_2(ids), "repeated_tokens": 1 - different / tokens,
            "base_perplexity": math.exp(min(nats, 700))}        # no overflow


def evaluate(agent: EvaluatedAgent, task: Task, out: Path | None = None) -> dict[str, float]:
    """Metrics of `eval_samples` responses to each held-out query; of greedy ones as greedy_NAME, if the task
    asks for them. With `out`, greedy ones for any task, pass@k and the best of k; the responses are written
    into that folder.
    """
    set_seed(EVALUATION_SEED)               # for tasks that draw
    queries = task.held_out_queries
    samples = agent.cfg.eval_samples
    repeated = [query for query in queries for _ in range(samples)]
    sampled, reward_B, metrics = respond_alone(agent, task, repeated, seed=0)
    metrics = merge_metrics(metrics, diversity_metrics(sampled))
    if not task.greedy and not out:
        return metrics

    greedy, greedy_reward_Q, greedy_metrics = respond_alone(agent, task, queries, seed=None)
    for name, x in greedy_metrics.items():
        metrics[f"greedy_{name}"] = x
    if not out:
        return metrics

    reward_Qm = reward_B.view(-1, samples).cpu().numpy()
    metrics |= best_of_metrics(reward_Qm)
    rows = []
    for i, query in enumerate(queries):
        rows.append({
            "query": query, "greedy": greedy.text[i], "greedy_reward": greedy_reward_Q[i].item(),
            "sampled": sampled.text[i * samples:(i + 1) * samples], "rewards": reward_Qm[i].tolist()})
    if processes().is_main:
        write_jsonl(out / f"{agent.name}.jsonl", rows)
    return metrics


def evaluate_team(method, players: Sequence[EvaluatedAgent]) -> dict[str, float]:
    """Each role's task reward, KL and combined reward, means over a response in each role to each held-out
    query; and the method's metrics of these responses.
    """
    set_seed(EVALUATION_SEED)               # for tasks and methods that draw
    task = method.task
    queries = task.held_out_queries
    length = method.cfg.max_response_length
    seeds = count(1)                    # with one seed, identical agents would respond identically

    def sample(player, prompts, queries, policy=None):          # as the training loop's
        model = policy or player.policy
        return sample_responses(model, prompts, queries, length, next(seeds), player.base)

    rollouts = method.respond(players, queries, sample)
    require_queries(rollouts, queries)
    metrics = {}
    rewards = []
    for role, player, rollout in zip(method.roles, players, rollouts, strict=True):
        reward_B = task.reward(queries, rollout.text)
        rewards.append(reward_B)
        means = response_metrics(rollout, reward_B, {}, task, player.cfg)
        for name in ("task_reward", "kl", "combined_reward"):
            metrics[f"{role}_{name}"] = means[name]
    return merge_metrics(metrics, method.team_metrics(rollouts, rewards))


def distinct_2(ids: list[list[int]]) -> float:
    """Distinct pairs of successive tokens, divided by all pairs of all responses; 0 if there is none."""
    pairs = []
    for row in ids:
        pairs += pairwise(row)
    return len({*pairs}) / max(1, len(pairs))


def best_of_metrics(reward_Qm: np.ndarray) -> dict[str, float]:
    """pass@k and the reward of the best of k, for k = 1, 2, 4 ..., of m responses to each of Q queries. A
    response is solved if its reward is above 0.
    """
    metrics = {}
    k = 1
    while k <= reward_Qm.shape[1]:
        metrics[f"pass@{k}"] = best_of_n(reward_Qm > 0, k)
        metrics[f"best_of_{k}"] = best_of_n(reward_Qm, k)
        k *= 2
    return metrics


def best_of_n(reward_Qm: np.ndarray, n: int) -> float:
    """The reward of the best of n responses, from m >= n responses to each query.

        E[max] = sum_i C(i - 1, n - 1) / C(m, n) r_(i),        r_(1) <= ... <= r_(m)

    The expectation over all subsets of n of the m, averaged over queries; of rewards of 0 and 1 it is pass@n
    (Chen et al., arXiv:2107.03374).
    """
    m = reward_Qm.shape[1]
    subsets = math.comb(m, n)
    weight_m = [math.comb(i, n - 1) / subsets for i in range(m)]
    best_Q = np.sort(reward_Qm, 1) @ np.array(weight_m)
    return float(best_Q.mean())
