"""How well the agents of a finished run answer two at a time, on held-out queries, at its temperature.

    python -m cory.studies.team RUN_DIR

For every ordered pair of agents (PPO's one with itself): the first answers the bare query, the second answers
having seen that answer; and the second answers the bare query, too. Written to RUN_DIR/team.json: mean reward
of the first answer (`first`), of the second having seen it (`second`), of the better of these two (`team`),
and of the better of two answers to the bare query (`alone`), each a mean over pairs, rounds and queries. With
rewards of 0 and 1 the better of two is pass@2.
"""
import argparse
import json
from itertools import permutations
from pathlib import Path

import torch

from cory.commands.evaluate import final_model, require_whole
from cory.commands.flags import OneLineParser
from cory.commands.report import require_finished
from cory.errors import exit_on_user_error
from cory.experiment.evaluation import EVALUATION_SEED, answer, require_same_reward, rows_at_once
from cory.experiment.run import find_task
from cory.experiment.saved_config import load_config, read_config
from cory.ppo.loading import load_language_model
from cory.ppo.model import LanguageModel
from cory.system.files import replace_text
from cory.system.folder import locked
from cory.system.machine import prepare_device, settled_anew
from cory.tasks.task import Task


def rewards_of_two(task: Task, first: LanguageModel, second: LanguageModel, queries: list[str],
                   seed: int) -> dict[str, torch.Tensor]:
    """Rewards (B,) of answers to one batch of queries, as in the module's text."""
    limit, bare = task.cfg.max_response_length, task.pioneer_prompts(queries)
    a1 = answer(first, bare, limit, seed)
    a2 = answer(second, task.observer_prompts(queries, a1), limit, seed + 1)
    by_itself = answer(second, bare, limit, seed + 2)
    r1, r2, r = (task.reward(queries, texts) for texts in (a1, a2, by_itself))
    return {"first": r1, "second": r2, "team": r1.maximum(r2), "alone": r1.maximum(r)}


def measure(task: Task, models: list[LanguageModel], rounds: int) -> dict[str, float]:
    """Means over ordered pairs of different models (of the one with itself), rounds and held-out queries."""
    pairs = list(permutations(models, 2)) or [(models[0], models[0])]
    rows, found = rows_at_once(256, task.cfg.max_response_length), {}
    for number in range(rounds):
        for first, second in pairs:
            for at in range(0, len(task.held_out_queries), rows):
                seed = EVALUATION_SEED + 1_000_003 * (number + 1) + 3 * at
                queries = task.held_out_queries[at:at + rows]
                for name, r in rewards_of_two(task, first, second, queries, seed).items():
                    found.setdefault(name, []).append(r)
    return {name: torch.cat(parts).mean().item() for name, parts in found.items()}


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory.studies.team", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="folder of a finished run")
    parser.add_argument("--rounds", type=int, default=4, help="answers of each kind to every query")
    args = parser.parse_args(argv)
    require_finished([args.run_dir])
    require_whole(args.run_dir)
    cfg = settled_anew(load_config(args.run_dir))
    cfg.require("knowledge_transfer", cfg.knowledge_transfer, "no observer saw an answer; nothing to measure")
    task_class = find_task(cfg)
    data, device = task_class.load_data(cfg), prepare_device(cfg)
    base = load_language_model(cfg.model, cfg.temperature, cfg.precision, device, cfg.storage)
    task = task_class(cfg, data, base)
    with locked(args.run_dir):
        require_same_reward(task, args.run_dir)
        agents = [final_model(args.run_dir, name, cfg, base) for name in read_config(args.run_dir)["agents"]]
        found = {"rounds": args.rounds, "base": measure(task, [base], args.rounds),
                 "agents": measure(task, agents, args.rounds)}
        replace_text(args.run_dir / "team.json", json.dumps(found, indent=1) + "\n")
    print(f"written: {args.run_dir / 'team.json'}")


if __name__ == "__main__":
    main()
