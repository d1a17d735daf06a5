"""The one place where files of a run folder are opened: what is read is checked, what is written is whole.

A run folder may come from a stranger, and its disk may be full or broken. A link in it is never followed, a
file that is no plain file is never opened, and whatever is wrong with one is said in one line that names it.
"""
import errno
import json
import os
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from cory.errors import UserError

MOST_BYTES = 2**31              # of a text file: no log or answer file comes near it


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a plain file; a link, a pipe, a device or a folder is refused. Raises `UserError`."""
    if path.is_symlink():
        raise UserError("file", str(path), "is a link, and links in a run folder are not followed; remove it")
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError("file", str(path), "is no plain file; remove it")
    return handle


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever goes wrong in reading and understanding a file becomes a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError("file", str(path), f"cannot be read ({reason(error)}); put it back") from error
    except Exception as error:              # the readers of weights and moments raise kinds of their own
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise UserError("file", str(path), f"is damaged ({why}); put back a copy of it") from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Whatever goes wrong in writing becomes a `UserError` that names the file and what its disk has left."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError("file", str(path), f"cannot be written ({reason(error)}){way_out(path)}") from error
    except Exception as error:              # torch and safetensors have no kind of their own for a full disk
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        if "No space left" not in str(error) and "os error" not in str(error) and free > 2**24:
            raise
        why = os.strerror(errno.ENOSPC) if free <= 2**24 else " ".join(str(error).split())[:120]
        raise UserError("file", str(path), f"cannot be written ({why}){way_out(path)}") from error


def reason(error: OSError) -> str:
    return error.strerror or str(error)


def way_out(path: Path) -> str:
    free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
    return f"; its disk has {free / 1e9:.2f} GB free: make room, then go on with --resume"


def read_text(path: Path) -> str:
    """Raises `UserError` for what is no plain file of UTF-8."""
    with readable(path), os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise UserError("file", str(path), f"has {size} bytes, too many to be what it should be")
        return file.read().decode("utf-8")


def read_json(path: Path):
    with readable(path):
        return json.loads(read_text(path))


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a log, none if there is no file; a last line cut off by a kill is left out. Raises `UserError`
    for a line that is no row.
    """
    if not path.exists() and not path.is_symlink():
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


def append_jsonl(path: Path, rows: list[dict]) -> None:
    with writable(path), os.fdopen(open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())                     # no checkpoint may outlive the rows it follows


def replace_text(path: Path, text: str) -> None:
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A new temporary file beside `path`, to be written in the block, that then takes its place: a reader
    finds the old file or the new one, never a part, and a link of either name is replaced, not followed.
    """
    temporary = path.with_name(path.name + ".writing")
    with writable(path):
        remove(temporary)
        os.close(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            yield temporary
            flush(temporary)
            temporary.replace(path)
        except BaseException:
            remove(temporary)
            raise
        flush(path.parent)


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


def put_in_place(temporary: Path, final: Path) -> None:
    """Flushes a finished folder and renames it; an older one of that name goes first."""
    flush(*(p for p in temporary.rglob("*") if p.is_file()), temporary)
    remove(final)
    temporary.rename(final)
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
