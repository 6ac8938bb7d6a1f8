"""Packed: one forward over all spans of a step, side by side, without padding beyond the tile.

Token-wise layers see `[T, 1]` tokens; attention runs over each row's own keys (`attention`, `kv`); only
tokens that are sampled from go through the head (`attach`). Shapes are rounded as `Shapes` says, so that a
row's logits don't depend on its company.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_cache

from .. import backend
from ..models import Model
from . import attention
from .attach import Attending, Caches, attached, keep, modules_of, selecting
from .kv import Geometry, KVStore
from .layout import Group, Placed, plan
from .selfcheck import agrees, allowance
from .shapes import Shapes, round_up
from .spans import Span

_KEYED = (mlx_cache.KVCache, mlx_cache.RotatingKVCache, mlx_cache.ConcatenateKVCache)


LAUNCH = 4
"""Layers after which what is built so far is launched, so that a GPU works while the rest is built."""


class Unpackable(ValueError):
    """This architecture can't run packed; the message says why."""


@dataclass(frozen=True)
class _Window:
    """What `make_mask` gives in place of a mask: a model hands it to each layer that it is meant for."""

    size: int


class _LayerCache(Attending):
    """What one layer sees in place of its KV cache: every token's position, and a way to attend."""

    def __init__(self, step: _Step | _Tracing, position: int, window: int | None):
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
    ) -> _Window | None:
        """A token alone in its batch row needs no mask; a window is passed on to `attend`."""
        window = window_size or self.window
        return _Window(window) if window else None

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        window = self.window
        if isinstance(mask, _Window):
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


class _Step:
    """One forward, as the layers see it: pure but for the slabs it replaces."""

    def __init__(
        self,
        arrays: dict[str, mx.array],
        groups: tuple[Group, ...],
        slabs: dict[str, Any],
        forward: PackedForward,
        eager: bool,
    ):
        self.arrays, self.groups, self.slabs = arrays, groups, slabs
        self.shapes, self.cpu, self.layers = forward.shapes, forward.cpu, forward.layers
        self.apart, self.eager = forward.apart, eager
        self.positions = arrays["positions"]
        self.masks: dict[tuple, mx.array] = {}

    def mask(self, group: int, window: int | None, dtype: mx.Dtype) -> mx.array:
        key = (group, window)
        if key not in self.masks:
            mask = attention.visible(self.arrays[f"p{group}"], self.groups[group].keys, window)
            # The fused kernel adds its mask: make once what it would make in every layer.
            self.masks[key] = mask if self.cpu else mx.where(mask, 0, -mx.inf).astype(dtype)
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
                q = _take(queries, self.arrays[f"q{i}"]).reshape(
                    group.rows, group.queries, *queries.shape[1:2], -1
                )
            else:
                q = queries[group.token : group.token + group.rows].swapaxes(1, 2)
            mask = self.mask(i, window, queries.dtype)
            out = attention.attend(q, k, v, mask, scale, sinks, self.shapes.block, self.cpu)
            outs.append(out.reshape(group.rows * group.queries, -1))
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        out = _take(out, self.arrays["back"]).reshape(*queries.shape[:3], -1)
        if self.eager and layer % LAUNCH == LAUNCH - 1:
            mx.async_eval(out)
        return out

    def _kept(self, capacity: str, kept: mx.array, new: mx.array) -> mx.array:
        """A slab with the step's keys (or values) in it."""
        if f"b{capacity}" in self.arrays:  # it was blank: gathering it is faster than writing into it
            return _take(new, self.arrays[f"b{capacity}"])
        if f"f{capacity}" in self.arrays:
            line = self.arrays[f"f{capacity}"]
            if f"w{capacity}" in self.arrays:
                kept[line] = _take(new, self.arrays[f"w{capacity}"])
            else:  # all of the slab's rows, in order
                token = next(g.token for g in self.groups if g.slab == capacity)
                kept[line] = new[token : token + len(line)].reshape(len(line), -1)
        return kept

    def _rows(self, i: int, group: Group, kept: mx.array, heads: int) -> mx.array:
        """One call's keys (or values): `[rows, keys, heads, dim]`."""
        capacity, width = int(group.slab), kept.shape[1]
        if group.slot < 0:
            kept = _take(kept.reshape(-1, capacity * width), self.arrays[f"s{i}"])
        elif kept.shape[0] > group.rows * capacity:
            kept = kept[group.slot * capacity : (group.slot + group.rows) * capacity]
        rows = kept.reshape(group.rows, capacity, heads, -1)
        return rows if capacity == group.keys else rows[:, : group.keys]


class _Tracing:
    """Stands in for a step while geometry is discovered: notes shapes, computes nothing."""

    def __init__(self, apart: set[int]) -> None:
        self.positions = mx.zeros((2,), mx.int32)
        self.apart = set(apart)
        self.fits = True
        self.geometry: dict[int, Geometry] = {}
        self.heads: dict[int, int] = {}

    def attend(
        self,
        position: int,
        window: int | None,
        fresh: bool,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *_: Any,
    ) -> mx.array:
        self.fits &= queries.shape[-1] == keys.shape[-1] and queries.shape[2] == 1
        geometry = Geometry(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype)
        if self.geometry.setdefault(position, geometry) != geometry:
            raise Unpackable("one layer attends over different keys")
        self.heads[position] = queries.shape[1]
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
        self.apart: set[int] = set()
        geometry, heads = self._discover()
        self.attending = sorted({(g, heads[position]) for position, g in geometry.items()}, key=str)
        self.layers = {position: layer for layer, position in enumerate(geometry)}
        smallest = max(shapes.bucket, 128 if self.cpu else 256)
        self.store = KVStore(list(geometry.values()), smallest, shapes.skip)
        self.piece = smallest if self.cpu else 4 * smallest
        self.compile = not self.cpu if compile is None else compile
        self._compiled: dict[tuple, Any] = {}
        error = agrees(model, self)
        if not error <= allowance(model):
            raise Unpackable(f"packed, its logits are off by {error:.2g} of their standard deviation")

    def length(self, row: Hashable) -> int:
        """Tokens of a row whose keys are kept."""
        place = self.store.places.get(row)
        return place.length if place else 0

    def release(self, row: Hashable, wipe: bool = True) -> None:
        """Drop a row's keys and values; `wipe` unless all its logits were finite."""
        self.store.release(row, wipe)

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
                logits, slabs = self._forward(inputs, slabs, groups, eager=not self.cpu)
        finally:
            self.store.give(slabs)
        for span in spans:
            place = self.store.places[span.row]
            place.length, place.slab.blank = span.stop, False
        return logits[:sampled]

    def state(self) -> list[mx.array]:
        """Arrays that a step has replaced: evaluate them with the step's logits."""
        return [a for slab in self.store.slabs.values() for a in (*slab.keys, *slab.values)]

    def _compiled_for(self, groups: tuple[Group, ...]) -> Any:
        if groups not in self._compiled:
            self._compiled[groups] = mx.compile(lambda inputs, slabs: self._forward(inputs, slabs, groups))
        return self._compiled[groups]

    def _forward(
        self,
        inputs: dict[str, mx.array],
        slabs: dict[str, Any],
        groups: tuple[Group, ...],
        eager: bool = False,
    ) -> tuple[mx.array, dict[str, Any]]:
        slabs = {c: (list(k), list(v)) for c, (k, v) in slabs.items()}
        step = _Step(inputs, groups, slabs, self, eager)
        tokens = inputs["tokens"]
        if "carry" in inputs:
            source = inputs["source"]
            tokens = mx.where(source >= 0, inputs["carry"][mx.maximum(source, 0)], tokens)
        caches = Caches(self.caches(step), lambda hidden: hidden[inputs["pick"]])
        with attached(self.names):
            logits = self.view(tokens[:, None], cache=caches)[:, 0]
        return (logits if caches.selected else caches.select(logits)), slabs

    def caches(self, step: Any) -> list[Any]:
        """What the model's layers see in place of their caches, for one step."""
        positions = iter(range(1 << 30))

        def build(cache: Any) -> Any:
            if isinstance(cache, mlx_cache.CacheList):
                return tuple(build(c) for c in cache.caches)
            if type(cache) not in _KEYED or getattr(cache, "keep", False):
                raise Unpackable(f"it keeps {type(cache).__name__}, not each token's keys and values")
            return _LayerCache(step, next(positions), getattr(cache, "max_size", None))

        return [build(c) for c in mlx_cache.make_prompt_cache(self.model.module)]

    def _discover(self) -> tuple[dict[int, Geometry], dict[int, int]]:
        """Each layer's cache geometry and query heads, from a forward that is traced and never computed."""
        for _ in range(2):  # again, where layers turn out to keep a part of their keys apart
            step = _Tracing(self.apart)
            caches = self.caches(step)
            try:
                with attached(self.names):
                    self.view(mx.zeros((2, 1), mx.int32), cache=Caches(caches, lambda hidden: hidden))
            except Unpackable:
                raise
            except Exception as error:  # whatever a model's code makes of tokens side by side
                line = str(error).strip().partition("\n")[0]
                reason = f"its code doesn't take tokens side by side ({type(error).__name__}: {line:.80})"
                if isinstance(error, AttributeError) and isinstance(error.obj, _LayerCache):
                    reason = f"it reads its cache's {error.name} itself"
                raise Unpackable(reason) from None
            settled = step.apart == self.apart
            self.apart = step.apart
            if settled:
                break
        unread = [c.position for c in _leaves(caches) if c.kept is not None and c.written is None]
        if unread:
            raise Unpackable("it reads keys other than through scaled_dot_product_attention")
        if not step.fits:
            raise Unpackable("queries and keys of one layer differ in width")
        if not step.geometry:
            raise Unpackable("its layers don't attend through scaled_dot_product_attention with a KV cache")
        return dict(sorted(step.geometry.items())), step.heads

    def _plan(
        self, spans: Sequence[Span], carried: bool
    ) -> tuple[tuple[Group, ...], dict[str, np.ndarray], int]:
        places = [self.store.places[s.row] for s in spans]
        placed = [
            Placed(s.start, s.count, p.slab.capacity, p.slot) for s, p in zip(spans, places, strict=True)
        ]
        slabs = {p.slab.capacity: p.slab for p in places}
        # A GPU sees few shapes if a call always covers the whole slab.
        slots = {c: slab.used if self.cpu else len(slab.rows) for c, slab in slabs.items()}
        layout = plan(placed, slots, self.shapes, piece=self.piece, coarse=not self.cpu)
        arrays = layout.arrays
        tokens, positions = np.zeros(layout.size, np.int32), np.zeros(layout.size, np.int32)
        source = np.full(layout.size, -1, np.int32)
        lines: dict[int, list[np.ndarray]] = defaultdict(list)
        wheres: dict[int, list[np.ndarray]] = defaultdict(list)
        for span, place, first in zip(spans, placed, layout.first, strict=True):
            if span.source is None:
                tokens[first : first + span.count] = span.tokens
            else:
                source[first] = span.source
            run = np.arange(span.count)
            positions[first : first + span.count] = span.start + run
            lines[place.capacity].append(place.slot * place.capacity + span.start + run)
            wheres[place.capacity].append(first + run)
        for capacity, slab in slabs.items():
            line, where = np.concatenate(lines[capacity]), np.concatenate(wheres[capacity])
            if slab.blank and 2 * len(line) >= len(slab.rows) * capacity:
                made = np.zeros((len(slab.rows), capacity), np.int32)
                for i, s in enumerate(placed):
                    if s.capacity == capacity:  # its other lines repeat its own token: no harm to siblings
                        made[s.slot] = layout.first[i]
                made.reshape(-1)[line] = where
                arrays[f"b{capacity}"] = made.reshape(-1)
                slab.dirty |= {slot for slot, row in enumerate(slab.rows) if row is None}
                continue
            alone = sum(s.capacity == capacity and s.count == 1 for s in placed)
            sliced = any(g.slab == str(capacity) and g.token >= 0 for g in layout.groups)
            if sliced and len(line) == alone == len(slab.rows):
                arrays[f"f{capacity}"] = line[np.argsort(where)].astype(np.int32)
                continue
            # Written twice, with the same values, so that the number of writes is one of few.
            spare = round_up(len(line), self.shapes.tile) - len(line)
            arrays[f"f{capacity}"] = np.pad(line, (0, spare), mode="edge").astype(np.int32)
            arrays[f"w{capacity}"] = np.pad(where, (0, spare), mode="edge").astype(np.int32)
        arrays["tokens"], arrays["positions"] = tokens, positions
        if carried:
            arrays["source"] = source
        pick = [
            first + span.count - 1 for span, first in zip(spans, layout.first, strict=True) if span.sample
        ]
        count = len(pick)
        pick += pick[-1:] * (round_up(count, self.shapes.head) - count)
        arrays["pick"] = np.array(pick or [0], np.int32)
        return layout.groups, arrays, count


def _take(lines: mx.array, index: mx.array) -> mx.array:
    """Lines, flattened, by index; many at once in the widest elements there are, which is faster."""
    flat = lines.reshape(lines.shape[0], -1)
    wide = index.size > 1024 and flat.shape[1] * flat.itemsize % 8 == 0 and flat.itemsize < 8
    taken = mx.take(flat.view(mx.uint64) if wide else flat, index.reshape(-1), axis=0)
    return taken.view(flat.dtype) if wide else taken


def _leaves(caches: Any) -> Iterator[_LayerCache]:
    for cache in caches:
        yield from _leaves(cache) if isinstance(cache, tuple) else (cache,)
