"""Compare runs, or evaluate finished ones again. With --help after its name, a
command lists its options.

    python -m cory report RUN_DIR RUN_DIR --by learning_rate
    python -m cory evaluate RUN_DIR RUN_DIR --samples 64
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
    about = "Plot several runs, and print a table of their held-out metrics, as means over seeds."
    report = commands.add_parser("report", help="plot and table of several runs", description=about)
    report.add_argument("run_dirs", nargs="+", type=Path, help="folders of runs, finished or not")
    report.add_argument("--by", nargs="+", default=[], metavar="SETTING",
                        help="settings whose values divide the runs into groups; put this after the folders")
    report.add_argument("--out", type=Path, metavar="FILE", default=Path("comparison.png"),
                        help="write the plot to this .png, .pdf or .svg (default: comparison.png)")
    report.add_argument("--csv", type=Path, metavar="FILE",
                        help="also write all held-out metrics to this file")
    about = """Evaluate finished runs again, with more responses: all held-out metrics, the reward of greedy
        responses, pass@k (whether one of k responses has a reward above 0), and the best of n."""
    evaluate = commands.add_parser("evaluate", help="evaluate finished runs again", description=about)
    evaluate.add_argument("run_dirs", nargs="+", type=Path, help="folders of finished runs")
    evaluate.add_argument("--samples", type=int, default=64, help="responses sampled per query (default: 64)")
    evaluate.add_argument("--queries", type=int, default=0,
                          help="held-out queries (default: as many as in the run)")
    evaluate.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto",
                          help="default: auto, a CUDA GPU if there is one")
    evaluate.add_argument("--dtype", choices=["auto", "float32", "tf32", "bfloat16"],
                          help="precision of matrix products (default: the run's)")
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
    from cory.evaluate import evaluate_run
    from cory.run_folder import claimed
    with launched({"device": args.device}):
        for run_dir in args.run_dirs:
            with claimed(run_dir, resume=True):
                evaluate_run(run_dir, args.samples, args.queries, args.device, args.dtype)


if __name__ == "__main__":
    main()
