"""Which rows run together: drain a window of the queue, sort rows into cohorts. Pure functions, no MLX.

The engine makes a `Row` of each request, drains a window, and runs the cohorts it gets here in order.
Nothing about sampling is looked at: a seed or a filter never changes a cohort. The one exception comes in
from outside as `exclusive`, which the `isolate` policy sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from .grouping import group_by_length
from .requests import PRIORITIES

__all__ = ["OVERHEAD", "STRATEGIES", "WINDOW", "Cohort", "Row", "drain_window", "plan_cohorts"]

STRATEGIES = ("packed", "by-length", "runs")
WINDOW = 64  # requests that "by-length" may reorder among themselves
OVERHEAD = 64  # tokens that one more padded forward costs; measured on CPUs about 10, on an H200 about 2,000


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
    """

    id: str
    length: int
    cached: int = 0
    decode: bool = False
    priority: str = "normal"
    exclusive: bool = False

    def __post_init__(self) -> None:
        whose = f' for row "{self.id}"' if self.id else ""
        if self.length < 1:
            raise ValueError(f"length={self.length}{whose}: must be at least 1")
        if not 0 <= self.cached < self.length:
            raise ValueError(f"cached={self.cached}{whose}: must be in [0, {self.length}), under its length")
        if self.priority not in PRIORITIES:
            raise ValueError(f'priority={self.priority!r}{whose}: must be "high", "normal" or "low"')

    @property
    def cold(self) -> bool:
        """Whether nothing of it has been computed."""
        return not self.cached and not self.decode

    @property
    def remainder(self) -> int:
        """Tokens that its next span computes."""
        return 1 if self.decode else self.length - self.cached


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


_R = TypeVar("_R", bound=Any)


def drain_window(queue: Iterable[_R], max_rows: int = 0, token_budget: int = 0) -> tuple[list[_R], list[_R]]:
    """Take the next window off a queue.

    Rows are taken by priority, high, normal, low, first come first served within one, and the window ends
    at the first that does not fit, even if a later one would: a long prompt is not overtaken for ever.

    Parameters
    ----------
    queue : iterable of Row
        Or of anything with a `remainder` and a `priority`.
    max_rows : int
        Most rows; 0 is no limit.
    token_budget : int
        Most padded tokens, rows x longest remainder; 0 is no limit. The first row always fits.

    Returns
    -------
    taken, rest : lists
        `taken` in the order in which they were taken, `rest` in the order of the queue.
    """
    limits = _Limits(max_rows, token_budget)
    queue = list(queue)
    lanes = [[i for i, row in enumerate(queue) if row.priority == lane] for lane in PRIORITIES]
    order = [i for lane in lanes for i in lane]
    stop = limits.padded_end([queue[i].remainder for i in order], 0, len(order))
    out = set(order[:stop])
    return [queue[i] for i in order[:stop]], [row for i, row in enumerate(queue) if i not in out]


def plan_cohorts(
    rows: Iterable[Row],
    strategy: str = "packed",
    *,
    can_batch: bool = True,
    can_pad: bool = True,
    max_rows: int = 0,
    token_budget: int = 0,
    window: int = WINDOW,
    overhead: int = OVERHEAD,
) -> list[Cohort]:
    """Sort rows into cohorts.

    An exclusive row is a sequential cohort of its own, in place. For the rows between:

    "packed"
        Consecutive rows, cold, adopted and decoding alike, as many as row cap and budget allow.
    "by-length"
        For the padded forward: within each `window` consecutive rows, the cold ones are grouped so that
        padded tokens, plus `overhead` for each group, are least; see `grouping`. The others run one after
        the other. Nobody falls `window` places behind.
    "runs"
        The reference, as other engines do it. A maximal contiguous run of cold rows is batched if it has
        two or more rows and may be padded, or needs no padding; all else gathers, up to the next batched
        run, in a sequential cohort. Limits first cut the rows into windows by the rule of `drain_window`.

    Parameters
    ----------
    rows : iterable of Row
    strategy : {"packed", "by-length", "runs"}
    can_batch : bool
        False: the model takes one row at a time, so every cohort is sequential.
    can_pad : bool
        False: only rows of equal length are batched. Packing never pads.
    max_rows : int
        Most rows in a cohort; 0 is no limit.
    token_budget : int
        Most tokens that a cohort of two rows or more computes: padded area if batched; 0 is no limit.
    window : int
        How many consecutive rows "by-length" may reorder.
    overhead : int
        What one more padded forward costs, in tokens; at 0 only equal lengths are worth a group.

    Returns
    -------
    list of Cohort
        Every row once. Except under "by-length", the cohorts' rows, joined, are the input.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: must be one of {', '.join(STRATEGIES)}")
    if not 1 <= window <= _MOST_WINDOW:
        raise ValueError(f"window={window}: must be in [1, {_MOST_WINDOW}]; the rows that may be reordered")
    if overhead < 0:
        raise ValueError(f"overhead={overhead}: must be at least 0; the tokens that one more forward costs")
    limits = _Limits(max_rows, token_budget)
    rows = list(rows)
    costs = [row.remainder for row in rows]
    parts: list[_Part] = []
    if strategy == "by-length" and can_batch:
        parts = _by_length(rows, costs, limits, can_pad, window, overhead)
    else:
        for start, stop in _stretches(rows):
            if rows[start].exclusive:
                parts.append(("sequential", range(start, stop)))
            elif strategy == "packed" and can_batch:
                parts += (("packed", piece) for piece in limits.cut(range(start, stop), costs))
            else:
                parts += _runs(rows, costs, start, stop, limits, can_batch, can_pad)
    return [
        Cohort(tuple(rows[p.start : p.stop] if isinstance(p, range) else [rows[i] for i in p]), kind, index)
        for index, (kind, p) in enumerate(parts)
    ]


_MOST_WINDOW = 4_096
_Part = tuple[str, Sequence[int]]  # a cohort's kind and its rows' places in the input


@dataclass(frozen=True)
class _Limits:
    max_rows: int
    token_budget: int

    def __post_init__(self) -> None:
        for name in ("max_rows", "token_budget"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0; 0 is no limit")

    def padded_end(self, costs: Sequence[int], start: int, stop: int) -> int:
        """End of the window that begins at `start`, counting padded area."""
        if self.max_rows:
            stop = min(stop, start + self.max_rows)
        if not self.token_budget:
            return stop
        longest = costs[start] if start < stop else 0
        for i in range(start + 1, stop):
            longest = max(longest, costs[i])
            if (i - start + 1) * longest > self.token_budget:
                return i
        return stop

    def cut(self, places: Sequence[int], costs: Sequence[int]) -> list[Sequence[int]]:
        """Consecutive pieces, each as long as row cap and sum of costs allow."""
        if not self.max_rows and not self.token_budget:
            return [places] if places else []
        most_rows, budget = self.max_rows or len(places), self.token_budget or sum(costs)
        pieces: list[Sequence[int]] = []
        start = total = 0
        for n, place in enumerate(places):
            total += costs[place]
            if n > start and (total > budget or n - start == most_rows):
                pieces.append(places[start:n])
                start, total = n, costs[place]
        if start < len(places):
            pieces.append(places[start:])
        return pieces


def _stretches(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Where to cut so that every exclusive row is by itself."""
    alone = [i for i, row in enumerate(rows) if row.exclusive]
    cuts = sorted({0, len(rows), *alone, *(i + 1 for i in alone)})
    return list(pairwise(cuts))


def _runs(
    rows: Sequence[Row],
    costs: Sequence[int],
    start: int,
    stop: int,
    limits: _Limits,
    can_batch: bool,
    can_pad: bool,
) -> Iterator[_Part]:
    while start < stop:
        end = limits.padded_end(costs, start, stop)
        gathered = i = start  # the sequential cohort so far is rows[gathered:i]
        while i < end and can_batch:
            run = i
            while i < end and not rows[i].cached and not rows[i].decode:
                i += 1
            if i - run > 1 and (can_pad or len({row.length for row in rows[run:i]}) == 1):
                if gathered < run:
                    yield "sequential", range(gathered, run)
                yield "batched", range(run, i)
                gathered = i
            else:
                i += i == run  # past a row that is not cold
        if gathered < end:
            yield "sequential", range(gathered, end)
        start = end


def _by_length(
    rows: Sequence[Row], costs: Sequence[int], limits: _Limits, can_pad: bool, window: int, overhead: int
) -> list[_Part]:
    blocks = [
        range(at, min(at + window, stop))
        for start, stop in _stretches(rows)
        for at in range(start, stop, window)
    ]
    cold = [[i for i in block if rows[i].cold and not rows[i].exclusive] for block in blocks]
    groupings = group_by_length(
        [[costs[i] for i in places] for places in cold],
        max_rows=limits.max_rows,
        token_budget=limits.token_budget,
        can_pad=can_pad,
        overhead=overhead,
    )
    parts: list[_Part] = []
    for block, places, groups in zip(blocks, cold, groupings, strict=True):
        mine: list[_Part] = [
            ("batched" if len(group) > 1 else "sequential", [places[k] for k in group]) for group in groups
        ]
        if len(places) < len(block):
            out = set(places)
            mine += (("sequential", piece) for piece in limits.cut([i for i in block if i not in out], costs))
            # Whoever came first goes first.
            mine.sort(key=lambda part: part[1][0])
        parts += mine
    return parts
