"""Ctrl-C, SIGTERM and SIGHUP end a run after its iteration, with a checkpoint."""
import os
import signal
from contextlib import contextmanager
from functools import partial
from typing import Iterator

from cory.system.distributed import processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
received: list[int] = []        # since `noted` began


@contextmanager
def noted() -> Iterator[None]:
    """A block in which the first signal is noted in `received`, and a second one ends the program at once."""
    received.clear()
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if previous[number] is not signal.SIG_IGN:                      # nohup ignores SIGHUP
            signal.signal(number, partial(handle, os.getpid()))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def handle(run_pid: int, number: int, frame) -> None:
    """A second signal ends the run at once; a process forked by a reward has no iteration to finish."""
    repeats = number == signal.SIGHUP or processes().size > 1       # shells and torchrun repeat the first one
    if received and not repeats or os.getpid() != run_pid:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    if number == signal.SIGHUP:                 # the terminal is gone: no print may fail
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    if not received and processes().is_main:
        os.write(2, b"\nfinishing this iteration first\n")    # `print` may be what has been interrupted
    received.append(number)
