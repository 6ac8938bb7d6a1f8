"""The three ways to sort rows into cohorts, as cuts in a list: `cohorts` says what each is for.

Each yields parts `(kind, start, stop)` of the rows. Only "by-length" moves rows, and hands back the order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any

import numpy as np

from .grouping import least_padding

if TYPE_CHECKING:
    from .cohorts import Row

__all__ = ["Limits", "by_length", "packed", "runs", "whole"]

Part = tuple[str, int, int]


@dataclass(frozen=True)
class Limits:
    """Most rows in a cohort and most tokens it computes; 0 is no limit. One row always fits."""

    max_rows: int = 0
    token_budget: int = 0

    def __post_init__(self) -> None:
        whole("max_rows", self.max_rows, 0, 2**31 - 1, "0 is no limit")
        whole("token_budget", self.token_budget, 0, 2**31 - 1, "0 is no limit")

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


def packed(rows: Sequence[Row], limits: Limits) -> Iterator[Part]:
    """Consecutive rows of any sort, as many as fit."""
    costs = _costs(rows)
    for start, stop in _stretches(rows):
        if rows[start].exclusive:
            yield "sequential", start, stop
        else:
            for a, b in limits.cut(costs, start, stop):
                yield "packed", a, b


def runs(rows: Sequence[Row], limits: Limits, *, can_batch: bool, can_pad: bool) -> Iterator[Part]:
    """Runs of cold rows batched, all else gathered; first cut into windows that fit when padded."""
    costs = _costs(rows)
    for start, stop in _stretches(rows):
        while start < stop:
            end = limits.padded_end(costs, start, stop)
            gathered = i = start  # the sequential cohort so far is gathered:i
            while i < end and can_batch:
                run = i
                while i < end and rows[i].cold:
                    i += 1
                if i - run > 1 and (can_pad or len(set(costs[run:i])) == 1):
                    if gathered < run:
                        yield "sequential", gathered, run
                    yield "batched", run, i
                    gathered = i
                elif i == run:
                    i += 1  # past a row that is not cold
            if gathered < end:
                yield "sequential", gathered, end
            start = end


def by_length(
    rows: Sequence[Row], limits: Limits, *, can_pad: bool, window: int, overhead: int
) -> tuple[list[int], Iterator[Part]]:
    """Within each window, cold rows grouped at least padding, the others one after the other.

    Returns
    -------
    order : list of int, [rows]
        Places in the input, in the order in which they run.
    parts : iterator of (kind, start, stop)
        Cuts in that order.
    """
    if not rows:
        return [], iter(())
    windows = [(at, min(at + window, b)) for a, b in _stretches(rows) for at in range(a, b, window)]
    costs = np.fromiter(map(attrgetter("remainder"), rows), np.int64, len(rows))
    cold = np.fromiter(map(attrgetter("cold"), rows), bool, len(rows))
    cold &= ~np.fromiter(map(attrgetter("exclusive"), rows), bool, len(rows))
    places = np.flatnonzero(cold)
    sizes = np.add.reduceat(cold, [a for a, _ in windows], dtype=np.int64)
    # The place of the first member of each row's cohort: sorted by it, cohorts fall into line, and
    # whoever came first goes first.
    leaders = np.arange(len(rows))
    leaders[places] = places[
        least_padding(
            costs[places],
            sizes,
            max_rows=limits.max_rows,
            token_budget=limits.token_budget,
            can_pad=can_pad,
            overhead=overhead,
        )
    ]
    others = np.flatnonzero(~cold)
    spent = costs[others].tolist()
    counts = np.array([b - a for a, b in windows]) - sizes
    ends = np.cumsum(counts).tolist()
    firsts = [first for a, b in pairwise([0, *ends]) if a < b for first, _ in limits.cut(spent, a, b)]
    leaders[others] = np.repeat(others[firsts], np.diff([*firsts, len(others)]))
    order = np.argsort(leaders, kind="stable")
    starts = np.flatnonzero(np.diff(leaders[order], prepend=-1))
    stops = np.append(starts[1:], len(rows))
    batched = cold[order[starts]] & (stops - starts > 1)
    kinds = np.where(batched, "batched", "sequential")
    return order.tolist(), zip(kinds.tolist(), starts.tolist(), stops.tolist(), strict=True)


def _costs(rows: Sequence[Row]) -> list[int]:
    return list(map(attrgetter("remainder"), rows))


def _stretches(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Where to cut so that every exclusive row is by itself."""
    alone = list(compress(range(len(rows)), map(attrgetter("exclusive"), rows)))
    return list(pairwise(sorted({0, len(rows), *alone, *(i + 1 for i in alone)})))


def whole(name: str, value: Any, least: int, most: int, advice: str, whose: str = "") -> None:
    """Refuse what is not an integer in [least, most]."""
    try:
        good = not isinstance(value, bool) and least <= index(value) <= most
    except TypeError:
        good = False
    if not good:
        raise ValueError(f"{name}={value!r}{whose}: must be an integer in [{least}, {most}]; {advice}")
