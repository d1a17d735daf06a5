"""pass@k of finished runs: greedy and sampled responses of base and agents to the held-out bare queries.

Several runs must differ in method, seed and the settings of --by alone; they are shown as means over seeds:

    python -m cory evaluate RUN_DIR [RUN_DIR ...] --k 1 2 4 8 16 32 --samples 64
"""
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from cory.config import Config
from cory.errors import UserError, exit_on_user_error
from cory.flags import load_config, read_config
from cory.loading import load_language_model, model_errors
from cory.ppo.formulas import pass_at_k
from cory.ppo.lora import load_adapter
from cory.ppo.model import LanguageModel
from cory.run.evaluation import best_of_n, merged, sample_responses
from cory.run.plots import draw_pass_at_k
from cory.run.report import finished, parser_of_runs
from cory.run.run import find_task, load_bases
from cory.run.tables import grouped, groups_table
from cory.system.device import prepare_device, resolve_auto
from cory.system.distributed import launched, processes
from cory.system.files import write_text
from cory.tasks.task import Task


def solved_metrics(model: LanguageModel, task: Task, samples: int, ks: list[int],
                   out: Path) -> tuple[dict[str, float], np.ndarray]:
    """Mean reward, share solved and task metrics of greedy responses to the Q held-out queries, pass@k of
    `samples` sampled ones, and the rewards of these, (Q, samples). Solved means a reward above 0. Writes the
    responses to `out`.
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
    processes().broadcast(lambda: write_text(out, "".join(json.dumps(row) + "\n" for row in rows)))
    own = {"task_reward": reward_Q.mean().item(), "solved": (reward_Q > 0).float().mean().item()}
    metrics = {f"greedy_{name}": value for name, value in merged(own, task.metrics(queries, greedy)).items()}
    for k in ks:
        metrics[f"pass@{k}"] = fmean(pass_at_k(samples, n, k) for n in (reward_Qm > 0).sum(1).tolist())
    return metrics, reward_Qm.cpu().numpy()


def evaluate_run(run_dir: Path, args: Namespace) -> dict[str, dict]:
    """Evaluates base and agents of one run into RUN_DIR/evaluation. Returns {name: metrics}."""
    cfg, device = resolve_auto(replace(load_config(run_dir), device=args.device, dtype="auto"))
    prepare_device(cfg, device)
    task_class = find_task(cfg)
    data = task_class.load_data(cfg)            # divided as in the run: nothing it trained on is held out now
    columns = read_config(run_dir)["agents"]
    bases = load_bases(cfg, columns, device)
    rows = len(getattr(data, cfg.eval_split))
    if args.queries > rows:
        raise UserError("queries", args.queries, f"there are {rows} {cfg.eval_split} rows")
    task = task_class(replace(cfg, eval_queries=args.queries or cfg.eval_queries), data, bases["base"])
    folder, metrics = run_dir / "evaluation", {}
    folder.mkdir(exist_ok=True)
    for name in [*bases, *columns]:
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
    if not cfg.lora_rank:
        return load_language_model(str(final), cfg, base.device)
    with model_errors("adapter", str(final)):
        adapter = load_adapter(base.lm, name, final)
    return LanguageModel(base.lm, base.tokenizer, cfg.dtype, cfg.chat_template, adapter)


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = parser_of_runs("evaluate", __doc__, "pass_at_k.png")
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="the k of pass@k")
    parser.add_argument("--samples", type=int, default=64, help="responses sampled per query")
    parser.add_argument("--queries", type=int, default=0, help="held-out queries; 0: as many as in the run")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    args = parser.parse_args(argv)
    if not 1 <= min(args.k) <= max(args.k) <= args.samples:
        raise UserError("k", args.k, f"must be from 1 to --samples {args.samples}")
    configs, runs = finished(args.run_dirs, args.by), []
    with launched(vars(args)):
        for run_dir, config in zip(args.run_dirs, configs, strict=True):
            runs.append((config, evaluate_run(run_dir, args)))
        if processes().is_main:
            print(groups_table("held-out", grouped(runs, args.by)))
            draw_pass_at_k(runs, args.k, args.out, args.by)
            print(f"written: {args.out}, and responses and metrics to the folder evaluation/ of each run")
