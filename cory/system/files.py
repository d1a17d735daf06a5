"""The files of a run folder: files are written whole, by one process at a time."""
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
    """Renames a finished file or folder; a folder of that name is removed first."""
    if temporary.is_dir() and path.exists():
        shutil.rmtree(path)
    os.replace(temporary, path)


def append_jsonl(path: Path, rows: list[dict]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[dict]:
    """Rows, none if there is no file; a last line that a kill has cut off is dropped."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[None]:
    """The run folder belongs to this process alone until the block ends; it is removed if it is still empty
    then. Raises `UserError`.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError("run_dir", str(folder), "is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)            # it dies with the process
    except Timeout:
        raise UserError("run_dir", str(folder), "is in use by another process; wait, or stop it") from None
    with lock:
        if not resume and not is_empty(folder):
            raise UserError("run_dir", str(folder), "is not empty; continue a run with --resume, or name "
                            "another folder")
        try:
            yield
        finally:
            if is_empty(folder):
                shutil.rmtree(folder)


def is_empty(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= {".lock"}
