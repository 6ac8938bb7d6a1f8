"""KV: where each row's keys and values live between steps.

Rows of like capacity share a *slab*, one array of lines a layer, so that a decode step attends over many rows
in one call without gathering them first. On a CPU, whose matmul copies what isn't contiguous, a line is one
head's part of a token, `[slots x heads x capacity, dim]`; on a GPU it is a whole token, `[slots x capacity,
heads x dim]`, which takes fewer and longer writes. A row moves to a larger slab when it outgrows its own,
which happens once in some hundred tokens. What is attended to, and how, is `packed`'s business; nothing here
knows of tokens or requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class Geometry:
    """One layer's cache: key and value heads, their widths, and the dtype."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        """Bytes that one token takes."""
        return (self.key_heads * self.key_dim + self.value_heads * self.value_dim) * self.dtype.size


@dataclass
class Place:
    """Where a row is: its slab, its slot there, and how many of its tokens are written."""

    slab: Slab
    slot: int
    length: int = 0


@dataclass(eq=False)
class Slab:
    """Rows of one capacity: `keys[layer]`, `values[layer]` are its lines.

    `blank` until something was written to it: then a step may make its arrays instead of filling them. A
    `dirty` slot may hold what isn't finite: masked keys count for nothing, but nothing times NaN is NaN.
    """

    capacity: int
    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)
    rows: list[Hashable | None] = field(default_factory=list)
    blank: bool = True
    dirty: set[int] = field(default_factory=set)

    @property
    def used(self) -> int:
        """Slots up to and including the last one taken."""
        return max((slot + 1 for slot, row in enumerate(self.rows) if row is not None), default=0)

    def lines(self, slot: int, length: int, parts: int) -> slice | mx.array:
        """Where a row's first tokens are, of which each has `parts` lines: [parts x length]."""
        if parts == 1:
            return slice(slot * self.capacity, slot * self.capacity + length)
        first = (slot * parts + np.arange(parts)) * self.capacity
        return mx.array((first[:, None] + np.arange(length)).reshape(-1).astype(np.int32))

    def wipe(self, slot: int) -> None:
        """Set all that a slot holds to zero."""
        for array in (*self.keys, *self.values):
            size = array.shape[0] // len(self.rows)
            array[slot * size : (slot + 1) * size] = 0


def steps(count: int) -> int:
    """`count` rounded up to 1, 2, 3, 4, 6, 8, 12, 16 ...: few different sizes, at most a third to spare."""
    if count <= 4:
        return max(1, count)
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power


class KVStore:
    """Every row's keys and values, by row name.

    Parameters
    ----------
    geometry : list of Geometry
        One per layer that keeps a cache.
    bucket : int
        Capacities are whole numbers of buckets (tokens), by `steps`.
    least : int
        The smallest capacity.
    skip : tuple of int
        Capacities that are passed over.
    split : bool
        Each head's part of a token is a line of its own.
    """

    def __init__(
        self,
        geometry: list[Geometry],
        bucket: int,
        least: int,
        skip: tuple[int, ...] = (),
        split: bool = True,
    ):
        self.geometry, self.bucket, self.least, self.skip = geometry, bucket, least, skip
        self.split = split
        self.slabs: dict[int, Slab] = {}
        self.places: dict[Hashable, Place] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        slots = sum(slab.capacity * len(slab.rows) for slab in self.slabs.values())
        return slots * sum(g.nbytes for g in self.geometry)

    def reserve(self, lengths: dict[Hashable, int]) -> None:
        """Make room so that each named row can hold that many tokens; new rows are created."""
        wanted: dict[int, list[Hashable]] = {}
        for row, length in lengths.items():
            place = self.places.get(row)
            if place is None or length > place.slab.capacity:
                wanted.setdefault(self._capacity(length), []).append(row)
        for capacity, rows in wanted.items():
            slab = self.slabs.setdefault(capacity, Slab(capacity))
            free = [slot for slot, row in enumerate(slab.rows) if row is None]
            self._grow(slab, len(rows) - len(free))
            free = [slot for slot, row in enumerate(slab.rows) if row is None]
            for row, slot in zip(rows, free, strict=False):
                if slot in slab.dirty:
                    slab.dirty.remove(slot)
                    slab.wipe(slot)
                old = self.places.get(row)
                slab.rows[slot] = row
                self.places[row] = Place(slab, slot, old.length if old else 0)
                if old is not None:
                    self._put(self.places[row], self._get(old, old.length), old.length)
                    old.slab.dirty.add(old.slot)  # a prompt that moves between chunks has shown no logits yet
                    self._free(old)

    def release(self, row: Hashable, wipe: bool = True) -> None:
        """Forget a row; the last out of a slab frees its memory. `wipe` unless what it left is finite."""
        place = self.places.pop(row, None)
        if place is not None:
            if wipe:
                place.slab.dirty.add(place.slot)
            self._free(place)

    def clear(self) -> None:
        """Forget every row and free all slabs, those whose arrays were handed out and lost too."""
        self.places.clear()
        self.slabs.clear()

    def read(self, row: Hashable, length: int | None = None) -> list[tuple[mx.array, mx.array]]:
        """The first `length` tokens' keys and values, `[heads, length, dim]` each, a pair a layer."""
        place = self.places[row]
        return self._get(place, place.length if length is None else length)

    def write(self, row: Hashable, pairs: Iterable[tuple[mx.array, mx.array]], length: int) -> None:
        """Put `length` tokens' keys and values at the start of a (new) row."""
        self.reserve({row: length})
        self._put(self.places[row], pairs, length)
        self.places[row].length = length

    def take(self) -> dict[str, tuple[list[mx.array], list[mx.array]]]:
        """Every slab's arrays, handed over: no reference stays here, so a step can write them in place."""
        taken = {str(c): (slab.keys, slab.values) for c, slab in self.slabs.items()}
        for slab in self.slabs.values():
            slab.keys, slab.values = [], []
        return taken

    def give(self, taken: dict[str, tuple[list[mx.array], list[mx.array]]]) -> None:
        """Put back what `take` handed out, or what a step made of it."""
        for capacity, (keys, values) in taken.items():
            slab = self.slabs[int(capacity)]
            slab.keys, slab.values = list(keys), list(values)

    def _capacity(self, length: int) -> int:
        capacity = self.bucket * steps(-(-max(length, self.least) // self.bucket))
        while capacity in self.skip:
            capacity = self.bucket * steps(capacity // self.bucket + 1)
        return capacity

    def _grow(self, slab: Slab, by: int) -> None:
        if by <= 0:
            return
        by = steps(len(slab.rows) + by) - len(slab.rows)
        size = by * slab.capacity
        keys = [self._blank(size, g.key_heads, g.key_dim, g.dtype) for g in self.geometry]
        values = [self._blank(size, g.value_heads, g.value_dim, g.dtype) for g in self.geometry]
        if slab.rows:
            keys, values = (
                [mx.concatenate(pair) for pair in zip(old, new, strict=True)]
                for old, new in ((slab.keys, keys), (slab.values, values))
            )
        slab.keys, slab.values = keys, values
        slab.rows += [None] * by

    def _blank(self, tokens: int, heads: int, dim: int, dtype: mx.Dtype) -> mx.array:
        return mx.zeros((tokens * heads, dim) if self.split else (tokens, heads * dim), dtype)

    def _get(self, place: Place, length: int) -> list[tuple[mx.array, mx.array]]:
        slab, slots = place.slab, len(place.slab.rows)
        layers = zip(slab.keys, slab.values, self.geometry, strict=True)
        return [
            (in_rows(k, slots, slab.capacity, g.key_heads, self.split)[place.slot, :, :length],
             in_rows(v, slots, slab.capacity, g.value_heads, self.split)[place.slot, :, :length])
            for k, v, g in layers
        ]  # fmt: skip

    def _put(self, place: Place, pairs: Iterable[tuple[mx.array, mx.array]], length: int) -> None:
        slab = place.slab
        for layer, pair in enumerate(pairs):
            for kept, new in zip((slab.keys, slab.values), pair, strict=True):
                part = new[:, :length] if self.split else new[:, :length].swapaxes(0, 1)
                lines = slab.lines(place.slot, length, len(new) if self.split else 1)
                kept[layer][lines] = part.reshape(-1, kept[layer].shape[1])
        slab.blank = False

    def _free(self, place: Place) -> None:
        place.slab.rows[place.slot] = None
        if not any(row is not None for row in place.slab.rows):
            del self.slabs[place.slab.capacity]


def in_rows(lines: mx.array, rows: int, capacity: int, heads: int, split: bool) -> mx.array:
    """Lines as `[rows, heads, capacity, dim]`."""
    if split:
        return lines.reshape(rows, heads, capacity, -1)
    return lines.reshape(rows, capacity, heads, -1).swapaxes(1, 2)
