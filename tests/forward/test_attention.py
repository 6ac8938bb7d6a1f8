"""Both ways to attend, a CPU's and a GPU's, give what attention is by its definition."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from toolkit.forward import attention

KEYS = 24
CASES = list(product([1, 5], [(6, 6), (6, 2), (4, 1)], [1, 4], [None, 7], [False, True], [1, 3]))


def naive(q, k, v, positions, window, scale, sinks):
    """One row, one query and one head at a time, in float64."""
    rows, queries, heads, _ = q.shape
    out = np.zeros((rows, queries, heads, v.shape[-1]))
    for r, i, h in np.ndindex(rows, queries, heads):
        kv = h // (heads // k.shape[1])
        at = positions[r if len(positions) > 1 else 0, i]
        seen = [j for j in range(KEYS) if j <= at and (not window or j > at - window)]
        scores = k[r, kv, seen] @ q[r, i, h] * scale
        weights = np.exp(scores - scores.max())
        total = weights.sum() + (np.exp(sinks[h] - scores.max()) if sinks is not None else 0)
        out[r, i, h] = weights @ v[r, kv, seen] / total
    return out.reshape(rows * queries, -1)


@pytest.mark.parametrize("cpu", [True, False])
def test_attention_is_that_of_the_definition(cpu):
    rng = np.random.default_rng(0)
    for queries, (heads, kv), block, window, sunk, masks in CASES:
        rows, scale = 3, 0.3
        q = rng.standard_normal((rows, queries, heads, 8))
        k, v = (rng.standard_normal((rows, kv, KEYS, 8)) for _ in "kv")
        sinks = rng.standard_normal(heads) if sunk else None
        positions = np.sort(rng.integers(0, KEYS, (masks, queries)), axis=1)
        fold = attention.folded(queries, heads, kv, sunk, cpu)
        mask = attention.mask(mx.array(positions), KEYS, window, fold, block, None if cpu else mx.float32)
        arrays = [mx.array(a.astype(np.float32)) for a in (q, k, v)]
        given = mx.array(sinks.astype(np.float32)) if sunk else None
        got = np.array(attention.attend(*arrays, mask, scale, given, block, cpu))
        due = naive(q, k, v, positions, window, scale, sinks)
        case = queries, heads, kv, block, window, sunk, masks
        assert got.shape == due.shape and np.abs(got - due).max() < 1e-5, case
        wrong = naive(q, k, v, np.minimum(positions + 1, KEYS - 1), window, scale, sinks)
        assert np.abs(got - wrong).max() > 1e-3, case  # one key more is seen
