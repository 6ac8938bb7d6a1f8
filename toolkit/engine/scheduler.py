"""Planning: what one step of the engine runs. Takes rows from the queue as room and budget allow.

Two ways: `chunks`, one packed cohort of decode tokens and pieces of prompts; `whole`, cohorts of whole
prompts as `cohorts` plans them, then the decode tokens. Both call `enter` for every row that they take, which
says whether the row has work left: what it has to compute is known only once its prefix was looked up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from ..cohorts.plan import STRATEGIES, drain_window, plan_cohorts
from ..cohorts.types import whole as whole_number
from ..forward.spans import Forward
from ..requests import PRIORITIES
from .row_state import Live


@dataclass(frozen=True)
class Work:
    """A cohort to run: `chunks[i]` tokens of `rows[i]`."""

    kind: str
    rows: Sequence[Live]
    chunks: Sequence[int]


def chunks(
    running: Sequence[Live], arrived: Iterator[Live], enter: Callable[[Live], bool], room: int, budget: int
) -> list[Work]:
    """A token of each decoding row, then prompts in chunks by priority, as far as the budget goes.

    Parameters
    ----------
    running : sequence of Live
        Rows in the batch.
    arrived : iterator of Live
        The queue, in the order in which it is served.
    enter : callable
    room : int
        How many more rows the batch can hold.
    budget : int
        Tokens; 0 is no cap.
    """
    taken: dict[Live, int] = {}
    behind: list[Live] = []  # in the batch, but not through their prompt
    for row in running:
        if not row.decoding:
            behind.append(row)
        elif not row.full:
            taken[row] = 1
    left = (budget or sys.maxsize) - len(taken)
    # An exclusive row waits until it is first in the queue, and those behind it wait too.
    new = list(takewhile(lambda row: not row.exclusive, islice(arrived, room if left > 0 else 0)))
    for row in sorted((*behind, *new), key=lambda row: PRIORITIES.index(row.priority)):
        if left <= 0:
            break
        if row in new and not enter(row):
            continue
        taken[row] = min(row.remainder, left)
        left -= taken[row]
    return [Work("packed", list(taken), list(taken.values()))] if taken else []


def whole(
    running: Sequence[Live], arrived: Iterator[Live], enter: Callable[[Live], bool], room: int, budget: int,
    strategy: str, forward: Forward, max_rows: int,
) -> list[Work]:  # fmt: skip
    """Cohorts of whole prompts out of the next window, then a token of each decoding row; see `chunks`."""
    decoding = [row for row in running if row.decoding and not row.full]
    window, _ = drain_window(list(islice(arrived, room)), room, budget) if room > 0 else ([], [])
    new = [row for row in takewhile(lambda row: not row.exclusive, window) if enter(row)]
    rows = {plan.id: row for row in new if (plan := row.plan())}
    planned = plan_cohorts(
        [row.plan() for row in new],
        strategy,
        can_batch=forward.can_batch,
        can_pad=forward.can_pad,
        max_rows=max_rows,
        token_budget=budget,
    )
    works = []
    for cohort in planned:
        members = [rows[plan.id] for plan in cohort.rows]
        works.append(Work(cohort.kind, members, [row.remainder for row in members]))
    if decoding:
        works.append(Work("decode", decoding, [1] * len(decoding)))
    return works


def check(
    planner: str | None, max_rows: int, token_budget: int, prefix_cache: int, pipeline: bool | None
) -> None:
    """Refuse settings that no engine can have."""
    whole_number("max_rows", max_rows, 1, 2**31 - 1, "the rows in the batch at one time")
    whole_number("token_budget", token_budget, 0, 2**31 - 1, "the tokens of a step; 0 is no cap")
    whole_number("prefix_cache", prefix_cache, 0, 2**63 - 1, "bytes of prefixes to keep; 0 keeps none")
    if pipeline not in (None, True, False):
        raise ValueError(f"pipeline={pipeline!r}: must be True, False or None; None is True on a GPU")
    if planner is not None and planner not in STRATEGIES:
        raise ValueError(f"planner={planner!r}: must be one of {', '.join(STRATEGIES)}")


def planner_for(forward: Forward, planner: str | None, prefix_cache: int) -> str:
    """The planner asked for, or the forward's own; what only the packed forward can is refused elsewhere."""
    if forward.name == "packed":
        return planner or "packed"
    needs = f'with forward="{forward.name}": needs forward="packed"'
    if planner == "packed":
        raise ValueError(f'planner="packed" {needs}; use planner="runs" or "by-length"')
    if prefix_cache:
        raise ValueError(f"prefix_cache={prefix_cache} {needs}; leave it at 0")
    return planner or "runs"
