"""Errors that a user can fix, one line each."""
import functools
import sys
from contextlib import contextmanager


class UserError(Exception):
    """`UserError("cliprange", 0.0, "must be above 0")` reads `cliprange is 0.0: must be above 0`."""

    def __str__(self) -> str:
        *where, hint = self.args
        text = f"{where[0]} is {where[1]!r}: {hint}" if where else hint
        return " ".join(text.split())


def exit_on_user_error(main):
    """Decorator for scripts: a `UserError` becomes one line on stderr and exit status 2; Ctrl-C is 130."""
    @functools.wraps(main)
    def run(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")          # one write, so that processes' lines do not mix
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    return run


def merge_metrics(*parts: dict) -> dict[str, float]:
    """All metrics, as floats. A name in two of the parts, such as a custom metric's, raises `TypeError`."""
    merged = {}
    for part in parts:
        for name, x in part.items():
            if name in merged:
                raise TypeError(f"two metrics are named {name!r}; rename one")
            merged[name] = float(x)
    return merged


@contextmanager
def as_user_error(what: str):
    """A block in which libraries read what a setting names; any of their errors becomes one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} cannot be read: {type(error).__name__}: {str(error)[:300]}") from error
