"""Ctrl-C, SIGTERM and SIGHUP end a run where nothing is lost."""
import os
import signal
import sys
import threading

from cory.system.distributed import is_main, world_size

NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
HANGUP = getattr(signal, "SIGHUP", None)                # Windows has none


class Signals:
    """From `install` to `remove`: a signal outside `waiting` ends the program at once. While `waiting` it is
    noted in `received`, and the run ends itself after the iteration; a second one ends the program at once,
    except under torchrun, which may pass on what has reached its processes already, and except SIGHUP, which
    terminal and shell may both send.

    Exit status: 128 + the signal's number, as a shell has it. What nohup has ignored stays ignored. Forked
    processes, such as a reward starts, do not inherit `handle`: see `end_by_signals`.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self.waiting = False
        self.before = {}

    def install(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():       # Python allows it nowhere else
            handled = [number for number in NUMBERS if signal.getsignal(number) != signal.SIG_IGN]
            self.before = {number: signal.signal(number, self.handle) for number in handled}
        return self

    def remove(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame) -> None:
        if self.received:                                               # torchrun has passed it on once more
            return
        self.received = signal.Signals(number)
        if not self.waiting:
            say(f"stopped by {self.received.name}")
            raise SystemExit(self.status)
        if world_size() == 1:
            for each in self.before:                                    # a second one ends the run at once
                signal.signal(each, signal.SIG_IGN if each == HANGUP else signal.SIG_DFL)
        say(f"{self.received.name}: this iteration is finished and saved first")

    @property
    def status(self) -> int:
        return 128 + self.received


def say(line: str) -> None:
    if is_main():
        print(f"\n{line}", file=sys.stderr, flush=True)


# Signals that the forking thread had blocked before.
blocked = threading.local()


def block() -> None:
    """Before a fork: Python forgets a signal that reaches a child as it starts. Blocked, the signal waits."""
    blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked.before)


def end_by_signals() -> None:
    """In a forked process the system ends it at a signal. A handler in Python would not be called while it
    waits for a lock, and `multiprocessing.Pool` would wait for it for ever.
    """
    for number in NUMBERS:
        if isinstance(getattr(signal.getsignal(number), "__self__", None), Signals):
            signal.signal(number, signal.SIG_DFL)
    unblock()


if hasattr(os, "register_at_fork"):                     # Windows has no fork
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=end_by_signals)
