"""Output: files that are whole or not there, tables in three formats, JSON whose floats read back.

Standard output has the answer and nothing else; `say` puts all other words on standard error.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..results import shortest_float32

if TYPE_CHECKING:
    import pandas as pd

TABLES = (".parquet", ".csv", ".jsonl")
PICTURES = (".png", ".svg", ".html")


def say(words: str) -> None:
    """One line on standard error."""
    print("toolkit:", " ".join(words.split()), file=sys.stderr, flush=True)


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


def write(path: str | None, data: bytes) -> None:
    """Put bytes in a file, all of them or none; None is standard output."""
    if path is None:
        sys.stdout.flush()
        rest = memoryview(data)
        while rest:  # under PYTHONUNBUFFERED, a pipe that is full takes a part of it and says so
            rest = rest[sys.stdout.buffer.write(rest) :]
        return
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
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        part.unlink(missing_ok=True)


def lines(values: Iterable[Any]) -> bytes:
    """JSON lines, keys sorted."""
    return "".join(
        json.dumps(v, ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n" for v in values
    ).encode()


def document(value: Any) -> bytes:
    """One JSON document, keys sorted."""
    return (json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, indent=2) + "\n").encode()


class Tabular(Protocol):
    """A result with a table."""

    def to_frame(self) -> pd.DataFrame: ...


def joined(results: Iterable[Tabular]) -> pd.DataFrame:
    """Tables of one kind, one under the other."""
    import pandas as pd

    return pd.concat([result.to_frame() for result in results], ignore_index=True)


def write_table(path: str | None, frame: pd.DataFrame) -> None:
    """Put a table in a file of the kind that its name says; None is JSON lines on standard output."""
    suffix = Path(path).suffix if path else ".jsonl"
    if suffix == ".csv":
        data = str(frame.to_csv(index=False)).encode()
    elif suffix == ".parquet":
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        data = buffer.getvalue()
    else:
        data = lines(_records(frame))
    write(path, data)


def _records(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """A table's rows for JSON: floats are float32 in shortest form, undefined is None."""
    columns = [[_plain(value) for value in frame[name].tolist()] for name in frame]
    for row in zip(*columns, strict=True):
        yield dict(zip(frame.columns, row, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return shortest_float32(value)
    return value if isinstance(value, str | int) else None
