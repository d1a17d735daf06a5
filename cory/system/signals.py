"""Ctrl-C, SIGTERM and SIGHUP end a run after its iteration, with a checkpoint."""
import os
import signal
from contextlib import contextmanager, suppress
from typing import Iterator

from cory.system.distributed import processes

HANGUP = getattr(signal, "SIGHUP", None)        # Windows has none
SIGNALS = [number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number]
received: list[signal.Signals] = []             # since `noted` began
handled = {}                                    # in its block: {signal: what answered it before}


@contextmanager
def noted() -> Iterator[None]:
    """A block in which the first signal is noted in `received`. A second one ends the program at once, except
    under torchrun, which passes on what has reached its processes already, and except SIGHUP, which terminal
    and shell may both send. What nohup ignores stays ignored.
    """
    received.clear()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            handled[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        while handled:
            signal.signal(*handled.popitem())


def handle(number: int, frame) -> None:
    if number == HANGUP:                        # the terminal is gone: no print may fail
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    if received and number != HANGUP and processes().size == 1:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if not received and processes().is_main:
        said = f"\n{signal.Signals(number).name}: this iteration is finished and saved first\n"
        with suppress(OSError):                 # no `print`: the signal may have come within another one
            os.write(2, said.encode())
    received.append(signal.Signals(number))


def mask(how: int) -> None:
    """While a run forks, signals wait: Python would forget those that reach the child as it starts."""
    if handled:
        signal.pthread_sigmask(how, SIGNALS)


def end_by_signals() -> None:
    """A forked process, such as a reward starts, ends by a signal: no iteration of it will ever end."""
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    mask(signal.SIG_UNBLOCK)


if hasattr(os, "register_at_fork"):             # Windows has no fork
    os.register_at_fork(before=lambda: mask(signal.SIG_BLOCK), after_in_child=end_by_signals,
                        after_in_parent=lambda: mask(signal.SIG_UNBLOCK))
