"""Compare runs, or evaluate a finished one again. COMMAND --help lists the options of a command.

    python -m cory report RUN_DIR RUN_DIR
    python -m cory evaluate RUN_DIR --samples 64
"""
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from cory.errors import exit_on_user_error


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m cory", description=__doc__,
                            formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="plot runs, and print a table of means over seeds")
    report.add_argument("run_dirs", nargs="+", type=Path, help="folders of runs, which may still go on")
    report.add_argument("--out", type=Path, metavar="FILE", default=Path("comparison.png"),
                        help="write the plot to this .png, .pdf or .svg (default: comparison.png)")
    report.add_argument("--over", choices=["iteration", "tokens"], default="iteration",
                        help="the x axis: iterations, or all tokens that were sampled in training")
    evaluate = commands.add_parser(
        "evaluate", help="all held-out metrics of a finished run; of each agent alone with more responses, "
                         "and with pass@k and the best of n")
    evaluate.add_argument("run_dir", type=Path, help="folder of a finished run")
    evaluate.add_argument("--samples", type=int, default=64, help="responses sampled per query (default: 64)")
    evaluate.add_argument("--queries", type=int, default=0,
                          help="held-out queries (default: as many as in the run)")
    args = parser.parse_args(argv)
    if args.command == "report":
        from cory.run.report import compare
        compare(args.run_dirs, args.out, args.over)
        return
    from cory.machine.distributed import process_group
    from cory.run.evaluate import evaluate_run
    with process_group("auto"):
        evaluate_run(args.run_dir, args.samples, args.queries)


if __name__ == "__main__":
    main()
