"""Which rows run together: drain a window of the queue, sort rows into cohorts. Pure functions, no MLX.

The engine makes a `Row` of each request, drains a window, and runs the cohorts it gets here in order.
Nothing about sampling is looked at: a seed or a filter never changes a cohort. The one exception comes in
from outside as `exclusive`, which the `isolate` policy sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from ..fields import INT32
from ..requests import PRIORITIES
from . import strategies
from .report import Comparison, Plan
from .types import Cohort, Limits, Row, whole

__all__ = [
    "OVERHEAD",
    "STRATEGIES",
    "WINDOW",
    "compare",
    "drain_window",
    "plan",
    "plan_cohorts",
]

STRATEGIES = ("packed", "by-length", "runs")
WINDOW = 64  # requests that "by-length" may reorder among themselves
OVERHEAD = 64  # tokens that one more padded forward costs: about 10 on a CPU, 2,000 on a large GPU

_MOST_WINDOW = 1_024  # which keeps the sums in `padding` within 63 bits


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
    limits = Limits(max_rows, token_budget)
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
        padded tokens, plus `overhead` for each group, are least; see `padding`. The others run one after
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
    given = plan(
        rows,
        strategy,
        can_batch=can_batch,
        can_pad=can_pad,
        max_rows=max_rows,
        token_budget=token_budget,
        window=window,
        overhead=overhead,
    )
    return list(given.cohorts)


def plan(
    rows: Iterable[Row],
    strategy: str = "packed",
    *,
    can_batch: bool = True,
    can_pad: bool = True,
    max_rows: int = 0,
    token_budget: int = 0,
    window: int = WINDOW,
    overhead: int = OVERHEAD,
) -> Plan:
    """As `plan_cohorts`, with totals and a table."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: must be one of {', '.join(STRATEGIES)}")
    whole("window", window, 1, _MOST_WINDOW, "the rows that may be reordered among themselves")
    whole("overhead", overhead, 0, INT32, "the tokens that one more padded forward costs")
    limits = Limits(max_rows, token_budget)
    rows = tuple(rows)
    order: Sequence[int] = range(len(rows))
    parts: Iterable[tuple[str, int, int]]
    if strategy == "runs" or not can_batch:
        parts = strategies.runs(rows, limits, can_batch=can_batch, can_pad=can_pad)
    elif strategy == "packed":
        parts = strategies.packed(rows, limits)
    else:
        order, parts = strategies.by_length(rows, limits, can_pad=can_pad, window=window, overhead=overhead)
        rows = tuple([rows[i] for i in order])
    cohorts = tuple([Cohort(rows[a:b], kind, index) for index, (kind, a, b) in enumerate(parts)])
    return Plan(strategy, cohorts, tuple(order))


def compare(rows: Iterable[Row], names: Sequence[str] = STRATEGIES, **how: Any) -> Comparison:
    """Plan the same rows under each of the strategies.

    Parameters
    ----------
    rows : iterable of Row
    names : sequence of str
        Strategies to compare.
    **how
        As for `plan_cohorts`: can_batch, can_pad, max_rows, token_budget, window, overhead.
    """
    rows = list(rows)
    return Comparison(tuple(plan(rows, name, **how) for name in names))
