"""Filters: which candidates of a ranked row survive, and which would if every logit were a little off.

Each filter but typical-p (see `typical`) keeps a run of the ranked list, so a row's survivors are positions
[first, last). With an error of at most `d` in every logit, the n-th largest logit moves by at most `d` as
well, whichever id holds it; so the ends of the run move within bounds that the same formulas give.
`surviving` computes those bounds for several `d` at once: at d = 0 they are the filter itself, otherwise
what `drift_bound` needs.

Definitions, in nats on logits `z` less the row's maximum, with p the softmax over what reached the filter:

top_n_sigma  keeps z >= z_max - n * (standard deviation of the allowed logits)  Tang et al. 2024
top_k        keeps the k most probable ids, exactly k also in a tie             Fan et al. 2018
top_p        keeps an id if the mass strictly before it is below top_p          Holtzman et al. 2020
min_p        keeps p >= min_p * p_max                                           Nguyen et al. 2024
xtc          where the row's gate is open, drops every id that reaches the threshold except the least
             probable of them                                                   p-e-w 2024

"Before" is the list's order: more probable first, then the lower id. A comparison that float32 cannot
settle (within 1e-6) counts as reached: top_p = .8 keeps two of (.5, .3, .1, .1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .ranking import Lists, at_places, namespace

TIE = 1e-6


@dataclass(frozen=True, eq=False)
class Settings:
    """Parameters of some rows as columns [rows, 1], in NumPy or MLX.

    `columns` has a filter only if some row uses it. Off is infinity for top_n_sigma, 2^30 for top_k, 2 for
    top_p and for XTC's threshold (also where the gate is shut), -infinity for min_p, which is its logarithm.
    """

    order: tuple[str, ...]
    inverse: Any  # 1 / temperature
    columns: dict[str, Any]

    def take(self, rows: np.ndarray) -> Settings:
        """Some rows of NumPy settings."""
        return Settings(self.order, self.inverse[rows], {k: v[rows] for k, v in self.columns.items()})


@dataclass(frozen=True, eq=False)
class Run:
    """Bounds [rows, errors] of the surviving positions [first, last), for each error; equal at error 0.

    In a list of `count` ids, last = count + 1 is somewhere beyond the list and count + 2 the whole row.
    `known` is False where the list is too short, or the filters interact in a way that is not followed.
    """

    first: tuple[Any, Any]
    last: tuple[Any, Any]
    known: Any


def surviving(lists: Lists, settings: Settings, error: Any, stages: tuple[str, ...]) -> Run:
    """Bounds of the surviving run after `stages` for logit errors of at most `error` [rows, errors]."""
    xp, count = namespace(lists.z), lists.z.shape[-1]
    zero = xp.zeros(error.shape, dtype=xp.int32)
    alive = (lists.z > -np.inf).sum(axis=-1, keepdims=True).astype(xp.int32)
    if not lists.complete:
        alive = xp.where(alive == count, count + 2, alive)
    last = zero + alive
    run = Run((zero, zero), (last, last), error >= 0)
    hot = False
    for name in stages:
        if name == "temperature":
            hot = True
        elif name in settings.columns:
            run = _STAGES[name](At(lists, settings, error, hot), run)
    return run


@dataclass(frozen=True)
class At:
    """What a filter needs beside the run that reached it."""

    lists: Lists
    settings: Settings
    error: Any
    hot: bool  # temperature was applied before this filter

    @cached_property
    def beta(self) -> Any:
        return self.settings.inverse if self.hot else self.settings.inverse * 0 + 1

    @cached_property
    def tilt(self) -> Any:
        # Raising some masses and lowering the rest by the error changes their odds by this factor at most.
        xp = namespace(self.error)
        return xp.exp(xp.minimum(2 * self.error * self.beta, 60.0))

    @cached_property
    def slack(self) -> Any:
        # Rounding of sums, relative: float64 prefixes of float32 weights on the host, float32 elsewhere.
        return (self.error > 0) * (2e-6 if namespace(self.error) is np else 1e-5)

    @cached_property
    def before(self) -> Any:
        return self.lists.masses(self.beta if self.hot else None)[0]

    def below(self, last: Any) -> Any:
        """Mass of the first `last` positions."""
        xp, count = namespace(last), self.lists.z.shape[-1]
        before, total = self.lists.masses(self.beta if self.hot else None)
        return xp.where(last > count, total, at_places(before, xp.minimum(last, count)))

    def shorten(self, run: Run, off: Any, low: Any, high: Any) -> Run:
        """The run with `last` no more than these counts, where the filter is on."""
        xp, count = namespace(low), self.lists.z.shape[-1]
        if not self.lists.complete:
            low, high = (xp.where(n >= count, count + 1, n) for n in (low, high))
        last = tuple(
            xp.where(off, old, xp.minimum(old, n)) for old, n in zip(run.last, (low, high), strict=True)
        )
        return replace(run, last=last)

    def settled(self, run: Run, off: Any, mass: bool = True) -> Run:
        """A filter after XTC reads where the run starts, and one that normalises, where it ends."""
        known = run.first[0] == run.first[1]
        if mass:
            open_end = self.lists.z.shape[-1] + 1
            known = known & (run.last[0] != open_end) & (run.last[1] != open_end)
        return replace(run, known=run.known & (off | known))


def _top_n_sigma(at: At, run: Run) -> Run:
    n, z = at.settings.columns["top_n_sigma"], at.lists.z
    xp = namespace(z)
    off = n == np.inf
    run = at.settled(run, off, mass=False)
    floor = best(z, run) - xp.where(off, 0, n) * at.lists.deviation(n < np.inf)
    # The deviation of the logits moves by at most the error, as their maximum does.
    slack = at.error * (2 + n)
    low = xp.maximum(reaching(z, floor + slack), run.first[0] + 1)
    return at.shorten(run, off, low, reaching(z, floor - slack))


def _top_k(at: At, run: Run) -> Run:
    k = at.settings.columns["top_k"]
    off = k >= at.lists.shifted.shape[-1]
    run = at.settled(run, off, mass=False)
    return at.shorten(run, off, run.first[0] + k, run.first[0] + k)


def _top_p(at: At, run: Run) -> Run:
    p = at.settings.columns["top_p"]
    xp, off = namespace(p), p > 1
    run = at.settled(run, off)
    p = xp.where(off, 0.5, p * (1 - TIE))
    start = at_places(at.before, run.first[0])
    low = p / (p + (1 - p) * at.tilt) * (1 - at.slack)
    high = p / (p + (1 - p) / at.tilt) * (1 + at.slack)
    low, high = (
        _below(at.before[:, :-1], start + share * (at.below(last) - start))
        for share, last in zip((low, high), run.last, strict=True)
    )
    # One id stays, also where top_p or all that mass is too small for float32.
    low, high = (xp.maximum(n, run.first[0] + 1) for n in (low, high))
    return at.shorten(run, off, low, high)


def _min_p(at: At, run: Run) -> Run:
    log_min_p, z = at.settings.columns["min_p"], at.lists.z
    xp, off = namespace(z), log_min_p == -np.inf
    run = at.settled(run, off, mass=False)
    floor = best(z, run) + (log_min_p - TIE) / at.beta
    low = xp.maximum(reaching(z, floor + 2 * at.error), run.first[0] + 1)
    return at.shorten(run, off, low, reaching(z, floor - 2 * at.error))


def best(z: Any, run: Run) -> Any:
    """The largest logit that survives: [rows, errors]."""
    xp = namespace(z)
    return at_places(z, xp.minimum(run.first[0], z.shape[-1] - 1))


def _xtc(at: At, run: Run) -> Run:
    threshold = at.settings.columns["xtc"]
    xp, off = namespace(threshold), threshold > 1
    run = at.settled(run, off)
    start = at_places(at.before, run.first[0])
    threshold = xp.where(off, 0.5, xp.maximum(threshold * (1 - TIE), 1e-30))
    # p >= threshold, with the rest of the mass moving against the id or with it.
    low = (
        threshold / (threshold + (1 - threshold) / at.tilt) * (1 + at.slack) * (at.below(run.last[1]) - start)
    )
    high = (
        threshold / (threshold + (1 - threshold) * at.tilt) * (1 - at.slack) * (at.below(run.last[0]) - start)
    )
    first = tuple(
        xp.where(
            off, old, xp.maximum(xp.minimum(reaching(at.lists.z, xp.log(mass) / at.beta), last) - 1, old)
        )
        for mass, last, old in zip((low, high), run.last, run.first, strict=True)
    )
    return replace(run, first=first)


_STAGES = {"top_n_sigma": _top_n_sigma, "top_k": _top_k, "top_p": _top_p, "min_p": _min_p, "xtc": _xtc}


def reaching(descending: Any, floor: Any) -> Any:
    """How many of each descending row [rows, n] are at least `floor` [rows, m]: int32 [rows, m]."""
    return leading(descending, floor, lambda value, bound: value >= bound)


def _below(ascending: Any, ceiling: Any) -> Any:
    return leading(ascending, ceiling, lambda value, bound: value < bound)


def leading(rows: Any, bound: Any, holds: Any) -> Any:
    """How many leading entries of each row [rows, n] hold against each bound [rows, m]: int32 [rows, m].

    What holds for an entry must hold for all before it.
    """
    xp, count = namespace(rows), rows.shape[-1]
    size = count * bound.shape[-1]
    # On the host both ways give the same counts; elsewhere the choice must not depend on the siblings.
    if size * len(rows) <= 1 << 17 if xp is np else size <= 2048:
        return holds(rows[:, None, :], bound[:, :, None]).sum(axis=-1).astype(xp.int32)
    low = xp.zeros(bound.shape, dtype=xp.int32)
    high = low + count
    for _ in range(count.bit_length()):
        middle = (low + high) // 2
        here = holds(at_places(rows, xp.minimum(middle, count - 1)), bound) & (low < high)
        low, high = xp.where(here, middle + 1, low), xp.where(here, high, middle)
    return low
