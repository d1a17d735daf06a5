"""A run's folder belongs to one process at a time."""
import os
import time
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Iterator

from filelock import FileLock, Timeout

from cory import names
from cory.config import Config
from cory.errors import UserError
from cory.system.files import read_text, replace_text

OF_LOCK = {".lock", ".process"}         # what `locked` puts into the folder


@contextmanager
def claimed(cfg: Config) -> Iterator[Path]:
    """The folder of a new or resumed run, made before anything is loaded, and this process's alone until the
    block ends. Nothing existing is overwritten: a folder with anything in it is refused, unless it is
    resumed. Who made the folder removes it again if it is still empty at the end. Raises `UserError`.
    """
    folder = Path(cfg.run_dir) if cfg.run_dir else numbered(cfg)
    made_here = make(folder) if cfg.run_dir else True
    with locked(folder):
        held = {path.name for path in folder.iterdir()} - OF_LOCK
        if held and not cfg.resume:
            holds_run = "config.json" in held
            why = "holds another run; continue it with --resume" if holds_run else "is not empty"
            raise UserError("run_dir", str(folder), f"{why}, or name another --run_dir")
        try:
            yield folder
        finally:
            if made_here and {path.name for path in folder.iterdir()} <= OF_LOCK:
                with suppress(OSError):                     # Windows removes no file that is open
                    for name in OF_LOCK:
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which dies with the process. Raises `UserError` if another process has it."""
    lock, holder = folder / ".lock", folder / ".process"
    if lock.is_symlink():
        raise UserError("file", str(lock), "is a link, and links in a run folder are not followed; remove it")
    claim = FileLock(lock, timeout=0)
    try:
        claim.acquire()
    except Timeout as error:
        process = read_text(holder).strip()[:80] if holder.exists() else "another process"
        way_out = f"is in use by {process}; wait for its end, or stop it"
        raise UserError("run_dir", str(folder), way_out) from error
    except OSError as error:
        raise not_writable(folder, error) from error
    try:
        replace_text(holder, f"process {os.getpid()}\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        claim.release()


def numbered(cfg: Config) -> Path:
    """A new folder under runs/, named by what runs and when; of a second one in one second `...-2`."""
    what = f"{names.short_name(cfg.task).lower()}-{names.short_name(cfg.method)}-{cfg.preset}-seed{cfg.seed}"
    first = Path(f"runs/{what}-{time.strftime('%Y%m%d-%H%M%S')}")
    numbers = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(folder for folder in chain([first], numbers) if make(folder))


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
