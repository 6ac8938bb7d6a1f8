"""Kernels: the unfiltered draw fused into one pass over the logits, for CUDA and Metal.

Noise words, Gumbel, temperature, best and runner-up and the row's mass come from one read of the logits;
`unfiltered` is the same arithmetic in MLX operations, the reference, and what runs where a kernel does not.
Noise words are equal to the bit; scores differ by the last places of the logarithms. A row is cut into chunks
by its own length only, so its result does not depend on the batch. The first use on a device compares the
kernel with the reference and keeps to the reference if they disagree or the kernel doesn't compile.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from .. import noise
from . import unfiltered
from .kernel_sources import AT, CHUNK, CUDA, JOIN, METAL, PART, THREADS


def draw(
    logits: mx.array, inverse: mx.array, greedy: mx.array | None, keys: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """As `plain.draw_lazy`, fused where the device has a kernel that passed its check."""
    if fused():
        return draw_fused(logits, inverse, greedy, keys)
    return unfiltered.draw_lazy(logits, inverse, greedy, keys)


def gumbel_at(keys: mx.array, ids: mx.array) -> mx.array:
    """As `noise.gumbel_at`, in one kernel where there is one."""
    if fused():
        return noise.gumbel_from_bits(bits_at_fused(keys, ids))
    return noise.gumbel_at(keys, ids)


def fused() -> bool:
    """Whether the default device runs the fused kernels, and runs them right."""
    return mx.default_device().type != mx.DeviceType.cpu and _checked()


@cache
def _checked() -> bool:
    try:
        right = _agrees()
        problem = "disagree with the reference"
    except Exception as error:  # a compiler's or driver's own kinds of error
        right, problem = False, f"don't run: {str(error).strip().splitlines()[0] if str(error) else error!r}"
    if not right:
        warnings.warn(f"fused sampling kernels {problem}; using plain MLX operations", stacklevel=2)
    return right


def draw_fused(
    logits: mx.array, inverse: mx.array, greedy: mx.array | None, keys: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Tokens, margins, log probabilities and the rows' maxima, each [rows], by the fused kernel."""
    rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK)
    scale = mx.ones((rows,), dtype=mx.float32) if greedy is None else 1 - greedy[:, 0].astype(mx.float32)
    floats, ids = _kernel("part", ("logits", "inverse", "scale", "keys"), ("floats", "ids"), PART)(
        inputs=[logits, inverse.reshape(-1), scale, keys],
        template=[("T", logits.dtype), ("VOCAB", vocab), ("CHUNKS", chunks)],
        grid=(THREADS * chunks, rows, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, chunks, 5), (rows, chunks)],
        output_dtypes=[mx.float32, mx.int32],
    )
    tokens, values = _kernel("join", ("floats", "ids", "inverse"), ("tokens", "values"), JOIN)(
        inputs=[floats, ids, inverse.reshape(-1)],
        template=[("CHUNKS", chunks)],
        grid=(32, rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows,), (rows, 3)],
        output_dtypes=[mx.int32, mx.float32],
    )
    return tokens, values[:, 0], values[:, 1], values[:, 2]


def bits_at_fused(keys: mx.array, ids: mx.array) -> mx.array:
    """As `noise.bits_at`, by a kernel: uint32 [rows, k]."""
    rows, count = ids.shape
    (words,) = _kernel("at", ("keys", "ids"), ("words",), AT)(
        inputs=[keys, ids.astype(mx.int32)],
        template=[("COUNT", count)],
        grid=(-(-count // 32) * 32, rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows, count)],
        output_dtypes=[mx.uint32],
    )
    return words


@cache
def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str) -> Any:
    make, header = (mx.fast.metal_kernel, METAL) if mx.metal.is_available() else (mx.fast.cuda_kernel, CUDA)
    # MLX keeps compiled kernels by name, on disk too: the name must change with the source.
    version = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    return make(
        name=f"draw_{name}_{version}", input_names=inputs, output_names=outputs, source=source, header=header
    )


def _agrees() -> bool:
    rows, vocab = 4, 2 * CHUNK + 77
    ramp = np.sin(np.arange(rows * vocab, dtype=np.float32)).reshape(rows, vocab) * 4
    logits, inverse = mx.array(ramp), mx.array([[1.0], [0.5], [2.0], [1.0]])
    greedy = mx.array([[False], [False], [False], [True]])
    keys = mx.array(noise.row_keys(range(rows), [0] * rows, range(rows)))
    ids = mx.array(np.arange(rows * 64, dtype=np.int32).reshape(rows, 64) * 61 % vocab)
    words = mx.take_along_axis(noise.bits(keys, vocab), ids, axis=-1)
    ours, reference = (
        draw_fused(logits, inverse, greedy, keys),
        unfiltered.draw_lazy(logits, inverse, greedy, keys),
    )
    same = mx.array_equal(bits_at_fused(keys, ids), words) & mx.array_equal(ours[0], reference[0])
    for a, b in zip(ours[1:], reference[1:], strict=True):
        same = same & mx.allclose(a, b, rtol=1e-4, atol=1e-4)
    return bool(same.item())
