"""`forward.cpu_exp`: exact to the last places within its range; what isn't finite is not hidden."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations

from toolkit.forward import attention, cpu_exp

exp = mx.compile(cpu_exp.exp)


def test_the_polynomial_is_the_exponential_to_the_last_places():
    x = np.random.default_rng(0).uniform(-87, 88, 100_003).astype(np.float32)
    off = np.array(exp(mx.array(x))).astype(np.float64) / np.exp(x.astype(np.float64)) - 1
    assert 0 < np.abs(off).max() < 3e-7
    assert exp(mx.array([0.0, -0.0])).tolist() == [1, 1]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_beyond_its_range_it_stays_positive_and_finite_but_not_for_what_is_no_number(size):
    low, high = (float(exp(mx.array([x])).item()) for x in (-87.0, 88.0))
    for x, expected in ((-np.inf, low), (-1e30, low), (1e30, high), (np.inf, high)):
        assert exp(mx.full((size,), x)).tolist() == [expected] * size
    assert 0 < low < 2e-38 and 1e38 < high < np.inf
    assert np.isnan(np.array(exp(mx.full((size,), mx.nan)))).all()


@pytest.mark.parametrize(("dtype", "near"), [(mx.float32, 1e-6), (mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
def test_the_gate_is_mlx_lms_within_rounding(dtype, near):
    gate, x = (mx.array(a).astype(dtype) for a in np.random.default_rng(1).normal(0, 5, (2, 9, 300)))
    ours, theirs = cpu_exp.swiglu(gate, x), activations.swiglu(gate, x)
    assert ours.dtype == theirs.dtype == dtype
    ours, theirs = (np.array(a.astype(mx.float32)) for a in (ours, theirs))
    assert np.allclose(ours, theirs, rtol=near, atol=near)
    assert not np.allclose(ours, np.array(x.astype(mx.float32)), rtol=near, atol=near)
    ill = cpu_exp.swiglu(mx.array([mx.nan, mx.inf, -mx.inf]), mx.ones(3))
    assert not np.isfinite(np.array(ill)).any()


def test_masked_scores_weigh_nothing_and_scores_far_below_next_to_nothing():
    scores = mx.array([[0.0, -1.0, -mx.inf, -500.0]])
    weights = np.array(attention._exp(scores, scores.max(-1, keepdims=True)))[0]
    assert weights[0] == 1 and weights[1] == pytest.approx(np.exp(-1)) and weights[2] == 0
    assert 0 < weights[3] < 1e-37
