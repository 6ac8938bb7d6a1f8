"""Plain: draws of rows without filters, over the whole vocabulary in vocabulary order.

On a CPU in NumPy, a few rows at a time so that they stay in the cache; elsewhere as lazy MLX arrays, which
is also the reference for `kernels`, the fused form of the same arithmetic.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from .. import noise
from . import threads

_CACHED = 1 << 17  # elements of a chunk


def draw_host(
    logits: np.ndarray, best: np.ndarray, inverse: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, margins and log probabilities, each [rows], of rows [rows, V] with maxima `best` [rows, 1]."""
    rows, vocab = logits.shape
    tokens, margins, logprobs = (
        np.empty(rows, np.int32),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
    )
    words = np.asarray(noise.bits(keys, vocab))
    step = max(1, _CACHED // vocab)

    def one(start: int) -> None:
        part = slice(start, start + step)
        scores = (logits[part] - best[part]) * inverse[part]
        mass = np.exp(scores).sum(axis=-1)
        perturbed = noise.gumbel_from_bits(words[part])
        perturbed += scores
        tokens[part], margins[part] = best_two_host(perturbed)
        chosen = np.take_along_axis(scores, tokens[part, None], axis=-1)[:, 0]
        logprobs[part] = chosen - np.log(mass)

    threads.run(one, range(0, rows, step))
    return tokens, margins, logprobs


def greedy_host(logits: np.ndarray, best: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of greedy rows: the best logit, and how far the next is behind."""
    scores = logits - best
    mass = np.exp(scores).sum(axis=-1)
    tokens, margins = best_two_host(scores)
    return tokens, margins, -np.log(mass)


def best_two_host(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first best id of each row and its lead over the next; overwrites the scores."""
    tokens = scores.argmax(axis=-1)
    row = np.arange(len(scores))
    best = scores[row, tokens].copy()
    scores[row, tokens] = -np.inf
    return tokens.astype(np.int32), best - scores.max(axis=-1)


def draw_lazy(
    logits: mx.array, inverse: mx.array, greedy: mx.array | None, keys: Any
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Tokens, margins, log probabilities and the rows' maxima, each [rows], of logits [rows, V].

    Rows where `greedy` [rows, 1] is True get no noise; None means that there are none.
    """
    logits = logits.astype(mx.float32)
    best = mx.max(logits, axis=-1, keepdims=True)
    scores = (logits - best) * inverse
    perturbed = scores + noise.gumbel(keys, logits.shape[-1])
    if greedy is not None:
        perturbed = mx.where(greedy, scores, perturbed)
    tokens, margins = best_two(perturbed)
    chosen = mx.take_along_axis(scores, tokens[:, None], axis=-1)
    logprobs = chosen - mx.logsumexp(scores, axis=-1, keepdims=True)
    return tokens, margins, logprobs[:, 0], best[:, 0]


def best_two(scores: mx.array) -> tuple[mx.array, mx.array]:
    """The first best id of each row and its lead over the next: int32 and float32, [rows]."""
    rows, vocab = scores.shape
    width = next((w for w in (512, 384, 256, 128, 64) if vocab % w == 0), 256)
    scores = mx.pad(scores, ((0, 0), (0, -vocab % width)), constant_values=-mx.inf)
    blocks = scores.reshape(rows, -1, width)
    # One pass for the blocks' maxima; after that, only the best block is looked into.
    peaks = blocks.max(axis=-1)
    block = mx.argmax(peaks, axis=-1, keepdims=True)
    inside = mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    place = mx.argmax(inside, axis=-1, keepdims=True)
    best = mx.take_along_axis(inside, place, axis=-1)
    lane = mx.arange(width, dtype=place.dtype)[None]
    other = mx.where(lane == place, -mx.inf, inside).max(axis=-1)
    column = mx.arange(peaks.shape[-1], dtype=block.dtype)[None]
    elsewhere = mx.where(column == block, -mx.inf, peaks).max(axis=-1)
    token = (block * width + place)[:, 0].astype(mx.int32)
    return mx.minimum(token, vocab - 1), best[:, 0] - mx.maximum(other, elsewhere)
