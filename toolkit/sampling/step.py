"""Step: one batch of logits on its way through a `Sampler`, from the adjustments to `Drawn`.

Rows are sorted here into those for `unfiltered` (or `kernels`), those for `chain`, those for
`logits_processors`. `xp` is NumPy, computing at once, or MLX, lazily.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from . import chain, draws, kernels, unfiltered
from .draws import Drawn, columns, host
from .drift_bound import from_margin
from .filters import Settings
from .logits_processors import adjust
from .ranking import namespace, rank


class Step:
    """One step's logits, adjusted, and the ways to draw from them."""

    def __init__(self, sampler: Any, logits: mx.array, histories: Any, gates: Any):
        if logits.ndim != 2 or logits.shape[0] != sampler.rows:
            raise ValueError(f"logits of shape {logits.shape}: must be [{sampler.rows}, vocabulary]")
        self.sampler, self.logits, self.vocab = sampler, logits, logits.shape[-1]
        self.gates = gates
        self.xp: Any = draws.library()
        self.errors: dict[int, str] = {}
        self.stretch: np.ndarray | None = None
        z: Any = host(logits) if self.xp is np else logits
        rows = sampler.adjusted
        if len(rows):
            z = self._adjust(z, rows, histories)
        self.z = z
        if self.xp is np:
            self.best = z.max(axis=-1, keepdims=True)
            self.bad = ~np.isfinite(self.best[:, 0])
            if self.bad.any():
                self.z = np.where(self.bad[:, None], np.float32(0), z)
                self.best = np.where(self.bad[:, None], np.float32(0), self.best)

    def _adjust(self, z: Any, rows: np.ndarray, histories: Any) -> Any:
        sampler, xp = self.sampler, self.xp
        if sampler.needs_history and histories is None:
            raise ValueError(
                "histories=None: rows with penalties or processors need prompt and generated ids"
            )
        picked = [((), ()) if histories is None else histories[i] for i in rows]
        requests = [sampler.requests[i] for i in rows]
        z = z.astype(xp.float32) if xp is mx else z
        part = z if len(rows) == sampler.rows else z[rows if xp is np else mx.array(rows)]
        part, stretch, errors = adjust(part, requests, picked, sampler.mask(self.vocab, xp))
        self.errors = {int(rows[i]): message for i, message in errors.items()}
        self.stretch = np.ones((sampler.rows, 1), dtype=np.float32)
        self.stretch[rows] = stretch
        if len(rows) == sampler.rows:
            return part
        if xp is np:
            z = np.array(z)
            z[rows] = part
            return z
        where = mx.broadcast_to(mx.array(rows)[:, None], part.shape)
        return mx.put_along_axis(z, where, part, axis=0)

    # Keyed draws.

    def keyed(self, keys: Any) -> tuple[Any, ...]:
        """Tokens, margins, log probabilities, drift; where lazy, also which rows are bad."""
        sampler = self.sampler
        listed = np.flatnonzero(sampler.filtered & ~sampler.greedy)
        others = np.flatnonzero(~sampler.filtered | sampler.greedy)
        parts = [(rows, self._plain(rows, keys)) for rows in [others] if len(rows)]
        found = list(self._survivors(listed))
        if self.xp is np:
            picked: list[Any] = chain.pick_host(found, np.asarray(keys))
        else:
            own = mx.array(keys)
            picked = [(*chain.pick_lazy(part, own[mx.array(part.rows)]), part.bad) for part in found]
        parts += [(part.rows, values) for part, values in zip(found, picked, strict=True)]
        return self._merge(parts)

    def _plain(self, rows: np.ndarray, keys: Any) -> tuple[Any, ...]:
        sampler = self.sampler
        if self.xp is mx:
            z, keys = (
                a if len(rows) == sampler.rows else a[mx.array(rows)] for a in (self.z, mx.array(keys))
            )
            inverse, temperature, mask = sampler.unfiltered(rows)
            return _plain_lazy(z, keys, inverse, temperature, mask)
        greedy = sampler.greedy[rows]
        out: list[Any] = [np.empty(len(rows), t) for t in (np.int32, np.float32, np.float32)]
        for which, at in ((True, np.flatnonzero(greedy)), (False, np.flatnonzero(~greedy))):
            if not len(at):
                continue
            part = rows[at]
            whole = len(part) == sampler.rows
            z, best = (self.z, self.best) if whole else (self.z[part], self.best[part])
            got = (
                unfiltered.greedy_host(z, best)
                if which
                else unfiltered.draw_host(z, best, sampler.inverse[part], np.asarray(keys)[part])
            )
            for target, values in zip(out, got, strict=True):
                target[at] = values
        tokens, margins, logprobs = out
        return tokens, margins, logprobs, from_margin(margins, 1 / sampler.inverse[rows, 0])

    def _survivors(self, rows: np.ndarray) -> Any:
        sampler, xp = self.sampler, self.xp
        for length, members in sampler.groups(self.vocab, rows):
            settings = sampler.settings(members, xp)
            if "xtc" in settings.columns:
                settings = self._gate(settings, members)
            whole = len(members) == sampler.rows
            if xp is np:
                shifted = (self.z if whole else self.z[members]) - (
                    self.best if whole else self.best[members]
                )
            else:
                z = (self.z if whole else self.z[mx.array(members)]).astype(mx.float32)
                best = mx.max(z, axis=-1, keepdims=True)
                # No row of NaN is sorted or summed; a row whose largest isn't 0 is bad.
                shifted = mx.where(mx.isnan(best) | mx.isinf(best), -1.0, z - best)
            yield from chain.survivors(shifted, settings, members, length)

    def _gate(self, settings: Settings, rows: np.ndarray) -> Settings:
        # A shut gate is a threshold that nothing reaches.
        shut = np.ones(self.sampler.rows, dtype=bool)
        shut[self.sampler.gated] = np.asarray(self.gates) >= self.sampler.gate_chance
        threshold = columns([self.sampler.requests[i] for i in rows])["xtc"]
        gated = np.where(shut[rows, None], np.float32(2), threshold)
        xtc = gated if self.xp is np else mx.array(gated)
        return Settings(settings.order, settings.inverse, {**settings.columns, "xtc": xtc})

    def _merge(self, parts: list[tuple[np.ndarray, tuple[Any, ...]]]) -> tuple[Any, ...]:
        if len(parts) == 1 and len(parts[0][0]) == self.sampler.rows:
            return parts[0][1]
        rows = np.concatenate([rows for rows, _ in parts]) if parts else np.zeros(0, np.int32)
        back = np.argsort(rows)
        columns_ = zip(*(values for _, values in parts), strict=True)
        if self.xp is np:
            return tuple(np.concatenate(c)[back] for c in columns_)
        return tuple(mx.concatenate(c)[mx.array(back)] for c in columns_)

    # Draws from the global generator.

    def scores(self, greedy: bool = True) -> Any:
        """Scores [rows, V] after the chain, NaN in bad rows; `greedy`: with greedy rows' filters, which their
        draws skip."""
        sampler, xp = self.sampler, self.xp
        filtered = np.flatnonzero(sampler.filtered if greedy else sampler.filtered & ~sampler.greedy)
        if xp is np:
            scores = (self.z - self.best) * sampler.inverse
            for found in self._survivors(filtered):
                scores[found.rows] = chain.scores_of(found)
            scores[self.bad] = np.nan
            return scores
        z = self.z.astype(mx.float32)
        best = mx.max(z, axis=-1, keepdims=True)
        scores = (z - best) * mx.array(sampler.inverse)
        for found in self._survivors(filtered):
            part = chain.scores_of(found)
            where = mx.broadcast_to(mx.array(found.rows)[:, None], part.shape)
            whole = len(found.rows) == sampler.rows
            scores = part if whole else mx.put_along_axis(scores, where, part, axis=0)
        return mx.where(mx.isfinite(best), scores, mx.nan)

    def shared(self, together: bool) -> tuple[Any, ...]:
        """As `keyed`; margins and drift of greedy rows only."""
        sampler = self.sampler
        greedy = np.flatnonzero(sampler.greedy)
        free = np.flatnonzero(~sampler.greedy)
        scores = mx.array(self.scores())
        if self.xp is np and self.bad.any():
            scores = mx.where(mx.array(self.bad)[:, None], 0, scores)
        parts: list[tuple[np.ndarray, tuple[Any, ...]]] = []
        if len(free):
            if together:
                # Greedy rows take part in the draw, as with the peers: it moves the generator by its shape.
                tokens = mx.random.categorical(scores)[mx.array(free)]
            else:
                tokens = mx.concatenate([mx.random.categorical(scores[i : i + 1]) for i in free.tolist()])
            part = scores[mx.array(free)]
            chosen = mx.take_along_axis(part, tokens[:, None], axis=-1)[:, 0]
            logprobs = chosen - mx.logsumexp(part, axis=-1)
            undefined = mx.full(tokens.shape, mx.nan)
            values: tuple[Any, ...] = (tokens.astype(mx.int32), undefined, logprobs, undefined)
            if self.xp is np:
                values = tuple(np.asarray(v) for v in values)
            else:
                values = (*values, mx.isnan(part.max(axis=-1)) | (part.max(axis=-1) == -mx.inf))
            parts.append((free, values))
        if len(greedy):
            parts.append((greedy, self._plain(greedy, np.zeros((sampler.rows, 2), np.uint32))))
        return self._merge(parts)

    # What comes of it.

    def drawn(self, tokens: Any, margins: Any, logprobs: Any, drift: Any, bad: Any = None) -> Drawn:
        """Assemble; single survivors and bad rows get NaN."""
        xp = self.xp
        if self.stretch is not None:
            drift = drift / (self.stretch[:, 0] if xp is np else mx.array(self.stretch[:, 0]))
        bad = self.bad if xp is np else bad
        settle = _settled if xp is np else _settled_lazy
        tokens, margins, logprobs, drift = settle(tokens, margins, logprobs, drift, bad, self.vocab)
        tokens, logprobs, margins, drift, bad = (
            a if xp is mx else mx.array(a) for a in (tokens, logprobs, margins, drift, bad)
        )
        return Drawn(tokens, logprobs, margins, drift, bad, self._top(), self.errors, self.logits)

    def _top(self) -> tuple[mx.array, mx.array] | None:
        asked = self.sampler.asked
        if not asked.any():
            return None
        count = min(int(asked.max()), self.vocab)
        if self.xp is np:
            ids, values = self._top_host(asked > 0, count)
        else:
            scores = self.scores(greedy=False)
            logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
            bad = mx.isnan(scores[:, :1])  # never sorted, and not shown
            ids = mx.argsort(mx.where(bad, 0, -logprobs), axis=-1)[:, :count].astype(mx.int32)
            values = mx.take_along_axis(logprobs, ids, axis=-1)
        shown = (mx.arange(count)[None] < mx.array(asked)[:, None]) & (values > -mx.inf)
        return mx.where(shown, ids, -1), mx.where(shown, values, -mx.inf)

    def _top_host(self, asked: np.ndarray, count: int) -> tuple[mx.array, mx.array]:
        # Ranked lists, and only for rows that ask: sorting every row's vocabulary costs more than the draw.
        ids = np.zeros((len(asked), count), np.int32)
        values = np.full((len(asked), count), -np.inf, np.float32)
        asked = asked & ~self.bad
        if asked.any():
            scores = self.scores(greedy=False)[asked]
            shifted = scores - scores.max(axis=-1, keepdims=True)
            lists = rank(shifted, count)
            ids[asked] = lists.ids
            values[asked] = lists.z - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return mx.array(ids), mx.array(values)


# Compiled, since a step is short and each operation costs the host some microseconds.
@mx.compile
def _plain_lazy(z: mx.array, keys: mx.array, inverse: mx.array, temperature: mx.array, mask: Any) -> Any:
    tokens, margins, logprobs, best = kernels.draw(z, inverse, mask, keys)
    bad = mx.isnan(best) | mx.isinf(best)
    return tokens, margins, logprobs, from_margin(margins, temperature), bad


def _settled(tokens: Any, margins: Any, logprobs: Any, drift: Any, bad: Any, vocab: int) -> Any:
    xp = namespace(margins)
    undefined = xp.array(np.nan, dtype=xp.float32)
    # An infinite bound: a vocabulary, or an allowed set, of one.
    margins = xp.where(bad | xp.isinf(margins), undefined, margins)
    logprobs, drift = (xp.where(bad, undefined, a) for a in (logprobs, drift))
    return xp.clip(tokens, 0, vocab - 1), margins, logprobs, drift


_settled_lazy = mx.compile(_settled)
