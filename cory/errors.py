"""One kind of error for everything a person can mend: it names the field, its value and the way out."""
import os
import sys
import time
from contextlib import contextmanager
from typing import IO, Iterator

DIVERGED = "has diverged"
speaks = os.environ.get("RANK", "0") == "0"             # of processes with the same fault one says it


class UserError(Exception):
    """`UserError("cliprange", 0.0, "must be above 0")` reads `cliprange is 0.0: must be above 0`.

    Scripts print it as one line and exit with status 2.
    """

    def __init__(self, field: str, value, way_out: str):
        super().__init__(printable(f"{field} is {value!r}: {way_out}"))

    @classmethod
    def of(cls, line: str) -> "UserError":
        """With the line of another process's error."""
        error = cls("", "", "")
        error.args = (line,)
        return error


class Diverged(UserError):
    """A gradient, weight or log-probability is NaN or infinite: `weights is 'w': llm1 has diverged: WAY OUT`.

    A study knows by the words `DIVERGED` that a run ended like this, and would do so again.
    """

    def __init__(self, field: str, value, who: str, way_out: str):
        super().__init__(field, value, f"{who} {DIVERGED}: {way_out}")


class LastingOutput:
    """stdout or stderr that never raises. A closed terminal, `| head -1` or a full disk must not end a run:
    after the first error what is written goes nowhere.
    """

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        self.attempt(self.stream.write, text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, call, *text: str) -> None:
        try:
            call(*text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


@contextmanager
def lasting_output() -> Iterator[None]:
    """A block in which no print raises. What the terminal's encoding lacks is written as an escape."""
    before = sys.stdout, sys.stderr
    if hasattr(sys.stdout, "reconfigure"):                  # a notebook's has no encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = map(LastingOutput, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def exit_on_user_error(main):
    """Decorator for scripts: a `UserError` becomes one line on stderr and exit status 2; Ctrl-C exits 130."""
    @lasting_output()
    def run(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            time.sleep(0 if speaks else 5)      # one with the same fault says it; torchrun then ends all
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("stopped by SIGINT", file=sys.stderr)
            raise SystemExit(130) from None
    return run


def printable(text: str) -> str:
    """One line, with what could move a terminal's cursor or change its colours written out."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
