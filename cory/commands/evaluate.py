"""pass@k of finished runs: greedy and drawn answers of base and agents to the held-out bare queries.

Several runs must differ in method, seed and the settings of --by alone; they are shown as means over seeds:

    python -m cory evaluate RUN_DIR [RUN_DIR ...] --k 1 2 4 8 16 32 --samples 64
"""
import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

from tqdm import tqdm

from cory.commands.report import finished, require_picture, require_same_settings
from cory.config import Config
from cory.errors import UserError, exit_on_user_error
from cory.experiment import evaluation
from cory.experiment.fingerprints import of_run, require_same
from cory.experiment.flags import OneLineParser
from cory.experiment.plots import draw_pass_at_k
from cory.experiment.run import find_task, load_bases
from cory.experiment.saved_config import load_config
from cory.experiment.tables import grouped, groups_table
from cory.ppo.formulas import pass_at_k
from cory.ppo.loading import load_language_model
from cory.ppo.lora import load_adapter
from cory.ppo.model import LanguageModel
from cory.system.distributed import all_gather_parts, broadcast, held_by_main, is_main, launched
from cory.system.files import own_folder, replace_text
from cory.system.folder import locked
from cory.system.machine import prepare_device, settled_anew
from cory.tasks.task import Task

ROWS = 256          # responses sampled together, or fewer long ones


def answer_all(model: LanguageModel, task: Task, samples: int, label: str) -> list[dict]:
    """One greedy answer (round 0) and `samples` drawn ones (rounds 1, 2, ...) to every held-out query.

    Returns {"responses", "rewards"} of each round, in the order of the queries.
    """
    queries, length = task.held_out_queries, task.cfg.max_response_length
    size = evaluation.rows_at_once(ROWS, length)
    batches = list(product(range(samples + 1), range(0, len(queries), size)))

    def answered(rows: slice) -> list[tuple[str, float]]:
        pairs = []
        bar = tqdm(batches[rows], label, unit="batch", dynamic_ncols=True, disable=not is_main())
        for number, first in bar:
            seed = None if number == 0 else evaluation.EVALUATION_SEED + 1_000_003 * number + first
            asked = queries[first:first + size]
            responses = evaluation.answer(model, task.pioneer_prompts(asked), length, seed)
            pairs += zip(responses, task.checked(asked, responses), strict=True)
        return pairs

    pairs, n = all_gather_parts(len(batches), answered), len(queries)
    rounds = [pairs[at:at + n] for at in range(0, len(pairs), n)]
    return [{"responses": [text for text, _ in one], "rewards": [reward for _, reward in one]}
            for one in rounds]


def solved_metrics(task: Task, rounds: list[dict], ks: list[int]) -> dict[str, float]:
    """From what `answer_all` returns: mean reward, share solved and task metrics of the greedy answers, and
    pass@k of the drawn ones, mean over queries. Solved means a reward above 0.
    """
    greedy, *drawn = rounds
    rewards, n = greedy["rewards"], len(task.held_out_queries)
    metrics = {"task_reward": sum(rewards) / n, "solved": sum(reward > 0 for reward in rewards) / n}
    metrics |= evaluation.checked(task.metrics(task.held_out_queries, greedy["responses"]), taken=metrics)
    metrics = {f"greedy_{name}": value for name, value in metrics.items()}
    solved = [sum(one["rewards"][i] > 0 for one in drawn) for i in range(n)]       # of each query's answers
    for k in ks:
        metrics[f"pass@{k}"] = sum(pass_at_k(len(drawn), count, k) for count in solved) / n
    return metrics


def reopened(run_dir: Path, saved: dict, device: str,
             queries: int = 0) -> tuple[Config, Task, dict[str, LanguageModel]]:
    """Settings on this machine, task and bases of a finished run; `saved` is its config.json. The task has
    `queries` held-out queries if that is not 0. Raises `UserError` if data, base or reward are not what the
    run was trained with.
    """
    trained = load_config(run_dir)
    cfg = settled_anew(replace(trained, device=device))         # it may have been trained on another machine
    task_class = find_task(cfg)
    data = task_class.load_data(cfg)            # divided as in the run: nothing it trained on is held out now
    bases = load_bases(cfg, cfg.base_columns(saved["agents"]), prepare_device(cfg))
    task = task_class(cfg, data, bases["base"])
    for name, fingerprint in of_run(data, bases, task).items():
        if name == "data" or cfg.storage == trained.storage:    # in another its weights have other bits
            require_same(cfg, saved, name, fingerprint)
    evaluation.require_same_reward(task, run_dir)
    if queries:
        task = task_class(replace(cfg, eval_queries=queries), data, bases["base"])
    return cfg, task, bases


def evaluate_run(run_dir: Path, saved: dict, args: argparse.Namespace) -> dict[str, dict]:
    """Evaluates base and agents of one run into RUN_DIR/evaluation. Returns {name: metrics}."""
    cfg, task, bases = reopened(run_dir, saved, args.device, args.queries)
    columns = cfg.base_columns(saved["agents"])
    folder, metrics = broadcast(lambda: own_folder(run_dir / "evaluation")), {}
    for name in [*bases, *saved["agents"]]:
        model = bases.get(name) or final_model(run_dir, name, cfg, bases[columns[name]])
        rounds = answer_all(model, task, args.samples, f"{run_dir.name} {name}")
        metrics[name] = solved_metrics(task, rounds, args.k)
        lines = "".join(json.dumps(answers) + "\n" for answers in rounds)
        broadcast(lambda name=name, lines=lines: replace_text(folder / f"{name}.jsonl", lines))
    results = {"samples": args.samples, "queries": len(task.held_out_queries), **metrics}
    broadcast(lambda: replace_text(folder / "results.json", json.dumps(results, indent=1) + "\n"))
    return metrics


def final_model(run_dir: Path, name: str, cfg: Config, base: LanguageModel) -> LanguageModel:
    """An agent's policy as the run left it, on the base's device; with LoRA its adapter on the base."""
    final = run_dir / "final" / name
    if not cfg.lora:
        return load_language_model(str(final), cfg.temperature, cfg.precision, base.device)
    adapter = load_adapter(base.lm, name, final)
    return LanguageModel(base.lm, base.tokenizer, cfg.temperature, cfg.precision, adapter)


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m cory evaluate", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    add("--by", nargs="+", default=[], metavar="SETTING", help="settings that tell the runs apart")
    add("--k", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="the k of pass@k")
    add("--samples", type=int, default=64, help="responses drawn per query; the more, the less pass@k varies")
    add("--queries", type=int, default=0, help="held-out queries; 0 = as many as the run used")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--out", type=Path, help="picture to write (default: RUN_DIR/evaluation/pass_at_k.png)")
    args = parser.parse_args(argv)
    for name, value, least in (("k", min(args.k), 1), ("samples", args.samples, max(args.k)),
                               ("queries", args.queries, 0)):
        if value < least:
            why = ", the largest --k" if name == "samples" else ""
            raise UserError(name, value, f"must be {least} or more{why}")
    saved = finished(args.run_dirs)
    require_same_settings(args.run_dirs, saved, args.by)
    if args.out:
        require_picture(args.out)
    for run_dir, config in zip(args.run_dirs, saved, strict=True):
        for name in config["agents"]:
            if not (run_dir / "final" / name).is_dir():
                raise UserError("run_dirs", str(run_dir), f"has no final/{name}; put it back, or train again")
    with launched(vars(args)):
        evaluate_runs(args, saved)


def evaluate_runs(args: argparse.Namespace, saved: list[dict]) -> None:
    """Each run in turn, then table and picture of all; `saved` are their config.json."""
    runs = []
    for run_dir, config in zip(args.run_dirs, saved, strict=True):
        with held_by_main(locked, run_dir):
            metrics = evaluate_run(run_dir, config, args)
        queries = args.queries or config["eval_queries"]
        runs.append((config | {"eval_queries": queries}, metrics))
    if is_main():
        print(groups_table(f"held-out, {queries} queries", grouped(runs, args.by)))
        out = args.out or args.run_dirs[0] / "evaluation" / "pass_at_k.png"
        draw_pass_at_k(runs, args.k, out, args.by)
        print(f"written: {out}, and answers and metrics to the folder evaluation/ of each run")
