"""Small writes and reads of a run folder that a kill cannot spoil."""
import json
import os
from pathlib import Path


def append_jsonl(path: Path, rows: list[dict]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())                     # no checkpoint may outlive the rows it follows


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a log, none if there is no file; a last line cut off by a kill is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that a reader finds the old text or the new one, never a part."""
    temporary = path.with_name(path.name + ".writing")
    temporary.write_text(text)
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


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
