"""Comparison of finished runs: a picture and a table of means and standard deviations over seeds.

    python -m cory report RUN_DIR [RUN_DIR ...] --by learning_rate --out comparison.png

Means are over the seeds of one method, and of one value of each setting that --by names. Runs that differ
in any other setting are refused.
"""
import argparse
import os
from itertools import combinations
from pathlib import Path
from typing import Sequence

from cory.commands.flags import OneLineParser
from cory.errors import UserError, exit_on_user_error
from cory.experiment.groups import grouped
from cory.experiment.limit import limit_of
from cory.experiment.plots import draw_comparison
from cory.experiment.saved_config import BESIDE_SETTINGS, read_config
from cory.experiment.tables import groups_table
from cory.names import guess
from cory.system.files import read_json, read_log

# Runs may differ in these, and in what concerns W&B, and still be compared.
FREE_BETWEEN_RUNS = {"method", "seed", "run_dir", "resume", "save_every", "sample_rows", "device",
                     "cpu_matmul"}


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
    if path and path.is_dir():
        raise UserError(field, str(path), "is a folder; name a file in it")
    if path and not os.access(path.absolute().parent, os.W_OK):
        raise UserError(field, str(path), "its folder is missing or not writable; name another place")


def require_same_settings(run_dirs: list[Path], configs: list[dict], by: Sequence[str] = ()) -> None:
    """Runs of these config.json can be grouped by method and `by`. Raises `UserError` if they cannot."""
    settings = set.union(*map(set, configs)) - BESIDE_SETTINGS         # some may be of some runs alone
    for name in by:
        if name not in settings:
            raise UserError("by", name, f"is no setting; {guess(name, settings)}config.json lists them")
    first, free = configs[0], {*by, *FREE_BETWEEN_RUNS, *BESIDE_SETTINGS}
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
    config, rows = read_config(run_dir), read_log(run_dir / "metrics.jsonl")
    if not rows:
        raise no_use(run_dir / "metrics.jsonl", "holds no rows")
    return config, rows, read_eval(run_dir, config["agents"])


def read_eval(run_dir: Path, agents: list[str]) -> dict:
    """eval.json: `iteration`, `queries`, and the metrics of base and agents, each a number by name."""
    path = run_dir / "eval.json"
    found = read_json(path)
    if not (isinstance(found, dict) and type(found.get("iteration")) is int):
        raise no_use(path, "names no iteration")
    for name in ("base", *agents):
        metrics = found.get(name)
        if not (metrics and isinstance(metrics, dict)):
            raise no_use(path, f"has no metrics of {name!r}")
        for key, value in metrics.items():
            if not isinstance(value, (int, float)):
                raise no_use(path, f"has {name}'s {key} as {str(value)[:40]!r}")
    return found


def no_use(path: Path, why: str) -> UserError:
    return UserError("file", str(path), f"{why}; leave this run out, or put back a copy of the file")


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory report", description=__doc__,
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
    limits = [limit_of(run_dir) for run_dir in args.run_dirs]
    draw_comparison([(config, rows) for config, rows, _ in runs], args.out, args.by, limits)
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
