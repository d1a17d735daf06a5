"""Held-out evaluation: responses to the bare queries of held-out rows, with fixed random numbers. As a
command, greedy accuracy, pass@k, best of n and team metrics of finished runs, for base and agents:

    python -m cory evaluate RUN_DIR [RUN_DIR ...] --samples 64
"""
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from cory.config import METHODS, TASKS, Config, OneLineParser, load_config, read_config
from cory.device import prepare_device, resolve_auto
from cory.distributed import launched, processes, unsharded
from cory.errors import UserError, exit_on_user_error, find
from cory.loading import load_language_model, model_errors
from cory.log import read_jsonl, write_text
from cory.ppo.lora import Lora
from cory.ppo.model import LanguageModel
from cory.ppo.rollout import Rollout, join, sample_rollout, score_rollout
from cory.ppo.sampling import real_ids
from cory.report import table
from cory.tasks.task import Task

EVALUATION_SEED = 20_241_006    # on one device, the same random numbers for all models, seeds, iterations


def sample_responses(model: LanguageModel, prompts: list[str], length: int, seed: int | None,
                     reference: LanguageModel | None = None) -> Rollout:
    """A sampled response of at most `length` tokens to each prompt, greedy without a seed; with the same seed
    from the same random numbers, whatever the model and the number of processes. With a reference, also with
    log-probabilities and the exact KL.
    """
    most = 128 if model.device.type == "cuda" else max(1, min(128, 8192 // length))

    def responses(at: int) -> Rollout:
        some, uniform_TB = prompts[at:at + most], None
        if seed is not None:
            rng = np.random.default_rng((EVALUATION_SEED, seed, at))
            uniform_TB = torch.from_numpy(rng.random((length, len(some))))
        rollout = sample_rollout(model, some, length, uniform_TB)
        if reference is not None:
            rollout = score_rollout(rollout, model, reference, "full", most)
        return rollout.to("cpu")

    starts = range(0, len(prompts), most)
    with unsharded(*filter(None, (model, reference))):
        mine = [responses(at) for at in starts[processes().rows(len(starts))]]
    return join(processes().gather(mine), model.tokenizer.eos_token_id)


def evaluate(model: LanguageModel, reference: LanguageModel, cfg: Config, task: Task) -> dict[str, float]:
    """`eval_samples` responses of at most `max_response_length` tokens to each held-out query.

    The metrics of docs/settings.md; kl in nats per response, length in tokens per response, EOS included.
    Then the task's own metrics, and those of greedy responses as greedy_NAME, if it asks for them.
    """
    queries, length = task.held_out_queries, cfg.max_response_length
    asked = [query for query in queries for _ in range(cfg.eval_samples)]
    responses = sample_responses(model, task.pioneer_prompts(asked), length, 0, reference)
    ids = real_ids(responses.response_BT, responses.mask_BT)
    reward, kl = task.reward(asked, responses.text).mean().item(), responses.kl_B.mean().item()
    tokens = sum(map(len, ids))
    metrics = {"task_reward": reward, "kl": kl, "combined_reward": reward - cfg.init_kl_coef * kl,
               "length": tokens / len(ids), "distinct_1": distinct(ids, 1), "distinct_2": distinct(ids, 2),
               "repeated_tokens": 1 - sum(len(set(row)) for row in ids) / tokens,
               "base_perplexity": math.exp(-responses.ref_logp_BT.sum().item() / tokens),
               "sampling_gap": responses.sampling_gap}
    metrics = merged(metrics, task.metrics(asked, responses.text))
    if task.greedy:
        greedy = sample_responses(model, task.pioneer_prompts(queries), length, None).text
        metrics |= {f"greedy_{name}": value for name, value in task.metrics(queries, greedy).items()}
    return metrics


def merged(*parts: dict[str, float]) -> dict[str, float]:
    """All metrics together; no two may share a name."""
    metrics = {}
    for part in parts:
        for name, value in part.items():
            if name in metrics:
                raise UserError("metric", name, "is another metric's name, too; rename it")
            metrics[name] = float(value)
    return metrics


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


# --- the command ---
def solved_metrics(model: LanguageModel, task: Task, samples: int, out: Path) -> dict[str, float]:
    """For greedy responses to the held-out queries, mean reward, share solved (a reward above 0) and task
    metrics; for `samples` sampled ones per query, pass@k for k = 1, 2, 4, ..., and the reward of the best of
    n for n = 4, 16, 32 up to samples / 2. Writes the responses to `out`.
    """
    queries, length = task.held_out_queries, task.cfg.max_response_length
    greedy = sample_responses(model, task.pioneer_prompts(queries), length, None).text
    asked = [query for query in queries for _ in range(samples)]
    sampled = sample_responses(model, task.pioneer_prompts(asked), length, 0).text
    reward_Q = task.reward(queries, greedy)
    reward_Qm = task.reward(asked, sampled).view(len(queries), samples)
    rows = [{"query": query, "greedy": greedy[i], "greedy_reward": reward_Q[i].item(),
             "sampled": sampled[i * samples:(i + 1) * samples], "rewards": reward_Qm[i].tolist()}
            for i, query in enumerate(queries)]
    if processes().is_main:
        write_text(out, "".join(json.dumps(row) + "\n" for row in rows))
    own = {"task_reward": reward_Q.mean().item(), "solved": (reward_Q > 0).float().mean().item()}
    metrics = {f"greedy_{name}": value for name, value in merged(own, task.metrics(queries, greedy)).items()}
    reward_Qm = reward_Qm.cpu().numpy()
    for k in (2**i for i in range(samples.bit_length())):
        metrics[f"pass@{k}"] = best_of_n(reward_Qm > 0, k)
    for n in (n for n in (4, 16, 32) if 2 * n <= samples):
        metrics[f"best_of_{n}"] = best_of_n(reward_Qm, n)
    return metrics


def evaluate_run(run_dir: Path, samples: int, queries: int, device: str, dtype: str | None) -> None:
    """Evaluates base, agents and team of one run into RUN_DIR/evaluation, and prints the tables."""
    saved, base_of = load_config(run_dir), read_config(run_dir)["agents"]
    cfg, device = resolve_auto(replace(saved, device=device, dtype=dtype or saved.dtype))
    if not (run_dir / "final").exists():
        raise UserError("run_dirs", str(run_dir), "is no finished run (no final/); --resume it first")
    prepare_device(cfg, device)
    task_class, method_class = find("task", cfg.task, TASKS), find("method", cfg.method, METHODS)
    data = task_class.load_data(cfg)            # split as in the run: nothing it trained on is held out now
    queries = min(queries or cfg.eval_queries, len(getattr(data, cfg.eval_split)))
    models = {}
    for name, base in base_of.items():
        own = method_class.agent_config(cfg, name)
        models[base] = models.get(base) or load_language_model(own.model, own, device)
        models[name] = final_model(run_dir / "final" / name, name, own, models[base])
    task = task_class(replace(cfg, eval_queries=queries), data, models["base"])
    method, last = method_class(cfg, task), read_jsonl(run_dir / "samples.jsonl")[-1]
    memory = torch.load(run_dir / "final/memory.pt", weights_only=True)
    method.memory, task.memory = memory["method"], memory["task"]
    folder = run_dir / "evaluation"
    folder.mkdir(exist_ok=True)
    metrics = {name: solved_metrics(models[name], task, samples, folder / f"{name}.jsonl")
               for name in [*dict.fromkeys(base_of.values()), *base_of]}
    played = [last[f"{role}_agent"] for role in method.roles]                   # in the last iteration
    for team, names in (("base_team", [base_of[name] for name in played]), ("team", played)):
        of_team = method.team_metrics([SimpleNamespace(name=agent, policy=models[name])
                                       for agent, name in zip(played, names, strict=True)])
        metrics |= {team: merged(of_team)} if of_team else {}
    if processes().is_main:
        results = {"queries": queries, "samples": samples, **metrics}
        write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    print(table(run_dir.name, metrics.items()))
    print(f"responses and metrics: {folder}", flush=True)


def final_model(final: Path, name: str, cfg: Config, base: LanguageModel) -> LanguageModel:
    if not cfg.lora_rank:
        return load_language_model(str(final), cfg, base.device)
    with model_errors("adapter", str(final)):
        adapter = Lora.load(base.lm, name, final)
    return LanguageModel(base.lm, base.tokenizer, cfg.dtype, cfg.chat_template, cfg.temperature, adapter)


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m cory evaluate", description="Evaluates finished runs.")
    parser.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--samples", type=int, default=64, help="responses sampled per query")
    parser.add_argument("--queries", type=int, default=0, help="maximum held-out queries; 0: as in the run")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "tf32", "bfloat16"], help="default: the run's")
    args = parser.parse_args(argv)
    if args.samples < 1:
        raise UserError("samples", args.samples, "must be 1 or more")
    with launched(vars(args)):
        for run_dir in args.run_dirs:
            evaluate_run(run_dir, args.samples, args.queries, args.device, args.dtype)
