import sys

if sys.version_info < (3, 11):
    print(f"error: Python is {sys.version.split()[0]}: this needs 3.11 or newer", file=sys.stderr)
    raise SystemExit(2)
