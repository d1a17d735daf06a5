"""A run's folder, which belongs to one process at a time; and the signals after which a run ends."""
import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator

from filelock import FileLock, Timeout

from cory.config import Config, short_name
from cory.distributed import processes
from cory.errors import UserError

# Ctrl-C; a scheduler's end, and its warning; a closed terminal
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def run_folder(cfg: Config) -> Path:
    """`cfg.run_dir`, or a new folder under runs/, named by what runs, when, and the process."""
    what = f"{short_name(cfg.task)}-{short_name(cfg.method)}-{cfg.preset}-seed{cfg.seed}".lower()
    new = f"runs/{what}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Path(processes().gather([cfg.run_dir or new])[0])


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[Path]:
    """The run's folder, its own alone until the block ends; it is removed if it is still empty then."""
    if not processes().is_main:
        yield folder
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)            # it dies with the process
    except Timeout:
        raise UserError("run_dir", str(folder), "is in use by another process; wait, or stop it") from None
    with lock:
        if not resume and [*folder.iterdir()] != [folder / ".lock"]:
            raise UserError("run_dir", str(folder), "is not empty; continue a run with --resume, or name "
                            "another folder")
        try:
            yield folder
        finally:
            if [*folder.iterdir()] == [folder / ".lock"]:
                shutil.rmtree(folder)


@contextmanager
def signals_noted(received: list[int]) -> Iterator[None]:
    """A block in which the first of `SIGNALS` is noted in `received`, and a second one ends the program at
    once. Signals that are ignored stay so, as SIGHUP under `nohup`. Outside the main thread, where Python
    cannot install handlers, signals keep their effect.

    Processes forked in the block, as the workers of a pool are, do not note signals: they are ended by all
    but Ctrl-C, which a terminal sends to them as well, and which leaves them to the iteration.
    """
    def note(number: int, frame) -> None:
        if received and processes().size == 1:                  # torchrun repeats the first one
            raise KeyboardInterrupt
        if not received and processes().is_main:
            with suppress(OSError):                             # the terminal may be closed
                os.write(2, b"\nfinishing this iteration first\n")     # a `print` may be interrupted
        received.append(int(number))

    # A worker's signals wait until it has no handler in Python, which would not run while it waits in C.
    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, previous)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, previous)

    def forget() -> None:
        for number in previous:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        unblock()

    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in SIGNALS if is_main and signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in heard}
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=forget)
    try:
        yield
    finally:
        while previous:
            signal.signal(*previous.popitem())
