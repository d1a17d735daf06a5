"""Comparison of finished runs: a picture and a table of means and standard deviations over seeds.

    python -m cory.report RUN_DIR [RUN_DIR ...] --by learning_rate --out comparison.png

Means are over the seeds of one method, and of one value of each setting that --by names. Runs that differ
in any other setting are refused.
"""
import argparse
import json
import os
from itertools import combinations
from pathlib import Path
from typing import Sequence

from cory.command_line import OneLineParser
from cory.config import read_config
from cory.errors import UserError, exit_on_user_error
from cory.experiment.files import read_jsonl
from cory.experiment.groups import grouped
from cory.experiment.plots import draw_comparison
from cory.experiment.tables import groups_table
from cory.names import guess

# Runs may differ in these, and in what concerns W&B, and still be compared.
FREE_BETWEEN_RUNS = {"method", "seed", "run_dir", "resume", "save_every", "sample_rows", "device",
                     "cpu_matmul"}
NO_SETTINGS = {"config", "agents"}              # what config.json holds beside the settings


def require_finished(run_dirs: list[Path]) -> None:
    """Raises `UserError` for a folder without eval.json, or named twice."""
    for i, run_dir in enumerate(run_dirs):
        if not (run_dir / "eval.json").exists():
            raise UserError("run_dirs", str(run_dir), "is no finished run (no eval.json); --resume it first")
        if run_dir.resolve() in [other.resolve() for other in run_dirs[:i]]:
            raise UserError("run_dirs", str(run_dir), "is named twice; name each run once")


def require_picture(path: Path | None, field: str = "out") -> None:
    """A picture can be written there: said before work is done for it. Raises `UserError`."""
    if path and path.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(field, str(path), "must end in .png, .pdf or .svg")
    if path and not os.access(path.absolute().parent, os.W_OK):
        raise UserError(field, str(path), "its folder is missing or not writable; name another place")


def require_same_settings(run_dirs: list[Path], configs: list[dict], by: Sequence[str] = ()) -> None:
    """Runs of these config.json can be grouped by method and `by`. Raises `UserError` if they cannot."""
    settings = set.union(*map(set, configs)) - NO_SETTINGS         # some may be of some runs alone
    for name in by:
        if name not in settings:
            raise UserError("by", name, f"is no setting; {guess(name, settings)}config.json lists them")
    first, free = configs[0], {*by, *FREE_BETWEEN_RUNS, *NO_SETTINGS}
    for run_dir, config in zip(run_dirs, configs, strict=True):
        differ = [name for name in first | config if config.get(name) != first.get(name)
                  and name not in free and not name.startswith("wandb")]
        if differ:
            raise UserError("run_dirs", str(run_dir), f"differs from {run_dirs[0]} in {', '.join(differ)}; "
                            f"make a group of each value with --by {' '.join([*by, *differ])}")
    for (other, old), (run_dir, new) in combinations(zip(run_dirs, configs, strict=True), 2):
        same_group = all(old.get(name) == new.get(name) for name in ("method", *by))
        if same_group and old["agents"] != new["agents"]:
            raise UserError("run_dirs", str(run_dir), f"has other agents than {other}; leave one out")
        if same_group and old["seed"] == new["seed"]:
            raise UserError("run_dirs", str(run_dir), f"has seed {new['seed']} as {other} has; leave one out")


def read_run(run_dir: Path) -> tuple[dict, list[dict], dict]:
    """config.json, the rows of metrics.jsonl and eval.json of a finished run. Raises `UserError`."""
    try:
        config, held_out = read_config(run_dir), json.loads((run_dir / "eval.json").read_text())
        rows = read_jsonl(run_dir / "metrics.jsonl")
        if not rows or not all(held_out[name] for name in ("base", *config["agents"])):
            raise ValueError("no metrics in it")
        return config, rows, held_out
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"cannot be read ({type(error).__name__}: {error}); leave this run out, or train it again"
        raise UserError("run_dirs", str(run_dir), why) from error


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory.report", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, default="comparison.png", help="picture to write")
    parser.add_argument("--by", nargs="+", default=[], metavar="SETTING",
                        help="settings of which each value is a group of its own; stands behind the folders")
    args = parser.parse_args(argv)
    require_finished(args.run_dirs)
    require_picture(args.out)
    runs = [read_run(run_dir) for run_dir in args.run_dirs]
    require_same_settings(args.run_dirs, [config for config, _, _ in runs], args.by)
    print(groups_table("held-out", grouped([(config, held_out) for config, _, held_out in runs], args.by)))
    draw_comparison([(config, rows) for config, rows, _ in runs], args.out, args.by)
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
