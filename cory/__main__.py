"""Commands for finished runs.

    python -m cory report RUN_DIR [RUN_DIR ...] --by learning_rate --out comparison.png
    python -m cory evaluate RUN_DIR [RUN_DIR ...] --samples 64
"""
from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from cory.config import OneLineParser
from cory.errors import UserError, exit_on_user_error


def report(args: Namespace) -> None:
    from cory.report import compare

    compare(args.run_dirs, args.by, args.out)


def evaluate(args: Namespace) -> None:
    from cory.distributed import launched
    from cory.run import evaluate_run

    if args.samples < 1:
        raise UserError("samples", args.samples, "must be 1 or more")
    with launched({"device": args.device}):
        for run_dir in args.run_dirs:
            evaluate_run(run_dir, args.samples, args.queries, args.device, args.dtype)


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory", description=__doc__,
                           formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="report or evaluate")
    own = commands.add_parser("report", description="A plot and a table of means over seeds.")
    own.set_defaults(command=report)
    own.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    own.add_argument("--by", nargs="+", default=[], metavar="SETTING",
                     help="settings of which each value forms its own group; goes after the folders")
    own.add_argument("--out", type=Path, default=Path("comparison.png"), help="plot: png, pdf, svg")
    own = commands.add_parser("evaluate", description="Greedy responses, pass@k, best of n, team metrics.")
    own.set_defaults(command=evaluate)
    own.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    own.add_argument("--samples", type=int, default=64, help="responses sampled per query")
    own.add_argument("--queries", type=int, default=0, help="held-out queries; 0: as in the run")
    own.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    own.add_argument("--dtype", choices=["auto", "float32", "tf32", "bfloat16"], help="default: the run's")
    args = parser.parse_args(argv)
    args.command(args)


if __name__ == "__main__":
    main()
