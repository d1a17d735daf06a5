"""Comparison of finished runs: a picture and a table of means and standard deviations over seeds.

    python -m cory report RUN_DIR [RUN_DIR ...] --by learning_rate --out comparison.png

Means are over the seeds of one method, and of one value of each setting that --by names. Runs that differ
in any other setting are refused.
"""
import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Sequence

from cory.errors import UserError, exit_on_user_error
from cory.experiment.flags import OneLineParser
from cory.experiment.plots import draw_runs
from cory.experiment.saved_config import BESIDE_SETTINGS, load_config, read_config
from cory.experiment.tables import grouped, groups_table
from cory.names import guess
from cory.system.files import read_json, readable

# Runs may differ in these, and in what concerns W&B, and still be compared.
FREE_BETWEEN_RUNS = {"method", "seed", "run_dir", "resume", "save_every", "sample_rows", "device",
                     "cpu_matmul"}


def finished(run_dirs: list[Path]) -> list[dict]:
    """config.json of each run. A setting that a run is older than has its default, which is printed. Raises
    `UserError` for a folder that holds no run, or none that has finished.
    """
    configs = [read_config(run_dir) for run_dir in run_dirs]
    for run_dir in run_dirs:
        if not (run_dir / "eval.json").exists():
            raise UserError("run_dirs", str(run_dir), "is no finished run (no eval.json); --resume it first")
    known = set.union(*map(set, configs))
    for run_dir, config in zip(run_dirs, configs, strict=True):
        if known - {*config}:
            defaults = asdict(load_config(run_dir))
            missing = {name: defaults[name] for name in sorted(known - {*config}) if name in defaults}
            for name, default in missing.items():
                print(f"{run_dir} is older than --{name}: taken as its default, {default}")
            config |= dict.fromkeys(known - {*config}) | missing        # None: of another class of settings
    return configs


def require_picture(path: Path) -> None:
    """Raises `UserError` unless a picture can be written there, before any work for it."""
    is_picture = path.suffix in (".png", ".pdf", ".svg") and not path.is_dir()
    if not is_picture or not os.access(path.absolute().parent, os.W_OK):
        raise UserError("out", str(path), "must end in .png, .pdf or .svg, where files can be written")


def require_same_settings(run_dirs: list[Path], configs: list[dict], by: Sequence[str] = ()) -> None:
    """Runs of these config.json can be grouped by method and `by`. Raises `UserError` if they cannot."""
    settings = set.union(*map(set, configs)) - {*BESIDE_SETTINGS}       # some may be of some runs alone
    for name in {*by} - settings:
        raise UserError("by", name, f"is no setting; {guess(name, settings)}config.json lists them")
    compared = sorted(name for name in settings - {*by, *FREE_BETWEEN_RUNS} if not name.startswith("wandb"))
    run_of = {}
    for run_dir, config in zip(run_dirs, configs, strict=True):
        differ = [name for name in compared if config.get(name) != configs[0].get(name)]
        if differ:
            raise UserError("run_dirs", str(run_dir), f"differs from {run_dirs[0]} in {', '.join(differ)}; "
                            f"make a group of each value with --by {' '.join([*by, *differ])}")
        member = str([config.get(name) for name in ("method", *by, "seed")])
        if member in run_of:
            why = f"has seed {config['seed']} as {run_of[member]} has; leave one out"
            raise UserError("run_dirs", str(run_dir), why)
        run_of[member] = run_dir


def read_eval(run_dir: Path, agents: list[str]) -> dict:
    """eval.json, which has the metrics of base and agents by name. Raises `UserError`."""
    path = run_dir / "eval.json"
    with readable(path):
        held_out = read_json(path)
        names = ["base", *agents, *{"team"} & held_out.keys()]
        return held_out | {name: dict(held_out[name]) for name in names}


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m cory report", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, default=Path("comparison.png"), help="picture to write")
    parser.add_argument("--by", nargs="+", default=[], metavar="SETTING",
                        help="settings of which each value is a group of its own; stands behind the folders")
    args = parser.parse_args(argv)
    configs = finished(args.run_dirs)
    require_picture(args.out)
    require_same_settings(args.run_dirs, configs, args.by)
    runs = [(config, read_eval(run_dir, config["agents"]))
            for run_dir, config in zip(args.run_dirs, configs, strict=True)]
    print(groups_table("held-out", grouped(runs, args.by)))
    draw_runs(args.run_dirs, args.out, args.by, configs)
    print(f"written: {args.out}")
