"""The one place where files of a run folder are opened: what is read is checked, what is written is whole.

A run folder may come from a stranger, and its disk may be full. A link in it is never followed, and whatever
is wrong with a file is said in one line that names it.
"""
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Iterator

from cory.errors import UserError


# --- errors ---
@contextmanager
def file_errors(path: Path | str, tried: str) -> Iterator[None]:
    """Whatever goes wrong in a block that reads or writes a file becomes a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:              # tokenizers and safetensors raise kinds of their own
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        if tried == "read" and isinstance(error, FileNotFoundError):
            way_out = "does not exist; check the path, or put back a copy of it"
        elif isinstance(error, (OSError, UnicodeEncodeError)) or "os error" in str(error):
            way_out = f"cannot be {tried} ({why}); mend its disk or folder, then go on with --resume"
        elif tried == "read":
            way_out = f"is damaged ({type(error).__name__}: {why}); put back a copy of it"
        else:
            raise
        raise UserError("file", str(path), way_out) from error


readable, writable = partial(file_errors, tried="read"), partial(file_errors, tried="written")


def require_plain(path: Path) -> None:
    """A plain file, or nothing yet. Raises `UserError` for a link, pipe, device or folder."""
    if path.is_symlink() or path.exists() and not path.is_file():
        raise UserError("file", str(path), "is a link or no plain file; remove it")


# --- read ---
@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A plain file to read from. Raises `UserError`, also for what goes wrong in the block."""
    with readable(path):
        require_plain(path)
        with path.open("rb") as file:
            yield file


def checksum(path: Path) -> str:
    """The first 16 digits of a file's SHA-256. Raises `UserError`."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def read_text(path: Path) -> str:
    """Raises `UserError` for what is no plain file of UTF-8."""
    with opened(path) as file:
        return file.read().decode("utf-8")


def read_json(path: Path):
    with opened(path) as file:
        return json.load(file)


def read_jsonl(path: Path) -> list[dict]:
    """Rows, none if there is no file; a last line cut off by a kill is left out. Raises `UserError`."""
    if not os.path.lexists(path):
        return []
    rows = []
    for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        with readable(f"{path}:{number}"):
            rows.append(json.loads(line))
            if not isinstance(rows[-1], dict):
                raise ValueError("no row of a log")
    return rows


def read_log(path: Path) -> list[dict]:
    """Rows of metrics.jsonl or samples.jsonl: each names its iteration. Raises `UserError`."""
    rows = read_jsonl(path)
    if any(type(row.get("iteration")) is not int for row in rows):
        raise UserError("file", str(path), "has a row without iteration; put back a copy of it")
    return rows


# --- write ---
def append_jsonl(path: Path, rows: list[dict]) -> None:
    """Adds to a file that is there. Raises `UserError` if it is gone: what follows would be half a log."""
    require_plain(path)
    with writable(path), path.open("r+") as file:
        file.seek(0, os.SEEK_END)
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())                     # no checkpoint may outlive the rows it follows


def replace_text(path: Path, text: str) -> None:
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The name of a file or folder to be made in the block, which then takes the place of `path`: a reader
    finds the old one or the new one, never a part. A link of either name is replaced, not followed.
    """
    temporary = path.with_name(path.name + ".writing")
    with writable(path):
        remove(temporary)
        try:
            yield temporary
            put_in_place(temporary, path)
        except BaseException:
            remove(temporary)
            raise


def put_in_place(temporary: Path, final: Path) -> None:
    """Flushes a finished file or folder and renames it; an older folder of that name goes first."""
    flush(*temporary.rglob("*"), temporary)
    if temporary.is_dir():
        remove(final)
    temporary.replace(final)
    flush(final.parent)


def flush(*paths: Path) -> None:
    """Forces files, or a folder's list of entries, onto the disk. Windows cannot do that by such a handle."""
    for path in paths if os.name == "posix" else ():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def remove(path: Path) -> None:
    """A file, a link itself, or a folder and what is in it; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def own_folder(path: Path, parents: bool = False) -> Path:
    """A folder inside a run folder, made if need be. Raises `UserError` for a link or a file of that name, or
    where the run's folder is gone, unless `parents` may be made, too.
    """
    if path.is_symlink():
        raise UserError("file", str(path), "must be a folder of the run, not a link; remove it")
    with writable(path):
        path.mkdir(parents=parents, exist_ok=True)
    return path
