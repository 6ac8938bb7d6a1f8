"""The three ways to sort rows into cohorts, as cuts in a list: `plan` says what each is for.

Each yields parts `(kind, start, stop)` of the rows. Only "by-length" moves rows, and hands back the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, pairwise
from operator import attrgetter

import numpy as np

from .padding import least_padding
from .types import Limits, Part, Row

__all__ = ["by_length", "packed", "runs"]


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
