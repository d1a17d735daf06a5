"""Comparison of finished runs: a plot, and a table of means and standard deviations over seeds.

    python -m cory report RUN_DIR [RUN_DIR ...] --by learning_rate --out comparison.png

Means are over the seeds of one method, and of one value of each setting that --by names. Runs that differ in
any other setting are refused.
"""
import json
from argparse import ArgumentTypeError, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Sequence

from cory.errors import UserError, exit_on_user_error
from cory.flags import FREE_ON_RESUME, OneLineParser, read_config
from cory.names import guess
from cory.run.plots import draw_runs
from cory.run.tables import grouped, groups_table

# Runs may differ in these, and still be compared. Of model and data `FREE_ON_RESUME` allows other places.
FREE_BETWEEN_RUNS = FREE_ON_RESUME - {"iterations", "model", "dataset", "reward_model"} | {
    "method", "seed", "device", "agents"}


def parser_of_runs(command: str, description: str, out: str) -> OneLineParser:
    """What every command on finished runs is told."""
    parser = OneLineParser(prog=f"python -m cory {command}", description=description,
                           formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--by", nargs="+", default=[], metavar="SETTING",
                        help="settings of which each value is a group of its own; stands behind the folders")
    parser.add_argument("--out", type=plot_path, default=Path(out), help="plot to write: png, pdf, svg")
    return parser


def plot_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".pdf", ".svg") or not path.parent.is_dir():
        raise ArgumentTypeError(f"{text!r} must end in .png, .pdf or .svg, and its folder must be there")
    return path


def finished(run_dirs: list[Path], by: Sequence[str] = ()) -> list[dict]:
    """config.json of finished runs that can be grouped by method and `by`. Raises `UserError`."""
    configs = [read_config(run_dir) for run_dir in run_dirs]
    settings, run_of = {name for config in configs for name in config}, {}
    for name in {*by} - settings:
        raise UserError("by", name, f"is no setting; {guess(name, settings)}config.json lists them")
    for run_dir, config in zip(run_dirs, configs, strict=True):
        if not (run_dir / "eval.json").exists():
            raise UserError("run_dirs", str(run_dir), "is no finished run (no eval.json); --resume it first")
        differ = sorted(name for name in settings - {*by} - FREE_BETWEEN_RUNS
                        if config.get(name) != configs[0].get(name))
        if differ:
            raise UserError("run_dirs", str(run_dir), f"differs from {run_dirs[0]} in {', '.join(differ)}; "
                            f"make a group of each value with --by {' '.join([*by, *differ])}")
        other = run_of.setdefault(str([config.get(name) for name in ("method", *by, "seed")]), run_dir)
        if other is not run_dir:
            raise UserError("run_dirs", str(run_dir), f"has the seed of {other}; leave one out")
    return configs


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = parser_of_runs("report", __doc__, "comparison.png")
    parser.add_argument("--roles", action="store_true", help="plot roles instead of agents")
    args = parser.parse_args(argv)
    configs, runs = finished(args.run_dirs, args.by), []
    for run_dir, config in zip(args.run_dirs, configs, strict=True):
        held_out = json.loads((run_dir / "eval.json").read_text())
        runs.append((config, {name: x for name, x in held_out.items() if isinstance(x, dict)}))
    print(groups_table("held-out", grouped(runs, args.by)))
    draw_runs(args.run_dirs, args.out, args.by, args.roles)
    print(f"written: {args.out}")
