"""Sampler: a batch's parameters, compiled once; every step, logits in and one token a row out.

Rows are sorted by what they need: greedy and unfiltered rows go over the whole vocabulary (`unfiltered`, or
`kernels` on a GPU), rows with filters through ranked lists (`chain`), and only rows with masks, bias or
penalties are adjusted first (`logits_processors`). A row's result depends on nothing outside the row, so it
has the same bits alone and in any batch.

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
from . import chain
from .draws import ORDER, Draw, Drawn, check_order, columns, filtered, library
from .filters import Settings
from .logits_processors import History, adjusted, allowed, penalised
from .step import Step


class Sampler:
    """The rows of a batch, compiled.

    Parameters
    ----------
    draws : sequence of Draw
        One per row: request, seed and choice are read here; position and history are given at each step.
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
        self._ahead: tuple[np.ndarray, Any] = np.full(self.rows, -2), None
        self.adjusted = np.flatnonzero([adjusted(r) for r in self.requests])
        self.filtered = np.array([filtered(r) for r in self.requests], dtype=bool)
        inverse = [1.0 if r.greedy else 1 / r.temperature for r in self.requests]
        self.inverse = np.array(inverse, dtype=np.float32)[:, None]
        self.gated = np.flatnonzero([r.xtc_probability > 0 for r in self.requests])
        self.gate_chance = np.array([self.requests[i].xtc_probability for i in self.gated])
        self.asked = np.array([r.logprobs for r in self.requests], dtype=int)
        self._compiled: dict[Any, Any] = {}

    def keys(self, positions: Any, purpose: int = noise.DRAW) -> Any:
        """Row keys of the draws at these positions: uint32 [rows, 2], or [rows, steps, 2].

        Rows that go on from position to position get theirs from a table of the next `AHEAD` steps, which
        is on the device where draws are lazy.
        """
        positions = np.array(positions)  # kept: the caller may go on counting in its own
        if purpose != noise.DRAW or positions.shape != (self.rows,) or not self.rows:
            return self._keys(positions, purpose)
        first, table = self._ahead
        steps = positions - first
        step = int(steps[0])
        if 0 < step < (2 if table is None else AHEAD) and (steps == step).all():
            if table is None:
                table = self._keys(positions[:, None] + np.arange(AHEAD), purpose).swapaxes(0, 1)
                table = np.ascontiguousarray(table) if library() is np else mx.array(table)
                self._ahead, step = (positions, table), 0
            return table[step]
        self._ahead = positions, None
        return self._keys(positions, purpose)

    def _keys(self, positions: np.ndarray, purpose: int) -> np.ndarray:
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
        gates = noise.uniform(self.keys(positions, noise.XTC)[self.gated]) if len(self.gated) else ()
        with np.errstate(all="ignore"):
            step = Step(self, logits, histories, gates)
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
        gates = np.asarray(mx.random.uniform(shape=(len(self.gated),))) if len(self.gated) else ()
        with np.errstate(all="ignore"):
            step = Step(self, logits, histories, gates)
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
            gates = noise.uniform(self.keys(positions, noise.XTC)) if len(self.gated) else np.ones(self.rows)
        with np.errstate(all="ignore"):
            return mx.array(Step(self, logits, histories, np.asarray(gates)[self.gated]).scores())

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

    def unfiltered(self, rows: np.ndarray) -> tuple[mx.array, mx.array, mx.array | None]:
        """What `unfiltered` needs of some rows, as MLX arrays: 1 / temperature, temperature, greedy."""
        key = ("plain", rows.tobytes())
        if key not in self._compiled:
            inverse, greedy = self.inverse[rows], self.greedy[rows]
            mask = mx.array(greedy[:, None]) if greedy.any() else None
            self._compiled[key] = mx.array(inverse), mx.array(1 / inverse[:, 0]), mask
        return self._compiled[key]

    def mask(self, vocab: int, xp: Any) -> Any:
        """Allowed ids of the rows that are adjusted, made once."""
        key = ("mask", xp is np, vocab)
        if key not in self._compiled:
            mask = allowed([self.requests[i] for i in self.adjusted], vocab)
            self._compiled[key] = mask if mask is None or xp is np else mx.array(mask)
        return self._compiled[key]

    def groups(self, vocab: int, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Rows with filters by list length (see `chain.list_length`)."""
        key = (vocab, rows.tobytes())
        if key not in self._compiled:
            # Typical-p and XTC are followed differently by `drift_bound`, also where their siblings would not
            # be.
            by: dict[tuple[int, bool, bool], list[int]] = {}
            for row in rows:
                request = self.requests[row]
                used = set(columns([request]))
                length = chain.list_length(request.top_k or vocab, self.order, used, vocab)
                by.setdefault((length, "typical_p" in used, "xtc" in used), []).append(row)
            self._compiled[key] = [(length, np.array(members)) for (length, *_), members in by.items()]
        return self._compiled[key]


AHEAD = 64
"""Steps whose keys are made at once: some hundred small NumPy calls, whether for one step or for many."""

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
