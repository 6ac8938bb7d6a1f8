"""The fused kernels against plain MLX operations: their source on a CPU, themselves on a GPU."""

import shutil

import mlx.core as mx
import numpy as np
import pytest
from helpers.kernel_emulator import Emulator

from toolkit import noise
from toolkit.sampling import kernels, unfiltered
from toolkit.sampling.kernel_sources import CHUNK


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the kernels' source for the CPU: install it")
    return Emulator(tmp_path_factory.mktemp("kernels"))


def rows_of(rows, vocab):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(rows, vocab)) * 4).astype(np.float32)
    inverse = np.array([1.0, 0.5, 2.0], np.float32)[:rows]
    scale = np.array([1.0, 1.0, 0.0], np.float32)[:rows]
    return logits, inverse, scale, noise.row_keys(range(rows), [0] * rows, range(rows))


@pytest.mark.parametrize("vocab", [1, 258, CHUNK, CHUNK + 77])
def test_the_kernels_source_draws_what_plain_operations_draw(emulator, vocab):
    logits, inverse, scale, keys = rows_of(3, vocab)
    logits[0, 5 : vocab // 2] = -np.inf
    ours = emulator.draw(logits, inverse, scale, keys)
    reference = unfiltered.draw_lazy(
        mx.array(logits), mx.array(inverse[:, None]), mx.array(scale[:, None] == 0), keys
    )
    assert ours[0].tolist() == reference[0].tolist()
    for a, b in zip(ours[1:], reference[1:], strict=True):
        assert np.allclose(a, np.array(b), rtol=1e-5, atol=1e-4, equal_nan=True)


def test_the_kernels_source_reports_rows_without_a_best(emulator):
    logits, inverse, scale, keys = rows_of(3, 300)
    logits[0], logits[1, 7], logits[2, 3] = -np.inf, np.nan, np.inf
    _, _, _, top = emulator.draw(logits, inverse, scale, keys)
    assert top[0] == -np.inf and np.isnan(top[1]) and top[2] == np.inf


def test_the_kernels_source_makes_the_noise_words(emulator):
    keys = noise.row_keys(range(2), [0, 1], [5, 6])
    ids = np.random.default_rng(0).integers(0, 150_000, (2, 40)).astype(np.int32)
    assert (emulator.bits_at(keys, ids) == noise.bits_at(keys, ids)).all()


def test_on_a_cpu_the_plain_operations_run():
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("this is the CPU's half: benchmarks/gpu_draw.py is the GPU's")
    assert not kernels.fused()


def test_fused_kernels_agree_on_a_gpu():
    if mx.default_device().type == mx.DeviceType.cpu:
        pytest.skip("needs a GPU; the kernels' source ran on the CPU above")
    assert kernels.fused()
