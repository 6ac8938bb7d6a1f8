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
from . import kernels
from .drift import max_drift
from .filters import Run, Settings, surviving
from .ranking import Lists, namespace, rank, sizes
from .typical import Typical, typical

# Candidates listed beyond the survivors, so that `max_drift` sees who might be let in.
_BEYOND = 24


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


def survivors(shifted: Any, settings: Settings, rows: np.ndarray, length: int) -> Iterator[Survivors]:
    """Filter rows [n, vocab] with maximum 0; `length` as from `list_length`."""
    vocab = shifted.shape[-1]
    if length or namespace(shifted) is not np:
        yield _filter(shifted, settings, rows, length or vocab)
        return
    # On the host the list grows until it holds the survivors and some more.
    for size in sizes(vocab):
        found = _filter(shifted, settings, rows, size)
        last = found.run.last[0][:, 0]
        done = (found.run.known[:, 0] & (last <= size - size // 4)) | found.lists.complete
        if done.all():
            yield found
            return
        if done.any():
            pick = np.flatnonzero(done)
            yield _filter(shifted[pick], settings.take(pick), rows[pick], size)
        pick = np.flatnonzero(~done)
        shifted, settings, rows = shifted[pick], settings.take(pick), rows[pick]


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


def pick(found: Survivors, keys: Any) -> tuple[Any, Any, Any, Any]:
    """Draw one survivor a row: ids, margins, log probabilities and max_drift, each [rows].

    `keys` are the rows' own. A margin is infinite where one id survives.
    """
    lists = found.lists
    xp, alive = namespace(lists.z), found.alive
    scores = lists.z * found.settings.inverse
    mass = xp.where(alive, xp.exp(scores), 0).sum(axis=-1, keepdims=True)
    perturbed = scores + _noise(lists, keys)
    here = xp.where(alive, perturbed, -np.inf)
    best = here.max(axis=-1, keepdims=True)
    # Equal scores go to the lowest id, as in vocabulary order.
    drawn = xp.argmin(xp.where(here == best, lists.ids, 1 << 30), axis=-1)[:, None]
    drawn = drawn.astype(xp.int32)
    place = xp.arange(lists.z.shape[-1], dtype=xp.int32)[None]
    margin = best - xp.where(place == drawn, -np.inf, here).max(axis=-1, keepdims=True)
    drift = max_drift(lists, found.settings, found.stages, perturbed, drawn, margin, found.typical)
    logprob = xp.take_along_axis(scores, drawn, axis=-1) - xp.log(mass)
    token = xp.take_along_axis(lists.ids, drawn, axis=-1)
    return tuple(a[:, 0] for a in (token, margin, logprob, drift))


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


def _noise(lists: Lists, keys: Any) -> Any:
    vocab, count = lists.shifted.shape[-1], lists.z.shape[-1]
    if count * 16 <= vocab:
        return (noise if namespace(lists.z) is np else kernels).gumbel_at(keys, lists.ids)
    if namespace(lists.z) is np:
        whole = noise.gumbel_from_bits(np.asarray(noise.bits(keys, vocab)))
        return np.take_along_axis(whole, lists.ids, axis=-1)
    return mx.take_along_axis(noise.gumbel(keys, vocab), lists.ids, axis=-1)
