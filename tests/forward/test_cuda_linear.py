"""Narrow steps: which layers run in one launch, what a step does with them, and that nothing stays behind.

The kernel itself is CUDA's: `benchmarks/gpu_linear.py` compares its bits there, as the probe does on every
device. Here the layers themselves stand in for it.
"""

from __future__ import annotations

import toolkit as tk  # isort: skip # it binds the BLAS, which must come before mlx

import threading
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from ways import Setting

from toolkit import backend
from toolkit.forward import cuda_linear
from toolkit.forward.packed import PackedForward
from toolkit.forward.patch import attached
from toolkit.forward.shapes import Shapes
from toolkit.forward.spans import Span
from toolkit.invariance import search, verdict
from toolkit.invariance.cancelling_layers import layers_of

WIDE, NARROW = Shapes(64, 8, 1, 128), Shapes(64, 8, 1, 128, (), 64)
PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [9, 8, 7], "c": [100] * 12}


@pytest.fixture(scope="module")
def half() -> tk.Model:
    return Setting("tiny", "llama", dtype="bfloat16").model()


@pytest.fixture
def launches(monkeypatch) -> list[tuple[tuple[int, ...], int]]:
    """What would have been launched: the lines' shape, and how many layers."""
    seen: list[tuple[tuple[int, ...], int]] = []
    itself = nn.Linear.__call__

    def plain(x, layers):
        seen.append((x.shape, len(layers)))
        return [itself(layer, x) for layer in layers]

    monkeypatch.setattr(cuda_linear, "linear", plain)
    return seen


def decoded(forward: PackedForward) -> np.ndarray:
    """Logits after the prompts and one more token each."""
    mx.eval(forward.run([Span(name, 0, p) for name, p in PROMPTS.items()]))
    out = forward.run([Span(name, len(p), [7]) for name, p in PROMPTS.items()])
    out = np.array(out.astype(mx.float32))
    for name in PROMPTS:
        forward.release(name)
    return out


def test_layers_that_read_the_same_array_are_found(half, launches):
    sets = PackedForward(half, NARROW).linears
    layers = half.module.model.layers
    for layer in layers:
        at, mlp = layer.self_attn, layer.mlp
        for some in ((at.q_proj, at.k_proj, at.v_proj), (at.o_proj,), (mlp.gate_proj, mlp.up_proj),
                     (mlp.down_proj,)):  # fmt: skip
            for one in some:
                assert {id(a) for a in sets[id(one)]} == {id(a) for a in some}
    assert len(sets) == 7 * len(layers), "and the head is not among them"
    assert PackedForward(half, WIDE).linears == {}


def test_a_decode_step_launches_each_set_once_and_gives_the_same_bits(half, launches):
    want = decoded(PackedForward(half, WIDE))
    assert launches == []
    forward = PackedForward(half, NARROW)
    del launches[:]  # of its check before first use
    assert np.array_equal(decoded(forward), want)
    counts = [count for _, count in launches]
    assert counts == [3, 1, 2, 1] * len(half.module.model.layers)
    assert {shape for shape, _ in launches} == {(32, 1, 64), (32, 1, 128)}, "a tile of 32, and no prefill"
    del launches[:]
    rows = {str(i): [i + 1, 5] for i in range(65)}
    mx.eval(forward.run([Span(name, 0, p) for name, p in rows.items()]))
    mx.eval(forward.run([Span(name, 2, [7]) for name in rows]))
    assert launches == [], "65 rows are not narrow"


def test_a_step_goes_through_what_is_put_in_place(half, launches, monkeypatch):
    forward = PackedForward(half, NARROW)
    want = decoded(forward)
    plain = cuda_linear.linear
    monkeypatch.setattr(cuda_linear, "linear", lambda x, layers: [2 * y for y in plain(x, layers)])
    assert not np.array_equal(decoded(forward), want)


def test_within_a_step_other_threads_keep_their_own_layers_and_an_error_leaves_nothing(half, monkeypatch):
    itself, seen = nn.Linear.__call__, []
    layer, x = nn.Linear(4, 4), mx.ones((1, 4))
    own = np.array(layer(x))
    with attached([], lambda layer, x, original: original(layer, x) + 1):
        assert np.array_equal(np.array(layer(x)), own + 1)
        thread = threading.Thread(target=lambda: seen.append(np.array(layer(x))))
        thread.start()
        thread.join()
    assert np.array_equal(seen[0], own) and nn.Linear.__call__ is itself
    monkeypatch.setattr(cuda_linear, "linear", lambda x, layers: 1 / 0)
    forward = PackedForward(half, NARROW)
    with pytest.raises(ZeroDivisionError):
        decoded(forward)
    assert nn.Linear.__call__ is itself and np.array_equal(np.array(layer(x)), own)


def test_only_what_the_kernel_takes_is_given_to_it(monkeypatch):
    def layer(width: int, rows: int, dtype: mx.Dtype = mx.bfloat16) -> nn.Linear:
        made = nn.Linear(width, rows)
        made.set_dtype(dtype)
        return made

    assert cuda_linear.fits(layer(64, 24), 300) and cuda_linear.fits(layer(64, 24, mx.float16), 300)
    for other in (layer(64, 24, mx.float32), layer(60, 24), layer(64, 20), layer(64, 304),
                  nn.Linear(64, 24).to_quantized(64, 4), nn.RMSNorm(64)):  # fmt: skip
        assert not cuda_linear.fits(other, 300)
    one = layer(64, 24)
    monkeypatch.setattr(cuda_linear, "linear", lambda x, layers: pytest.fail("not for the kernel"))
    step = cuda_linear.Linears({id(one): (one,)})
    for x in (mx.ones((33, 64), mx.bfloat16), mx.ones((32, 64), mx.float32)):
        assert step(one, x, lambda layer, x: "itself") == "itself"


@pytest.mark.skipif(not backend.on_cpu(), reason="about a CPU; on CUDA benchmarks/gpu_linear.py says more")
def test_a_cpu_has_no_such_kernel():
    assert not cuda_linear.available()


@pytest.fixture
def device(monkeypatch):
    """A device that would have the kernel; what stands in for it is the layers themselves, run on a tile."""
    monkeypatch.setattr(cuda_linear, "available", lambda: True)
    itself = nn.Linear.__call__

    def put(change=lambda y: y):
        monkeypatch.setattr(cuda_linear, "linear", lambda x, layers: [change(itself(a, x)) for a in layers])

    return put


def test_the_probe_turns_narrow_steps_on_only_where_the_kernel_gives_the_same_bits(half, device):
    device()
    shapes, checks = search.search(half)
    assert shapes.narrow == cuda_linear.MOST and not any(c.differing for c in checks)
    tried = [c for c in checks if c.what.startswith("narrow step")]
    assert {c.what.split(", ", 1)[1] for c in tried} == {f"linear {name}" for name in layers_of(half)[0]}
    assert all(c.compared == 96 for c in tried)
    device(lambda y: y + mx.abs(y) * 2.0**-8)  # one unit in the last place
    shapes, checks = search.search(half)
    assert shapes.narrow == 0 and not any("narrow" in c.what + c.shapes for c in checks)
    assert any(c.differing for c in search.measure(half, replace(shapes, narrow=64)))


def test_a_kernel_that_does_not_run_is_no_reason_to_refuse_a_model(half, device, monkeypatch):
    device()

    def fails(x, layers):
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(cuda_linear, "linear", fails)
    assert search.search(half)[0].narrow == 0


def test_a_kernel_that_fails_only_in_the_model_is_left_out_too(half, device):
    calls = iter(range(10**6))
    tried = sum(2 for _ in layers_of(half)[0])
    device(lambda y: y if next(calls) < tried else y + 1)
    shapes, checks = search.search(half)
    assert shapes.narrow == 0 and not any(c.differing for c in checks)


def test_models_with_other_matrices_have_no_narrow_steps(half, device):
    device()
    assert cuda_linear.covers(half)
    for family, changes in (("mixtral", {}), ("deepseek_v3", {}), ("llama", {"hidden_size": 72})):
        assert not cuda_linear.covers(Setting("tiny", family, changes, "bfloat16").model()), family
    assert not cuda_linear.covers(Setting("tiny", "llama").model()), "float32"


def test_a_verdict_with_narrow_steps_is_read_back_and_no_other_number(half, device, tmp_path, monkeypatch):
    device()
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    found = verdict.verdict(half, fresh=True)
    assert "narrow 64" in repr(found)
    verdict._known.clear()
    (path,) = (tmp_path / "invariance").glob("*.json")
    assert verdict._read(path, found.where).shapes == found.shapes
    path.write_text(path.read_text().replace('"narrow": 64', '"narrow": 40'))
    assert verdict._read(path, found.where) is None
