"""Packed: one forward over all spans of a step, side by side, without padding beyond the tile.

Token-wise layers see `[T, 1]` tokens; attention runs over each row's own keys (`attention`, `kv_cache`); only
tokens that are sampled from go through the head (`patch`). Shapes are rounded as `Shapes` says, so that a
row's logits don't depend on its company.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_cache

from .. import backend
from ..models.load import Model
from .cuda_linear import TILE, Linears, Readers
from .kv_cache import KVStore
from .layer_cache import LayerCache, Step, Tracing, Unpackable
from .layout import Group, Placed, plan
from .patch import Caches, attached, detach, functions_of, selecting
from .reference_check import agrees, allowance
from .shapes import Shapes, round_up
from .spans import Span

COMPILED = 256
"""Steps of different shapes that are kept compiled; decoding rows of a few lengths make some dozens."""
_KEYED = (mlx_cache.KVCache, mlx_cache.RotatingKVCache, mlx_cache.ConcatenateKVCache)


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
        self.names = functions_of(model.module, self.cpu)
        self.apart: set[int] = set()
        readers = Readers()
        traced = self._discover(readers)
        self.linears = readers.sets(model.vocab_size) if shapes.narrow else {}
        geometry = dict(sorted(traced.geometry.items()))
        self.attending = sorted({(g, traced.heads[i], traced.sinks[i]) for i, g in geometry.items()}, key=str)
        self.layers = {position: layer for layer, position in enumerate(geometry)}
        least = 128 if self.cpu else 256
        bucket = max(shapes.bucket, 64 if self.cpu else 256)
        self.store = KVStore(list(geometry.values()), bucket, least, shapes.skip, split=self.cpu)
        self.piece = max(shapes.bucket, least) * (1 if self.cpu else 4)
        self.compile = not self.cpu if compile is None else compile
        self._compiled: dict[tuple, Any] = {}
        try:
            error = agrees(model, self)
        except RuntimeError as failed:  # MLX's own, of a kernel that this device can't run
            raise Unpackable(f"a step of it fails here ({str(failed).strip():.120})") from None
        if not error <= allowance(model):
            raise Unpackable(f"packed, its logits are off by {error:.2g} of their standard deviation")

    def length(self, row: Hashable) -> int:
        """Tokens of a row whose keys are kept."""
        place = self.store.places.get(row)
        return place.length if place else 0

    def release(self, row: Hashable, wipe: bool = True) -> None:
        """Drop a row's keys and values; `wipe` unless all its logits were finite."""
        self.store.release(row, wipe)

    def reset(self) -> None:
        """Drop every row, and all that a step which an exception ended may have left half done."""
        self.store.clear()
        self._compiled.clear()  # MLX may hold one that was being traced

    def read(self, row: Hashable, length: int | None = None) -> list[tuple[mx.array, mx.array]]:
        """A row's keys and values, to be kept elsewhere: `[heads, length, dim]` pairs, one per layer."""
        return self.store.read(row, length)

    def write(self, row: Hashable, pairs: list[tuple[mx.array, mx.array]], length: int) -> None:
        """Start a row from keys and values kept elsewhere."""
        self.store.write(row, pairs, length)

    def run(self, spans: Sequence[Span], carry: mx.array | None = None) -> mx.array:
        """One step.

        Parameters
        ----------
        spans : sequence of Span
            At most one per row, each starting where the row's kept tokens end.
        carry : int32, [n], optional
            Tokens still on the device; a span whose `source` is i takes its one token from `carry[i]`.

        Returns
        -------
        [sampled, vocab]
            Logits after the last token of each span that samples, in order. Lazy.
        """
        self.store.reserve({s.row: s.stop for s in spans})
        groups, arrays, sampled = self._plan(spans, carry is not None)
        inputs = _upload(arrays)
        if carry is not None:
            inputs["carry"] = carry
        slabs = self.store.take()
        try:
            # A prefill's shapes hardly ever come again; a decode step's nearly always do.
            if self.compile and all(s.count == 1 for s in spans):
                logits, slabs = self._compiled_for(groups)(inputs, slabs)
            else:
                logits, slabs = self._forward(inputs, slabs, groups, eager=not self.cpu)
        except BaseException:
            detach()
            raise
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
            if len(self._compiled) == COMPILED:
                del self._compiled[next(iter(self._compiled))]
            me = weakref.proxy(self)  # or this forward, slabs and all, would wait for the garbage collector
            self._compiled[groups] = mx.compile(lambda inputs, slabs: me._forward(inputs, slabs, groups))
        return self._compiled[groups]

    def _forward(
        self,
        inputs: dict[str, mx.array],
        slabs: dict[str, Any],
        groups: tuple[Group, ...],
        eager: bool = False,
    ) -> tuple[mx.array, dict[str, Any]]:
        slabs = {c: (list(k), list(v)) for c, (k, v) in slabs.items()}
        step = Step(
            inputs,
            groups,
            slabs,
            layers=self.layers,
            apart=self.apart,
            shapes=self.shapes,
            cpu=self.cpu,
            split=self.store.split,
            eager=eager,
        )
        tokens = inputs["tokens"]
        if "carry" in inputs:
            source = inputs["source"]
            tokens = mx.where(source >= 0, inputs["carry"][mx.maximum(source, 0)], tokens)
        caches = Caches(self.caches(step), lambda hidden: hidden[inputs["pick"]])
        narrow = tokens.size <= self.shapes.narrow and all(g.queries == 1 for g in groups)
        with attached(self.names, Linears(self.linears) if narrow else None):
            logits = self.view(tokens[:, None], cache=caches)[:, 0]
        return (logits if caches.selected else caches.select(logits)), slabs

    def caches(self, step: Any) -> list[Any]:
        """What the model's layers see in place of their caches, for one step."""
        places = count()
        return [_layer_cache(cache, step, places) for cache in mlx_cache.make_prompt_cache(self.model.module)]

    def _discover(self, readers: Readers) -> Tracing:
        """What each layer caches and how it attends, from a forward that is traced and never computed."""
        for _ in range(2):  # again, where layers turn out to keep a part of their keys apart
            step = Tracing(self.apart)
            caches = self.caches(step)
            try:
                with attached(self.names, readers):
                    self.view(mx.zeros((2, 1), mx.int32), cache=Caches(caches, lambda hidden: hidden))
            except Unpackable:
                raise
            except Exception as error:  # whatever a model's code makes of tokens side by side
                line = str(error).strip().partition("\n")[0]
                reason = f"its code doesn't take tokens side by side ({type(error).__name__}: {line:.80})"
                if isinstance(error, AttributeError) and isinstance(error.obj, LayerCache):
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
        return step

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
        shapes = self.shapes
        if len(spans) <= shapes.narrow and all(s.count == 1 for s in spans):
            shapes = replace(shapes, tile=TILE)
        layout = plan(placed, slots, shapes, piece=self.piece, coarse=not self.cpu)
        arrays = layout.arrays
        counts = np.array([s.count for s in spans])
        heads = np.array([(s.start, s.slot * s.capacity + s.start, at, s.capacity)
                          for s, at in zip(placed, layout.first, strict=True)])  # fmt: skip
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        position, line_of, where_of, capacity_of = np.repeat(heads, counts, axis=0).T
        position, line_of, where_of = position + within, line_of + within, where_of + within
        tokens, positions = np.zeros(layout.size, np.int32), np.zeros(layout.size, np.int32)
        source = np.full(layout.size, -1, np.int32)
        positions[where_of] = position
        tokens[where_of] = list(chain.from_iterable(s.tokens if s.source is None else (0,) for s in spans))
        if carried:
            source[heads[:, 2]] = [-1 if s.source is None else s.source for s in spans]
        for capacity, slab in slabs.items():
            here = capacity_of == capacity
            line, where = line_of[here], where_of[here]
            if slab.blank and 2 * len(line) >= len(slab.rows) * capacity:
                made = np.zeros((len(slab.rows), capacity), np.int32)
                for i, s in enumerate(placed):
                    if s.capacity == capacity:  # its other lines repeat its own token: no harm to siblings
                        made[s.slot] = layout.first[i]
                made.reshape(-1)[line] = where
                arrays[f"b{capacity}"] = made.reshape(-1)
                slab.dirty |= {slot for slot, row in enumerate(slab.rows) if row is None}
                continue
            alone = int(((heads[:, 3] == capacity) & (counts == 1)).sum())
            sliced = any(g.slab == str(capacity) and g.token >= 0 for g in layout.groups)
            if sliced and len(line) == alone == len(slab.rows):
                arrays[f"f{capacity}"] = line[np.argsort(where)].astype(np.int32)
                continue
            # Written twice, with the same values, so that the number of writes is one of few.
            spare = round_up(len(line), shapes.tile) - len(line)
            arrays[f"f{capacity}"] = np.pad(line, (0, spare), mode="edge").astype(np.int32)
            arrays[f"w{capacity}"] = np.pad(where, (0, spare), mode="edge").astype(np.int32)
        arrays["tokens"], arrays["positions"] = tokens, positions
        if carried:
            arrays["source"] = source
        pick = [
            first + span.count - 1 for span, first in zip(spans, layout.first, strict=True) if span.sample
        ]
        wanted = len(pick)
        pick += pick[-1:] * (round_up(wanted, self.shapes.head) - wanted)
        arrays["pick"] = np.array(pick or [0], np.int32)
        return layout.groups, arrays, wanted


def _upload(arrays: dict[str, np.ndarray]) -> dict[str, mx.array]:
    """Small integer arrays on the device, handed over in one piece: each hand-over costs a GPU's host."""
    whole = mx.array(np.concatenate([a.reshape(-1) for a in arrays.values()], dtype=np.int32))
    stops = np.cumsum([a.size for a in arrays.values()]).tolist()
    return {
        name: whole[stop - a.size : stop].reshape(a.shape)
        for (name, a), stop in zip(arrays.items(), stops, strict=True)
    }


# A function of the module: a closure that calls itself would keep its step, slabs and all, until the garbage
# collector runs.
def _layer_cache(cache: Any, step: Any, places: Iterator[int]) -> Any:
    if isinstance(cache, mlx_cache.CacheList):
        return tuple(_layer_cache(part, step, places) for part in cache.caches)
    if type(cache) not in _KEYED or getattr(cache, "keep", False):
        raise Unpackable(f"it keeps {type(cache).__name__}, not each token's keys and values")
    return LayerCache(step, next(places), getattr(cache, "max_size", None))


def _leaves(caches: Any) -> Iterator[LayerCache]:
    for cache in caches:
        yield from _leaves(cache) if isinstance(cache, tuple) else (cache,)
