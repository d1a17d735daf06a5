"""Ctrl-C, SIGTERM and SIGHUP end a run after its iteration, with a checkpoint."""
import os
import signal
from contextlib import contextmanager
from typing import Iterator

from cory.system.distributed import processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
received: list[int] = []        # since `noted` began
handled = {}                    # in its block: {signal: its previous handler}


@contextmanager
def noted() -> Iterator[None]:
    """A block in which the first signal is noted in `received`, and a second one ends the program at once."""
    received.clear()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:              # nohup ignores SIGHUP
            handled[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        while handled:
            signal.signal(*handled.popitem())


def handle(number: int, frame) -> None:
    if number == signal.SIGHUP:                 # the terminal is gone: no print may fail. Shells repeat it.
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    elif received and processes().size == 1:    # torchrun repeats the first one
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    if not received and processes().is_main:
        os.write(2, b"\nfinishing this iteration first\n")    # `print` may be what has been interrupted
    received.append(number)


def mask(how: int) -> None:
    """While a run forks, signals wait: Python loses those that reach the child as it starts."""
    if handled:
        signal.pthread_sigmask(how, SIGNALS)


def end_by_signals() -> None:
    """A process forked by a reward ends at once on a signal: it has no iteration to finish."""
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    mask(signal.SIG_UNBLOCK)


os.register_at_fork(before=lambda: mask(signal.SIG_BLOCK), after_in_child=end_by_signals,
                    after_in_parent=lambda: mask(signal.SIG_UNBLOCK))
