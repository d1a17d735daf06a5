"""How far the objective can rise, from a base's own answers to the held-out queries (docs/learning.md).

    python -m cory limit RUN_DIR ...        # of finished runs: eval.json and curves.png then show it
    python -m cory limit imdb --model DIR   # of a model: imdb or gsm8k, then any flags of its script
"""
import json
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from tqdm import tqdm

from cory.commands.flags import OneLineParser, parse
from cory.commands.report import require_finished
from cory.config import GSM8K_PRESETS, IMDB_PRESETS, Config, Gsm8kConfig, ImdbConfig
from cory.errors import exit_on_user_error
from cory.experiment.evaluation import EVALUATION_SEED, answer, rows_at_once
from cory.experiment.fingerprints import of_model
from cory.experiment.limit import Limit, made_with
from cory.experiment.plots import draw_curves
from cory.experiment.run import find_task
from cory.experiment.saved_config import load_config
from cory.experiment.tables import results_table
from cory.ppo.loading import load_language_model
from cory.system.files import read_json, replace_text
from cory.system.folder import locked
from cory.system.machine import prepare_device, settled_anew

EXPERIMENTS = {"imdb": (ImdbConfig, IMDB_PRESETS), "gsm8k": (Gsm8kConfig, GSM8K_PRESETS)}


def base_rewards(cfg: Config, n: int) -> dict:
    """What limit.json holds: n rewards of the base's answers to each held-out query, and the first answer."""
    task_class = find_task(cfg)
    data, cfg = task_class.load_data(cfg), settled_anew(cfg)
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


def limit_of_run(run_dir: Path, n: int) -> None:
    """Puts limit.json into a run's folder, and what follows from it into eval.json and curves.png."""
    cfg = load_config(run_dir)
    with locked(run_dir):
        found = base_rewards(cfg, n)
        limit = Limit(found["rewards"], cfg.init_kl_coef)
        held_out = {name: limit.with_share(metrics) if isinstance(metrics, dict) else metrics
                    for name, metrics in read_json(run_dir / "eval.json").items()}
        replace_text(run_dir / "limit.json", json.dumps(found))
        replace_text(run_dir / "eval.json", json.dumps(held_out, indent=1) + "\n")
        draw_curves(run_dir)
    print(run_dir, results_table(limit.metrics()), results_table(held_out), sep="\n", flush=True)


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory limit", description=__doc__, allow_abbrev=False,
                           formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("of", nargs="+", help="folders of finished runs; or imdb, gsm8k")
    parser.add_argument("--samples", type=int, default=64, help="answers to each query; 16 or more")
    parser.add_argument("--out", type=Path, help="of a model: a file for the rewards")
    args, flags = parser.parse_known_args(argv)
    if args.samples < 16:
        parser.error(f"--samples {args.samples}: must be 16 or more")
    if args.of[0] in EXPERIMENTS:
        cfg = parse(*EXPERIMENTS[args.of[0]], [*args.of[1:], *flags])
        found = base_rewards(cfg, args.samples)
        print(results_table(Limit(found["rewards"], cfg.init_kl_coef).metrics()))
        if args.out:
            replace_text(args.out, json.dumps(found))
        return
    if flags:
        parser.error(f"unknown: {' '.join(flags)}; a run has settings of its own")
    run_dirs = [Path(name) for name in args.of]
    require_finished(run_dirs)
    for run_dir in run_dirs:
        limit_of_run(run_dir, args.samples)


if __name__ == "__main__":
    main()
