"""Attention of one call of a packed step: some rows' queries over their own keys.

On a GPU that is MLX's fused kernel. On a CPU it is written out here, for the sake of `fast.exp`. On both, the
heads that share a KV head fold into one query block when a row has a single query: a block of one query would
take another kernel than prefill does.
"""

from __future__ import annotations

import mlx.core as mx

from .cpu_exp import exp
from .shapes import round_up


def folded(queries: int, heads: int, kv_heads: int, sinks: bool, cpu: bool) -> int:
    """How many heads stand side by side in a query block: those of one KV head, or one."""
    return heads // kv_heads if cpu or (queries == 1 and not sinks) else 1


def mask(
    positions: mx.array, keys: int, window: int | None, fold: int, block: int, dtype: mx.Dtype | None = None
) -> mx.array:
    """Which keys each query sees, causal and within the window, laid out as `attend` lays out its queries.

    Parameters
    ----------
    positions : int, [rows or 1, queries]
    keys : int
    window : int or None
    fold : int
        See `folded`.
    block : int
        The query block; what fills it sees what the last query sees.
    dtype : mx.Dtype, optional
        Give what is added to scores, 0 or -inf.

    Returns
    -------
    [rows or 1, 1, queries x fold, rounded up to the block, keys]
        Bool, or that dtype.
    """
    here = mx.repeat(positions, fold, axis=1)
    spare = round_up(here.shape[1], block) - here.shape[1]
    if spare:
        here = mx.concatenate([here, mx.repeat(here[:, -1:], spare, axis=1)], axis=1)
    here, there = here[:, None, :, None], mx.arange(keys)[None, None, None]
    seen = there <= here
    if window:
        seen = seen & (there > here - window)
    return seen if dtype is None else mx.where(seen, 0, -mx.inf).astype(dtype)


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
    mask : [rows or 1, 1, ..., keys]
        From `mask`: on a CPU bool; on a GPU what is added to the scores, in their dtype.
    sinks : [heads] or None
        Attention sinks: a logit a head that takes probability and gives no value.
    block : int
        The query block; what fills it is dropped from the result.

    Returns
    -------
    [rows x queries, heads x value_dim]
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
        filled = _filled(queries.swapaxes(1, 2), block)
        out = mx.fast.scaled_dot_product_attention(filled, keys, values, scale=scale, mask=mask, sinks=sinks)
        return out[:, :, :count].swapaxes(1, 2).reshape(rows * count, -1)
    filled = _filled(_fold(queries, keys.shape[1]), block)
    out = mx.fast.scaled_dot_product_attention(filled, keys, values, scale=scale, mask=mask)
    size = heads // keys.shape[1]
    return (out if out.shape[2] == size else out[:, :, :size]).reshape(rows, -1)


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
    size = count * fold
    filled = _filled(_fold(queries * scale, kv_heads), block)
    spare = filled.shape[2] - size
    scores = mx.where(mask, filled @ keys.swapaxes(-1, -2), -mx.inf)
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
    return out.transpose(0, 2, 1, 3, 4).reshape(rows * count, -1)


def _fold(queries: mx.array, kv_heads: int) -> mx.array:
    """Heads that share a KV head as queries of it: `[rows, kv_heads, queries x heads, dim]`."""
    rows, count, heads, dim = queries.shape
    fold = heads // kv_heads
    if count > 1:
        queries = queries.reshape(rows, count, kv_heads, fold, dim).transpose(0, 2, 1, 3, 4)
    return queries.reshape(rows, kv_heads, count * fold, dim)


def _filled(queries: mx.array, block: int) -> mx.array:
    """Queries up to the block: only the shape matters, what is added is dropped later."""
    spare = round_up(queries.shape[2], block) - queries.shape[2]
    return mx.pad(queries, [(0, 0), (0, 0), (0, spare), (0, 0)]) if spare else queries


@mx.compile
def _exp(scores: mx.array, top: mx.array) -> mx.array:
    """exp(scores - top) for scores up to top; 0 at -inf, which is what masked scores are."""
    return mx.where(scores == -mx.inf, 0.0, exp((scores - top).astype(mx.float32)))
