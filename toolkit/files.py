"""Files: whole or not there, and tables in three formats whose floats read back."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .results import shortest_float32

if TYPE_CHECKING:
    import pandas as pd

TABLES = (".parquet", ".csv", ".jsonl")


def check(option: str, path: str | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse an output file that could not be written, before the work and not after it."""
    if path is None:
        return
    target = Path(path)
    if suffixes and target.suffix not in suffixes:
        raise ValueError(f"{option} {path}: must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}")
    if target.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            f"{option} {path}: Parquet needs pyarrow (pip install pyarrow); .csv and .jsonl don't"
        )
    if target.is_dir():
        raise ValueError(f"{option} {path}: is a directory; name a file in it")
    if not target.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {target.parent}; make it first")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ValueError(f"{option} {path}: no permission to write there")


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Put bytes in a file, all of them or none."""
    target = Path(path).resolve()  # a link stays one, and its target changes
    if target.exists() and not target.is_file():  # a device or a pipe: there is nothing to replace
        target.write_bytes(data)
        return
    part = target.with_name(f".toolkit-{os.getpid()}.part")  # beside it: a rename works within one disk only
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        part.unlink(missing_ok=True)


def table(frame: pd.DataFrame, suffix: str) -> bytes:
    """A table as a file of the kind that a suffix says: .csv, .parquet, or else JSON lines."""
    if suffix == ".csv":
        return str(frame.to_csv(index=False)).encode()
    if suffix == ".parquet":
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        return buffer.getvalue()
    return lines(_records(frame))


def lines(values: Iterable[Any]) -> bytes:
    """JSON lines, keys sorted."""
    return "".join(
        json.dumps(v, ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n" for v in values
    ).encode()


def _records(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """A table's rows for JSON: float32 in shortest form, other floats in full, undefined is None."""
    columns = [
        [_plain(value, str(frame[name].dtype).lower() == "float32") for value in frame[name].tolist()]
        for name in frame
    ]
    for row in zip(*columns, strict=True):
        yield dict(zip(frame.columns, row, strict=True))


def _plain(value: Any, single: bool) -> Any:
    if isinstance(value, float):
        return shortest_float32(value) if single else float(value) if math.isfinite(value) else None
    return value if isinstance(value, str | int) else None
