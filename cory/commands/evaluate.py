"""pass@k of finished runs: greedy and drawn answers of base and agents to the held-out bare queries.

Several runs must differ in method, seed and the settings of --by alone; they are shown as means over seeds:

    python -m cory evaluate RUN_DIR [RUN_DIR ...] --k 1 2 4 8 16 32 --samples 64
"""
import argparse
import json
import math
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Callable

from tqdm import tqdm

from cory.commands.report import read_eval, require_finished, require_picture, require_same_settings
from cory.config import Config
from cory.errors import UserError, exit_on_user_error
from cory.experiment import evaluation
from cory.experiment.flags import OneLineParser
from cory.experiment.plots import draw_pass_at_k
from cory.experiment.run import find_task
from cory.experiment.saved_config import load_config, read_config
from cory.experiment.tables import grouped, groups_table
from cory.ppo import formulas
from cory.ppo.loading import load_language_model
from cory.ppo.lora import load_adapter
from cory.ppo.model import LanguageModel
from cory.system.distributed import all_gather_parts, broadcast, held_by_main, is_main, launched, world_size
from cory.system.files import append_jsonl, own_folder, read_json, read_jsonl, replace_text
from cory.system.folder import locked
from cory.system.machine import prepare_device, settled_anew
from cory.tasks.task import Task

ROWS = 256          # responses sampled together, or fewer long ones


def solve(name: str, load: Callable, task: Task, folder: Path, samples: int) -> list[dict]:
    """One greedy answer (round 0) and `samples` drawn ones (rounds 1, 2, ...) to every query, as file lines.

    A line is one batch: {"round", "first" query, "responses", "rewards"}. Lines that stand there already are
    not made again, so that an evaluation goes on where it was stopped and more samples can be added.
    """
    path, rows = folder / f"{name}.jsonl", evaluation.rows_at_once(ROWS, task.cfg.max_response_length)
    batches = {at: task.held_out_queries[at:at + rows] for at in range(0, len(task.held_out_queries), rows)}
    lines = broadcast(lambda: answered_before(path, batches))
    missing = [place for place in product(range(samples + 1), batches) if place not in lines]
    model = load(name) if missing else None

    def answered(number: int, first: int) -> dict:
        seed = None if number == 0 else evaluation.EVALUATION_SEED + 1_000_003 * number + first
        prompts = task.pioneer_prompts(batches[first])
        responses = evaluation.answer(model, prompts, task.cfg.max_response_length, seed)
        rewards = task.checked(batches[first], responses)
        return dict(round=number, first=first, responses=responses, rewards=rewards)

    at_once = world_size()                                                  # a batch for each process
    for at in tqdm(range(0, len(missing), at_once), desc=f"{folder.parent.name} {name}", unit="batch",
                   dynamic_ncols=True, disable=not is_main()):
        now = missing[at:at + at_once]
        made = all_gather_parts(len(now), lambda rows, now=now: [answered(*place) for place in now[rows]])
        lines |= {(line["round"], line["first"]): line for line in made}
        if is_main():
            append_jsonl(path, made)
    return [lines[place] for place in product(range(samples + 1), batches)]


def answered_before(path: Path, batches: dict[int, list[str]]) -> dict[tuple[int, int], dict]:
    """The whole lines of a file, by round and first query; what a stopped evaluation left of one is cut off.
    Raises `UserError`.
    """
    lines = {}
    for number, line in enumerate(read_jsonl(path), start=1):
        if not is_answered(line, batches):
            way_out = "is no batch of answers to these queries; remove the file to answer anew"
            raise UserError("file", f"{path}:{number}", way_out)
        lines[line["round"], line["first"]] = line
    replace_text(path, "".join(json.dumps(line) + "\n" for line in lines.values()))
    return lines


def is_answered(line: dict, batches: dict[int, list[str]]) -> bool:
    """Whether a line holds a text and a reward for each query of its batch."""
    first, responses, rewards = line.get("first"), line.get("responses"), line.get("rewards")
    if not (type(line.get("round")) is type(first) is int and type(responses) is type(rewards) is list):
        return False
    return (first in batches and len(responses) == len(rewards) == len(batches[first])
            and all(isinstance(text, str) for text in responses)
            and all(isinstance(reward, (int, float)) and math.isfinite(reward) for reward in rewards))


def solved_metrics(task: Task, lines: list[dict], ks: list[int]) -> dict[str, float]:
    """From the lines of `solve`: greedy mean reward, share solved, task metrics; pass@k of drawn answers."""
    n = len(task.held_out_queries)
    responses, rewards = ([x for line in lines for x in line[key]] for key in ("responses", "rewards"))
    solved = [reward > 0 for reward in rewards]         # of n greedy answers, then of n in each drawn round
    greedy = {"task_reward": sum(rewards[:n]) / n, "solved": sum(solved[:n]) / n}
    greedy |= evaluation.checked(task.metrics(task.held_out_queries, responses[:n]), taken=greedy)
    metrics = {f"greedy_{name}": value for name, value in greedy.items()}
    drawn = [solved[n + i::n] for i in range(n)]
    for k in ks:
        metrics[f"pass@{k}"] = sum(formulas.pass_at_k(len(row), sum(row), k) for row in drawn) / n
    return metrics


def evaluate_run(run_dir: Path, cfg: Config, agents: list[str], queries: int, args) -> dict[str, dict]:
    """Evaluates base and agents of one finished run into RUN_DIR/evaluation, and returns {name: metrics}."""
    task_class = find_task(cfg)
    data = task_class.load_data(cfg)            # divided as in the run: nothing it trained on is held out now
    rows_held_out = len(getattr(data, cfg.eval_split))
    if queries > rows_held_out:
        way_out = f"the run's {cfg.eval_split} part has {rows_held_out} rows; ask for fewer"
        raise UserError("queries", queries, way_out)
    settings = {"iteration": read_eval(run_dir, agents)["iteration"], "queries": queries,
                "split": cfg.eval_split, "temperature": cfg.temperature,
                "max_response_length": cfg.max_response_length}
    folder = run_dir / "evaluation"
    require_same_evaluation(folder, settings)
    cfg = settled_anew(cfg)                     # the run may have been trained on another kind of machine
    base = load_language_model(cfg.model, cfg.temperature, cfg.precision, prepare_device(cfg), cfg.storage)
    task = task_class(replace(cfg, eval_queries=queries), data, base)
    evaluation.require_same_reward(task, run_dir)

    def load(name: str) -> LanguageModel:
        return base if name == "base" else final_model(run_dir, name, cfg, base)

    broadcast(lambda: own_folder(folder))
    broadcast(lambda: replace_text(folder / "settings.json", json.dumps(settings) + "\n"))
    metrics = {name: solved_metrics(task, solve(name, load, task, folder, args.samples), args.k)
               for name in ["base", *agents]}
    results = {"samples": args.samples, **settings, **metrics}
    broadcast(lambda: replace_text(folder / "results.json", json.dumps(results, indent=1) + "\n"))
    return metrics


def final_model(run_dir: Path, name: str, cfg: Config, base: LanguageModel) -> LanguageModel:
    """An agent's policy as the run left it, on the base's device; with LoRA its adapter on the base."""
    final = run_dir / "final" / name
    if not cfg.lora:
        return load_language_model(str(final), cfg.temperature, cfg.precision, base.device)
    adapter = load_adapter(base.lm, name, final)
    return LanguageModel(base.lm, base.tokenizer, cfg.temperature, cfg.precision, adapter)


def require_same_evaluation(folder: Path, settings: dict) -> None:
    """An evaluation that stands in the folder was made with these settings. Raises `UserError`."""
    path = folder / "settings.json"
    old = read_json(path) if path.exists() else settings
    if not isinstance(old, dict):
        raise UserError("file", str(path), f"holds no settings; move {folder} away to make a new evaluation")
    changed = "; ".join(f"{k} was {old.get(k)}, now {v}" for k, v in settings.items() if old.get(k) != v)
    if changed:
        raise UserError("run_dirs", str(folder.parent), "has an evaluation with other settings "
                        f"({changed}); move {folder} away to make a new one")


def require_whole(run_dir: Path, agents: list[str]) -> None:
    """The run has a model of each agent, and a place to write to. Raises `UserError`."""
    for name in agents:
        if not (run_dir / "final" / name).is_dir():
            raise UserError("run_dirs", str(run_dir), f"has no final/{name}; put it back, or train again")
    if not os.access(run_dir, os.W_OK):
        raise UserError("run_dirs", str(run_dir), "cannot be written to; copy the run to a folder of yours")


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
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
            raise UserError(name, value, f"must be {least} or more")
    require_finished(args.run_dirs)
    saved = [read_config(run_dir) for run_dir in args.run_dirs]
    require_same_settings(args.run_dirs, saved, args.by)
    require_picture(args.out)
    for run_dir, config in zip(args.run_dirs, saved, strict=True):
        require_whole(run_dir, config["agents"])
    with launched(vars(args)):
        evaluate_runs(args, saved)


def evaluate_runs(args: argparse.Namespace, saved: list[dict]) -> None:
    """Each run in turn, then table and picture of all; `saved` are their config.json."""
    runs = []
    for run_dir, config in zip(args.run_dirs, saved, strict=True):
        cfg = replace(load_config(run_dir), device=args.device)
        queries = args.queries or cfg.eval_queries
        with held_by_main(locked, run_dir):
            metrics = evaluate_run(run_dir, cfg, config["agents"], queries, args)
        runs.append((config | {"eval_queries": queries}, metrics))
    if is_main():
        print(groups_table(f"held-out, {queries} queries", grouped(runs, args.by)))
        out = args.out or args.run_dirs[0] / "evaluation" / "pass_at_k.png"
        draw_pass_at_k(runs, args.k, out, args.by)
        print(f"written: {out}, and answers and metrics to the folder evaluation/ of each run")


if __name__ == "__main__":
    main()
