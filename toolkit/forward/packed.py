"""Packed: one forward over all spans of a step, side by side, without padding beyond the tile.

Token-wise layers see `[T, 1]` tokens; attention runs over each row's own keys (`attention`, `kv`); only tokens
that are sampled from go through the head (`attach`). Shapes are rounded as `Shapes` says, so that a row's
logits don't depend on its company.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_cache

from .. import backend
from ..models import Model
from . import attention
from .attach import Attending, Caches, attached, modules_of, selecting
from .kv import SLOT_STEP, Geometry, KVStore
from .shapes import Shapes, round_up
from .spans import Span


_KEYED = (mlx_cache.KVCache, mlx_cache.RotatingKVCache, mlx_cache.ConcatenateKVCache, mlx_cache.ChunkedKVCache)


class Unpackable(ValueError):
    """This architecture can't run packed; the message says why."""


class _LayerCache(Attending):
    """What one layer sees in place of its KV cache: every token's position, and a way to attend."""

    def __init__(self, step: _Step | _Tracing, position: int, window: int | None, chunk: int | None):
        self.step, self.position, self.window, self.chunk = step, position, window, chunk
        self.offset = step.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> None:
        """A token alone in its batch row needs no mask; a window is kept for `attend`."""
        self.window = window_size or self.window

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array:
        if mask is not None and not isinstance(mask, str):
            raise Unpackable("its attention adds a mask of its own")
        return self.step.attend(self, queries, keys, values, scale, sinks)


class _Step:
    """One forward, as the layers see it: pure but for the slabs it replaces."""

    def __init__(self, arrays: dict[str, mx.array], groups: tuple[attention.Group, ...], slabs: dict[str, Any],
                 forward: PackedForward):
        self.arrays, self.groups, self.slabs = arrays, groups, slabs
        self.shapes, self.cpu, self.layers = forward.shapes, forward.cpu, forward.layers
        self.positions = arrays["positions"]
        self.masks: dict[tuple, mx.array] = {}

    def mask(self, group: int, window: int | None, chunk: int | None) -> mx.array:
        key = (group, window, chunk)
        if key not in self.masks:
            self.masks[key] = attention.visible(
                self.arrays[f"p{group}"], self.groups[group].keys, window, chunk)
        return self.masks[key]

    def attend(self, cache: _LayerCache, queries: mx.array, keys: mx.array, values: mx.array, scale: float,
               sinks: mx.array | None) -> mx.array:
        layer = self.layers[cache.position]
        for capacity, (all_keys, all_values) in self.slabs.items():
            if f"w{capacity}" in self.arrays:
                write, slot, place = (self.arrays[f"{name}{capacity}"] for name in ("w", "slot", "place"))
                all_keys[layer][slot, :, place] = keys[write, :, 0]
                all_values[layer][slot, :, place] = values[write, :, 0]
        queries = queries[:, :, 0]
        outs = []
        for i, group in enumerate(self.groups):
            all_keys, all_values = self.slabs[group.slab]
            k, v = all_keys[layer], all_values[layer]
            if group.gathered:
                k, v = (x[self.arrays[f"s{i}"], :, : group.keys] for x in (k, v))
            else:
                k, v = (x[: group.rows, :, : group.keys] for x in (k, v))
            out = attention.attend(queries[self.arrays[f"q{i}"]], k, v, self.mask(i, cache.window, cache.chunk),
                                   scale, sinks, self.shapes.block, self.cpu)
            outs.append(out.reshape(-1, *out.shape[2:]))
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        return out[self.arrays["back"]][:, :, None]


class _Tracing:
    """Stands in for a step while geometry is discovered: notes shapes, computes nothing."""

    def __init__(self) -> None:
        self.positions = mx.zeros((2,), mx.int32)
        self.geometry: dict[int, Geometry] = {}

    def attend(self, cache: _LayerCache, queries: mx.array, keys: mx.array, values: mx.array, *_: Any) -> mx.array:
        self.geometry[cache.position] = Geometry(
            keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype)
        return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)


class PackedForward:
    """Runs steps of spans on one model.

    Parameters
    ----------
    model : Model
    shapes : Shapes
        See `invariance`; `PLAIN` for no rule.
    compile : bool
        Compile steps with `mx.compile`; default on a GPU, where a step is launch-bound.
    """

    name = "packed"
    can_batch, can_pad = True, True

    def __init__(self, model: Model, shapes: Shapes, *, compile: bool | None = None):
        self.model, self.shapes = model, shapes
        self.cpu = backend.on_cpu()
        self.view = selecting(model.module)
        self.names = modules_of(model.module)
        geometry = self._discover()
        self.layers = {position: layer for layer, position in enumerate(geometry)}
        smallest = max(shapes.bucket, 128 if self.cpu else 256)
        self.store = KVStore(list(geometry.values()), smallest)
        self.piece = smallest
        self.compile = not self.cpu if compile is None else compile
        self._compiled: dict[tuple, Any] = {}

    def length(self, row: Hashable) -> int:
        """Tokens of a row whose keys are kept."""
        place = self.store.places.get(row)
        return place.length if place else 0

    def release(self, row: Hashable) -> None:
        """Drop a row's keys and values."""
        self.store.release(row)

    def read(self, row: Hashable, length: int | None = None) -> list[tuple[mx.array, mx.array]]:
        """A row's keys and values, to be kept elsewhere: `[heads, length, dim]` pairs, one a layer."""
        return self.store.read(row, length)

    def write(self, row: Hashable, pairs: list[tuple[mx.array, mx.array]], length: int) -> None:
        """Start a row from keys and values kept elsewhere."""
        self.store.write(row, pairs, length)

    def run(self, spans: Sequence[Span], carry: mx.array | None = None) -> mx.array:
        """One step.

        Parameters
        ----------
        spans : sequence of Span
            At most one a row, each starting where the row's kept tokens end.
        carry : int32, [n], optional
            Tokens still on the device; a span whose `source` is i takes its one token from `carry[i]`.

        Returns
        -------
        [sampled, vocab]
            Logits after the last token of each span that samples, in order. Lazy.
        """
        self.store.reserve({s.row: s.stop for s in spans})
        groups, arrays, sampled = self._plan(spans, carry is not None)
        inputs = {name: mx.array(a) for name, a in arrays.items()}
        if carry is not None:
            inputs["carry"] = carry
        slabs = self.store.take()
        try:
            # A prefill's shapes hardly ever come again; a decode step's nearly always do.
            if self.compile and all(s.count == 1 for s in spans):
                logits, slabs = self._compiled_for(groups)(inputs, slabs)
            else:
                logits, slabs = self._forward(inputs, slabs, groups)
        finally:
            self.store.give(slabs)
        for span in spans:
            self.store.places[span.row].length = span.stop
        return logits[:sampled]

    def state(self) -> list[mx.array]:
        """Arrays that a step has replaced: evaluate them with the step's logits."""
        return [a for slab in self.store.slabs.values() for a in (*slab.keys, *slab.values)]

    def _compiled_for(self, groups: tuple[attention.Group, ...]) -> Any:
        if groups not in self._compiled:
            self._compiled[groups] = mx.compile(lambda inputs, slabs: self._forward(inputs, slabs, groups))
        return self._compiled[groups]

    def _forward(self, inputs: dict[str, mx.array], slabs: dict[str, Any], groups: tuple[attention.Group, ...]
                 ) -> tuple[mx.array, dict[str, Any]]:
        slabs = {c: (list(k), list(v)) for c, (k, v) in slabs.items()}
        step = _Step(inputs, groups, slabs, self)
        tokens = inputs["tokens"]
        if "carry" in inputs:
            source = inputs["source"]
            tokens = mx.where(source >= 0, inputs["carry"][mx.maximum(source, 0)], tokens)
        caches = Caches(self._caches(step), lambda hidden: hidden[inputs["pick"]])
        with attached(self.names):
            logits = self.view(tokens[:, None], cache=caches)[:, 0]
        return logits, slabs

    def _caches(self, step: Any) -> list[Any]:
        positions = iter(range(1 << 30))

        def build(cache: Any) -> Any:
            if isinstance(cache, mlx_cache.CacheList):
                return tuple(build(c) for c in cache.caches)
            window = cache.max_size if isinstance(cache, mlx_cache.RotatingKVCache) else None
            chunk = cache.chunk_size if isinstance(cache, mlx_cache.ChunkedKVCache) else None
            if not isinstance(cache, _KEYED) or getattr(cache, "keep", 0):
                raise Unpackable(f"it keeps a {type(cache).__name__}, which is not a row's keys and values")
            return _LayerCache(step, next(positions), window, chunk)

        return [build(c) for c in mlx_cache.make_prompt_cache(self.model.module)]

    def _discover(self) -> dict[int, Geometry]:
        """Each layer's cache geometry, from a forward that is traced and never computed."""
        step = _Tracing()
        with attached(self.names):
            self.view(mx.zeros((2, 1), mx.int32), cache=Caches(self._caches(step), lambda hidden: hidden))
        if not step.geometry:
            raise Unpackable("its layers don't attend through scaled_dot_product_attention with a KV cache")
        return dict(sorted(step.geometry.items()))

    def _plan(self, spans: Sequence[Span], carried: bool) -> tuple[tuple, dict[str, np.ndarray], int]:
        total = sum(s.count for s in spans)
        size = round_up(total, self.shapes.tile)
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        source = np.full(size, -1, np.int32)
        pieces: dict[int, list[attention.Piece]] = defaultdict(list)
        writes: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        pick, at = [], 0
        for span in spans:
            place = self.store.places[span.row]
            capacity = place.slab.capacity
            if span.source is None:
                tokens[at : at + span.count] = span.tokens
            else:
                source[at] = span.source
            positions[at : at + span.count] = np.arange(span.start, span.stop)
            writes[capacity].append((at, span.count, place.slot, span.start))
            for first in range(0, span.count, self.piece):
                count = min(self.piece, span.count - first)
                pieces[capacity].append(attention.Piece(at + first, span.start + first, count, place.slot))
            at += span.count
            if span.sample:
                pick.append(at - 1)
        step = 1 if self.cpu else SLOT_STEP
        used = {c: round_up(self.store.slabs[c].used, step) for c in pieces}
        groups, arrays = attention.plan(dict(pieces), used, size, self.shapes)
        for capacity, entries in writes.items():
            index = np.concatenate([np.arange(first, first + n) for first, n, _, _ in entries])
            slot = np.concatenate([np.full(n, s) for _, n, s, _ in entries])
            place = np.concatenate([np.arange(start, start + n) for _, n, _, start in entries])
            # Written twice, with the same values, so that the number of writes is one of few.
            spare = round_up(len(index), self.shapes.tile) - len(index)
            arrays[f"w{capacity}"], arrays[f"slot{capacity}"], arrays[f"place{capacity}"] = (
                np.pad(a, (0, spare), mode="edge").astype(np.int32) for a in (index, slot, place))
        arrays["tokens"], arrays["positions"] = tokens, positions
        if carried:
            arrays["source"] = source
        count = len(pick)
        pick += pick[-1:] * (round_up(count, self.shapes.head) - count)
        arrays["pick"] = np.array(pick or [0], np.int32)
        return groups, arrays, count


