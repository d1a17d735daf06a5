"""Greedy accuracy, pass@k and best of n of finished runs, for base and agents.

    python -m cory evaluate RUN_DIR [RUN_DIR ...] --samples 64
"""
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cory.config import METHODS, Config
from cory.errors import UserError, exit_on_user_error
from cory.flags import OneLineParser, load_config, read_config
from cory.loading import load_language_model, model_errors
from cory.names import find
from cory.ppo.lora import load_adapter
from cory.ppo.model import LanguageModel
from cory.run.held_out import best_of_n, merged, sample_responses
from cory.run.run import find_task, load_bases
from cory.run.tables import results_table
from cory.system.device import prepare_device, resolve_auto
from cory.system.distributed import launched, processes
from cory.system.files import read_jsonl, write_text
from cory.tasks.task import Task


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
    processes().broadcast(lambda: write_text(out, "".join(json.dumps(row) + "\n" for row in rows)))
    own = {"task_reward": reward_Q.mean().item(), "solved": (reward_Q > 0).float().mean().item()}
    metrics = {f"greedy_{name}": value for name, value in merged(own, task.metrics(queries, greedy)).items()}
    for k in (2**i for i in range(samples.bit_length())):
        _, metrics[f"pass@{k}"] = best_of_n((reward_Qm > 0).cpu().numpy(), k)
    for n in (n for n in (4, 16, 32) if 2 * n <= samples):
        _, metrics[f"best_of_{n}"] = best_of_n(reward_Qm.cpu().numpy(), n)
    return metrics


class Member(NamedTuple):
    """An agent as `team_metrics` sees it."""
    policy: LanguageModel


class Team(NamedTuple):
    """A run as `team_metrics` sees it; `roles` are those of its last iteration."""
    cfg: Config
    task: Task
    roles: list[Member]


def evaluate_run(run_dir: Path, samples: int, queries: int, device: str, dtype: str | None) -> None:
    """Evaluates base and agents of one run into RUN_DIR/evaluation, and prints the table."""
    saved = load_config(run_dir)
    cfg, device = resolve_auto(replace(saved, device=device, dtype=dtype or saved.dtype))
    if not (run_dir / "final").exists():
        raise UserError("run_dirs", str(run_dir), "is no finished run (no final/); --resume it first")
    prepare_device(cfg, device)
    task_class = find_task(cfg)
    data = task_class.load_data(cfg)            # split as in the run: nothing it trained on is held out now
    queries = min(queries or cfg.eval_queries, len(getattr(data, cfg.eval_split)))
    columns = read_config(run_dir)["agents"]
    bases = load_bases(cfg, columns, device)
    task = task_class(replace(cfg, eval_queries=queries), data, bases["base"])
    folder, metrics = run_dir / "evaluation", {}
    folder.mkdir(exist_ok=True)
    models = dict(bases)
    for name, column in columns.items():
        models[name] = final_model(run_dir, name, cfg, bases[column])
    for name, model in models.items():
        metrics[name] = solved_metrics(model, task, samples, folder / f"{name}.jsonl")
    played = read_jsonl(run_dir / "metrics.jsonl")[-1]["roles"].values()        # in the last iteration
    for team, members in (("base_team", [columns[name] for name in played]), ("team", played)):
        roles = [Member(models[name]) for name in members]
        measured = find("method", cfg.method, METHODS)().team_metrics(Team(cfg, task, roles))
        metrics |= {team: merged(measured)} if measured else {}
    results = {"queries": queries, "samples": samples, **metrics}
    processes().broadcast(lambda: write_text(folder / "results.json", json.dumps(results, indent=1) + "\n"))
    print(results_table(metrics, run_dir.name))
    print(f"responses and metrics: {folder}", flush=True)


def final_model(run_dir: Path, name: str, cfg: Config, base: LanguageModel) -> LanguageModel:
    final = run_dir / "final" / name
    if not cfg.lora_rank:
        return load_language_model(str(final), cfg, base.device)
    with model_errors("adapter", str(final)):
        adapter = load_adapter(base.lm, name, final)
    return LanguageModel(base.lm, base.tokenizer, cfg.dtype, cfg.chat_template, adapter)


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m cory evaluate", description=__doc__.partition("\n")[0])
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
