"""Held-out evaluation: a model answers bare queries it was never trained on, with a fixed seed, beside the untrained base.

During training `evaluate` takes a few figures. Of finished runs, this takes greedy accuracy and pass@k, of the base and of each agent;
several runs must differ in method and seed alone, and are shown as means over seeds:

    python -m cory.evaluate RUN_DIR [RUN_DIR ...] --k 1 2 4 8 16 32 --samples 64
"""
import argparse
import json
import math
import os
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Callable

import torch
from tqdm import tqdm

from cory.ppo import formulas
from cory.config import Config, OneLineParser, load_config
from cory.errors import UserError, exit_on_user_error
from cory.experiment.files import append_jsonl, read_jsonl, replace_text
from cory.tasks.gsm8k import Gsm8k
from cory.tasks.imdb import Imdb
from cory.ppo.lora import load_adapter
from cory.experiment.machine import choose_device, tune_cpu
from cory.ppo.model import LanguageModel, load_language_model
from cory.report import draw_pass_at_k, pass_at_k_table, require_finished, require_picture, require_same_settings
from cory.ppo.rollout import sweep
from cory.ppo.sampling import decode, encode_prompts, sample
from cory.tasks.task import Task

EVALUATION_SEED = 20_241_006        # the same random numbers for every model, method, seed and iteration


def rows_at_once(most: int, length: int) -> int:
    """Responses sampled together: fewer where they are long, so that keys and values stay small."""
    return max(1, min(most, 8192 // length))


@torch.no_grad()
def evaluate(model: LanguageModel, reference: LanguageModel, task: Task, cfg: Config) -> dict[str, float]:
    """Samples one response of at most `max_response_length` tokens per held-out query, at the training temperature.

    task_reward: mean r(s0, a). kl: exact KL(pi || pi0) summed over each response's tokens, nats, mean over responses.
    combined_reward: task_reward - init_kl_coef kl. length: tokens per response, EOS included. distinct_n: different n-grams
    over all n-grams of all responses. repeated_tokens: share of tokens that stood earlier in the same response.
    base_perplexity: exp of the mean negative log-probability per token under the base, at the same temperature. Then the task's own
    figures, and, if it asks for them, those of greedy answers as greedy_NAME.
    """
    texts, ids, kl, ref_logp = [], [], 0.0, 0.0
    queries, rows = task.held_out_queries, rows_at_once(64, cfg.max_response_length)
    for at in range(0, len(queries), rows):
        generator = torch.Generator().manual_seed(EVALUATION_SEED + at)
        prompts = encode_prompts(model, task.pioneer_prompts(queries[at:at + rows]), cfg.max_response_length)
        response_BT, mask_BT, _ = sample(model, prompts, cfg.max_response_length, generator)
        real = mask_BT.bool()
        hidden, ref_hidden = (m.response_hidden(*prompts, response_BT)[real] for m in (model, reference))
        _, ref_logp_N, kl_N = sweep(model, reference, hidden, ref_hidden, response_BT[real], "full")
        kl, ref_logp = kl + kl_N.sum().item(), ref_logp + ref_logp_N.sum().item()
        texts += decode(model, response_BT, mask_BT)
        ids += [row[keep].tolist() for row, keep in zip(response_BT, real)]
    rewards, figures = task.reward(queries, texts), task.figures(queries, texts)
    if task.greedy:
        greedy = [text for at in range(0, len(queries), rows)
                  for text in answer(model, task, queries[at:at + rows], cfg.max_response_length, seed=None)]
        figures |= {f"greedy_{name}": value for name, value in task.figures(queries, greedy).items()}
    tokens, kl_coef = sum(map(len, ids)), cfg.init_kl_coef
    return {"task_reward": rewards.mean().item(), "kl": kl / len(queries),
            "combined_reward": rewards.mean().item() - kl_coef * kl / len(queries), "length": tokens / len(queries),
            "distinct_1": distinct(ids, 1), "distinct_2": distinct(ids, 2),
            "repeated_tokens": 1 - sum(len(set(row)) for row in ids) / tokens, "base_perplexity": math.exp(-ref_logp / tokens), **figures}


@torch.no_grad()
def answer(model: LanguageModel, task: Task, queries: list[str], length: int, seed: int | None) -> list[str]:
    """Responses of at most `length` tokens to one batch of bare queries; greedy without a seed."""
    prompts = encode_prompts(model, task.pioneer_prompts(queries), length)
    drawn = sample(model, prompts, length, None if seed is None else torch.Generator().manual_seed(seed))
    return decode(model, drawn.response_BT, drawn.mask_BT)


def distinct(ids: list[list[int]], n: int) -> float:
    """Different n-grams over all n-grams, pooled over responses; 0 if no response has n tokens."""
    grams = [tuple(row[i:i + n]) for row in ids for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


# --- finished runs ----------------------------------------------------------------------------------------------------
def solve(load: Callable[[], LanguageModel], task: Task, path: Path, samples: int, length: int, rows: int, bar: tqdm) -> list[dict]:
    """One greedy answer (round 0) and `samples` drawn ones (rounds 1, 2, ...) to every held-out query, as lines of a file.

    A line is one batch: {"round", "first" query, "responses", "rewards"}. Lines that stand there already are not made again, so that an
    evaluation goes on where it was stopped, and more samples can be added; the model is loaded if any is missing.
    """
    lines = {(line["round"], line["first"]): line for line in read_jsonl(path)}
    replace_text(path, "".join(json.dumps(line) + "\n" for line in lines.values()))
    places = [(number, first) for number in range(samples + 1) for first in range(0, len(task.held_out_queries), rows)]
    model = None if lines.keys() >= set(places) else load()
    for number, first in places:
        if (number, first) not in lines:
            queries = task.held_out_queries[first:first + rows]
            responses = answer(model, task, queries, length, None if number == 0 else EVALUATION_SEED + 1_000_003 * number + first)
            rewards = task.reward(queries, responses).tolist()
            lines[number, first] = {"round": number, "first": first, "responses": responses, "rewards": rewards}
            append_jsonl(path, [lines[number, first]])
        bar.update()
    return [lines[place] for place in places]


def solved_figures(task: Task, lines: list[dict], ks: list[int]) -> dict:
    """Of greedy answers the mean reward, the share solved (reward > 0) and the task's own figures; of drawn ones pass@k for each k."""
    greedy = [line for line in lines if line["round"] == 0]
    responses, rewards = ([x for line in greedy for x in line[key]] for key in ("responses", "rewards"))
    drawn = [[] for _ in task.held_out_queries]
    for line in lines:
        for i, reward in enumerate(line["rewards"] if line["round"] else []):
            drawn[line["first"] + i].append(reward > 0)
    figures = {"task_reward": sum(rewards) / len(rewards), "solved": sum(reward > 0 for reward in rewards) / len(rewards),
               **task.figures(task.held_out_queries, responses)}
    return {f"greedy_{name}": value for name, value in figures.items()} | {
        f"pass@{k}": sum(formulas.pass_at_k(len(row), sum(row), k) for row in drawn) / len(drawn) for k in ks}


def evaluate_run(run_dir: Path, task_class: type[Task], cfg: Config, args: argparse.Namespace, base_from: Path | None) -> dict:
    """Evaluates base and agents of one finished run into RUN_DIR/evaluation, and returns {name: figures}.

    `base_from` is the folder of an earlier run of the same settings: the base's answers are taken from there.
    """
    data = task_class.load_data(cfg)                                # divided as in the run: nothing it trained on is held out now
    queries = args.queries or cfg.eval_queries
    if queries > len(data.held_out):
        raise UserError("queries", queries, f"the run held out {len(data.held_out)} rows of {cfg.dataset}; ask for fewer")
    rows = args.rows or rows_at_once(256, cfg.max_response_length)
    iteration = json.loads((run_dir / "eval.json").read_text())["iteration"]
    settings = {"iteration": iteration, "queries": queries, "temperature": cfg.temperature, "rows": rows,
                "max_response_length": cfg.max_response_length}
    folder = run_dir / "evaluation"
    if (folder / "settings.json").exists() and (old := json.loads((folder / "settings.json").read_text())) != settings:
        changed = "; ".join(f"{k} was {old.get(k)}, now {v}" for k, v in settings.items() if old.get(k) != v)
        raise UserError("run_dirs", str(run_dir), f"has an evaluation with other settings ({changed}); move {folder} away to make a new one")
    device = choose_device(cfg)
    if device.type == "cpu":
        tune_cpu()
    base = load_language_model(cfg.model, cfg.temperature, cfg.dtype, device, cfg.storage)
    task = task_class(replace(cfg, eval_queries=queries), data, base)
    folder.mkdir(exist_ok=True)
    replace_text(folder / "settings.json", json.dumps(settings) + "\n")
    if base_from and not (folder / "base.jsonl").exists():
        shutil.copy(base_from / "evaluation" / "base.jsonl", folder / "base.jsonl")

    def agent(name: str) -> LanguageModel:
        final = run_dir / "final" / name
        if cfg.lora:
            return LanguageModel(base.lm, base.tokenizer, cfg.temperature, cfg.dtype, load_adapter(base.lm, name, final))
        return load_language_model(str(final), cfg.temperature, cfg.dtype, device)

    loads = {"base": lambda: base} | {name: partial(agent, name) for name in agents_of(cfg)}
    figures, batches = {}, len(loads) * (args.samples + 1) * math.ceil(queries / rows)
    with tqdm(total=batches, desc=run_dir.name, unit="batch", dynamic_ncols=True) as bar:
        for name, load in loads.items():
            lines = solve(load, task, folder / f"{name}.jsonl", args.samples, cfg.max_response_length, rows, bar)
            figures[name] = solved_figures(task, lines, args.k)
    replace_text(folder / "results.json", json.dumps({"samples": args.samples, **settings, **figures}, indent=1) + "\n")
    return figures


def agents_of(cfg: Config) -> list[str]:
    return ["llm1"] if cfg.method == "ppo" else ["llm1", "llm2"]


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="the k of pass@k")
    parser.add_argument("--samples", type=int, default=64, help="responses drawn per query; the more, the less pass@k varies")
    parser.add_argument("--queries", type=int, default=0, help="held-out queries; 0 = as many as the run used")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 = the run's own")
    parser.add_argument("--rows", type=int, default=0, help="responses sampled together; 0 = 256, or fewer long ones")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, help="picture to write (default: RUN_DIR/evaluation/pass_at_k.png)")
    args = parser.parse_args(argv)
    for name, holds, way_out in (("k", min(args.k) >= 1, "must be 1 or more"), ("rows", args.rows >= 0, "must be 0 or more"),
                                 ("samples", args.samples >= max(args.k), f"must be at least the largest k = {max(args.k)}"),
                                 ("queries", args.queries >= 0, "must be 0 or more"),
                                 ("temperature", 0 <= args.temperature < math.inf, "must be 0 or more")):
        if not holds:
            raise UserError(name, getattr(args, name), way_out)
    require_finished(args.run_dirs)
    configs = [load_config(run_dir) for run_dir in args.run_dirs]
    configs = [replace(cfg, temperature=args.temperature or cfg.temperature, device=args.device) for cfg in configs]
    require_same_settings(args.run_dirs, [asdict(cfg) for cfg in configs])
    out = args.out or args.run_dirs[0] / "evaluation" / "pass_at_k.png"
    require_picture(args.out)
    for run_dir, cfg in zip(args.run_dirs, configs):
        if missing := [name for name in agents_of(cfg) if not (run_dir / "final" / name).is_dir()]:
            raise UserError("run_dirs", str(run_dir), f"has no final/{missing[0]}; put the folder back, or train again")
        if not os.access(run_dir, os.W_OK):
            raise UserError("run_dirs", str(run_dir), "cannot be written to; copy the run to a folder of yours")
    task_class = {"imdb": Imdb, "gsm8k": Gsm8k}[configs[0].task]
    runs = []
    for run_dir, cfg in zip(args.run_dirs, configs):
        figures = evaluate_run(run_dir, task_class, cfg, args, args.run_dirs[0] if runs else None)
        runs.append((replace(cfg, eval_queries=args.queries or cfg.eval_queries), figures))
    print(pass_at_k_table(runs))
    draw_pass_at_k(runs, args.k, out)
    print(f"written: {out}, and answers and figures to {'/evaluation, '.join(map(str, args.run_dirs))}/evaluation")


if __name__ == "__main__":
    main()
