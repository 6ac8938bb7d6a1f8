"""Typical-p: keep the ids whose surprise is nearest the entropy. The one filter that keeps no run of a list.

Ids are taken by |-log p - entropy|, least first (in a tie, the more probable), while the mass before is
below typical_p; so the most probable id may go. What is kept is packed to the front of the list, and the
filters after it see a shorter row. See Meister et al., "Locally typical sampling", TACL 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .filters import TIE, At, Run, Settings, best, leading, surviving
from .ranking import Lists, at_places, namespace


@dataclass(frozen=True, eq=False)
class Typical:
    """The kept ids as lists, and what determines how much error the choice tolerates.

    Attributes
    ----------
    lists : Lists
        Kept ids in ranked order, then the others at -inf.
    off_by : float32, [rows, count]
        |-log p - entropy|, ascending; infinite for ids that did not reach the filter.
    mass, least : float32, [rows, count + 1] and [rows, count]
        Exclusive prefix of p in that order; the least p at or after a place, among the kept.
    kept : int32, [rows, 1]
    """

    lists: Lists
    off_by: Any
    mass: Any
    least: Any
    kept: Any
    before: Lists
    run: Run
    at: At
    stages: tuple[str, ...]


def typical(lists: Lists, settings: Settings, stages: tuple[str, ...]) -> Typical:
    """Apply `stages`, then typical-p, to complete lists."""
    xp, count = namespace(lists.z), lists.z.shape[-1]
    at = At(lists, settings, settings.inverse * 0, "temperature" in stages)
    run = surviving(lists, settings, at.error, stages)
    place = xp.arange(count, dtype=xp.int32)[None]
    reached = (place >= run.first[0]) & (place < run.last[0])
    # Less the best that reached it, which may be far below the best of all.
    energy = xp.where(reached, (lists.z - best(lists.z, run)) * at.beta, -np.inf)
    p = xp.exp(energy)
    whole = p.sum(axis=-1, keepdims=True)
    p = p / whole
    surprise = xp.where(reached, xp.log(whole) - energy, 0)
    off_by = xp.abs(surprise - (p * surprise).sum(axis=-1, keepdims=True))
    off_by = xp.where(reached, off_by, np.inf)
    order = _argsort(xp, off_by)
    off_by, p = (at_places(a, order) for a in (off_by, p))
    mass = xp.concatenate([p[:, :1] * 0, xp.cumsum(p, axis=-1)], axis=-1)
    bound = settings.columns["typical_p"] * (1 - TIE)
    # One id stays, also where typical_p is too small for float32.
    kept = xp.maximum(leading(mass[:, :-1], bound, lambda m, b: m < b), 1)
    kept = xp.minimum(kept, run.last[0] - run.first[0])
    # Positions of the kept in ranked order, then the rest.
    back = _argsort(xp, order)
    front = _argsort(xp, xp.where(back < kept, place, place + count))
    z = xp.where(place < kept, at_places(lists.z, front), -np.inf)
    ids = at_places(lists.ids, front)
    tail = xp.where(place < kept, p, np.inf)[:, ::-1]
    least = (np.minimum.accumulate(tail, axis=-1) if xp is np else xp.cummin(tail, axis=-1))[:, ::-1]
    return Typical(Lists(z, ids, lists.shifted), off_by, mass, least, kept, lists, run, at, stages)


def withstands(t: Typical, error: Any) -> Any:
    """Whether no logit error up to `error` [rows, errors] changes the kept set: bool [rows, errors]."""
    xp, count = namespace(error), t.off_by.shape[-1]
    settings, beta = t.at.settings, t.at.beta
    run = surviving(t.before, settings, error, t.stages)
    same = run.known & (run.first[0] == run.first[1]) & (run.last[0] == run.last[1])
    z = xp.concatenate([t.before.z, t.before.z[:, :1] * 0 - np.inf], axis=-1)
    same = (
        same & _apart(xp, z, run.last[0], error) & ((run.first[0] == 0) | _apart(xp, z, run.first[0], error))
    )
    # Surprise moves by 2 e and the entropy by at most e * E|surprise - entropy| along the way.
    e = error * beta
    tilt = xp.exp(xp.minimum(2 * e, 60.0))
    spread = xp.where(t.off_by < np.inf, t.off_by * (t.mass[:, 1:] - t.mass[:, :-1]), 0)
    spread = spread.sum(axis=-1, keepdims=True)
    moved = 2 * e + 2 * e * (tilt * spread + 2 * e) + 1e-5
    off_by = xp.concatenate([t.off_by, t.off_by[:, :1] * 0 + np.inf], axis=-1)
    edge = at_places(off_by, t.kept - 1)
    following = at_places(off_by, t.kept)
    all_kept = following == np.inf
    same = same & (all_kept | (following - edge > 2 * moved))
    # The kept reach the bound, and would not without any that may come last.
    bound = settings.columns["typical_p"]
    share = at_places(t.mass, t.kept)
    same = same & (all_kept | (share / (share + (1 - share) * tilt) > bound + 1e-5))
    start = leading(t.off_by, edge - 2 * moved, lambda a, b: a < b)
    rest = share - at_places(t.least, xp.minimum(start, count - 1))
    return same & (rest * tilt / (rest * tilt + 1 - rest) < bound - 1e-5)


def _apart(xp, z, edge, error):
    low = at_places(z, edge)
    high = at_places(z, xp.maximum(edge - 1, 0))
    return (low == -np.inf) | (high - low > 2 * error * (1 + 1e-5) + 1e-5)


def _argsort(xp, a):
    return np.argsort(a, axis=-1, kind="stable").astype(np.int32) if xp is np else xp.argsort(a, axis=-1)
