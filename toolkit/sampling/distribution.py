"""Distribution: the sampler's short forms, and the exact distribution that its draws follow."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..requests import Request
from .draws import ORDER, Draw, Drawn
from .sampler import Sampler, sampler_for


def draw_keyed(logits: mx.array, draws: Sequence[Draw]) -> Drawn:
    """One token a row from logits [rows, V], by Gumbel-max over each row's own keyed noise."""
    return sampler_for(draws).draw(logits, [d.position for d in draws], _histories(draws))


def draw_shared(logits: mx.array, draws: Sequence[Draw], together: bool) -> Drawn:
    """One token a row from MLX's global generator; see `Sampler.draw_shared`."""
    return sampler_for(draws).draw_shared(logits, together, _histories(draws))


def process(logits: mx.array, draws: Sequence[Draw], order: Sequence[str] = ORDER) -> mx.array:
    """Scores after the chain: float32 [rows, V], less each row's maximum, over temperature; else -inf.

    XTC's gate is each row's own keyed draw. Greedy rows are filtered, not divided.
    """
    return sampler_for(draws, order).process(logits, [d.position for d in draws], _histories(draws))


def distribution(
    logits: mx.array,
    request: Request,
    order: Sequence[str] = ORDER,
    *,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> mx.array:
    """Exact probabilities of a request's next token after the chain.

    Parameters
    ----------
    logits : float, [V]
    request : Request
        Greedy: all mass on the best id. With XTC: the mixture over its gate.
    order : sequence of str
        See `ORDER`.
    prompt, generated : ids
        For penalties.

    Returns
    -------
    float32, [V]
    """
    if logits.ndim != 1:
        raise ValueError(f"logits of shape {logits.shape}: must be [vocabulary], one row")
    sampler = Sampler([Draw(request, 0)], order)
    histories = [(prompt, generated)]
    if request.greedy:
        token = sampler.draw(logits[None], [0], histories).tokens[0]
        return (mx.arange(logits.shape[-1]) == token).astype(mx.float32)
    total = np.zeros(logits.shape)
    chance = request.xtc_probability
    for gate, weight in ((0.0, chance), (1.0, 1 - chance)):
        if weight > 0:
            scores = sampler.process(logits[None], [0], histories, gates=np.array([gate]))[0]
            total += weight * softmax(scores)
    return mx.array(total.astype(np.float32))


def softmax(scores: mx.array) -> np.ndarray:
    """Probabilities of one row in float64: MLX's float32 sums are off by some 1e-4 over 49,152 tokens."""
    values = np.array(scores.astype(mx.float32)).astype(np.float64)
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def _histories(draws: Sequence[Draw]) -> list[tuple[Sequence[int], Sequence[int]]]:
    return [(d.prompt, d.generated) for d in draws]
