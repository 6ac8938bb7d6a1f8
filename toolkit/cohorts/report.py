"""What a plan costs: `Plan`, cohorts with their totals, and `Comparison`, plans side by side. Tables only.

Made by `cohorts.plan` and `cohorts.compare`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .types import Cohort

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Comparison", "Plan"]


@dataclass(frozen=True, repr=False)
class Plan:
    """Cohorts in the order in which they run, with what they cost.

    Attributes
    ----------
    strategy : str
    cohorts : tuple of Cohort
    order : tuple of int
        Places in the input of the cohorts' rows, joined.
    """

    strategy: str
    cohorts: tuple[Cohort, ...]
    order: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(cohort.tokens for cohort in self.cohorts)

    @property
    def padded_tokens(self) -> int:
        """Tokens computed."""
        return sum(cohort.padded_tokens for cohort in self.cohorts)

    @property
    def ratio(self) -> float:
        """Tokens computed for each real one."""
        return self.padded_tokens / self.tokens if self.cohorts else 1.0

    @property
    def wait(self) -> int:
        """Most places that a row's cohort starts behind the row's own arrival; 0 keeps the order."""
        return max(self._waits(), default=0)

    def _waits(self) -> Iterator[int]:
        start = 0
        for cohort in self.cohorts:
            for k in range(start, start + len(cohort.rows)):
                yield max(0, start - self.order[k])
            start += len(cohort.rows)

    def to_frame(self) -> pd.DataFrame:
        """One line a row, in running order.

        Returns
        -------
        pandas.DataFrame
            Columns: strategy, cohort, kind, index (in the cohort), id, arrival (place in the input), length,
            cached, decode, tokens (that it computes), padding (computed beside them), wait (places).
        """
        import pandas as pd

        lines: list[tuple[Any, ...]] = []
        waits = self._waits()
        for cohort in self.cohorts:
            longest = max(row.remainder for row in cohort.rows)
            for k, row in enumerate(cohort.rows):
                padding = longest - row.remainder if cohort.kind == "batched" else 0
                where = (self.strategy, cohort.index, cohort.kind, k, row.id, self.order[len(lines)])
                spent = (row.length, row.cached, row.decode, row.remainder, padding, next(waits))
                lines.append((*where, *spent))
        return pd.DataFrame(lines, columns=list(_COLUMNS))

    def totals(self) -> dict[str, Any]:
        """What `compare` shows of it."""
        return {
            "strategy": self.strategy,
            "cohorts": len(self.cohorts),
            "rows": len(self.order),
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
            "ratio": round(self.ratio, 4),
            "wait": self.wait,
            "most_rows": max((len(cohort.rows) for cohort in self.cohorts), default=0),
            "most_tokens": max((cohort.padded_tokens for cohort in self.cohorts), default=0),
        }

    def __repr__(self) -> str:
        return (
            f"Plan({self.strategy}: {len(self.order)} rows in {len(self.cohorts)} cohorts, "
            f"{self.ratio:.2f} tokens computed for each real one)"
        )

    def _repr_html_(self) -> str:
        cells = [
            (c.index, c.kind, ", ".join(row.id for row in c.rows[:12]) + ("…" if len(c.rows) > 12 else ""),
             len(c.rows), f"{c.tokens:,}", f"{c.padded_tokens:,}")
            for c in self.cohorts[:50]
        ]  # fmt: skip
        table = _table(("cohort", "kind", "requests", "rows", "tokens", "computed"), cells)
        return f"<p>{html.escape(repr(self))}</p>{table}"


@dataclass(frozen=True, repr=False)
class Comparison:
    """The same rows under several strategies."""

    plans: tuple[Plan, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """One object a strategy, keys sorted; the fields of `to_frame`."""
        return [dict(sorted(plan.totals().items())) for plan in self.plans]

    def to_frame(self) -> pd.DataFrame:
        """One line a strategy.

        Returns
        -------
        pandas.DataFrame
            Columns: strategy; cohorts, rows; tokens (real), padded_tokens (computed), ratio of the two; wait
            (most places that any row falls behind its arrival); most_rows, most_tokens (of one cohort).
        """
        import pandas as pd

        return pd.DataFrame([plan.totals() for plan in self.plans])

    def __str__(self) -> str:
        """The table in plain text."""
        lines = [_HEAD, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
            )
            for line in lines
        )

    def __repr__(self) -> str:
        ratios = ", ".join(f"{plan.strategy} {plan.ratio:.2f}" for plan in self.plans)
        return f"Comparison(tokens computed for each real one: {ratios})"

    def _repr_html_(self) -> str:
        return _table(_HEAD, self._cells())

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                p.strategy,
                f"{len(p.cohorts):,}",
                f"{p.tokens:,}",
                f"{p.padded_tokens:,}",
                f"{p.ratio:.2f}",
                str(p.wait),
            )
            for p in self.plans
        ]


_COLUMNS = ("strategy", "cohort", "kind", "index", "id", "arrival", "length", "cached", "decode", "tokens",
            "padding", "wait")  # fmt: skip
_HEAD = ("strategy", "cohorts", "tokens", "computed", "ratio", "longest wait")


def _table(head: Sequence[str], cells: Iterable[Sequence[Any]]) -> str:
    # No colours: they are left to the reader's theme, light or dark.
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    rows = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in line) for line in cells)
    return (
        f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(f'<tr>{r}</tr>' for r in rows)}</tbody></table>"
    )
