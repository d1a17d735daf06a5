"""A run's folder belongs to one process at a time."""
import os
import time
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Iterator

from filelock import FileLock, Timeout

from cory import names
from cory.config import Config
from cory.errors import UserError
from cory.system.files import read_text, remove, replace_text, require_plain

# What a run puts into its folder before config.json is there, and what a kill may leave of it.
BEFORE_A_RUN = {".lock", ".process", ".process.writing", "config.json.writing"}


@contextmanager
def claimed(cfg: Config) -> Iterator[Path]:
    """The folder of a new or resumed run, this process's alone until the block ends.

    A folder with anything in it is refused, unless it is resumed. Who made the folder removes it again if it
    is still empty at the end. Raises `UserError`.
    """
    folder = Path(cfg.run_dir) if cfg.run_dir else numbered(cfg)
    made_here = make(folder) or not cfg.run_dir
    with locked(folder):
        if not is_empty(folder) and not cfg.resume:
            holds_run = (folder / "config.json").exists()
            why = "holds another run; continue it with --resume" if holds_run else "is not empty"
            raise UserError("run_dir", str(folder), f"{why}, or name another --run_dir")
        try:
            yield folder
        finally:
            if made_here and is_empty(folder):
                with suppress(OSError):                     # Windows removes no file that is open
                    remove(folder)


def is_empty(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= BEFORE_A_RUN


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which dies with the process. Raises `UserError` if another process has it."""
    lock, holder = folder / ".lock", folder / ".process"
    require_plain(lock)
    try:
        claim = FileLock(lock).acquire(timeout=0)
    except Timeout as error:
        process = read_text(holder).strip()[:80] if holder.exists() else "another process"
        way_out = f"is in use by {process}; wait for its end, or stop it"
        raise UserError("run_dir", str(folder), way_out) from error
    except OSError as error:
        raise not_writable(folder, error) from error
    with claim:
        replace_text(holder, f"process {os.getpid()}\n")
        yield


def numbered(cfg: Config) -> Path:
    """A new folder under runs/, named by what runs and when; of a second one in one second `...-2`."""
    what = f"{names.short_name(cfg.task).lower()}-{names.short_name(cfg.method)}-{cfg.preset}-seed{cfg.seed}"
    name = f"runs/{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    folders = (Path(name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(folder for folder in folders if make(folder))


def make(folder: Path) -> bool:
    """Makes a folder. Returns whether it was not there before. Raises `UserError`."""
    try:
        str(folder).encode()                    # the libraries cannot write into another
        folder.mkdir(parents=True)
        return True
    except FileExistsError as error:
        if folder.is_dir():
            return False
        raise UserError("run_dir", str(folder), "is a file; name a folder") from error
    except (OSError, ValueError) as error:
        raise not_writable(folder, error) from error


def not_writable(folder: Path, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or " ".join(str(error).split())
    return UserError("run_dir", str(folder), f"is not writable ({why}); name another --run_dir")
