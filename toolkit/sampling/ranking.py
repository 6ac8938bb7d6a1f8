"""Ranking: the best ids of each row, most probable first, which is all that the filters look at.

A list of `count` candidates stands for a row of `vocab` logits: its ids in one total order (logit
descending, then id ascending, so a tie is never settled by chance), their logits less the row's maximum,
and the mass of the whole row. On a CPU the lists are made with NumPy, whose selection and sort are several
times faster than MLX's there; on a GPU they are lazy MLX arrays. `filters` works on either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

_ID_BITS = 20
_ROWS = 1 << 12
_SIZES = (512, 3072, 6144, 12_288)


def namespace(array: Any) -> Any:
    """The module, NumPy or MLX, whose functions take this array."""
    return mx if isinstance(array, mx.array) else np


def at_places(array: Any, places: Any) -> Any:
    """Entries of each row of [rows, n] at its own places [rows, k]."""
    if isinstance(array, np.ndarray):
        # What np.take_along_axis does, without its checks: most of these arrays are tiny.
        return array[np.arange(len(array))[:, None], places]
    return mx.take_along_axis(array, places, axis=-1)


@dataclass(frozen=True, eq=False)
class Lists:
    """The candidates of some rows, in NumPy or MLX.

    Attributes
    ----------
    z : float32, [rows, count]
        Logits less the row's maximum, descending; -inf where an id may not be drawn.
    ids : int32, [rows, count]
    shifted : float32, [rows, vocab]
        The whole rows the lists came from, in vocabulary order.
    """

    z: Any
    ids: Any
    shifted: Any
    _kept: dict = field(default_factory=dict, repr=False)

    @property
    def complete(self) -> bool:
        """Whether no id of the vocabulary is missing."""
        return self.z.shape[-1] == self.shifted.shape[-1]

    def deviation(self, rows: Any) -> Any:
        """Standard deviation of whole rows' allowed logits, where `rows` [rows, 1] is True: [rows, 1]."""
        if "deviation" not in self._kept:
            if namespace(self.z) is np:
                some = np.zeros((len(self.z), 1), dtype=np.float32)
                some[rows[:, 0]] = _deviation(np, self.shifted[rows[:, 0]])
                self._kept["deviation"] = some
            else:
                self._kept["deviation"] = _deviation(mx, self.shifted)
        return self._kept["deviation"]

    def masses(self, inverse: Any = None) -> tuple[Any, Any]:
        """Exclusive prefix masses [rows, count + 1] and each whole row's mass [rows, 1].

        A mass is exp(z), or exp(z * inverse) with inverse temperatures [rows, 1].
        """
        hot = inverse is not None
        if hot not in self._kept:
            xp = namespace(self.z)
            z, whole = (self.z * inverse, self.shifted * inverse) if hot else (self.z, self.shifted)
            prefix = _prefix(xp, xp.exp(z))
            total = prefix[:, -1:] if self.complete else xp.exp(whole).sum(axis=-1, keepdims=True)
            self._kept[hot] = prefix, total
        return self._kept[hot]

    def take(self, rows: np.ndarray) -> Lists:
        """Some rows of a NumPy list."""
        return Lists(self.z[rows], self.ids[rows], self.shifted[rows])


def rank(shifted: Any, count: int) -> Lists:
    """Lists of the best `count` ids of rows [rows, vocab] whose maximum is 0."""
    vocab = shifted.shape[-1]
    count = min(count, vocab)
    if isinstance(shifted, np.ndarray):
        parts = [_rank_host(shifted[i : i + _ROWS], count) for i in range(0, len(shifted), _ROWS)]
        z, ids = parts[0] if len(parts) == 1 else (np.concatenate(p) for p in zip(*parts, strict=True))
        return Lists(z, ids, shifted)
    # argpartition would leave ties at the boundary to chance; MLX's sort is stable.
    ids = mx.argsort(-shifted, axis=-1)[:, :count].astype(mx.int32)
    return Lists(mx.take_along_axis(shifted, ids, axis=-1), ids, shifted)


def sizes(vocab: int) -> tuple[int, ...]:
    """List lengths to try, shortest first, where the number of survivors is not known beforehand."""
    return (*(s for s in _SIZES if s * 4 <= vocab), vocab)


def _rank_host(shifted: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    rows, vocab = shifted.shape
    if vocab >= 1 << _ID_BITS:
        ids = np.argsort(-shifted, axis=-1, kind="stable")[:, :count].astype(np.int32)
        return np.take_along_axis(shifted, ids, axis=-1), ids
    if count == vocab:
        packed = _magnitude(shifted)
        packed |= np.arange(vocab, dtype=np.uint64)
        packed.sort(axis=-1)
        return _unpack(packed)
    # Everything down to a value that at least `count` ids reach, then one sort of what is left of all rows.
    place = np.flatnonzero(shifted >= _floor(shifted, count)[:, None])
    row, ids = np.divmod(place, vocab)
    packed = _magnitude(shifted.reshape(-1)[place])
    packed |= ids.astype(np.uint64)
    packed |= row.astype(np.uint64) << np.uint64(_ID_BITS + 31)
    packed.sort()
    start = np.searchsorted(packed, np.arange(rows, dtype=np.uint64) << np.uint64(_ID_BITS + 31))
    return _unpack(packed[start[:, None] + np.arange(count)])


def _floor(shifted: np.ndarray, count: int) -> np.ndarray:
    """A value in each row that at least `count` ids reach, and few more: [rows]."""
    rows, vocab = shifted.shape
    for size in (64, 16, 8, 4, 2):
        hands = vocab // size
        if count * 3 <= hands:
            # Deal the ids into hands: where `count` hands hold such a value, so do `count` ids.
            best = shifted[:, : hands * size].reshape(rows, size, hands).max(axis=1)
            return np.partition(best, hands - count, axis=-1)[:, hands - count]
    return np.partition(shifted, vocab - count, axis=-1)[:, vocab - count]


def _magnitude(shifted: np.ndarray) -> np.ndarray:
    # Values are at most 0, so the bits below the sign order them: the larger, the further down the list.
    key = (np.ascontiguousarray(shifted).view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    key <<= np.uint64(_ID_BITS)
    return key


def _unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ids = (packed & np.uint64((1 << _ID_BITS) - 1)).astype(np.int32)
    packed = packed >> np.uint64(_ID_BITS)
    z = (packed & np.uint64(0x7FFFFFFF)).astype(np.uint32) | np.uint32(0x80000000)
    return z.view(np.float32) + np.float32(0), ids


def _deviation(xp: Any, z: Any) -> Any:
    allowed = z > -np.inf
    count = allowed.sum(axis=-1, keepdims=True)
    mean = xp.where(allowed, z, 0).sum(axis=-1, keepdims=True) / count
    return xp.sqrt(xp.where(allowed, (z - mean) ** 2, 0).sum(axis=-1, keepdims=True) / count)


def _prefix(xp: Any, weights: Any) -> Any:
    rows, count = weights.shape
    if xp is np:
        before = np.zeros((rows, count + 1))
        np.cumsum(weights, axis=-1, dtype=np.float64, out=before[:, 1:])
        return before
    if count <= 1024:  # as one block: with none before it, CUDA would not bear the empty array below
        sums = xp.cumsum(weights, axis=-1)
    else:  # in two levels, so that float32 rounding stays near 1e-6 over a whole vocabulary
        width = 256
        inner = xp.cumsum(xp.pad(weights, ((0, 0), (0, -count % width))).reshape(rows, -1, width), axis=-1)
        outer = xp.cumsum(inner[:, :, -1], axis=-1)
        outer = xp.concatenate([xp.zeros((rows, 1)), outer[:, :-1]], axis=-1)
        sums = (inner + outer[:, :, None]).reshape(rows, -1)[:, :count]
    return xp.concatenate([xp.zeros((rows, 1)), sums], axis=-1)
