"""`python -m cory COMMAND ...`: what is done with finished runs. COMMAND --help says more."""
import sys
from importlib import import_module

COMMANDS = {"report": "plot and table of runs, over seeds and settings",
            "evaluate": "greedy accuracy and pass@k of finished runs"}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        import_module(f"cory.run.{name}").main(sys.argv[2:])
    elif name in ("-h", "--help"):
        print("\n".join(f"  python -m cory {command:10s} {says}" for command, says in COMMANDS.items()))
    else:
        print(f"error: command is {name!r}: choose from {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
