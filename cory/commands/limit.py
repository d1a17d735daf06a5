"""How far the objective can rise, from the base's own answers to the held-out queries (docs/learning.md).

    python -m cory limit RUN_DIR ...        # finished runs: eval.json and curves.png then show it
"""
import json
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from cory.commands.report import finished
from cory.config import Config
from cory.errors import exit_on_user_error
from cory.experiment.evaluation import EVALUATION_SEED, answer, rows_at_once
from cory.experiment.fingerprints import of_model
from cory.experiment.flags import OneLineParser
from cory.experiment.limit import Limit, made_with, on_limit
from cory.experiment.plots import draw_curves
from cory.experiment.run import find_task
from cory.experiment.saved_config import load_config
from cory.experiment.tables import results_table
from cory.ppo.loading import load_language_model
from cory.system.files import read_json, replace_text
from cory.system.folder import locked
from cory.system.machine import prepare_device, settled_anew


def base_rewards(cfg: Config, n: int = 64) -> dict:
    """What limit.json holds: n rewards of the base's answers to each held-out query, and the first answer."""
    task_class = find_task(cfg)
    data, cfg = task_class.load_data(cfg), settled_anew(replace(cfg, device="auto"))
    base = load_language_model(cfg.model, cfg.temperature, cfg.precision, prepare_device(cfg), cfg.storage)
    task = task_class(cfg, data, base)
    examples, rewards, queries = [], [], task.held_out_queries
    at_once = max(1, rows_at_once(256, cfg.max_response_length) // n)
    for at in tqdm(range(0, len(queries), at_once), desc="the base's answers", dynamic_ncols=True):
        asked = [query for query in queries[at:at + at_once] for _ in range(n)]
        texts = answer(base, task.pioneer_prompts(asked), cfg.max_response_length, EVALUATION_SEED + at)
        scored = [round(reward, 3) for reward in task.checked(asked, texts)]
        examples += texts[::n]
        rewards += [scored[i:i + n] for i in range(0, len(asked), n)]
    return {"made_with": made_with(cfg, task, of_model(base, task)), "examples": examples, "rewards": rewards}


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m cory limit", description=__doc__)
    parser.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    run_dirs = parser.parse_args(argv).run_dirs
    for run_dir, saved in zip(run_dirs, finished(run_dirs), strict=True):
        cfg, agents = load_config(run_dir), saved["agents"]
        with locked(run_dir):
            answers = base_rewards(replace(cfg, model=cfg.of_agent(agents[0]).model))
            limit = Limit(answers["rewards"], cfg.init_kl_coef)
            held_out = limit.with_shares(read_json(run_dir / "eval.json"), on_limit(cfg, agents))
            replace_text(run_dir / "limit.json", json.dumps(answers))
            replace_text(run_dir / "eval.json", json.dumps(held_out, indent=1) + "\n")
            draw_curves(run_dir)
        best = limit.with_shares(limit.metrics, limit.metrics)
        print(run_dir, results_table(best | held_out), sep="\n", flush=True)
