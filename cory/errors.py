"""Errors that a person can mend: one line that names the field, its value and the way out."""
import functools
import os
import sys
import time


class UserError(Exception):
    """`UserError("cliprange", 0.0, "must be above 0")` reads `cliprange is 0.0: must be above 0`."""

    def __init__(self, field: str, value, hint: str):
        super().__init__(field, value, hint)

    def __str__(self) -> str:
        field, value, hint = self.args
        return " ".join(f"{field} is {value!r}: {hint}".split())


class Diverged(UserError):
    """A gradient, weight or log-probability that is not finite."""


def exit_on_user_error(main):
    """Decorator for scripts: a `UserError` becomes one line on stderr and exit status 2; Ctrl-C exits 130."""
    @functools.wraps(main)
    def run(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            if os.environ.get("RANK", "0") != "0":
                time.sleep(10)              # torchrun ends this process if the main one has the same error
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    return run
