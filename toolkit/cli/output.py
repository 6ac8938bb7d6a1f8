"""Output: files that are whole or not there, tables in three formats, JSON whose floats read back.

Standard output has the answer and nothing else; `say` puts all other words on standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .. import files
from ..files import TABLES, check, lines

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PICTURES", "TABLES", "check", "document", "joined", "lines", "say", "write", "write_table"]

PICTURES = (".png", ".svg", ".html")


def say(words: str) -> None:
    """One line on standard error."""
    print("toolkit:", " ".join(words.split()), file=sys.stderr, flush=True)


def write(path: str | None, data: bytes) -> None:
    """Put bytes in a file, all of them or none; None is standard output."""
    if path is None:
        sys.stdout.flush()
        rest = memoryview(data)
        while rest:  # under PYTHONUNBUFFERED, a pipe that is full takes a part of it and says so
            rest = rest[sys.stdout.buffer.write(rest) :]
        return
    files.write(path, data)


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
    """Put a model's numbers in a file of the kind that its name says; None is JSON lines on standard output.

    They are float32 in columns of float64, and JSON lines have their shortest form.
    """
    suffix = Path(path).suffix if path else ".jsonl"
    if suffix == ".jsonl":
        frame = frame.astype({name: "float32" for name in frame if frame[name].dtype == "float64"})
    write(path, files.table(frame, suffix))
