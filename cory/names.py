"""Settings that name code: a short name of this package (`rloo`), or `module:Name` of the user's own."""
import difflib
import importlib
import os
import re
import sys
from typing import Iterable

from cory.errors import UserError


def find(field: str, name: str, known: dict[str, str]):
    """What `name` stands for: a key of `known`, or `module:Name` like the values there.

    A module is looked for as Python does, then in the present folder. Raises `UserError`.
    """
    full_name = known.get(name, name)
    if not re.fullmatch(r"\w[\w.]*:\w+", full_name):
        raise UserError(field, name, unknown(name, known))
    module_name, attribute = full_name.split(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise                                       # the module exists, and an import inside it failed
        hint = f"there is no module {module_name}; name it without .py, and start from its folder"
        raise UserError(field, name, hint) from error
    if not hasattr(module, attribute):
        raise UserError(field, name, f"the module {module_name} has no {attribute}")
    return getattr(module, attribute)


def unknown(name: str, known: dict[str, str]) -> str:
    """The hint for a name that is neither known nor `module:Name`."""
    choices = f"choose from {', '.join(known)}, or name" if known else "name"
    return f"unknown; {guess(name, known)}{choices} one of your own as module:Name"


def guess(name: str, known: Iterable[str]) -> str:
    """`did you mean NEAREST? `, or nothing if no known name is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def short_name(name: str) -> str:
    """What logs and legends show of `module:Name`: its last part."""
    return name.rpartition(":")[2]
