"""Chain: rows with filters, from logits to a token, its margin and its drift, on ranked lists.

`survivors` ranks rows, runs the filters and says which list positions survive; `pick` adds noise at the
listed ids only and takes the best. Rows that share a list length go together; the length depends on the
row's own parameters and logits alone, never on its siblings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .. import noise
from . import kernels, threads
from .drift_bound import max_drift
from .filters import Run, Settings, best, surviving
from .ranking import Lists, at_places, namespace, rank, sizes
from .typical import Typical, typical

# Candidates listed beyond the survivors, so that `max_drift` sees who might be let in.
_BEYOND = 24
_FULL = 0.75


@dataclass(frozen=True, eq=False)
class Survivors:
    """Ranked rows after the filters: of `rows` (indices into the batch), positions `run` of `lists`."""

    rows: np.ndarray
    lists: Lists
    settings: Settings
    stages: tuple[str, ...]
    run: Run
    typical: Typical | None

    @property
    def alive(self) -> Any:
        """Which listed ids survive: bool [rows, count]."""
        xp = namespace(self.lists.z)
        place = xp.arange(self.lists.z.shape[-1], dtype=xp.int32)[None]
        return (place >= self.run.first[0]) & (place < self.run.last[0])

    @property
    def bad(self) -> Any:
        """Rows whose logits have no finite maximum: their lists don't begin with 0."""
        ranked = self.lists if self.typical is None else self.typical.before
        return ranked.z[:, 0] != 0

    def take(self, which: np.ndarray) -> Survivors:
        """Some rows of NumPy survivors, by a boolean mask."""
        (a, b), (c, d) = self.run.first, self.run.last
        run = Run((a[which], b[which]), (c[which], d[which]), self.run.known[which])
        settings = self.settings.take(which)
        return Survivors(self.rows[which], self.lists.take(which), settings, self.stages, run, None)


def survivors(shifted: Any, settings: Settings, rows: np.ndarray, length: int) -> Iterator[Survivors]:
    """Filter rows [n, vocab] with maximum 0; `length` as from `list_length`."""
    vocab = shifted.shape[-1]
    if namespace(shifted) is not np:
        yield _filter(shifted, settings, rows, length or vocab)
        return
    if length:
        yield from _filter_host(shifted, settings, rows, length)
        return
    # On the host the list grows until it holds the survivors and some more.
    *short, whole = sizes(vocab)
    for size in short:
        fits = np.ones(len(rows), dtype=bool)
        if size != short[0]:
            fits = _estimate(shifted, settings) * 1.1 < size * _FULL
        waiting = ~fits
        for part in _filter_host(*_take(fits, shifted, settings, rows), size):
            done = part.run.known[:, 0] & (part.run.last[0][:, 0] <= size * _FULL)
            if done.any():
                yield part if done.all() else part.take(done)
            waiting[np.isin(rows, part.rows[~done])] = True
        if not waiting.any():
            return
        shifted, settings, rows = _take(waiting, shifted, settings, rows)
    yield from _filter_host(shifted, settings, rows, whole)


def _filter_host(shifted: np.ndarray, settings: Settings, rows: np.ndarray, size: int) -> list[Survivors]:
    parts = [part for part in threads.split(len(rows), size) if part.stop > part.start]
    return threads.run(lambda part: _filter(shifted[part], settings.take(part), rows[part], size), parts)


def _take(
    which: np.ndarray, shifted: np.ndarray, settings: Settings, rows: np.ndarray
) -> tuple[np.ndarray, Settings, np.ndarray]:
    if which.all():
        return shifted, settings, rows
    return shifted[which], settings.take(which), rows[which]


def _estimate(shifted: np.ndarray, settings: Settings) -> np.ndarray:
    """About how many ids survive, from every 64th of them."""
    sample = np.ascontiguousarray(shifted[:, ::64])
    return (
        surviving(rank(sample, sample.shape[-1]), settings, settings.inverse * 0, settings.order).last[0][
            :, 0
        ]
        * 64
    )


def list_length(top_k: int, order: tuple[str, ...], used: set[str], vocab: int) -> int:
    """How long a row's list must be: 0 if its logits decide, `vocab` if every id counts.

    `used` names the row's own filters.
    """
    if "typical_p" in used:
        return vocab
    if top_k >= vocab or any(
        name in used for name in ("top_p", "xtc") if order.index(name) < order.index("top_k")
    ):
        return 0
    length = 1 << (top_k + _BEYOND - 1).bit_length()
    return length if length * 4 <= vocab else vocab


def _filter(shifted: Any, settings: Settings, rows: np.ndarray, size: int) -> Survivors:
    lists = rank(shifted, size)
    stages, kept = settings.order, None
    if "typical_p" in settings.columns:
        split = stages.index("typical_p")
        kept = typical(lists, settings, stages[:split])
        lists = kept.lists
        stages = (*(("temperature",) if kept.at.hot else ()), *stages[split + 1 :])
    run = surviving(lists, settings, settings.inverse * 0, stages)
    return Survivors(rows, lists, settings, stages, run, kept)


def pick(found: Survivors, noise_at: Any) -> tuple[Any, Any, Any, Any]:
    """Draw one survivor a row: ids, margins, log probabilities and max_drift, each [rows].

    `noise_at` is Gumbel noise at the listed ids, [rows, count]. A margin is infinite where one id survives.
    """
    lists = found.lists
    xp, alive = namespace(lists.z), found.alive
    scores = lists.z * found.settings.inverse
    # Less the best survivor's: where XTC or typical-p took the best ids, the others may be far below them.
    lead = best(lists.z, found.run) * found.settings.inverse
    mass = xp.where(alive, xp.exp(scores - lead), 0).sum(axis=-1, keepdims=True)
    perturbed = scores + noise_at
    here = xp.where(alive, perturbed, -np.inf)
    drawn = xp.argmax(here, axis=-1)[:, None].astype(xp.int32)
    ahead, margin = _lead(xp, here, drawn)
    # Equal scores go to the lowest id, as in vocabulary order: rare, so the host looks only where it must.
    if xp is not np or not margin.all():
        equal = xp.where(here == ahead, lists.ids, 1 << 30)
        drawn = xp.argmin(equal, axis=-1)[:, None].astype(xp.int32)
    drift = max_drift(
        lists, found.settings, found.stages, perturbed, drawn, margin, found.run.last[0], found.typical
    )
    logprob = at_places(scores, drawn) - lead - xp.log(mass)
    token = at_places(lists.ids, drawn)
    return tuple(a[:, 0] for a in (token, margin, logprob, drift))


def _lead(xp: Any, scores: Any, drawn: Any) -> tuple[Any, Any]:
    """The score at a place of each row, and how far it is ahead of all others."""
    best = at_places(scores, drawn)
    if xp is np:
        row = np.arange(len(scores))[:, None]
        scores[row, drawn] = -np.inf
        margin = best - scores.max(axis=-1, keepdims=True)
        scores[row, drawn] = best
        return best, margin
    place = xp.arange(scores.shape[-1], dtype=xp.int32)[None]
    return best, best - xp.where(place == drawn, -np.inf, scores).max(axis=-1, keepdims=True)


def scores_of(found: Survivors) -> Any:
    """Scores in vocabulary order: float32 [rows, vocab], -inf for all but the survivors."""
    lists = found.lists
    xp = namespace(lists.z)
    listed = xp.where(found.alive, lists.z * found.settings.inverse, -np.inf)
    empty = xp.full(lists.shifted.shape, -np.inf, dtype=xp.float32)
    if xp is np:
        np.put_along_axis(empty, lists.ids, listed, axis=-1)
        return empty
    return mx.put_along_axis(empty, lists.ids, listed, axis=-1)


def pick_host(found: list[Survivors], keys: np.ndarray) -> list[tuple[Any, Any, Any, Any]]:
    """`pick` for each of several NumPy survivors; `keys` are those of all the batch's rows."""

    def one(work: tuple[Survivors, np.ndarray, np.ndarray | None]) -> tuple[Any, Any, Any, Any]:
        part, own, words = work
        if words is None:
            return pick(part, noise.gumbel_at(own, part.lists.ids))
        return pick(part, at_places(noise.gumbel_from_bits(words), part.lists.ids))

    work = [(part, keys[part.rows], _words(part, keys[part.rows])) for part in found]
    return threads.run(one, work)


def pick_lazy(found: Survivors, keys: mx.array) -> tuple[Any, Any, Any, Any]:
    """`pick` for MLX survivors; `keys` are the rows' own."""
    lists = found.lists
    if lists.z.shape[-1] * 16 <= lists.shifted.shape[-1]:
        return pick(found, kernels.gumbel_at(keys, lists.ids))
    whole = noise.gumbel(keys, lists.shifted.shape[-1])
    return pick(found, at_places(whole, lists.ids))


def _words(part: Survivors, keys: np.ndarray) -> np.ndarray | None:
    # A few words are cheaper one by one, many by the block.
    vocab = part.lists.shifted.shape[-1]
    return None if part.lists.z.shape[-1] * 16 <= vocab else np.asarray(noise.bits(keys, vocab))
