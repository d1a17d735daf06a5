"""Errors that a user can fix, one line each, and settings that name code."""
import difflib
import functools
import importlib
import os
import sys
from typing import Iterable


class UserError(Exception):
    """`UserError("cliprange", 0.0, "must be above 0")` reads `cliprange is 0.0: must be above 0`."""

    def __str__(self) -> str:
        *where, hint = self.args
        text = f"{where[0]} is {where[1]!r}: {hint}" if where else hint
        return " ".join(text.split())


def exit_on_user_error(main):
    """Decorator for scripts: a `UserError` becomes one line on stderr and exit status 2; Ctrl-C while a model
    is loaded, one line and status 130.
    """
    @functools.wraps(main)
    def run(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")          # in one piece, beside other processes
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            raise SystemExit(130) from None
    return run


def find(field: str, name: str, known: dict[str, str]):
    """What the setting `field` names: a short name of this package, a key of `known`, or `module:Name` of the
    user's own, whose module may be in the current folder. Raises `UserError`.
    """
    module_name, _, attribute = known.get(name, name).partition(":")
    if not attribute:
        raise UserError(field, name, unknown(name, known))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise                                       # the module exists, and an import inside it failed
        raise UserError(field, name, f"there is no module {module_name} here; name it without .py") from None
    if not hasattr(module, attribute):
        raise UserError(field, name, f"the module {module_name} has no {attribute}")
    return getattr(module, attribute)


def unknown(name: str, known: Iterable[str]) -> str:
    """The hint for a name that is neither known nor `module:Name`."""
    return f"unknown; {guess(name, known)}choose from {', '.join(known)}, or name your own as module:Name"


def guess(name: str, known: Iterable[str]) -> str:
    """`did you mean NEAREST? `, or nothing if no known name is close."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def short_name(name: str) -> str:
    """What logs and legends show of `module:Name`: its last part."""
    return name.rpartition(":")[2]
