"""Drift: how wrong every logit may be before a drawn token could change.

Two things can change it: an id that survives the filters, or would, overtakes the drawn one's perturbed
score; or a filter drops the drawn one. For an error `d` in the sup norm, `filters.surviving` bounds the
surviving run; the drawn id must stay inside whichever run comes of it, and every id that could be inside
must be more than 2 d / temperature behind. `max_drift` searches for the largest `d` that passes. It is a
lower bound: where the runner-up is what limits, it is the exact one, margin * temperature / 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .filters import Settings, reaching, surviving
from .ranking import Lists, at_places, namespace
from .typical import Typical, withstands

# Scores near the top are below 32 in size, so their float32 rounding stays below this.
ROUNDING = 8e-6
_HEAD = 256
_WINDOW = 2048
_COARSE = (4.0 ** -np.arange(12)).astype(np.float32)
_FINE = (4.0 ** (np.arange(12) / 12)).astype(np.float32)
_ONCE = (4.0 ** -(np.arange(48) / 4)).astype(np.float32)
_MOST = 25.0
_LOUDEST = 22.9


def from_margin(margin: Any, temperature: Any) -> Any:
    """The bound that the runner-up sets: where no filter is on, the whole answer."""
    xp = namespace(margin)
    return xp.maximum(margin - ROUNDING, 0) * temperature / 2


def max_drift(
    lists: Lists, settings: Settings, stages: tuple[str, ...], scores: Any, drawn: Any, margin: Any,
    last: Any, typical: Typical | None,
) -> Any:  # fmt: skip
    """Lower bound on the logit error that could change each row's token.

    Parameters
    ----------
    lists : Lists
    settings, stages
        The filters that made the survivors of these lists.
    scores : float32, [rows, count]
        Perturbed scores of all listed ids, also of those that did not survive.
    drawn : int32, [rows, 1]
        Position of the drawn id in its list.
    margin : float32, [rows, 1]
        Gap to the best other survivor; infinite if there is none.
    last : int32, [rows, 1]
        Where the survivors end.

    Returns
    -------
    float32, [rows, 1]
    """
    xp = namespace(scores)
    check = _Check(lists, settings, stages, scores, drawn, margin, last, typical)
    # Beyond this, nothing is gained and exponentials overflow.
    cap = _MOST * xp.minimum(1 / settings.inverse, 1)
    most = xp.minimum(from_margin(margin, 1 / settings.inverse), cap).astype(xp.float32)
    if xp is not np:
        # One round on a finer grid: on a GPU the number of operations counts, not their size.
        errors = most * xp.array(_ONCE)[None]
        return _largest(xp, errors, check(errors))
    coarse = most * _COARSE[None]
    passed = _largest(xp, coarse, check(coarse))
    fine = xp.minimum(passed * _FINE[None], most)
    return xp.maximum(passed, _largest(xp, fine, check(fine)))


def _largest(xp: Any, errors: Any, good: Any) -> Any:
    return xp.where(good, errors, 0).max(axis=-1, keepdims=True)


class _Check:
    """Whether a row's token stands any logit error up to some `error`."""

    def __init__(self, lists, settings, stages, scores, drawn, margin, last, typical):
        xp, count = namespace(scores), scores.shape[-1]
        self.xp, self.lists, self.settings, self.stages, self.typical = xp, lists, settings, stages, typical
        self.score = at_places(scores, drawn)
        self.z = at_places(lists.z, drawn)
        # Among the survivors the margin identifies the best; of the excluded, those that come next are looked
        # at.
        self.runner_up = self.score - margin
        self.last = last
        window = xp.minimum(last + xp.arange(min(_WINDOW, count), dtype=xp.int32)[None], count - 1)
        excluded = xp.where(
            (window >= last) & (at_places(lists.z, window) > -np.inf), at_places(scores, window), -np.inf
        )
        self.peak = _running_max(xp, excluded)
        self.xtc = "xtc" in settings.columns
        if self.xtc:
            # XTC removes the head of the list: look there place by place, further down by running maximum.
            place = xp.arange(count, dtype=xp.int32)[None]
            others = xp.where((place == drawn) | (lists.z == -np.inf), -np.inf, scores)
            self.head = others[:, None, :_HEAD]
            self.tail = _running_max(xp, xp.where(place < _HEAD, -np.inf, others))
        beyond = lists.z[:, :1] * 0 - np.inf if lists.complete else lists.z[:, -1:]
        self.ranked = xp.concatenate([lists.z, beyond], axis=-1)

    def __call__(self, error: Any) -> Any:
        xp, count = self.xp, self.lists.z.shape[-1]
        run = surviving(self.lists, self.settings, error, self.stages)
        # Any two logits may close in on each other by twice the error (and by their own rounding).
        reach = 2 * error * (1 + 1e-6) + xp.abs(self.z) * 2.0**-22
        stays = self._z(run.last[0]) < self.z - reach
        stays = stays & ((run.first[1] == 0) | (self._z(xp.maximum(run.first[1] - 1, 0)) > self.z + reach))
        low = self._z(xp.minimum(run.last[1], count) - 1)
        edge = low - 2 * error * (1 + 1e-6) - xp.abs(low) * 2.0**-22
        stop = reaching(self.lists.z, edge)
        seen = self.peak.shape[-1]
        beyond = xp.where(
            stop > self.last, at_places(self.peak, xp.clip(stop - self.last - 1, 0, seen - 1)), -np.inf
        )
        best = xp.maximum(self.runner_up, beyond)
        if self.xtc:
            best = self._between(run.first[0], stop, reach)
        ahead = (self.score - best - ROUNDING) / self.settings.inverse >= 2 * error * (1 - 1e-6)
        good = run.known & stays & ahead
        if not self.xtc:
            good = good & (stop - self.last <= seen)
        if not self.lists.complete:
            # Ids beyond the list are no better than its last, with the largest noise there is.
            loudest = self.lists.z[:, -1:] * self.settings.inverse + _LOUDEST
            good = good & ((stop < count) | ((self.score - loudest) / self.settings.inverse >= 2 * error))
        if self.typical is not None:
            good = good & withstands(self.typical, error)
        return good

    def _z(self, place: Any) -> Any:
        return at_places(self.ranked, self.xp.minimum(place, self.lists.z.shape[-1]))

    def _between(self, first: Any, stop: Any, reach: Any) -> Any:
        xp = self.xp
        start = reaching(self.lists.z, self._z(first) + reach)
        place = xp.arange(self.head.shape[-1], dtype=xp.int32)[None, None]
        inside = (place >= start[:, :, None]) & (place < stop[:, :, None])
        head = xp.where(inside, self.head, -np.inf).max(axis=-1)
        return xp.maximum(head, at_places(self.tail, xp.maximum(stop - 1, 0)))


def _running_max(xp: Any, a: Any) -> Any:
    return np.maximum.accumulate(a, axis=-1) if xp is np else xp.cummax(a, axis=-1)
