"""Report: lines of the table as they come, and the whole as a document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .. import backend
from .measure import Check, Figure, Line, Skipped

WIDTHS = 78, 12, 12, 7, 9
HEAD = "ours", "peer", "ratio", "at least"


def header(about: str) -> str:
    """What runs, and the columns."""
    return f"{about}\n{backend.info()!r}\n\n" + _columns(["work", *HEAD], "met")


def text(line: Line) -> str:
    """One line, and below it what is to be said about it."""
    if isinstance(line, Skipped):
        return f"{line.name}: {'FAILED' if line.failed else 'not run'}: {line.why}"
    said = [line.note] if line.note else []
    if isinstance(line, Check):
        cells = [line.work, f"{line.same:,}", f"of {line.compared:,}", "", ""]
    else:
        said.insert(0, f"against {line.against}")
        if line.where:
            said.append("where our time goes: " + ", ".join(f"{k} {v:.0%}" for k, v in line.where.items()))
        cells = [line.work, *(_rate(line, s) for s in (line.ours, line.peer)), f"{line.ratio:.2f}",
                 "" if line.at_least is None else f"{line.at_least:.2f}"]  # fmt: skip
        cells[0] += f" [{line.unit}]"
    met = {True: "yes", False: "NO", None: ""}[line.met]
    return "\n".join([_columns(cells, met), *(f"    {words}" for words in said)])


def document(lines: Sequence[Line], **about: Any) -> str:
    """All lines as JSON: keys sorted, `rows` in the order in which they were run."""
    where = {k: str(v) for k, v in backend.info().rows()}
    made = {"backend": where, "rows": [line.to_json() for line in lines], **about}
    return json.dumps(made, ensure_ascii=False, allow_nan=False, indent=2, sort_keys=True)


def _rate(figure: Figure, seconds: float) -> str:
    rate = figure.rate(seconds)
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"


def _columns(cells: Sequence[str], last: str) -> str:
    first, *others = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in
                      enumerate(zip(cells, WIDTHS, strict=True)))  # fmt: skip
    return f"{first} {' '.join(others)}  {last}".rstrip()
