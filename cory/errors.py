"""Errors that a user can fix: one line that names the field, its value and the remedy."""
import functools
import sys


class UserError(Exception):
    """`UserError("cliprange", 0.0, "must be above 0")` reads `cliprange is 0.0: must be above 0`."""

    def __str__(self) -> str:
        *where, hint = self.args
        text = f"{where[0]} is {where[1]!r}: {hint}" if where else hint
        return " ".join(text.split())


def exit_on_user_error(main):
    """Decorator for scripts: a `UserError` becomes one line on stderr and exit status 2; so does Ctrl-C while
    a model is loaded, with status 130.
    """
    @functools.wraps(main)
    def run(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            raise SystemExit(130) from None
    return run
