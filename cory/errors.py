"""Errors that a user can fix, one line each."""
import functools
import io
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator


class UserError(Exception):
    """`UserError("cliprange", 0.0, "must be above 0")` reads `cliprange is 0.0: must be above 0`."""

    def __str__(self) -> str:
        *where, hint = self.args
        text = f"{where[0]} is {where[1]!r}: {hint}" if where else hint
        return " ".join(text.split())


def exit_on_user_error(main):
    """Decorator for scripts: a `UserError` becomes one line on stderr and exit status 2. Characters that
    stdout cannot encode are replaced.
    """
    @functools.wraps(main)
    def run(*args, **kwargs):
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        try:
            return main(*args, **kwargs)
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")          # one write, so that processes' lines do not mix
            raise SystemExit(2) from None
    return run


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A block that parses a file; a `UserError` names one that it cannot parse."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("file", str(path), f"is damaged, {error!r}; restore or remove it") from error
