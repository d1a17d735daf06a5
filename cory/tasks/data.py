"""Rows of text from a local folder, a local .jsonl file or the Hub."""
import json
import logging
from pathlib import Path

from cory.errors import UserError


def load_columns(dataset: str, columns: list[str], subset: str = "") -> dict[str, list[tuple[str, ...]]]:
    """{split: one tuple of the columns' texts per row} of every split. A lone .jsonl file is the split `train`.

    Folders of `<split>.jsonl` are read here, so that a broken line can be named; any other layout (parquet, csv, Hub) is read
    by `datasets`. `subset` names the part to take of a data set that comes in several. Raises `UserError` naming file and row.
    """
    path = Path(dataset)
    files = [path] if path.suffix == ".jsonl" and path.is_file() else sorted(path.glob("*.jsonl"))
    if files:
        splits = {("train" if file is path else file.stem): read_jsonl(file) for file in files}
    else:
        splits = read_with_datasets(dataset, subset)
    return {split: list(zip(*(texts_of(f"{dataset} ({split})", rows, column) for column in columns))) for split, rows in splits.items()}


def read_jsonl(path: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise UserError("dataset", f"{path}:{number}", f"is not UTF-8 at byte {error.start} of the line; re-encode it") from error
        except json.JSONDecodeError as error:
            raise UserError("dataset", f"{path}:{number}", f"is not JSON ({error.msg}, column {error.colno}); mend the line") from error
        if not isinstance(row, dict):
            raise UserError("dataset", f"{path}:{number}", "is not a JSON object with named columns")
        rows.append(row)
    return rows


def read_with_datasets(dataset: str, subset: str) -> dict:
    from datasets import disable_progress_bars, get_dataset_config_names, load_dataset
    disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)        # what goes wrong is raised; its own traceback is not for users
    if Path(dataset).is_absolute() or dataset.startswith(".") or dataset.count("/") > 1:
        if not Path(dataset).exists():
            raise UserError("dataset", dataset, "no such file or folder")
    try:
        if Path(dataset).is_dir():                                  # the Hub's own layout keeps a subset in a folder of its name
            inner = Path(dataset) / subset
            return dict(load_dataset(str(inner if inner.is_dir() else dataset)))
        names = get_dataset_config_names(dataset)
        return dict(load_dataset(dataset, subset if subset in names else None))
    except UnicodeDecodeError as error:
        raise UserError("dataset", dataset, f"is not UTF-8 ({error.reason}); re-encode the file") from error
    except Exception as error:                                      # the Hub and each file format raise kinds of their own
        why = f"could not be read: {error}" if Path(dataset).exists() else (
            "is neither a local path nor to be had from the Hub now; with a network run "
            f"`hf download {dataset} --repo-type dataset --local-dir DIR`, then pass DIR")
        raise UserError("dataset", dataset, why) from error


def texts_of(source: str, rows, column: str) -> list[str]:
    if len(rows) == 0:
        raise UserError("dataset", source, "has no rows")
    columns = list(rows.column_names) if hasattr(rows, "column_names") else list(rows[0])
    if column not in columns:
        raise UserError("dataset", source, f"has no column {column!r}; columns found: {', '.join(columns)}")
    texts = rows[column] if hasattr(rows, "column_names") else [row.get(column) for row in rows]
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise UserError("dataset", f"{source}, row {number}", f"its {column!r} is {text!r}, not text; mend or remove the row")
        if not text.strip():
            raise UserError("dataset", f"{source}, row {number}", f"its {column!r} is empty; remove the row")
    return list(texts)
