"""Waiting: rows that are not in the batch, by priority, first come first served; some have yet to arrive."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import chain

from ..requests import PRIORITIES
from .row_state import Live


class Waiting:
    """The queue of an engine."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Live]] = {priority: deque() for priority in PRIORITIES}
        self._later: list[tuple[int, int, int, Live]] = []

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values())) + len(self._later)

    def __iter__(self) -> Iterator[Live]:
        return chain(*self._lanes.values(), (row for *_, row in self._later))

    @property
    def next_arrival(self) -> int | None:
        """The step at which the next row arrives, if one is still on its way."""
        return self._later[0][0] if self._later else None

    def add(self, row: Live) -> None:
        """Queue a row; it is there from its request's `arrival` on."""
        heapq.heappush(self._later, (row.request.arrival, row.order, row.choice, row))

    def put_back(self, row: Live) -> None:
        """Put a row at the head of its priority."""
        self._lanes[row.priority].appendleft(row)

    def save(self) -> tuple[dict[str, list[Live]], list[tuple[int, int, int, Live]]]:
        """What `restore` takes."""
        return {priority: list(lane) for priority, lane in self._lanes.items()}, list(self._later)

    def restore(self, saved: tuple[dict[str, list[Live]], list[tuple[int, int, int, Live]]]) -> None:
        """Wait for what was waited for when `saved` was made."""
        lanes, later = saved
        self._lanes = {priority: deque(lane) for priority, lane in lanes.items()}
        self._later = list(later)

    def discard(self, rows: list[Live]) -> None:
        """Take out rows that have just been added, all of them or those of them that were."""
        self._later = [entry for entry in self._later if entry[-1] not in rows]
        heapq.heapify(self._later)

    def arrived(self, step: int) -> Iterator[Live]:
        """Rows that are there at a step, in the order in which they are served."""
        while self._later and self._later[0][0] <= step:
            row = heapq.heappop(self._later)[-1]
            self._lanes[row.priority].append(row)
        return chain(*self._lanes.values())

    def remove(self, row: Live) -> None:
        """Take a row out."""
        lane = self._lanes[row.priority]
        if row in lane:
            lane.remove(row)
        else:
            self._later = [entry for entry in self._later if entry[-1] is not row]
            heapq.heapify(self._later)
