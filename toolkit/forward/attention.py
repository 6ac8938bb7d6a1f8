"""Attention of a packed step: each span's queries over its own row's keys, a few calls a layer.

`plan` groups spans whose shapes agree and says, in small integer arrays, where each query comes from and where
its result goes. `attend` runs one group. On a GPU that is MLX's fused kernel; on a CPU it is written out here,
since MLX's scalar `exp` is eight times slower there than a compiled polynomial and the heads that share a KV
head fold into one matrix product.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .shapes import Shapes, round_up

@dataclass(frozen=True)
class Piece:
    """Some consecutive tokens of one row: their first index in the step, first position, number; the row's slot.

    Long spans come in pieces, so that early queries don't meet keys that come later.
    """

    token: int
    position: int
    count: int
    slot: int


@dataclass(frozen=True)
class Group:
    """One attention call: the slab's capacity, how many keys, rows and queries.

    Unless `gathered`, the call's rows are the slab's own first rows, in order.
    """

    slab: str
    keys: int
    rows: int
    queries: int
    gathered: bool


def plan(pieces: dict[int, list[Piece]], used: dict[int, int], tokens: int, shapes: Shapes
         ) -> tuple[tuple[Group, ...], dict[str, np.ndarray]]:
    """Group a step's pieces into calls.

    Parameters
    ----------
    pieces : dict of slab capacity to list of Piece
    used : dict of slab capacity to int
        How many slots, from the first, a call over the slab's own rows would cover.
    tokens : int
        Tokens of the step, the tile's padding included.

    Returns
    -------
    groups : tuple of Group
        Static: with the arrays' shapes, all that a compiled step depends on.
    arrays : dict of str to int32 array
        `q{i}` [rows, queries]: index of the token that each query of group i is; `p{i}` its position;
        `s{i}` [rows]: slots, where they are gathered; `back` [tokens]: where each token's result lies.
    """
    groups: list[Group] = []
    arrays: dict[str, np.ndarray] = {}
    back = np.zeros(tokens, np.int32)
    base = 0
    for capacity, members in pieces.items():
        calls: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for piece in members:
            queries = 1 if piece.count == 1 else round_up(piece.count, max(shapes.block, 1))
            keys = round_up(piece.position + piece.count, shapes.bucket) if piece.count > 1 else 0
            calls[queries, keys].append(piece)
        for (queries, keys), group in sorted(calls.items()):
            if not keys:  # single tokens of one slab share a call, whatever their positions
                keys = min(capacity, round_up(max(p.position + 1 for p in group), shapes.bucket))
            whole = queries == 1 and 2 * len(group) >= used[capacity]
            rows = used[capacity] if whole else len(group)
            index = np.zeros((rows, queries), np.int32)
            where = np.zeros((rows, queries), np.int32)
            for order, piece in enumerate(group):
                row = piece.slot if whole else order
                index[row, : piece.count] = np.arange(piece.token, piece.token + piece.count)
                where[row, : piece.count] = np.arange(piece.position, piece.position + piece.count)
                back[piece.token : piece.token + piece.count] = base + row * queries + np.arange(piece.count)
            i = len(groups)
            arrays[f"q{i}"], arrays[f"p{i}"] = index, where
            if not whole:
                arrays[f"s{i}"] = np.array([p.slot for p in group], np.int32)
            groups.append(Group(str(capacity), keys, rows, queries, not whole))
            base += rows * queries
    arrays["back"] = back
    return tuple(groups), arrays


def visible(positions: mx.array, keys: int, window: int | None, chunk: int | None) -> mx.array:
    """Which keys each query sees: bool, [rows, 1, queries, keys]; causal, within the window or chunk."""
    here = positions[:, None, :, None]
    there = mx.arange(keys)[None, None, None]
    mask = there <= here
    if window:
        mask = mask & (there > here - window)
    if chunk:
        mask = mask & (there // chunk == here // chunk)
    return mask


def attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, scale: float,
           sinks: mx.array | None, block: int, cpu: bool) -> mx.array:
    """One group's attention.

    Parameters
    ----------
    queries : [rows, queries, heads, dim]
    keys, values : [rows, kv_heads, keys, dim]
    mask : bool, [rows, 1, queries, keys]
    sinks : [heads] or None
        Attention sinks (a logit that takes probability and gives no value).
    block : int
        The query block; results of the rows that fill it are dropped.

    Returns
    -------
    [rows, queries, heads, value_dim]
    """
    if not cpu:
        return _fused(queries, keys, values, mask, scale, sinks, block)
    return _folded(queries, keys, values, mask, scale, sinks, block)


def _fused(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, scale: float,
           sinks: mx.array | None, block: int) -> mx.array:
    count = queries.shape[1]
    if count < block:
        queries = mx.pad(queries, [(0, 0), (0, block - count), (0, 0), (0, 0)])
        mask = mx.concatenate([mask, mx.broadcast_to(mask[:, :, -1:], (*mask.shape[:2], block - count, mask.shape[3]))], 2)
    out = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(1, 2), keys, values, scale=scale, mask=mask, sinks=sinks)
    return out[:, :, :count].swapaxes(1, 2)


def _folded(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, scale: float,
            sinks: mx.array | None, block: int) -> mx.array:
    rows, count, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    fold = heads // kv_heads
    folded = queries.reshape(rows, count, kv_heads, fold, dim).transpose(0, 2, 1, 3, 4)
    folded = folded.reshape(rows, kv_heads, count * fold, dim) * scale
    spare = round_up(count * fold, block) - count * fold
    if spare:
        folded = mx.pad(folded, [(0, 0), (0, 0), (0, spare), (0, 0)])
    scores = folded @ keys.swapaxes(-1, -2)
    mask = mx.repeat(mask, fold, 2)
    if spare:
        mask = mx.pad(mask, [(0, 0), (0, 0), (0, spare), (0, 0)], constant_values=True)
    scores = mx.where(mask, scores, -mx.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(scores.dtype).reshape(kv_heads, 1, fold)
        sink = mx.broadcast_to(sink, (kv_heads, count, fold)).reshape(1, kv_heads, count * fold, 1)
        sink = mx.pad(sink, [(0, 0), (0, 0), (0, spare), (0, 0)])
        top = mx.maximum(top, sink)
    weights = _exp(scores, top, mask)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sink - top)
    out = (weights @ values) / total
    out = out[:, :, : count * fold].reshape(rows, kv_heads, count, fold, -1)
    return out.transpose(0, 2, 1, 3, 4).reshape(rows, count, heads, -1)


@mx.compile
def _exp(scores: mx.array, top: mx.array, mask: mx.array) -> mx.array:
    """exp(scores - top), 0 where masked: 2^n times a Taylor polynomial in f, |f| <= 1/2; within 3e-7.

    Clamped at 2^-126: MLX's own `exp` is scalar on x86, and the exponent is set here through its bits.
    """
    x = mx.maximum((scores - top).astype(mx.float32) * 1.4426950408889634, -126.0)
    n = mx.round(x)
    f = (x - n) * 0.6931471805599453
    p = 1 + f * (1 + f * (1 / 2 + f * (1 / 6 + f * (1 / 24 + f * (1 / 120 + f * (1 / 720))))))
    power = ((n.astype(mx.int32) + 127) << 23).view(mx.float32)
    return mx.where(mask, p * power, 0.0)
