"""What the runs of a study reached: a pandas frame, `rows.csv`, with a row for each held-out evaluation.

A row is of one agent of one run after one iteration. Iteration 0 is the base, which every agent equals there.
"""
from dataclasses import fields
from pathlib import Path

import pandas as pd

from cory.config import EXPERIMENTS
from cory.errors import UserError
from cory.experiment.checkpoint import checkpoints_of, read_state
from cory.experiment.saved_config import load_config
from cory.studies.runs import FREE, StudyRun
from cory.system.files import read_json, read_jsonl, read_log, readable

REWARD = {"imdb": "task_reward", "gsm8k": "greedy_accuracy"}        # what the column `reward` holds
ROW = ["task", "variant", "seed", "agent", "iteration"]             # what makes a row the one it is
MADE_BY = ["data", "weights", "dtype", "head_precision"]
TEXTS = ["task", "variant", "agent", "commit", *MADE_BY]            # a commit may look like a number
NEEDED = [*ROW, *MADE_BY, "init_kl_coef", "diverged", "core_seconds", "commit", "reward", "kl",
          "combined_reward", "distinct_2", "repeated_tokens"]
SETTING_NAMES = {f.name for config_class, _ in EXPERIMENTS.values() for f in fields(config_class)}
# Settings on which the base's held-out answers depend, and their rewards.
CHANGE_THE_BASE = {"model", "dataset", "reward_model", "checker", "one_shot", "chat_template", "temperature",
                   "min_query_length", "max_query_length", "max_response_length", "eval_queries",
                   "eval_samples", "eval_split", "lora", "load_in_4bit"}


def of_runs(runs: list[StudyRun]) -> pd.DataFrame:
    """Of the runs that finished or diverged. Settings that are the same in all of them are left out, but for
    the batch size: pictures need it when these rows are joined to others.
    """
    rows = pd.DataFrame([row for run in runs if run.finished or run.diverged for row in of_run(run)])
    may_go = SETTING_NAMES.intersection(rows).difference([*NEEDED, "batch_size"])
    return rows.drop(columns=[name for name in may_go if rows[name].nunique(dropna=False) == 1])


def of_run(run: StudyRun) -> list[dict]:
    """Rows of one run. Raises `UserError` for a folder that lacks what a run writes."""
    config, log = read_json(run.folder / "config.json"), read_log(run.folder / "metrics.jsonl")
    fingerprints, agents = config.pop("fingerprints"), config.pop("agents")
    if run.finished and [row["iteration"] for row in log] != [*range(config["iterations"] + 1)]:
        raise UserError("run_dir", str(run.folder), "lacks rows of its metrics.jsonl; delete it")
    about = {"task": run.task, "variant": run.variant, "seed": run.seed, "diverged": run.diverged,
             "core_seconds": core_seconds(run), "commit": commit(run),
             "data": fingerprints["data"], "weights": fingerprints["model"]}
    config["agent_settings"] = str(config["agent_settings"])
    about |= {name: value for name, value in config.items()
              if name not in {*FREE, *ROW, "config", "iterations"}}
    rows, columns = [], load_config(run.folder).base_columns(agents)
    for agent in agents:
        for iteration, metrics in evaluations(run, agent, columns[agent], log).items():
            reward = metrics[REWARD[run.task]]
            rows.append(about | {"agent": agent, "iteration": iteration, "reward": reward} | metrics)
    return rows


def evaluations(run: StudyRun, agent: str, base: str, log: list[dict]) -> dict[int, dict]:
    """{iteration: held-out metrics} of an agent and its team; the first and last with the share of the limit.
    """
    evaluated = {}
    for row in log:
        name = agent if row["iteration"] else base
        metrics = {key.removeprefix(prefix): value for prefix in ("eval/team/", f"eval/{name}/")
                   for key, value in row.items() if key.startswith(prefix)}         # the agent's own win
        if metrics:
            evaluated[row["iteration"]] = metrics
    if run.finished:
        held_out = read_json(run.folder / "eval.json")
        for iteration, name in ((0, base), (held_out["iteration"], agent)):
            evaluated[iteration] = evaluated.get(iteration, {}) | held_out[name]
    return evaluated


def core_seconds(run: StudyRun) -> float:
    """Of every try; NaN of a run that no study made."""
    costs = read_jsonl(run.folder / "cost.jsonl")
    return sum(row["core_seconds"] for row in costs) if costs else float("nan")


def commit(run: StudyRun) -> str:
    """Of the code that wrote its last checkpoint."""
    saved = checkpoints_of(run.folder)
    return read_state(saved[0])["versions"]["commit"] if saved else "unknown"


def read(paths: list[Path], **chosen: list[str] | None) -> pd.DataFrame:
    """The rows of some `rows.csv`: `read(paths, task=["imdb"])` has those of that task alone.

    Raises `UserError` for a file that is none, for a run in two of them, and if there is no such row.
    """
    frames, names = [], ", ".join(map(str, paths))
    for path in paths:
        with readable(path):
            frames.append(pd.read_csv(path, dtype=dict.fromkeys(TEXTS, str)))
        if missing := [name for name in NEEDED if name not in frames[-1]]:
            raise UserError("file", str(path), f"is no rows.csv of a study: it lacks {', '.join(missing)}")
    rows = pd.concat(frames, ignore_index=True)
    if (twice := rows.duplicated(ROW)).any():
        run = " ".join(map(str, rows[twice].iloc[0][ROW]))
        raise UserError("from", names, f"holds two rows of {run}; leave one file out")
    for name, values in chosen.items():
        rows = rows[rows[name].isin(values)] if values else rows
    if rows.empty:
        raise UserError("from", names, "holds no row of these tasks and variants")
    return rows


def require_comparable(rows: pd.DataFrame) -> None:
    """Runs of a task have the same data, weights, arithmetic and reward. Raises `UserError`.

    Runs that differ in a setting that changes the base are not held against each other. The reward is
    compared by what the base got, up to the rounding of two machines: in bfloat16 they draw other answers.
    """
    if rows.empty:
        return
    settings = CHANGE_THE_BASE.intersection(rows)
    for _, alike in rows[rows.iteration == 0].groupby(["task", *settings], dropna=False):
        first = alike.iloc[0]
        for _, other in alike.iterrows():
            differing = [f"{name} {other[name]}, not {first[name]}" for name in MADE_BY
                         if other[name] != first[name]]
            rounding = (0.05 if first["dtype"] == "float32" else 0.15) * max(1.0, abs(first.reward))
            if abs(other.reward - first.reward) > rounding:
                differing.append(f"a base of reward {other.reward:.2f}, not {first.reward:.2f}")
            if differing:
                run = f"{other.task} {other.variant} seed {other.seed}"
                raise UserError("run", run, f"has {'; '.join(differing)} as {first.variant} seed "
                                f"{first.seed} has: delete one of them, or take another --out")
