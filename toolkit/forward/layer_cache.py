"""Layers: what a model's layers see in place of their KV caches while a packed step runs.

`LayerCache` answers a layer's calls; `Step` does the work for all layers of one forward: it writes the step's
keys and values into the slabs and attends, group by group. `Tracing` stands in for a step while the model's
geometry is discovered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import attention
from .kv_cache import Geometry, in_rows
from .layout import Group
from .patch import Attending, keep
from .shapes import Shapes

LAUNCH = 4
"""Layers after which what is built so far is launched, so that a GPU works while the rest is built."""


class Unpackable(ValueError):
    """This architecture can't run packed; the message says why."""


@dataclass(frozen=True)
class Window:
    """What `make_mask` gives in place of a mask: a model hands it to each layer that it is meant for."""

    size: int


class LayerCache(Attending):
    """What one layer sees in place of its KV cache: every token's position, and a way to attend."""

    def __init__(self, step: Step | Tracing, position: int, window: int | None):
        self.step, self.position, self.window = step, position, window
        self.offset = step.positions
        self.kept: tuple[mx.array, mx.array] | None = None
        self.written: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.kept is not None:
            raise Unpackable("it adds to one layer's cache twice")
        self.kept = keys, values
        keep(self, keys)
        if self.position in self.step.apart:  # see `_joined`
            return keys, mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For layers that reuse this one's keys and values."""
        if self.kept is None:
            raise Unpackable("it reads a layer's keys before they are there")
        return self.kept

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Window | None:
        """A token alone in its batch row needs no mask; a window is passed on to `attend`."""
        window = window_size or self.window
        return Window(window) if window else None

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        window = self.window
        if isinstance(mask, Window):
            window = min(window or mask.size, mask.size)
        elif isinstance(mask, mx.array):
            queries, keys = self._joined(queries, keys, values, scale, mask)
        elif mask not in (None, "causal") or self.position in self.step.apart:
            raise Unpackable("its attention adds a mask of its own")
        fresh = self.written is None
        if self.written is None:
            self.written = keys, values
        elif self.written[1] is not values:
            raise Unpackable("one layer attends over different keys")
        return self.step.attend(self.position, window, fresh, queries, keys, values, scale, sinks)

    def _joined(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Queries and keys of multi-head latent attention, which keeps their rotated part apart.

        It scores that part itself, `(rotated queries * scale) @ rotated keys`, and passes the scores as a
        mask. `update_and_fetch` gave it the identity for those keys, so the mask is the scaled queries: from
        here on they are part of the queries, and their keys of the keys.
        """
        if self.kept is None or keys is not self.kept[0] or values is not keys:
            raise Unpackable("its attention adds a mask of its own")
        self.step.apart.add(self.position)
        return mx.concatenate([queries, mask / scale], -1), mx.concatenate(list(self.kept), -1)


class Step:
    """One forward, as the layers see it: pure but for the slabs it replaces.

    Parameters
    ----------
    arrays : dict of str to array
        The layout's, on the device.
    groups : tuple of Group
    slabs : dict of str to (keys, values)
        By capacity; each a list with one array per layer. The lists are changed.
    layers : dict of int to int
        Place in the slabs' lists of each layer that keeps a cache.
    apart : set of int
        Layers that keep a part of their keys apart.
    shapes : Shapes
    cpu : bool
    split : bool
        See `kv.KVStore`.
    eager : bool
        Launch what is built as it is built.
    """

    def __init__(
        self,
        arrays: dict[str, mx.array],
        groups: tuple[Group, ...],
        slabs: dict[str, Any],
        *,
        layers: dict[int, int],
        apart: set[int],
        shapes: Shapes,
        cpu: bool,
        split: bool,
        eager: bool,
    ):
        self.arrays, self.groups, self.slabs, self.layers = arrays, groups, slabs, layers
        self.apart, self.shapes, self.cpu, self.split, self.eager = apart, shapes, cpu, split, eager
        self.positions = arrays["positions"]
        self.masks: dict[tuple, mx.array] = {}
        self.places: dict[tuple[str, int], tuple[mx.array | None, mx.array | None]] = {}

    def mask(self, group: int, window: int | None, fold: int, dtype: mx.Dtype) -> mx.array:
        key = (group, window, fold)
        if key not in self.masks:
            # The fused kernel adds its mask: make once what it would make in every layer.
            kind = None if self.cpu else dtype
            positions, keys = self.arrays[f"p{group}"], self.groups[group].keys
            self.masks[key] = attention.mask(positions, keys, window, fold, self.shapes.block, kind)
        return self.masks[key]

    def attend(
        self,
        position: int,
        window: int | None,
        fresh: bool,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        layer = self.layers[position]
        if fresh:
            for capacity, pair in self.slabs.items():
                for kept, new in zip(pair, (keys, values), strict=True):
                    kept[layer] = self._kept(capacity, kept[layer], new)
        outs = []
        for i, group in enumerate(self.groups):
            k, v = (
                self._rows(i, group, kept[layer], new.shape[1])
                for kept, new in zip(self.slabs[group.slab], (keys, values), strict=True)
            )
            if group.token < 0:
                q = take(queries, self.arrays[f"q{i}"]).reshape(
                    group.rows, group.queries, *queries.shape[1:2], -1
                )
            else:
                q = queries[group.token : group.token + group.rows].swapaxes(1, 2)
            fold = attention.folded(group.queries, q.shape[2], k.shape[1], sinks is not None, self.cpu)
            mask = self.mask(i, window, fold, queries.dtype)
            outs.append(attention.attend(q, k, v, mask, scale, sinks, self.shapes.block, self.cpu))
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        if "back" in self.arrays:
            out = take(out, self.arrays["back"])
        out = out.reshape(*queries.shape[:3], -1)
        if self.eager and layer % LAUNCH == LAUNCH - 1:
            mx.async_eval(out)
        return out

    def _kept(self, capacity: str, kept: mx.array, new: mx.array) -> mx.array:
        """A slab with the step's keys (or values) in it."""
        parts = new.shape[1] if self.split else 1
        to, source = self._lines(capacity, parts)
        lines = new.reshape(new.shape[0] * parts, -1)
        if to is None:
            return kept if source is None else take(lines, source)
        if source is None:  # all of the slab's rows, in order
            token = next(g.token for g in self.groups if g.slab == capacity)
            kept[to] = lines[token * parts : token * parts + len(to)]
        else:
            kept[to] = take(lines, source)
        return kept

    def _lines(self, capacity: str, parts: int) -> tuple[mx.array | None, mx.array | None]:
        """Lines of a slab that a step writes, and lines of the step's own keys that go there.

        Without the first, the slab is made of the second: it was blank, and gathering it is faster than
        writing into it. Without the second, its rows' tokens are in order.
        """
        key = (capacity, parts)
        if key not in self.places:
            size, part = int(capacity), mx.arange(parts)
            blank, to, source = (self.arrays.get(f"{kind}{capacity}") for kind in "bfw")
            source = source if blank is None else blank
            if parts > 1 and blank is not None:
                source = (blank.reshape(-1, 1, size) * parts + part[:, None]).reshape(-1)
            elif parts > 1 and to is not None:
                to = ((to // size * (parts - 1) * size + to)[:, None] + part * size).reshape(-1)
                source = None if source is None else (source[:, None] * parts + part).reshape(-1)
            self.places[key] = to, source
        return self.places[key]

    def _rows(self, i: int, group: Group, kept: mx.array, heads: int) -> mx.array:
        """One call's keys (or values): `[rows, heads, keys, dim]`."""
        capacity = int(group.slab)
        lines = (heads if self.split else 1) * capacity  # of a slot
        if group.slot < 0:
            kept = take(kept.reshape(-1, lines * kept.shape[1]), self.arrays[f"s{i}"])
        elif kept.shape[0] > group.rows * lines:
            kept = kept[group.slot * lines : (group.slot + group.rows) * lines]
        rows = in_rows(kept, group.rows, capacity, heads, self.split)
        return rows if capacity == group.keys else rows[:, :, : group.keys]


class Tracing:
    """Stands in for a step while geometry is discovered: notes shapes, computes nothing."""

    def __init__(self, apart: set[int]) -> None:
        self.positions = mx.zeros((2,), mx.int32)
        self.apart = set(apart)
        self.fits = True
        self.geometry: dict[int, Geometry] = {}
        self.heads: dict[int, int] = {}
        self.sinks: dict[int, bool] = {}

    def attend(
        self,
        position: int,
        window: int | None,
        fresh: bool,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        self.fits &= queries.shape[-1] == keys.shape[-1] and queries.shape[2] == 1
        geometry = Geometry(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype)
        if self.geometry.setdefault(position, geometry) != geometry:
            raise Unpackable("one layer attends over different keys")
        self.heads[position], self.sinks[position] = queries.shape[1], sinks is not None
        return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)


def take(lines: mx.array, index: mx.array) -> mx.array:
    """Lines, flattened, by index; many at once in the widest elements there are, which is faster."""
    flat = lines.reshape(lines.shape[0], -1)
    wide = index.size > 1024 and flat.shape[1] * flat.itemsize % 8 == 0 and flat.itemsize < 8
    taken = mx.take(flat.view(mx.uint64) if wide else flat, index.reshape(-1), axis=0)
    return taken.view(flat.dtype) if wide else taken
