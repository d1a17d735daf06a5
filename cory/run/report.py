"""Comparison of finished runs: a plot, and a table of means and standard deviations over seeds.

    python -m cory report RUN_DIR [RUN_DIR ...] --by learning_rate --out comparison.png
"""
import json
from pathlib import Path

import pandas as pd

from cory.errors import UserError, exit_on_user_error
from cory.flags import FREE_ON_RESUME, OneLineParser, read_config
from cory.names import guess
from cory.run.plots import draw_runs
from cory.run.tables import grouped, groups_table

# Runs may differ in these, and still be compared.
FREE = FREE_ON_RESUME - {"iterations", "model", "dataset"} | {"method", "seed", "device", "agents"}


def comparable(run_dirs: list[Path], by: list[str]) -> list[dict]:
    """config.json of finished runs that differ in method, `by` and seed alone. Raises `UserError`."""
    configs = [read_config(run_dir) for run_dir in run_dirs]
    settings = pd.DataFrame(configs).astype(str)
    for name in {*by} - {*settings}:
        raise UserError("by", name, f"is no setting; {guess(name, settings)}config.json lists them")
    differ = [name for name in settings.columns.difference([*by, *FREE])
              if settings[name].nunique(dropna=False) > 1]
    if differ:
        raise UserError("run_dirs", [*map(str, run_dirs)], f"differ in {', '.join(differ)}; make a group of "
                        f"each value with --by {' '.join([*by, *differ])}")
    for run_dir, again in zip(run_dirs, settings.duplicated(["method", *by, "seed"]), strict=True):
        if again:
            raise UserError("run_dirs", str(run_dir), "has the seed of another in its group; leave one out")
        if not (run_dir / "eval.json").exists():
            raise UserError("run_dirs", str(run_dir), "is no finished run (no eval.json); --resume it first")
    return configs


@exit_on_user_error
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m cory report", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--by", nargs="+", default=[], metavar="SETTING",
                        help="settings of which each value forms its own group; goes after the folders")
    parser.add_argument("--out", type=Path, default=Path("comparison.png"), help="plot: png, pdf, svg")
    args = parser.parse_args(argv)
    if args.out.suffix not in (".png", ".pdf", ".svg"):
        raise UserError("out", str(args.out), "must end in .png, .pdf or .svg")
    runs = []
    for run_dir, config in zip(args.run_dirs, comparable(args.run_dirs, args.by), strict=True):
        held_out = json.loads((run_dir / "eval.json").read_text())
        runs.append((config, {name: x for name, x in held_out.items() if isinstance(x, dict)}))
    print(groups_table("held-out", grouped(runs, args.by)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw_runs(args.run_dirs, args.out, args.by)
    print(f"written: {args.out}")
