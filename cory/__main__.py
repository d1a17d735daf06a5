"""`python -m cory report` and `python -m cory evaluate`, for finished runs; see the --help of each."""
import sys
from importlib import import_module

if __name__ == "__main__":
    if sys.argv[1:2] not in (["report"], ["evaluate"]):
        sys.exit(__doc__)
    import_module(f"cory.{sys.argv[1]}").main(sys.argv[2:])
