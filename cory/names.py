"""Names of what a user may bring along: a task, a loop, an advantage, a schedule, an answer checker.

A setting holds a short name of this package (`rloo`) or `module:Name` of the user's own (`my_file:median`).
It stands in config.json, so that a resumed or evaluated run finds the same thing again, or says why not.
"""
import difflib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Iterable

from cory.errors import UserError

being_imported: list[str] = []      # modules that `find` is importing now; no run may start within one


def find(field: str, name: str, known: dict[str, str]):
    """What `name` names: a key of `known`, or `module:Name` like the values there. Raises `UserError`."""
    full_name = known.get(name, name)
    if not re.fullmatch(r"\w[\w.]*:\w+", full_name):
        raise UserError(field, name, unknown(name, known))
    module_name, attribute = full_name.split(":")
    if module_name.split(".")[0] in sys.stdlib_module_names:    # a stranger's config.json may say os:system
        raise UserError(field, name, "is Python's own, and none of these; name one of yours")
    module = import_module(field, name, module_name)
    if not hasattr(module, attribute):
        raise UserError(field, name, f"the module {module_name} has no {attribute}; name one that it defines")
    return getattr(module, attribute)


def import_module(field: str, name: str, module_name: str):
    """As Python finds it, else in the present folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    being_imported.append(module_name)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise                                       # the module is there and lacks something itself
        way_out = f"there is no module {module_name} here; name it without .py, and run this in its folder"
        raise UserError(field, name, way_out) from error
    except (UserError, SystemExit) as error:
        if getattr(error, "code", 2) != 2:
            raise                                       # a signal has stopped the program
        raise UserError(field, name, f"importing {module_name} starts something ({error}); keep its last "
                        'lines under `if __name__ == "__main__":`') from error
    finally:
        being_imported.pop()


def unknown(name: str, known: dict[str, str]) -> str:
    """The way out for a name that is neither known nor `module:Name`."""
    choices = f"choose from {', '.join(known)}, or name" if known else "name"
    return f"unknown; {guess(name, known)}{choices} one of your own as module:Name"


def guess(name: str, known: Iterable[str]) -> str:
    """`did you mean NEAREST? `, to stand before a way out; empty if no known name is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def name_of(thing) -> str:
    """`module:Name` of a class or function. The module of the script that runs is the script's own name."""
    module = thing.__module__
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "__main__").stem
    return f"{module}:{thing.__qualname__}"


def short_name(name: str) -> str:
    """What a run, a label or a legend shows: `chain:train_chain` is `chain`, `short:Short` is `Short`."""
    return name.rpartition(":")[2].removeprefix("train_")
