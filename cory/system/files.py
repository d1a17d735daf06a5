"""The files of a run folder: what is written is whole, and one process at a time writes."""
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from filelock import FileLock, Timeout

from cory.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Replaces a file: a reader finds the old text or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    put_in_place(temporary, path)


def put_in_place(temporary: Path, path: Path) -> None:
    """Renames a finished file or folder, once it is on the disk; a folder of that name is removed first."""
    for written in [temporary, *temporary.rglob("*")]:
        flush(written)
    if temporary.is_dir() and path.exists():
        shutil.rmtree(path)
    os.replace(temporary, path)
    flush(path.parent)


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def append_jsonl(path: Path, rows: list[dict]) -> None:
    """Adds rows, and waits until they are on the disk: no checkpoint outlives the rows before it."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: Path) -> list[dict]:
    """Rows, none if there is no file; a last line that a kill has cut off is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[None]:
    """The folder of a new or resumed run, this process's alone until the block ends; the lock dies with it.

    A new run takes a folder that is new or empty; one that is still empty at the end is removed. Raises
    `UserError`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("run_dir", str(folder), f"cannot be made ({error.strerror}); name another") from error
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout as error:
        hint = "is in use by another process; wait for it, or stop it"
        raise UserError("run_dir", str(folder), hint) from error
    with lock:
        if not resume and not is_empty(folder):
            has_run = (folder / "config.json").exists()
            why = "holds another run; continue it with --resume" if has_run else "is not empty"
            raise UserError("run_dir", str(folder), f"{why}, or name another --run_dir")
        try:
            yield
        finally:
            if is_empty(folder):
                shutil.rmtree(folder)


def is_empty(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= {".lock"}
