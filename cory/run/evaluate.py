"""pass@k of finished runs: greedy and sampled responses of base and agents to the held-out bare queries.

Several runs must differ in method, seed and the settings of --by alone; they are shown as means over seeds:

    python -m cory evaluate RUN_DIR [RUN_DIR ...] --k 1 2 4 8 16 32 --samples 64
"""
import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from cory.config import Config
from cory.errors import UserError, exit_on_user_error
from cory.flags import OneLineParser, load_config
from cory.loading import load_language_model, model_errors
from cory.ppo.formulas import pass_at_k
from cory.ppo.lora import load_adapter
from cory.ppo.model import LanguageModel
from cory.run.evaluation import best_of_n, merged, sample_responses
from cory.run.plots import draw_pass_at_k
from cory.run.report import finished
from cory.run.run import find_task, load_bases
from cory.run.tables import grouped, groups_table
from cory.system.device import prepare_device, resolve_auto
from cory.system.distributed import launched, processes
from cory.system.files import write_text
from cory.tasks.task import Task


def solved_metrics(model: LanguageModel, task: Task, samples: int, ks: list[int],
                   out: Path) -> tuple[dict[str, float], np.ndarray]:
    """Mean reward, share solved and task metrics of greedy responses, and pass@k of `samples` sampled ones, mean
    over the Q held-out queries; and the rewards of these, (Q, samples). Solved means a reward above 0. Writes the
    responses to `out`.
    """
    queries, length = task.held_out_queries, task.cfg.max_response_length
    greedy = sample_responses(model, task.pioneer_prompts(queries), length, None).text
    asked = [query for query in queries for _ in range(samples)]
    sampled = sample_responses(model, task.pioneer_prompts(asked), length, 0).text
    reward_Q, reward_Qm = task.reward(queries, greedy), task.reward(asked, sampled).view(len(queries), samples)
    rows = [{"query": query, "greedy": greedy[i], "greedy_reward": reward_Q[i].item(),
             "sampled": sampled[i * samples:(i + 1) * samples], "rewards": reward_Qm[i].tolist()}
            for i, query in enumerate(queries)]
    processes().broadcast(lambda: write_text(out, "".join(json.dumps(row) + "\n" for row in rows)))
    metrics = merged({"task_reward": reward_Q.mean().item(), "solved": (reward_Q > 0).float().mean().item()},
                     task.metrics(queries, greedy))
    metrics = {f"greedy_{name}": value for name, value in metrics.items()}
    for k in ks:
        solved = [pass_at_k(samples, count, k) for count in (reward_Qm > 0).sum(1).tolist()]
        metrics[f"pass@{k}"] = sum(solved) / len(solved)
    return metrics, reward_Qm.cpu().numpy()


def evaluate_run(run_dir: Path, agents: list[str], args: argparse.Namespace) -> dict[str, dict]:
    """Evaluates base and agents of one run into RUN_DIR/evaluation. Returns {name: metrics}."""
    cfg, device = resolve_auto(replace(load_config(run_dir), device=args.device, dtype="auto"))
    prepare_device(cfg, device)
    task_class = find_task(cfg)
    data = task_class.load_data(cfg)            # divided as in the run: nothing it trained on is held out now
    columns = cfg.base_columns(agents)
    bases = load_bases(cfg, columns, device)
    if args.queries > len(getattr(data, cfg.eval_split)):
        raise UserError("queries", args.queries, f"there are {len(getattr(data, cfg.eval_split))} "
                        f"{cfg.eval_split} rows")
    task = task_class(replace(cfg, eval_queries=args.queries or cfg.eval_queries), data, bases["base"])
    folder, metrics = run_dir / "evaluation", {}
    folder.mkdir(exist_ok=True)
    for name in [*bases, *agents]:
        model = bases[name] if name in bases else final_model(run_dir, name, cfg, bases[columns[name]])
        metrics[name], reward_Qm = solved_metrics(model, task, args.samples, args.k, folder / f"{name}.jsonl")
        if name == "base":
            best = {str(n): best_of_n(reward_Qm, n) for n in (4, 16, 32) if 2 * n <= args.samples}
    results = {"queries": len(task.held_out_queries), "samples": args.samples, "best_of_n": best, **metrics}
    processes().broadcast(lambda: write_text(folder / "results.json", json.dumps(results, indent=1) + "\n"))
    for n, (kl, reward) in best.items():
        print(f"the base's best of {n}: reward {reward:.2f}, KL at most {kl:.2f} nats, combined "
              f"{reward - cfg.init_kl_coef * kl:.2f}")
    return metrics


def final_model(run_dir: Path, name: str, cfg: Config, base: LanguageModel) -> LanguageModel:
    """An agent's policy as the run left it; with LoRA its adapter on the base."""
    final = run_dir / "final" / name
    if not cfg.of_agent(name).lora_rank:
        return load_language_model(str(final), cfg, base.device)
    with model_errors("adapter", str(final)):
        adapter = load_adapter(base.lm, name, final)
    return LanguageModel(base.lm, base.tokenizer, cfg.dtype, cfg.chat_template, adapter)


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m cory evaluate", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    add("--by", nargs="+", default=[], metavar="SETTING", help="settings that tell the runs apart")
    add("--k", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="the k of pass@k")
    add("--samples", type=int, default=64, help="responses sampled per query; the more, the less pass@k varies")
    add("--queries", type=int, default=0, help="held-out queries; 0 = as many as the run used")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--out", type=Path, default=Path("pass_at_k.png"), help="plot to write")
    args = parser.parse_args(argv)
    for name, value, minimum in (("k", min(args.k), 1), ("samples", args.samples, max(args.k)),
                                 ("queries", args.queries, 0)):
        if value < minimum:
            raise UserError(name, value, f"must be {minimum} or more" + ", the largest --k" * (name == "samples"))
    configs, runs = finished(args.run_dirs, args.by), []
    with launched(vars(args)):
        for run_dir, config in zip(args.run_dirs, configs, strict=True):
            metrics = evaluate_run(run_dir, config["agents"], args)
            runs.append((config | {"eval_queries": args.queries or config["eval_queries"]}, metrics))
        if processes().is_main:
            print(groups_table("held-out", grouped(runs, args.by)))
            draw_pass_at_k(runs, args.k, args.out, args.by)
            print(f"written: {args.out}, and responses and metrics to the folder evaluation/ of each run")
