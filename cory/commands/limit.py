"""How far the objective can rise, from the base's own answers to the held-out queries (docs/learning.md).

    python -m cory limit RUN_DIR ...        # finished runs: eval.json and curves.png then show it
"""
import json
from pathlib import Path

from tqdm import tqdm

from cory.commands.evaluate import reopened
from cory.commands.report import finished
from cory.config import Config
from cory.errors import exit_on_user_error
from cory.experiment.evaluation import EVALUATION_SEED, answer, rows_at_once
from cory.experiment.fingerprints import of_model
from cory.experiment.flags import OneLineParser
from cory.experiment.limit import Limit, made_with, on_limit
from cory.experiment.plots import draw_curves
from cory.experiment.tables import results_table
from cory.ppo.model import LanguageModel
from cory.system.files import read_json, replace_text
from cory.system.folder import locked
from cory.tasks.task import Task


def base_rewards(cfg: Config, task: Task, base: LanguageModel, n: int = 64) -> dict:
    """What limit.json holds: n rewards of the base's answers to each held-out query, and the first answer."""
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
        with locked(run_dir):
            cfg, task, bases = reopened(run_dir, saved, device="auto")
            answers = base_rewards(cfg, task, bases["base"])
            limit = Limit(answers["rewards"], cfg.init_kl_coef)
            held_out = limit.with_shares(read_json(run_dir / "eval.json"), on_limit(cfg, saved["agents"]))
            replace_text(run_dir / "limit.json", json.dumps(answers))
            replace_text(run_dir / "eval.json", json.dumps(held_out, indent=1) + "\n")
            draw_curves(run_dir)
        best = limit.with_shares(limit.metrics, limit.metrics)
        print(run_dir, results_table(best | held_out), sep="\n", flush=True)
