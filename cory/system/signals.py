"""Ctrl-C, SIGTERM and SIGHUP end a run after its iteration, with a checkpoint."""
import os
import signal
import sys
from contextlib import contextmanager
from typing import Iterator

from cory.system.distributed import processes

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
received: list[signal.Signals] = []     # since `noted` began


@contextmanager
def noted() -> Iterator[None]:
    """A block in which the first signal is noted in `received`. A second one ends the program at once, except
    under torchrun, which passes on what has reached its processes already. What nohup ignores stays ignored.
    """
    received.clear()
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def handle(number: int, frame) -> None:
    if number == getattr(signal, "SIGHUP", None):       # the terminal is gone: no print may fail
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if not received and processes().is_main:
        print(f"\n{signal.Signals(number).name}: this iteration is finished and saved first", file=sys.stderr,
              flush=True)
    if not received or processes().size > 1 or number == getattr(signal, "SIGHUP", None):
        received.append(signal.Signals(number))
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def system_answer() -> None:
    """A forked process, such as a reward starts, ends by a signal: no iteration of it will ever end."""
    for number in SIGNALS:
        if signal.getsignal(number) is handle:
            signal.signal(number, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=system_answer)
