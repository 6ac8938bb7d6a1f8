"""Rows for planning out of a file: of lengths (CSV, or one per line), or of requests. Runs no model.

`toolkit plan` reads its file here. Only text needs a tokenizer, which the caller hands in as `tokens_of`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .. import jsonl
from ..fields import Rules, refusal, show
from ..requests import Request
from .types import Row

__all__ = ["read_rows", "rows_of"]

_LENGTH = ("length", "prompt_tokens", "input_tokens", "contexttokens")  # what traces call it
_ROW = ("id", "length", "cached", "decode", "priority")

Lines = list[tuple[str, str]]
TokensOf = Callable[[Request], Sequence[int]]


def read_rows(source: jsonl.Source, tokens_of: TokensOf | None = None) -> list[Row]:
    """Rows from a file.

    Parameters
    ----------
    source : path, "-" or open file
        CSV with a column `length` (or `prompt_tokens`, `input_tokens`, `ContextTokens`) and perhaps `id` and
        `cached`; or one length per line; or JSON lines, each of them a row (`{"length": 12, "cached": 4}`) or
        a request. Lines that begin with # are skipped.
    tokens_of : function of a Request, optional
        Its prompt's token ids; called for a prompt or chat, never for `tokens`.

    Returns
    -------
    list of Row
        Without an id of its own, a row is named "r0", "r1", … by its place.

    Raises
    ------
    ValueError
        One line: file, line number, field, value, what is allowed.
    """
    lines = [(where, text) for where, text in jsonl.texts(source) if not text.lstrip().startswith("#")]
    given = _json(lines) if lines and lines[0][1].lstrip()[0] in "{[" else _csv(lines)
    rows: list[Row] = []
    seen: dict[str, str] = {}
    for where, fields in given:
        try:
            if isinstance(fields, dict) and "length" in fields:
                row = _row(fields, len(rows))
            else:
                request = Request.from_json(fields)
                tokens = request.tokens if request.tokens is not None else _count(request, tokens_of)
                row = _of(request, tokens, len(rows))
            if row.id in seen:
                raise refusal("", "id", row.id, f"already the id of {seen[row.id]}; ids must differ")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        seen[row.id] = where
        rows.append(row)
    return rows


def rows_of(requests: Iterable[Request], tokens_of: TokensOf) -> list[Row]:
    """A row for each request, once checked; without an id, "r0", "r1", … by its place."""
    return [_of(request, tokens_of(request), place) for place, request in enumerate(requests)]


def _of(request: Request, tokens: Sequence[int], place: int) -> Row:
    return Row(request.id or f"r{place}", len(tokens), request.cached, priority=request.priority)


def _count(request: Request, tokens_of: TokensOf | None) -> Sequence[int]:
    if tokens_of is None:
        rule = "needs a model to count its tokens; give tokens or length"
        raise refusal(request.id, request.source, getattr(request, request.source), rule)
    return tokens_of(request)


def _row(fields: dict[str, Any], place: int) -> Row:
    for name in fields:
        if name not in _ROW:
            raise refusal(
                "", show(name).strip('"'), fields[name], f"no such field; there are {', '.join(_ROW)}"
            )
    if not isinstance(fields.get("decode", False), bool):
        raise refusal("", "decode", fields["decode"], "must be true or false")
    return Row(**{**fields, "id": Rules("").text("id", fields.get("id") or f"r{place}")})


def _json(lines: Lines) -> Iterator[tuple[str, Any]]:
    for where, text in lines:
        yield where, jsonl.value(text, where)


def _csv(lines: Lines) -> Iterator[tuple[str, dict[str, Any]]]:
    names: list[str] = []
    for (where, _), cells in zip(lines, csv.reader(text for _, text in lines), strict=True):
        if not names:
            names = ["length" if cell.strip().lower() in _LENGTH else cell.strip().lower() for cell in cells]
            if names.count("length") == 1:
                continue
            if len(cells) > 1 or not cells[0].strip().isdigit():
                rule = f"must name one column of lengths: {', '.join(_LENGTH)}"
                raise ValueError(f"{where}: columns={show(','.join(cells))}: {rule}")
            names = ["length"]
        if len(cells) != len(names):
            raise ValueError(f"{where}: cells={len(cells)}: must be {len(names)}, as in the first line")
        fields: dict[str, Any] = dict(zip(names, (cell.strip() for cell in cells), strict=True))
        # What is not a plain number is left as text, which Row refuses by name.
        numbers = {k: int(v) for k, v in fields.items() if v.isascii() and v.isdigit() and len(v) < 11}
        yield (
            where,
            {k: numbers.get(k, fields[k]) for k in ("length", "cached") if k in fields}
            | ({"id": fields["id"]} if "id" in fields else {}),
        )
