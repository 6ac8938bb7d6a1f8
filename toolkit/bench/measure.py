"""Measure: turns, medians and ratios. Times drift from hour to hour: only ratios of one run count."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes
    ----------
    name, work : str
        Which group it belongs to, and what was done.
    ours, peer : float
        Medians, in seconds.
    against : str
        What `peer` is.
    amount, unit : float, str
        Rates are `amount / seconds` in `unit` ("tokens/s"); for "ms" they are `1000 * seconds / amount`.
    at_least : float or None
        Target of the ratio, where there is one.
    speedup : float or None
        The ratio, where it isn't `peer / ours`.
    note : str
    where : dict of str to float
        Shares of the time, where the target was missed; see `ours.profile`.
    """

    name: str
    work: str
    ours: float
    peer: float
    against: str
    amount: float
    unit: str
    at_least: float | None = None
    speedup: float | None = None
    note: str = ""
    where: Mapping[str, float] | None = None

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer."""
        return self.peer / self.ours if self.speedup is None else self.speedup

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without one."""
        return None if self.at_least is None else self.ratio >= self.at_least

    def rate(self, seconds: float) -> float:
        """Seconds, in the figure's unit."""
        return 1000 * seconds / self.amount if self.unit.startswith("ms") else self.amount / seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        made = asdict(self)
        del made["speedup"]
        made["where"] = dict(self.where) if self.where else None
        return made | {"kind": "speed", "ratio": self.ratio, "met": self.met,
                       "ours_rate": self.rate(self.ours), "peer_rate": self.rate(self.peer)}  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One comparison of bits or tokens: `same` of `compared` agree.

    Attributes
    ----------
    wanted : bool
        Whether a difference breaks a promise; False for a control, which ought to differ.
    """

    name: str
    work: str
    compared: int
    same: int
    wanted: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it is as promised; None where nothing was."""
        return self.same == self.compared if self.wanted else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"kind": "bits", "met": self.met}


@dataclass(frozen=True)
class Skipped:
    """What was not run, and why. `failed` if it was tried."""

    name: str
    why: str
    failed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"kind": "skipped"}


Line = Figure | Check | Skipped
Side = TypeVar("Side", bound=Hashable)


class Clock:
    """Wall time since the start, and how much is left of a limit."""

    def __init__(self, limit: float = math.inf):
        self.limit, self.start = limit, time.perf_counter()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        return self.limit - self.spent


def medians(sides: Mapping[Side, Callable[[], float]], rounds: int, warm: int = 1) -> dict[Side, float]:
    """Median seconds of each side. They take turns, so that a machine that slows down slows all of them.

    Parameters
    ----------
    sides : mapping of a name to a function
        Does the work once and returns the seconds that it took.
    rounds : int
        Turns that count.
    warm : int
        Turns before those.
    """
    times: dict[Side, list[float]] = {name: [] for name in sides}
    for turn in range(warm + rounds):
        for name, side in sides.items():
            taken = side()
            if turn >= warm:
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """The same work, returning the seconds it takes."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run
