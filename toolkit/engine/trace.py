"""Trace: what an engine did, in order. One `Event` for each seeding, forward, draw, arrival and departure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..chart_lookup import chart_function

if TYPE_CHECKING:
    import pandas as pd

LIMIT = 100_000


@dataclass(frozen=True)
class Event:
    """One thing an engine did.

    Attributes
    ----------
    index, step : int
        Place in the trace; engine step.
    phase : {"admit", "begin_prefill", "forward", "finish_prefill", "decode", "leave"}
    event : {"admit", "seed", "forward", "draw", "finish", "cancel", "preempt", "export", "import"}
    row, choice : str, int
        The request's id and choice; of a forward, all of its rows, joined by spaces.
    cohort, cohort_kind : int or None, str
    seed : int or None
    position, token : int or None
        Of a draw: the logical position of the token drawn, and the token.
    text : str
        The token's.
    shape : str
        Of a forward: how many spans and tokens, as "3 spans, 40 tokens".
    state : str
        The global generator after the event, where the policy uses it.
    """

    index: int = 0
    step: int = 0
    phase: str = ""
    event: str = ""
    row: str = ""
    choice: int = 0
    cohort: int | None = None
    cohort_kind: str = ""
    seed: int | None = None
    position: int | None = None
    token: int | None = None
    text: str = ""
    shape: str = ""
    state: str = ""


class Trace:
    """The newest events of an engine, oldest first.

    Parameters
    ----------
    text : callable
        A token's text, asked for when an event is read.
    limit : int
        Events to keep.
    """

    def __init__(self, text: Callable[[int], str] = str, limit: int = LIMIT):
        self._text = text
        # Plain tuples until they are read: a step adds one for every row.
        self._events: deque[tuple[Any, ...]] = deque(maxlen=limit)
        self._count = 0

    def add(
        self,
        step: int,
        phase: str,
        event: str,
        row: str,
        choice: int = 0,
        cohort: int | None = None,
        cohort_kind: str = "",
        seed: int | None = None,
        position: int | None = None,
        token: int | None = None,
        shape: str = "",
        state: str = "",
    ) -> None:
        """Append an event."""
        self._events.append(
            (
                *(self._count, step, phase, event, row, choice, cohort, cohort_kind),
                *(seed, position, token, shape, state),
            )
        )
        self._count += 1

    @property
    def count(self) -> int:
        """Events so far, those dropped included."""
        return self._count

    def forget(self, count: int) -> None:
        """Take back all events but the first `count`."""
        while self._events and self._events[-1][0] >= count:
            self._events.pop()
        self._count = count

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return map(self._event, tuple(self._events))

    def __getitem__(self, index: int) -> Event:
        return self._event(self._events[index])

    def _event(self, values: tuple[Any, ...]) -> Event:
        text = "" if values[10] is None else self._text(values[10])
        made: list[Any] = [*values[:11], text, *values[11:]]
        return Event(*made)

    def __repr__(self) -> str:
        dropped = self._count - len(self._events)
        return f"Trace({len(self._events)} events" + (f", {dropped} older ones dropped)" if dropped else ")")

    def to_frame(self) -> pd.DataFrame:
        """One row an event; the columns are `Event`'s fields. Counts and ids are nullable integers."""
        import pandas as pd

        # Seeds reach 2^64 in size: pandas would make floats of them beside a missing one.
        kinds = {"cohort": "Int64", "position": "Int64", "token": "Int64", "seed": object}
        names = [f.name for f in fields(Event)]
        events = list(self)
        columns = {name: [getattr(event, name) for event in events] for name in names}
        return pd.DataFrame({name: pd.Series(columns[name], dtype=kinds.get(name)) for name in names})

    def chart(self) -> Any:
        """The timeline: rows down, events along."""
        return chart_function("timeline")(self.to_frame())

    def _repr_html_(self) -> str:
        return str(self.to_frame()._repr_html_())
