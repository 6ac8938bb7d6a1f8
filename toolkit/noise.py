"""Noise: the random part of a draw, as a pure function of (seed, choice, purpose, position, token id).

Nothing here reads or writes a generator. `sampling` adds this noise to logits and takes the argmax, so that
a row's draw depends on nothing outside the row. Keys are small and made on the host with NumPy; the words
of a vocabulary come from MLX's own Threefry, block by block, so that CPU and GPU give the same bits and an
id's bits do not depend on the vocabulary's size.

The stream, version 1 (`T` is Threefry-2x32 with 20 rounds, as in `mx.random`)::

    k1        = T((seed >> 32, seed & 0xffffffff), (choice, purpose))     seed in two's complement, 64 bits
    k2        = T(k1, (position, 0))                                      the row key
    block key = T(k2, (block, 1))                                         ids 2048 * block onwards
    words     = T(block key, (j, j + 1024)) for j < 1024: the first word is id j's, the second id j + 1024's
    gate      = T(k2, (0, 2)), first word                                 one number a row, for XTC

A seed means the same in the next release: known-answer vectors in the tests hold the stream to it.

References
----------
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Threefry).
Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014 (the Gumbel-max trick).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

STREAM = 1
DRAW, XTC, DRAFT = 0, 1, 2
BLOCK = 2048

Keys = Any  # uint32 [rows, 2], of NumPy or MLX


def row_keys(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: int = DRAW
) -> np.ndarray:
    """The key of each row's next draw.

    Parameters
    ----------
    seeds : ints in [-2^63, 2^63), [rows]
    choices : ints, [rows]
        Which of a request's `n` completions; choice 0 is what n=1 gives.
    positions : ints, [rows]
        Logical position of the token being drawn: 0 is the first prompt token; padding not counted.
    purpose : int
        DRAW, XTC or DRAFT: one position's numbers for different uses are independent.

    Returns
    -------
    uint32, [rows, 2]
    """
    return keys_at(stream_keys(seeds, choices, purpose), positions)


def stream_keys(seeds: Sequence[int], choices: Sequence[int], purpose: int = DRAW) -> np.ndarray:
    """What a row's keys have in common over all positions: uint32 [rows, 2], made once a row."""
    seed = np.array([int(s) & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    high, low = (seed >> np.uint64(32)).astype(np.uint32), seed.astype(np.uint32)
    return np.stack(threefry(high, low, np.asarray(choices, dtype=np.uint32), np.uint32(purpose)), axis=-1)


def keys_at(streams: np.ndarray, positions: Any) -> np.ndarray:
    """Row keys from stream keys [rows, 2] and positions [rows], or [rows, steps] for several steps ahead."""
    position = np.asarray(positions, dtype=np.uint32)
    extra = (1,) * (position.ndim - 1)
    k0, k1 = (streams[:, i].reshape(-1, *extra) for i in (0, 1))
    return np.stack(threefry(k0, k1, position, np.uint32(0)), axis=-1)


def bits(keys: Keys, vocab: int) -> mx.array:
    """Each id's 32 random bits: uint32 [rows, vocab]. An id's word does not depend on `vocab`."""
    rows, blocks = keys.shape[0], -(-vocab // BLOCK)
    if rows == 0:
        return mx.zeros((0, vocab), dtype=mx.uint32)
    block_keys = mx.array(_block_keys(keys, blocks)).reshape(rows * blocks, 2)
    # split() is raw words; uniform() would keep 24 bits of each and lose the tail.
    words = mx.vmap(lambda key: mx.random.split(key, BLOCK // 2))(block_keys)
    return words.reshape(rows, blocks * BLOCK)[:, :vocab]


def bits_at(keys: Keys, ids: Any) -> Any:
    """The same words at some ids only: [rows, k] for ids [rows, k], equal to `bits(...)` there.

    NumPy ids give NumPy words, computed on the host; MLX ids give a lazy MLX array.
    """
    array = np.asarray if isinstance(ids, np.ndarray) else mx.array
    keys, ids = array(keys), ids.astype(np.uint32 if array is np.asarray else mx.uint32)
    one = _word(1, ids)
    block = threefry(keys[:, :1], keys[:, 1:], ids >> _word(11, ids), one)
    j = ids & _word(BLOCK // 2 - 1, ids)
    first, second = threefry(*block, j, j + _word(BLOCK // 2, ids))
    where = np.where if array is np.asarray else mx.where
    return where((ids & _word(BLOCK // 2, ids)) == 0, first, second)


def gumbel(keys: Keys, vocab: int) -> mx.array:
    """Standard Gumbel noise for every id: float32 [rows, vocab], finite everywhere.

    In nats, from -3.14 to 22.88, the ends of what 32 bits can say. Bits are equal on every device;
    the logarithms may differ in the last places.
    """
    return gumbel_from_bits(bits(keys, vocab))


def gumbel_at(keys: Keys, ids: Any) -> Any:
    """The same noise at some ids only: float32 [rows, k], NumPy for NumPy ids and MLX for MLX ids."""
    return gumbel_from_bits(bits_at(keys, ids))


def gumbel_from_bits(words: Any) -> Any:
    """-log(-log(u)) with u = (word + 1/2) / 2^32, without losing either tail to float32.

    Near u = 1, where float32 has no room for the missing bits, -log(u) is a short series in 1 - u, which
    the flipped word gives exactly.
    """
    if isinstance(words, np.ndarray):
        energy = words.astype(np.float32)
        energy += np.float32(0.5)
        energy *= _STEP
        np.negative(np.log(energy, out=energy), out=energy)
        top = words >= _NEAR_ONE
        energy[top] = _series(((~words[top]).astype(np.float32) + np.float32(0.5)) * _STEP)
        return np.negative(np.log(energy, out=energy), out=energy)
    u = (words.astype(mx.float32) + 0.5) * float(_STEP)
    v = ((words ^ mx.array(0xFFFFFFFF, dtype=mx.uint32)).astype(mx.float32) + 0.5) * float(_STEP)
    energy = mx.where(words >= mx.array(_NEAR_ONE), _series(v), -mx.log(u))
    return -mx.log(energy)


def uniform(keys: np.ndarray) -> np.ndarray:
    """One number in (0, 1) a row, from a key of its own purpose: float64 [rows], all 32 bits kept."""
    first, _ = threefry(keys[:, 0], keys[:, 1], np.uint32(0), np.uint32(2))
    return (first.astype(np.float64) + 0.5) * 2.0**-32


def threefry(k0: Any, k1: Any, c0: Any, c1: Any) -> tuple[Any, Any]:
    """Threefry-2x32, 20 rounds, on uint32 arrays of NumPy or of MLX that broadcast together."""
    schedule = (k0, k1, k0 ^ k1 ^ _word(0x1BD11BDA, k0))
    with np.errstate(over="ignore"):
        x0, x1 = c0 + k0, c1 + k1
        for group in range(5):
            for turn in _ROTATIONS[group % 2]:
                x0 = x0 + x1
                x1 = ((x1 << _word(turn, x1)) | (x1 >> _word(32 - turn, x1))) ^ x0
            x0 = x0 + schedule[(group + 1) % 3]
            x1 = x1 + schedule[(group + 2) % 3] + _word(group + 1, x1)
    return x0, x1


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_STEP = np.float32(2.0**-32)
_NEAR_ONE = np.uint32(2**32 - 2**26)  # 1 - u < 1/64: four terms of the series are exact to float32


def _series(v: Any) -> Any:
    return v * (1 + v * (0.5 + v * ((1 / 3) + v * 0.25)))


def _word(value: int, like: Any) -> Any:
    return mx.array(value, dtype=mx.uint32) if isinstance(like, mx.array) else np.uint32(value)


def _block_keys(keys: Keys, blocks: int) -> Any:
    if isinstance(keys, mx.array):
        block, one = mx.arange(blocks, dtype=mx.uint32)[None], mx.array(1, dtype=mx.uint32)
        return mx.stack(threefry(keys[:, :1], keys[:, 1:], block, one), axis=-1)
    block = np.arange(blocks, dtype=np.uint32)[None]
    return np.stack(threefry(keys[:, :1], keys[:, 1:], block, np.uint32(1)), axis=-1)
