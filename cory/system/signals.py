"""Ctrl-C, SIGTERM and SIGHUP end a run where nothing is lost."""
import os
import signal
import sys
import threading

from cory.system.distributed import is_main, world_size

NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Signals:
    """From `install` to `remove`: a signal outside `waiting` ends the program at once, with one line; while
    `waiting` it is noted in `received`, and the run ends itself after the iteration. A second one ends the
    program there and then. Not so several processes: torchrun may pass on what has reached them already, and
    stops those that take long. Exit status: 128 + the signal's number, as a shell has it. What was ignored
    before stays ignored.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self.waiting = False
        self.before = {}

    def install(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():       # Python allows it nowhere else
            for number in NUMBERS:
                # nohup has SIGHUP ignored, a script SIGINT by what it runs in the background
                if signal.getsignal(number) != signal.SIG_IGN or world_size() > 1:
                    self.before[number] = signal.signal(number, self.handle)
        return self

    def remove(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def handle(self, number: int, frame) -> None:
        alone = world_size() == 1
        if self.received and alone:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        first, self.received = not self.received, self.received or signal.Signals(number)
        if not self.waiting:
            say(f"stopped by {self.received.name}")
            raise SystemExit(self.status)
        if first:
            after = "a second signal ends the run at once" if alone else "torchrun waits some time for that"
            say(f"{self.received.name}: this iteration is finished and saved first; {after}")

    @property
    def status(self) -> int:
        return 128 + self.received


def say(line: str) -> None:
    if is_main():
        print(f"\n{line}", file=sys.stderr, flush=True)
