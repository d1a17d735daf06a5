"""`python -m cory report` and `python -m cory evaluate`, for finished runs; see the --help of each."""
import sys
from importlib import import_module


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command not in ("report", "evaluate"):
        print(__doc__, file=sys.stderr)
        raise SystemExit(2)
    import_module(f"cory.{command}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
