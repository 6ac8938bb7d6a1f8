"""Doctor: what computes here, for people and for bug reports; with a model, what may be promised of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import output
from .arguments import open_model


def doctor(args: argparse.Namespace) -> int:
    """Print the diagnosis; exit 1 where invariance can't be promised."""
    from ..study.doctor import doctor as diagnose

    found = diagnose(open_model(args.model) if args.model else None, fresh=args.fresh)
    if args.json:
        output.write(None, output.document(found.to_json()))
    else:
        print(columns(found.rows()))
        if found.verdict:
            checks = [(c.what, c.shapes, f"{c.compared:,}", f"{c.differing:,}", f"{c.largest:.2g}")
                      for c in found.verdict.checks]  # fmt: skip
            print(
                "\n" + columns([("check", "shapes", "compared", "differing", "largest"), *checks], numbers=3)
            )
        if found.reason:
            print(f"\n{found.reason}")
    return 0 if found.ok else 1


def columns(rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """Rows in columns, the last ones, with numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = len(widths) - numbers
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i < words else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
