"""The one place where files of a run folder are opened: what is read is checked, what is written is whole.

A run folder may come from a stranger, and its disk may be full or broken. A link in it is never followed, a
file that is no plain file is never opened, and whatever is wrong with one is said in one line that names it.
"""
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Iterator

from cory.errors import UserError


# --- errors ---
@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever goes wrong in reading and understanding a file becomes a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError("file", str(path), f"cannot be read ({why}); put it back") from error
    except Exception as error:              # the readers of weights raise kinds of their own
        why = f"{type(error).__name__}: {one_line(error)}"
        raise UserError("file", str(path), f"is damaged ({why}); put back a copy of it") from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Whatever goes wrong in writing becomes a `UserError` that names the file and what its disk has left."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:              # tokenizers and safetensors raise kinds of their own
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        why = getattr(error, "strerror", None) or one_line(error)
        free = shutil.disk_usage(path.parent).free / 1e9 if path.parent.exists() else 0
        way_out = f"its disk has {free:.2f} GB free: make room, then go on with --resume"
        raise UserError("file", str(path), f"cannot be written ({why}); {way_out}") from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


# --- read ---
def open_file(path: Path, mode: str) -> IO:
    """A plain file; a link, a pipe, a device or a folder is refused. Raises `UserError`."""
    if path.is_symlink():
        raise UserError("file", str(path), "is a link, and links in a run folder are not followed; remove it")
    if path.exists() and not path.is_file():
        raise UserError("file", str(path), "is no plain file; remove it")
    return path.open(mode)


def checksum(path: Path) -> str:
    """The first 16 digits of a file's SHA-256. Raises `UserError`."""
    with readable(path), open_file(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def read_text(path: Path) -> str:
    """Raises `UserError` for what is no plain file of UTF-8."""
    with readable(path), open_file(path, "rb") as file:
        return file.read().decode("utf-8")


def read_json(path: Path):
    with readable(path):
        return json.loads(read_text(path))


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a log, none if there is no file; a last line cut off by a kill is left out. Raises `UserError`
    for a line that is no row.
    """
    if not os.path.lexists(path):
        return []
    rows = []
    for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            rows.append(None)
        if not isinstance(rows[-1], dict):
            raise UserError("file", f"{path}:{number}", "is no row of a log; put back a copy of the file")
    return rows


def read_log(path: Path) -> list[dict]:
    """Rows of metrics.jsonl or samples.jsonl: each names its iteration."""
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if type(row.get("iteration")) is not int:
            raise UserError("file", f"{path}:{number}", "names no iteration; put back a copy of the file")
    return rows


# --- write ---
def append_jsonl(path: Path, rows: list[dict]) -> None:
    with writable(path), open_file(path, "a") as file:
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
    """Forces files, or a folder's list of entries, onto the disk. Windows cannot open a folder for that, and
    flushes only what may be written to.
    """
    for path in paths:
        if os.name == "nt" and path.is_dir():
            continue
        handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def remove(path: Path) -> None:
    """A file, a link itself, or a folder and what is in it; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def own_folder(path: Path) -> Path:
    """A folder inside a run folder, made if need be. Raises `UserError` for a link or a file of that name."""
    with writable(path):
        if path.is_symlink() or path.exists() and not path.is_dir():
            raise UserError("file", str(path), "must be a folder of the run, not a link or a file; remove it")
        path.mkdir(parents=True, exist_ok=True)
    return path
