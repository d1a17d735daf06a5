"""Commands for runs.

    python -m cory report RUN_DIR [RUN_DIR ...] --by learning_rate --out comparison.png
    python -m cory evaluate RUN_DIR [RUN_DIR ...] --samples 64
"""
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from cory.config import OneLineParser, read_config
from cory.errors import UserError, exit_on_user_error


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m cory", description=__doc__,
                           formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", description="A plot and a table of means over seeds.")
    report.add_argument("run_dirs", nargs="+", type=Path, help="folders of runs, finished or not")
    report.add_argument("--by", nargs="+", default=[], metavar="SETTING",
                        help="settings of which each value forms its own group; goes after the folders")
    report.add_argument("--out", type=Path, default=Path("comparison.png"), help="plot: .png, .pdf or .svg")
    report.add_argument("--csv", type=Path, metavar="FILE", help="also write all held-out metrics there")
    evaluate = commands.add_parser("evaluate", description="Greedy accuracy, pass@k, team metrics.")
    evaluate.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    evaluate.add_argument("--samples", type=int, default=64, help="responses sampled per query")
    evaluate.add_argument("--queries", type=int, default=0, help="held-out queries; 0: as in the run")
    evaluate.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    evaluate.add_argument("--dtype", choices=["auto", "float32", "tf32", "bfloat16"],
                          help="default: the run's")
    args = parser.parse_args(argv)
    if args.command == "report":
        from cory.report import compare
        compare(args.run_dirs, args.by, args.out, args.csv)
        return
    for run_dir in args.run_dirs:
        read_config(run_dir)
        if not (run_dir / "eval.json").exists():
            raise UserError("run_dirs", str(run_dir), "is not finished (no eval.json); wait, or resume it")
    from cory.distributed import launched
    from cory.record import evaluate_run
    from cory.run_folder import claimed
    with launched({"device": args.device}):
        for run_dir in args.run_dirs:
            with claimed(run_dir, resume=True):
                evaluate_run(run_dir, args.samples, args.queries, args.device, args.dtype)


if __name__ == "__main__":
    main()
