"""JSON lines in: the objects of a file or of standard input, each with where it stands.

Knows files and JSON, not requests. Every error is a ValueError of one line that begins "file:line:".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import IO, Any

from .fields import show

__all__ = ["Source", "read", "texts", "value"]

Source = str | PathLike[str] | IO[str] | IO[bytes]


def read(source: Source) -> Iterator[tuple[str, Any]]:
    """Each line's value.

    Parameters
    ----------
    source : path, "-" or open file
        As for `texts`.

    Yields
    ------
    where : str
        "file:line", for messages.
    value
        What the line says. NaN and Infinity, which JSON has not, become floats: the rule of the field they
        stand in refuses them, and can name it.
    """
    for where, text in texts(source):
        yield where, value(text, where)


def texts(source: Source) -> Iterator[tuple[str, str]]:
    """Each line that is not blank.

    Parameters
    ----------
    source : path, "-" or open file
        "-" is standard input. UTF-8; a byte order mark and CRLF are accepted.
    """
    name, lines = _lines(source)
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        try:
            text = line.decode() if isinstance(line, bytes) else line
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: byte {error.start + 1} is not UTF-8; save it as UTF-8") from None
        if number == 1:
            text = text.removeprefix("\ufeff")
        if text.strip():
            yield where, text


def value(text: str, where: str) -> Any:
    """One line's value; an error in it begins with `where`."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON at column {error.colno} ({error.msg}); one object a line"
        ) from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deep; one object a line") from None
    except ValueError as error:  # from _object, or an integer of more digits than Python converts
        raise ValueError(f"{where}: {str(error).split(';')[0]}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        # JSON would let the last one win, without a word.
        names = [name for name, _ in pairs]
        twice = next(name for k, name in enumerate(names) if name in names[:k])
        raise ValueError(f"field {show(twice)} is there twice, keep one")
    return fields


def _lines(source: Source) -> tuple[str, Iterable[bytes | str]]:
    if source == "-":
        return "<stdin>", getattr(sys.stdin, "buffer", sys.stdin)
    if not isinstance(source, str | PathLike):
        return str(getattr(source, "name", "<stream>")), source
    try:
        # Bytes: text mode would also break lines inside strings, at a lone carriage return.
        return str(source), Path(source).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{show(str(source))}: {reason}; give a file, or - for standard input") from None
