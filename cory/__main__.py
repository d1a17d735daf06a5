"""`python -m cory COMMAND ...`: what is done with runs beside training them. COMMAND --help says more."""
import sys
from importlib import import_module

COMMANDS = {
    "report": "a picture of curves, over seeds",
    "evaluate": "greedy accuracy and pass@k of finished runs",
    "limit": "what the base's own answers can reach",
    "study": "many variants over seeds, compared",
    "plan": "memory of a run, and the card that holds it",
    "benchmark": "seconds and memory of an iteration",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        import_module(f"cory.commands.{name}").main(sys.argv[2:])
        return
    lines = [f"  python -m cory {command:10s} {says}" for command, says in COMMANDS.items()]
    if name in ("", "-h", "--help"):
        print("\n".join(lines))
    else:
        print(f"error: command is {name!r}: choose from {', '.join(COMMANDS)}", file=sys.stderr)
    raise SystemExit(0 if name in ("-h", "--help") else 2)


if __name__ == "__main__":
    main()
