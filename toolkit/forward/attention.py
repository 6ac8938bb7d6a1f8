"""Attention of one call of a packed step: some rows' queries over their own keys.

On a GPU that is MLX's fused kernel. On a CPU it is written out here, for the sake of `fast.exp`. On both, the
heads that share a KV head fold into one query block when a row has a single query: a block of one query would
take another kernel than prefill does.
"""

from __future__ import annotations

import mlx.core as mx

from .fast import exp
from .shapes import round_up


def visible(positions: mx.array, keys: int, window: int | None) -> mx.array:
    """Which keys each query sees: bool, [rows, 1, queries, keys]; causal, and within the window."""
    here = positions[:, None, :, None]
    there = mx.arange(keys)[None, None, None]
    mask = there <= here
    if window:
        mask = mask & (there > here - window)
    return mask


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    scale: float,
    sinks: mx.array | None,
    block: int,
    cpu: bool,
) -> mx.array:
    """One call.

    Parameters
    ----------
    queries : [rows, queries, heads, dim]
    keys, values : [rows, kv_heads, keys, dim]
    mask : [rows or 1, 1, queries, keys]
        On a CPU bool; on a GPU what is added to the scores, in their dtype.
    sinks : [heads] or None
        Attention sinks: a logit a head that takes probability and gives no value.
    block : int
        The query block; what fills it is dropped from the result.

    Returns
    -------
    [rows, queries, heads, value_dim]
    """
    run = _written_out if cpu else _fused
    return run(queries, keys, values, mask, scale, sinks, block)


def _fused(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    scale: float,
    sinks: mx.array | None,
    block: int,
) -> mx.array:
    rows, count, heads, _ = queries.shape
    if count > 1 or sinks is not None:
        queries, mask = _pad(queries.swapaxes(1, 2), mask, count, block)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return out[:, :, :count].swapaxes(1, 2)
    folded, mask, size = _fold(queries, mask, keys.shape[1], block)
    out = mx.fast.scaled_dot_product_attention(folded, keys, values, scale=scale, mask=mask)
    return (out if out.shape[2] == size else out[:, :, :size]).reshape(rows, 1, heads, -1)


def _written_out(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    scale: float,
    sinks: mx.array | None,
    block: int,
) -> mx.array:
    rows, count, heads, _ = queries.shape
    kv_heads = keys.shape[1]
    fold = heads // kv_heads
    folded, mask, size = _fold(queries * scale, mask, kv_heads, block)
    spare = folded.shape[2] - size
    scores = mx.where(mask, folded @ keys.swapaxes(-1, -2), -mx.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(scores.dtype).reshape(kv_heads, 1, fold), (kv_heads, count, fold))
        sink = mx.pad(sink.reshape(1, kv_heads, size, 1), [(0, 0), (0, 0), (0, spare), (0, 0)])
        top = mx.maximum(top, sink)
    weights = _exp(scores, top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sink - top)
    out = ((weights.astype(values.dtype) @ values) / total).astype(values.dtype)
    out = out[:, :, :size].reshape(rows, kv_heads, count, fold, -1)
    return out.transpose(0, 2, 1, 3, 4).reshape(rows, count, heads, -1)


def _fold(queries: mx.array, mask: mx.array, kv_heads: int, block: int) -> tuple[mx.array, mx.array, int]:
    """Heads that share a KV head as queries of it: `[rows, kv_heads, queries x heads, dim]`, padded."""
    rows, count, heads, dim = queries.shape
    fold = heads // kv_heads
    if count > 1:
        queries = queries.reshape(rows, count, kv_heads, fold, dim).transpose(0, 2, 1, 3, 4)
    folded = queries.reshape(rows, kv_heads, count * fold, dim)
    shape = (mask.shape[0], 1, count, fold, mask.shape[3])
    mask = mx.broadcast_to(mask[:, :, :, None], shape).reshape(*shape[:2], count * fold, shape[4])
    return *_pad(folded, mask, count * fold, block), count * fold


def _pad(queries: mx.array, mask: mx.array, count: int, block: int) -> tuple[mx.array, mx.array]:
    """Fill the query block; what is added sees what the last query sees, and is dropped later."""
    spare = round_up(count, block) - count
    if spare:  # only the shape matters
        queries = mx.pad(queries, [(0, 0), (0, 0), (0, spare), (0, 0)])
        last = mx.broadcast_to(mask[:, :, -1:], (*mask.shape[:2], spare, mask.shape[3]))
        mask = mx.concatenate([mask, last], axis=2)
    return queries, mask


@mx.compile
def _exp(scores: mx.array, top: mx.array) -> mx.array:
    """exp(scores - top) for scores up to top; 0 at -inf, which is what masked scores are."""
    return mx.where(scores == -mx.inf, 0.0, exp((scores - top).astype(mx.float32)))
