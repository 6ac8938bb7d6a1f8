"""Sampler: a batch's parameters, compiled once; every step, logits in and one token a row out.

Rows are sorted by what they need: greedy and unfiltered rows go over the whole vocabulary (`plain`, or
`kernels` on a GPU), rows with filters through ranked lists (`chain`), and only rows with masks, bias or
penalties are adjusted first (`adjust`). A row's result depends on nothing outside the row, so it has the
same bits alone and in any batch.

On a CPU everything is computed at once, in NumPy where that is faster. On a GPU it is lazy: nothing is
evaluated, unless a row has a logits processor, which is the user's own code.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .. import noise
from ..requests import Request
from . import chain, kernels, plain
from . import rows as rows_
from .adjust import History, adjust, adjusted, allowed, penalised
from .drift import from_margin
from .filters import Settings
from .rows import ORDER, Draw, Drawn, check_order, columns, filtered, host


class Sampler:
    """The rows of a batch, compiled.

    Parameters
    ----------
    draws : sequence of Draw
        One a row: request, seed and choice are read here; position and history are given at each step.
    order : sequence of str
        The chain after mask, bias and penalties: a permutation of `ORDER`.

    Attributes
    ----------
    needs_history : bool
        Whether some row's logits depend on the tokens so far, so that `histories` must be given.
    """

    def __init__(self, draws: Sequence[Draw], order: Sequence[str] = ORDER):
        self.order = check_order(order)
        self.requests = [d.request for d in draws]
        self.rows = len(draws)
        self.greedy = np.array([r.greedy for r in self.requests], dtype=bool)
        self.needs_history = any(penalised(r) for r in self.requests)
        self._seeded = np.array([d.seed is not None for d in draws], dtype=bool)
        self._draws = [(d.seed or 0, d.choice) for d in draws]
        self._streams: dict[int, np.ndarray] = {}
        self._adjusted = np.flatnonzero([adjusted(r) for r in self.requests])
        self._filtered = np.array([filtered(r) for r in self.requests], dtype=bool)
        inverse = [1.0 if r.greedy else 1 / r.temperature for r in self.requests]
        self.inverse = np.array(inverse, dtype=np.float32)[:, None]
        self._gated = np.flatnonzero([r.xtc_probability > 0 for r in self.requests])
        self._gate_chance = np.array([self.requests[i].xtc_probability for i in self._gated])
        self._compiled: dict[Any, Any] = {}

    def keys(self, positions: Any, purpose: int = noise.DRAW) -> np.ndarray:
        """Row keys of the draws at these positions: uint32 [rows, 2], or [rows, steps, 2]."""
        if purpose not in self._streams:
            seeds, choices = zip(*self._draws, strict=True) if self._draws else ((), ())
            self._streams[purpose] = noise.stream_keys(seeds, choices, purpose)
        return noise.keys_at(self._streams[purpose], positions)

    def draw(
        self,
        logits: mx.array,
        positions: Sequence[int],
        histories: Sequence[History] | None = None,
        keys: Any = None,
    ) -> Drawn:
        """One keyed token a row.

        Parameters
        ----------
        logits : float, [rows, V]
        positions : ints, [rows]
            Logical position of the token being drawn.
        histories : sequence of (prompt ids, generated ids), optional
        keys : uint32, [rows, 2], optional
            From `keys(positions)`, where they were made ahead.
        """
        if not self._seeded.all():
            row = int(np.flatnonzero(~self._seeded)[0])
            raise ValueError(f"seed=None for row {row}: keyed draws need a seed for every row")
        keys = self.keys(positions) if keys is None else keys
        gates = noise.uniform(self.keys(positions, noise.XTC)[self._gated]) if len(self._gated) else ()
        with np.errstate(all="ignore"):
            step = _Step(self, logits, histories, gates)
            return step.drawn(*step.keyed(keys))

    def draw_shared(
        self, logits: mx.array, together: bool, histories: Sequence[History] | None = None
    ) -> Drawn:
        """One token a row from MLX's global generator, which moves.

        Parameters
        ----------
        together : bool
            False: a draw over [1, V] for each row that isn't greedy, in order, as the peers draw first
            tokens. True: one draw over [rows, V], greedy rows included, as they decode.
        """
        gates = np.asarray(mx.random.uniform(shape=(len(self._gated),))) if len(self._gated) else ()
        with np.errstate(all="ignore"):
            step = _Step(self, logits, histories, gates)
            return step.drawn(*step.shared(together))

    def process(
        self,
        logits: mx.array,
        positions: Sequence[int],
        histories: Sequence[History] | None = None,
        gates: Any = None,
    ) -> mx.array:
        """float32 scores [rows, V] after the chain, less each row's maximum; excluded ids are -inf.

        Greedy rows are filtered, not divided. `gates` [rows] are XTC's numbers in (0, 1), keyed if not given.
        """
        if gates is None:
            gates = noise.uniform(self.keys(positions, noise.XTC)) if len(self._gated) else np.ones(self.rows)
        with np.errstate(all="ignore"):
            return mx.array(_Step(self, logits, histories, np.asarray(gates)[self._gated]).scores())

    def settings(self, rows: np.ndarray, xp: Any) -> Settings:
        """Settings of some rows, in NumPy or MLX, made once."""
        key = (xp is np, rows.tobytes())
        if key not in self._compiled:
            made = columns([self.requests[i] for i in rows])
            inverse = self.inverse[rows]
            if xp is not np:
                made, inverse = {k: mx.array(v) for k, v in made.items()}, mx.array(inverse)
            self._compiled[key] = Settings(self.order, inverse, made)
        return self._compiled[key]

    def mask(self, vocab: int, xp: Any) -> Any:
        """Allowed ids of the rows that are adjusted, made once."""
        key = ("mask", xp is np, vocab)
        if key not in self._compiled:
            mask = allowed([self.requests[i] for i in self._adjusted], vocab)
            self._compiled[key] = mask if mask is None or xp is np else mx.array(mask)
        return self._compiled[key]

    def groups(self, vocab: int, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Rows with filters by list length (see `chain.list_length`)."""
        key = (vocab, rows.tobytes())
        if key not in self._compiled:
            # Typical-p and XTC are followed differently by `drift`, also where their siblings would not be.
            by: dict[tuple[int, bool, bool], list[int]] = {}
            for row in rows:
                request = self.requests[row]
                used = set(columns([request]))
                length = chain.list_length(request.top_k or vocab, self.order, used, vocab)
                by.setdefault((length, "typical_p" in used, "xtc" in used), []).append(row)
            self._compiled[key] = [(length, np.array(members)) for (length, *_), members in by.items()]
        return self._compiled[key]


class _Step:
    """One step's logits, adjusted, and the ways to draw from them."""

    def __init__(self, sampler: Sampler, logits: mx.array, histories: Any, gates: Any):
        if logits.ndim != 2 or logits.shape[0] != sampler.rows:
            raise ValueError(f"logits of shape {logits.shape}: must be [{sampler.rows}, vocabulary]")
        self.sampler, self.logits, self.vocab = sampler, logits, logits.shape[-1]
        self.gates = gates
        self.xp: Any = rows_.library()
        self.errors: dict[int, str] = {}
        self.stretch: np.ndarray | None = None
        z: Any = host(logits) if self.xp is np else logits
        rows = sampler._adjusted
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

    def keyed(self, keys: Any) -> tuple[Any, Any, Any, Any]:
        """Tokens, margins, log probabilities, drift."""
        sampler = self.sampler
        listed = np.flatnonzero(sampler._filtered & ~sampler.greedy)
        others = np.flatnonzero(~sampler._filtered | sampler.greedy)
        parts = [(rows, self._plain(rows, keys)) for rows in [others] if len(rows)]
        found = list(self._survivors(listed))
        if self.xp is np:
            picked = chain.pick_host(found, np.asarray(keys))
        else:
            picked = [chain.pick_lazy(part, mx.array(keys)[mx.array(part.rows)]) for part in found]
        parts += [(part.rows, values) for part, values in zip(found, picked, strict=True)]
        return self._merge(parts)

    def _plain(self, rows: np.ndarray, keys: Any) -> tuple[Any, Any, Any, Any]:
        sampler, xp = self.sampler, self.xp
        greedy = sampler.greedy[rows]
        if xp is mx:
            z, keys = (
                a if len(rows) == sampler.rows else a[mx.array(rows)] for a in (self.z, mx.array(keys))
            )
            inverse = mx.array(sampler.inverse[rows])
            mask = mx.array(greedy[:, None]) if greedy.any() else None
            tokens, margins, logprobs, best = kernels.draw(z, inverse, mask, keys)
            return tokens, margins, logprobs, from_margin(margins, (1 / inverse)[:, 0])
        out: list[Any] = [np.empty(len(rows), t) for t in (np.int32, np.float32, np.float32)]
        for which, at in ((True, np.flatnonzero(greedy)), (False, np.flatnonzero(~greedy))):
            if not len(at):
                continue
            part = rows[at]
            whole = len(part) == sampler.rows
            z, best = (self.z, self.best) if whole else (self.z[part], self.best[part])
            got = (
                plain.greedy_host(z, best)
                if which
                else plain.draw_host(z, best, sampler.inverse[part], np.asarray(keys)[part])
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
                shifted = z - mx.max(z, axis=-1, keepdims=True)
            yield from chain.survivors(shifted, settings, members, length)

    def _gate(self, settings: Settings, rows: np.ndarray) -> Settings:
        # A shut gate is a threshold that nothing reaches.
        shut = np.ones(self.sampler.rows, dtype=bool)
        shut[self.sampler._gated] = np.asarray(self.gates) >= self.sampler._gate_chance
        threshold = columns([self.sampler.requests[i] for i in rows])["xtc"]
        gated = np.where(shut[rows, None], np.float32(2), threshold)
        xtc = gated if self.xp is np else mx.array(gated)
        return Settings(settings.order, settings.inverse, {**settings.columns, "xtc": xtc})

    def _merge(self, parts: list[tuple[np.ndarray, tuple[Any, ...]]]) -> tuple[Any, Any, Any, Any]:
        if len(parts) == 1 and len(parts[0][0]) == self.sampler.rows:
            return parts[0][1]
        rows = np.concatenate([rows for rows, _ in parts]) if parts else np.zeros(0, np.int32)
        back = np.argsort(rows)
        columns_ = zip(*(values for _, values in parts), strict=True)
        if self.xp is np:
            merged = [np.concatenate(c)[back] for c in columns_]
        else:
            merged = [mx.concatenate(c)[mx.array(back)] for c in columns_]
        return merged[0], merged[1], merged[2], merged[3]

    # Draws from the global generator.

    def scores(self) -> Any:
        """Scores [rows, V] after the chain."""
        sampler, xp = self.sampler, self.xp
        if xp is np:
            scores = (self.z - self.best) * sampler.inverse
            for found in self._survivors(np.flatnonzero(sampler._filtered)):
                scores[found.rows] = chain.scores_of(found)
            scores[self.bad] = np.nan
            return scores
        z = self.z.astype(mx.float32)
        scores = (z - mx.max(z, axis=-1, keepdims=True)) * mx.array(sampler.inverse)
        for found in self._survivors(np.flatnonzero(sampler._filtered)):
            part = chain.scores_of(found)
            if len(found.rows) == sampler.rows:
                return part[mx.array(np.argsort(found.rows))]
            where = mx.broadcast_to(mx.array(found.rows)[:, None], part.shape)
            scores = mx.put_along_axis(scores, where, part, axis=0)
        return scores

    def shared(self, together: bool) -> tuple[Any, Any, Any, Any]:
        """Tokens, margins, log probabilities, drift; the latter two of greedy rows only."""
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
            values = (tokens.astype(mx.int32), undefined, logprobs, undefined)
            parts.append((free, tuple(np.asarray(v) for v in values) if self.xp is np else values))
        if len(greedy):
            parts.append((greedy, self._plain(greedy, np.zeros((sampler.rows, 2), np.uint32))))
        return self._merge(parts)

    # What comes of it.

    def drawn(self, tokens: Any, margins: Any, logprobs: Any, drift: Any) -> Drawn:
        """Assemble; single survivors and bad rows get NaN."""
        xp = self.xp
        if self.stretch is not None:
            drift = drift / (self.stretch[:, 0] if xp is np else mx.array(self.stretch[:, 0]))
        if xp is np:
            bad = self.bad
        else:
            top = self.z.max(axis=-1)
            bad = mx.isnan(top) | mx.isinf(top)
        undefined = xp.array(np.nan, dtype=xp.float32)
        # An infinite bound: a vocabulary, or an allowed set, of one.
        margins = xp.where(bad | xp.isinf(margins), undefined, margins)
        logprobs, drift = (xp.where(bad, undefined, a) for a in (logprobs, drift))
        tokens = xp.clip(tokens, 0, self.vocab - 1)
        tokens, logprobs, margins, drift, bad = (
            a if xp is mx else mx.array(a) for a in (tokens, logprobs, margins, drift, bad)
        )
        return Drawn(tokens, logprobs, margins, drift, bad, self._top(), self.errors, self.logits)

    def _top(self) -> tuple[mx.array, mx.array] | None:
        asked = np.array([r.logprobs for r in self.sampler.requests])
        if not asked.any():
            return None
        scores = mx.array(self.scores())
        logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
        count = min(int(asked.max()), self.vocab)
        ids = mx.argsort(-logprobs, axis=-1)[:, :count].astype(mx.int32)
        values = mx.take_along_axis(logprobs, ids, axis=-1)
        shown = (mx.arange(count)[None] < mx.array(asked)[:, None]) & (values > -mx.inf)
        return mx.where(shown, ids, -1), mx.where(shown, values, -mx.inf)


_SAMPLERS: dict[Any, tuple[list[Request], Sampler]] = {}
_LOCK = threading.Lock()


def sampler_for(draws: Sequence[Draw], order: Sequence[str] = ORDER) -> Sampler:
    """The sampler of these rows, compiled the first time that they come together."""
    key = (tuple((id(d.request), d.seed, d.choice) for d in draws), tuple(order))
    with _LOCK:
        if key not in _SAMPLERS:
            while len(_SAMPLERS) >= 32:
                del _SAMPLERS[next(iter(_SAMPLERS))]
            # Requests are held beside the sampler, so that none of their ids goes to another request.
            _SAMPLERS[key] = ([d.request for d in draws], Sampler(draws, order))
        return _SAMPLERS[key][1]
