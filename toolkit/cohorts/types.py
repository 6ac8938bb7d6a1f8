"""The values that planning works on: `Row` in, `Cohort` out, `Limits` between. No rule is in here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index
from typing import Any

from ..fields import INT32
from ..requests import PRIORITIES

__all__ = ["Cohort", "Limits", "Part", "Row", "whole"]


@dataclass(frozen=True, slots=True)
class Row:
    """What planning needs to know of a request.

    Parameters
    ----------
    id : str
    length : int
        Prompt tokens.
    cached : int
        How many of them are in the prefix cache; 0 is a cold row, more an adopted one.
    decode : bool
        Past its prompt: its span is one token.
    priority : {"high", "normal", "low"}
    exclusive : bool
        Runs by itself.

    Attributes
    ----------
    cold : bool
        Whether nothing of it has been computed.
    remainder : int
        Tokens that its next span computes.
    """

    id: str
    length: int
    cached: int = 0
    decode: bool = False
    priority: str = "normal"
    exclusive: bool = False
    cold: bool = field(init=False, repr=False, compare=False)
    remainder: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whose = f' for row "{self.id}"' if self.id else ""
        whole("length", self.length, 1, INT32, "prompt tokens", whose)
        whole("cached", self.cached, 0, self.length - 1, "at least one token is left to run", whose)
        if self.priority not in PRIORITIES:
            raise ValueError(f'priority={self.priority!r}{whose}: must be "high", "normal" or "low"')
        # Stored, not computed when asked: planning reads them a hundred thousand times.
        object.__setattr__(self, "cold", not (self.cached or self.decode))
        object.__setattr__(self, "remainder", 1 if self.decode else self.length - self.cached)


@dataclass(frozen=True, slots=True)
class Cohort:
    """Rows that run together.

    Attributes
    ----------
    rows : tuple of Row
    kind : {"batched", "sequential", "packed"}
        Padded side by side; one after the other; side by side without padding.
    index : int
        Its place in the plan.
    """

    rows: tuple[Row, ...]
    kind: str
    index: int

    @property
    def tokens(self) -> int:
        """Real tokens in it."""
        return sum(row.remainder for row in self.rows)

    @property
    def padded_tokens(self) -> int:
        """Tokens it computes: the padded area if batched, else the real ones (a packed tile not counted)."""
        if self.kind == "batched":
            return len(self.rows) * max(row.remainder for row in self.rows)
        return self.tokens

    def __repr__(self) -> str:
        ids = [row.id for row in self.rows[:8]] + ["…"] * (len(self.rows) > 8)
        return f"Cohort({self.index}, {self.kind}: {', '.join(ids)})"


Part = tuple[str, int, int]  # kind, start, stop


@dataclass(frozen=True)
class Limits:
    """Most rows in a cohort and most tokens it computes; 0 is no limit. One row always fits."""

    max_rows: int = 0
    token_budget: int = 0

    def __post_init__(self) -> None:
        whole("max_rows", self.max_rows, 0, INT32, "0 is no limit")
        whole("token_budget", self.token_budget, 0, INT32, "0 is no limit")

    def padded_end(self, costs: Sequence[int], start: int, stop: int) -> int:
        """End of the longest piece from `start` whose padded area fits."""
        if self.max_rows:
            stop = min(stop, start + self.max_rows)
        if not self.token_budget:
            return stop
        longest = 0
        for i in range(start, stop):
            if costs[i] > longest:
                longest = costs[i]
            if (i - start + 1) * longest > self.token_budget and i > start:
                return i
        return stop

    def cut(self, costs: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Consecutive pieces, each as long as its sum of costs allows."""
        so_far = list(accumulate(costs[start:stop], initial=0))
        at, count = 0, stop - start
        while at < count:
            end = bisect_right(so_far, so_far[at] + self.token_budget) - 1 if self.token_budget else count
            if self.max_rows:
                end = min(end, at + self.max_rows)
            end = max(end, at + 1)
            yield start + at, start + end
            at = end


def whole(name: str, value: Any, least: int, most: int, advice: str, whose: str = "") -> None:
    """Refuse what is not an integer in [least, most]."""
    try:
        good = not isinstance(value, bool) and least <= index(value) <= most
    except TypeError:
        good = False
    if not good:
        raise ValueError(f"{name}={value!r}{whose}: must be an integer in [{least}, {most}]; {advice}")
