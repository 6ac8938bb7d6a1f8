"""Sampling: filters and the draw over [rows, vocab] logits, each row by its own parameters and noise.

`Sampler(draws)` compiles the parameters of a batch's rows once; `.draw(logits, positions)` then draws one
token a row. `draw_keyed`, `draw_shared`, `process` and `distribution` are short forms of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .. import noise
from ..requests import Request

ORDER = ("top_n_sigma", "typical_p", "top_k", "top_p", "min_p", "xtc", "temperature")


@dataclass(frozen=True, eq=False)
class Draw:
    """One row's next draw: whose parameters, which stream, where in the sequence, after which tokens."""

    request: Request
    seed: int | None
    choice: int = 0
    position: int = 0
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a draw gives, one entry a row, lazily evaluated. NaN is undefined."""

    tokens: mx.array
    logprobs: mx.array
    raw_logprobs: mx.array
    margins: mx.array
    max_drift: mx.array
    bad: mx.array
    top: tuple[mx.array, mx.array] | None = None


class Sampler:
    """The parameters of some rows, compiled once and used at every step."""

    def __init__(self, draws: Sequence[Draw], order: Sequence[str] = ORDER):
        requests = [d.request for d in draws]
        self.rows = len(requests)
        self.greedy = np.array([r.greedy for r in requests])
        self.temperature = mx.array([[1.0 if r.greedy else r.temperature] for r in requests])
        self._filtered = [
            i for i, r in enumerate(requests) if not r.greedy and (r.top_k or r.top_p < 1 or r.min_p > 0)
        ]
        rows = [requests[i] for i in self._filtered]
        self._top_k = mx.array([[r.top_k or 2**30] for r in rows])
        self._top_p = mx.array([[r.top_p if r.top_p < 1 else np.inf] for r in rows])
        self._log_min_p = mx.array([[np.log(r.min_p) if r.min_p else -np.inf] for r in rows])
        self._seeded = all(d.seed is not None for d in draws)
        self._streams = noise.stream_keys([d.seed or 0 for d in draws], [d.choice for d in draws])

    def process(self, logits: mx.array) -> mx.array:
        """float32 scores [rows, V]: -inf for the excluded, else (z - max) / temperature."""
        z = logits.astype(mx.float32)
        z = z - mx.max(z, axis=-1, keepdims=True)
        if self._filtered:
            rows = mx.array(self._filtered)
            part = z[rows] if len(self._filtered) < self.rows else z
            part = mx.where(self._keep(part), part, -mx.inf)
            z = mx.put_along_axis(z, mx.broadcast_to(rows[:, None], part.shape), part, axis=0)
        return z / self.temperature

    def _keep(self, z: mx.array) -> mx.array:
        ids = mx.argsort(-z, axis=-1)
        ranked = mx.take_along_axis(z, ids, axis=-1)
        rank = mx.arange(z.shape[-1])[None]
        keep = rank < self._top_k
        p = mx.where(keep, mx.exp(ranked), 0)
        before = mx.cumsum(p, axis=-1, inclusive=False)
        keep = keep & (before < self._top_p * p.sum(axis=-1, keepdims=True))
        keep = keep & (ranked >= self._log_min_p)
        return mx.put_along_axis(mx.zeros_like(keep), ids, keep, axis=-1)

    def draw(self, logits: mx.array, positions: Sequence[int]) -> Drawn:
        """One keyed token a row."""
        scores = self.process(logits)
        keys = noise.keys_at(self._streams, positions)
        perturbed = scores + noise.gumbel(keys, logits.shape[-1])
        if self.greedy.any():
            perturbed = mx.where(mx.array(self.greedy)[:, None], scores, perturbed)
        return self._drawn(logits, scores, mx.argmax(perturbed, axis=-1), perturbed)

    def draw_shared(self, logits: mx.array, together: bool) -> Drawn:
        """One token a row from MLX's global generator."""
        scores = self.process(logits)
        if together:
            tokens = mx.random.categorical(scores)
            tokens = mx.where(mx.array(self.greedy), mx.argmax(scores, axis=-1), tokens)
        else:
            tokens = mx.concatenate(
                [
                    mx.argmax(scores[i : i + 1], axis=-1)
                    if self.greedy[i]
                    else mx.random.categorical(scores[i : i + 1])
                    for i in range(self.rows)
                ]
            )
        return self._drawn(logits, scores, tokens, None)

    def _drawn(self, logits: mx.array, scores: mx.array, tokens: mx.array, perturbed: Any) -> Drawn:
        at = tokens[:, None]
        raw = logits.astype(mx.float32)
        logprobs = (mx.take_along_axis(scores, at, -1) - mx.logsumexp(scores, -1, keepdims=True))[:, 0]
        raw_logprobs = (mx.take_along_axis(raw, at, -1) - mx.logsumexp(raw, -1, keepdims=True))[:, 0]
        nan = mx.full(tokens.shape, mx.nan)
        margins = max_drift = nan
        if perturbed is not None:
            best = mx.take_along_axis(perturbed, at, -1)
            second = mx.put_along_axis(perturbed, at, mx.array(-mx.inf), axis=-1).max(-1, keepdims=True)
            gap = (best - second)[:, 0]
            margins = mx.where(mx.isinf(gap), mx.nan, gap)
        bad = ~mx.isfinite(logprobs)
        return Drawn(tokens.astype(mx.int32), logprobs, raw_logprobs, margins, max_drift, bad)


def process(logits: mx.array, draws: Sequence[Draw], order: Sequence[str] = ORDER) -> mx.array:
    """float32 scores [rows, V] after the chain; excluded ids are -inf."""
    return Sampler(draws, order).process(logits)


def distribution(logits: mx.array, request: Request, order: Sequence[str] = ORDER) -> mx.array:
    """Exact probabilities, float32 [V], of a request's next token after the chain."""
    sampler = Sampler([Draw(request, 0)], order)
    if request.greedy:
        return (mx.arange(logits.shape[-1]) == mx.argmax(logits)).astype(mx.float32)
    return mx.softmax(sampler.process(logits[None]), axis=-1)[0]


def draw_keyed(logits: mx.array, draws: Sequence[Draw]) -> Drawn:
    """One token a row by Gumbel-max over keyed noise."""
    return Sampler(draws).draw(logits, [d.position for d in draws])


def draw_shared(logits: mx.array, draws: Sequence[Draw], together: bool) -> Drawn:
    """One token a row from MLX's global generator, as the peers draw."""
    return Sampler(draws).draw_shared(logits, together)
