"""Padded and sequential: the two ways the peers run a batch, kept as references.

Both use mlx-lm's own caches and plain shapes. `SequentialForward` runs every span by itself and takes any
architecture. `PaddedForward` right-pads cold prompts to the longest, cuts each row's cache to its own length,
and decodes the rows side by side with the caches merged, left-padded, as mlx-lm does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_cache

from ..models.load import Model
from .patch import Caches, selecting
from .reference_check import agrees, allowance
from .spans import Span

_PADDABLE = (mlx_cache.KVCache, mlx_cache.ConcatenateKVCache)
_BATCHABLE = (*_PADDABLE, mlx_cache.RotatingKVCache)


def abilities(model: Model) -> tuple[bool, bool, str]:
    """Whether rows of this model can run side by side, and with padding, and why not.

    Returns
    -------
    can_batch, can_pad : bool
    reason : str
        Empty if both.
    """
    kinds = {type(c) for c in mlx_cache.make_prompt_cache(model.module)}
    strange = sorted(k.__name__ for k in kinds if not issubclass(k, _BATCHABLE))
    if strange:
        return False, False, f"{model.name} keeps {', '.join(strange)}: its rows run one at a time"
    if any(not issubclass(k, _PADDABLE) for k in kinds):
        return True, False, f"{model.name} keeps a sliding window: only prompts of equal length share a batch"
    return True, True, ""


class SequentialForward:
    """Every span by itself, `[1, length]`."""

    name = "sequential"
    can_batch, can_pad = False, False

    def __init__(self, model: Model):
        self.model = model
        self.view = selecting(model.module)
        self.rows: dict[Hashable, list[Any]] = {}
        self.lengths: dict[Hashable, int] = {}

    def length(self, row: Hashable) -> int:
        """Tokens of a row that its cache holds."""
        return self.lengths.get(row, 0)

    def release(self, row: Hashable, wipe: bool = True) -> None:
        """Drop a row's cache."""
        self.rows.pop(row, None)
        self.lengths.pop(row, None)

    def reset(self) -> None:
        """Drop every row; see `PackedForward.reset`."""
        self.rows.clear()
        self.lengths.clear()

    def state(self) -> list[mx.array]:
        """Arrays to evaluate with a step's logits: none, as they depend on all that is read again."""
        return []

    def run(self, spans: Sequence[Span], carry: mx.array | None = None) -> mx.array:
        """One span after another; see `PackedForward.run`."""
        return self._stack([out for span in spans if (out := self._one(span)) is not None])

    def _one(self, span: Span) -> mx.array | None:
        if span.row not in self.rows:
            self.rows[span.row] = mlx_cache.make_prompt_cache(self.model.module)
        caches = Caches(self.rows[span.row], lambda hidden: hidden[:, -1:])
        logits = self.view(mx.array([list(span.tokens)]), cache=caches)[:, -1]
        self.lengths[span.row] = span.stop
        mx.eval(logits, [c.state for c in self.rows[span.row]])
        return logits if span.sample else None

    def _stack(self, outs: list[mx.array]) -> mx.array:
        return mx.concatenate(outs) if outs else mx.zeros((0, self.model.vocab_size))


class PaddedForward(SequentialForward):
    """Cold prompts side by side, right-padded; decode tokens side by side; anything else by itself."""

    name = "padded"
    can_batch = True

    def __init__(self, model: Model):
        super().__init__(model)
        can_batch, self.can_pad, reason = abilities(model)
        if not can_batch:
            raise ValueError(f'forward="padded": {reason}; use forward="sequential"')
        self.batch: tuple[list[Hashable], list[Any]] = ([], [])
        try:
            error = agrees(model, self)
        except Exception as failure:  # whatever a model's code makes of rows side by side
            line = str(failure).strip().partition("\n")[0]
            raise ValueError(f'forward="padded": {model.name} can\'t run rows side by side ({line:.80}); '
                             'use forward="sequential"') from None  # fmt: skip
        if not error <= allowance(model):
            raise ValueError(f'forward="padded": {model.name}, beside others, is off by {error:.2g} of its '
                             'logits\' standard deviation; use forward="sequential"')  # fmt: skip

    def run(self, spans: Sequence[Span], carry: mx.array | None = None) -> mx.array:
        """Group the spans by what can share a call; see `PackedForward.run`."""
        cold = [s for s in spans if s.start == 0 and s.sample]
        decode = [s for s in spans if s.start > 0 and s.count == 1 and s.sample]
        outs: dict[Hashable, mx.array] = {}
        if len(cold) > 1 and (self.can_pad or len({s.count for s in cold}) == 1):
            outs |= self._prefill(cold)
        if len(decode) > 1:
            outs |= self._decode(decode)
        for span in spans:
            if span.row not in outs:
                self._unbatch(span.row)
                out = self._one(span)
                if out is not None:
                    outs[span.row] = out
        return self._stack([outs[s.row] for s in spans if s.sample])

    def release(self, row: Hashable, wipe: bool = True) -> None:
        """Drop a row's cache, out of the running batch too."""
        rows, caches = self.batch
        if row in rows:
            keep = [i for i, other in enumerate(rows) if other != row]
            if keep:
                for cache in caches:
                    cache.filter(keep)
            self.batch = ([rows[i] for i in keep], caches if keep else [])
        super().release(row)

    def reset(self) -> None:
        """Drop every row, the running batch too."""
        self.batch = ([], [])
        super().reset()

    def _prefill(self, spans: Sequence[Span]) -> dict[Hashable, mx.array]:
        longest = max(s.count for s in spans)
        tokens = np.zeros((len(spans), longest), np.int32)
        for i, span in enumerate(spans):
            tokens[i, : span.count] = span.tokens
        caches = mlx_cache.make_prompt_cache(self.model.module)
        last = mx.array([s.count - 1 for s in spans])
        rows = mx.arange(len(spans))
        logits = self.view(mx.array(tokens), cache=Caches(caches, lambda hidden: hidden[rows, last][:, None]))
        logits = logits[:, -1] if logits.shape[1] == 1 else logits[rows, last]
        mx.eval(logits, [c.state for c in caches])
        for i, span in enumerate(spans):
            self.rows[span.row] = [_cut(cache, i, span.count) for cache in caches]
            self.lengths[span.row] = span.count
        mx.eval([c.state for span in spans for c in self.rows[span.row]])
        return {span.row: logits[i : i + 1] for i, span in enumerate(spans)}

    def _decode(self, spans: Sequence[Span]) -> dict[Hashable, mx.array]:
        wanted = [s.row for s in spans]
        if set(self.batch[0]) != set(wanted):
            for row in list(self.batch[0]):
                self._unbatch(row)
            layers = zip(*(self.rows[r] for r in wanted), strict=True)
            merged = [type(layer[0]).merge(list(layer)) for layer in layers]
            self.batch = (wanted, merged)
        rows, caches = self.batch
        by_row = {s.row: s for s in spans}
        tokens = mx.array([[by_row[r].tokens[0]] for r in rows])
        logits = self.view(tokens, cache=Caches(caches, lambda hidden: hidden))[:, -1]
        mx.eval(logits, [c.state for c in caches])
        for row in rows:
            self.lengths[row] += 1
        return {row: logits[i : i + 1] for i, row in enumerate(rows)}

    def _unbatch(self, row: Hashable) -> None:
        """Give a row of the running batch its own cache back."""
        rows, caches = self.batch
        if row in rows:
            self.rows[row] = [cache.extract(rows.index(row)) for cache in caches]
            lengths = self.lengths[row]
            mine = self.rows[row]
            self.release(row)
            self.rows[row], self.lengths[row] = mine, lengths


def _cut(cache: Any, row: int, length: int) -> Any:
    """One row of a right-padded batch's cache, without its padding."""
    kind: Any = type(cache)
    mine = kind.__new__(kind)
    mine.__dict__.update(cache.__dict__)
    keep = slice(0, length) if isinstance(cache, _PADDABLE) else slice(None)
    mine.keys, mine.values = cache.keys[row : row + 1, :, keep], cache.values[row : row + 1, :, keep]
    mine.offset = length
    return mine
