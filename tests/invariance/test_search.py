"""The probe has teeth, its verdict is kept and believed only where it was measured, and `invariant` obeys it.

The bundled BLAS runs a scalar loop for each row, so there every rule passes and proves nothing: the teeth are
shown under MKL, and the vacuous passes in a process of its own.
"""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import toolkit as tk
from toolkit import backend
from toolkit.forward import attention
from toolkit.forward.kv_cache import Geometry, KVStore, in_rows
from toolkit.forward.packed import PackedForward, Unpackable
from toolkit.forward.shapes import PLAIN, Shapes
from toolkit.invariance import search, verdict
from toolkit.invariance.attention_checks import Trial

ROOT = Path(__file__).parents[2]
mkl = pytest.mark.skipif(
    not (backend.on_cpu() and backend.info().blas == "mkl"),
    reason="shows what fails under MKL on a CPU; install the cpu extra",
)
SAFE = Shapes(8, 8, 4, 128, (256,))


@pytest.fixture(scope="module")
def three():
    """Three query heads share a KV head, as in SmolLM2."""
    return tk.tiny(hidden_size=192, num_attention_heads=3, num_key_value_heads=1, head_dim=64)


@pytest.fixture
def apart(monkeypatch, tmp_path):
    """A cache directory of its own, and nothing remembered."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(verdict, "_known", {})
    return tmp_path


@pytest.fixture
def counted(monkeypatch):
    """Instead of measuring, say what was measured before; count how often."""
    calls = []

    def search(model):
        calls.append(model)
        return SAFE, (verdict.Check("linear 64 x 64", "tile 8", 63, 0, 0.0),)

    monkeypatch.setattr(verdict, "search", search)
    return calls


def failing(model, shapes):
    return " | ".join(c.what for c in search.measure(model, shapes) if c.differing)


@mkl
def test_under_mkl_the_probe_finds_the_rules_and_they_pass(three):
    shapes, checks = search.search(three)
    assert (shapes.tile, shapes.head, shapes.block, shapes.bucket) == (8, 8, 4, 64)
    assert shapes.skip == (256, 320), "MKL cuts sums over these at another place than over 384 and more"
    assert not any(c.differing for c in checks) and all(c.compared for c in checks)
    assert {c.what.split()[0] for c in checks} == {"linear", "head", "attention", "model:"}
    assert not failing(three, shapes)


@mkl
@pytest.mark.parametrize(
    "shapes, expected",
    [
        (Shapes(1, 8, 4, 128, (256,)), "model: alone against in a batch"),
        (Shapes(8, 1, 4, 128, (256,)), "head 192 x 258"),
        (Shapes(8, 8, 1, 128, (256,)), "1 KV: decode"),
        (Shapes(8, 8, 2, 128, (256,)), "1 KV: chunks"),
        (Shapes(8, 8, 4, 128), "1 KV: decode"),
        (PLAIN, "1 KV: decode, far on"),
    ],
    ids=["tile 1", "head 1", "block 1", "block 2, three heads folded", "256 keys kept", "plain"],
)
def test_without_a_rule_the_probe_reports_failures(three, shapes, expected):
    assert expected in failing(three, shapes)


@mkl
def test_a_tile_of_one_fails_on_linear_layers_by_some_ulps(three):
    checks = [c for c in search.measure(three, Shapes(1, 8, 4, 128, (256,))) if c.what.startswith("linear")]
    assert all(c.differing > c.compared // 2 and 0 < c.largest < 0.01 for c in checks)


@mkl
def test_key_counts_to_skip_are_found_by_measurement(three):
    subject = search.Subject.of(three)
    assert search.skipped(subject, 4, 64) == (256, 320)
    assert search.skipped(subject, 4, 128) == (256,)
    assert search.skipped(subject, 4, 256) == (256,)
    trial = subject.trials[0]
    assert trial.apart(256, SAFE) > 0 == trial.apart(384, SAFE), "the same queries, the same keys"


def test_with_the_bundled_blas_everything_passes_vacuously():
    script = """
import toolkit as tk
from toolkit.invariance import search
from toolkit.forward.shapes import Shapes
assert tk.backend.info().blas == "reference", tk.backend.info()
shapes, checks = search.search(tk.load("tiny"))
print(shapes.tile, shapes.head, sum(c.differing for c in checks))
print(sum(c.differing for c in search.measure(tk.load("tiny"), Shapes(1, 1, 1, 128))))
"""
    if not backend.on_cpu() or sys.platform != "linux":
        pytest.skip("only MLX's Linux wheel for CPUs brings that BLAS")
    env = os.environ | {"TOOLKIT_BLAS": "off", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["1", "1", "0", "0"], done.stderr


def test_a_verdict_is_measured_once_and_kept(tiny, apart, counted, capsys):
    first = verdict.verdict(tiny)
    assert "measuring batch invariance of tiny" in capsys.readouterr().err
    verdict._known.clear()  # another process
    again = verdict.verdict(tiny)
    assert (len(counted), first) == (1, again) and first.holds
    assert capsys.readouterr().err == ""
    assert [p.suffix for p in (apart / "invariance").iterdir()] == [".json"]
    verdict.verdict(tiny, fresh=True)
    assert len(counted) == 2


@pytest.mark.parametrize("what", ["threads", "blas_version", "mlx", "instruction_set", "MKL_CBWR"])
def test_a_verdict_is_measured_again_where_anything_else_computes(tiny, apart, counted, monkeypatch, what):
    verdict.verdict(tiny)
    elsewhere = backend.fingerprint() | {what: "another"}
    monkeypatch.setattr(backend, "fingerprint", lambda: elsewhere)
    assert verdict.verdict(tiny).where[what] == "another"
    assert len(counted) == 2


def test_a_verdict_is_of_one_precision_and_one_shape(tiny, apart, counted):
    from dataclasses import replace

    others = [replace(tiny, dtype="bfloat16"), replace(tiny, config=tiny.config | {"rope_theta": 5e5})]
    for model in (tiny, *others, tk.tiny(hidden_size=128), tk.tiny(seed=5)):
        verdict.verdict(model)
    assert len(counted) == 4, "other weights of the same shapes share the verdict"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"shapes": 3}', '{"holds": true, "checks": []}', "\udc80"],
    ids=["empty", "cut off", "a list", "null", "no shapes", "half", "not text"],
)
def test_a_spoilt_cache_file_is_measured_again(tiny, apart, counted, text):
    verdict.verdict(tiny)
    (path,) = (apart / "invariance").iterdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    verdict._known.clear()
    assert verdict.verdict(tiny).shapes == SAFE
    assert len(counted) == 2 and json.loads(path.read_text())["holds"]


@pytest.mark.parametrize(
    "field, value", [("tile", 0), ("tile", "8"), ("skip", 3), ("bucket", None), ("new", 1)]
)
def test_a_cache_file_with_shapes_that_make_no_sense_is_measured_again(tiny, apart, counted, field, value):
    verdict.verdict(tiny)
    (path,) = (apart / "invariance").iterdir()
    kept = json.loads(path.read_text())
    kept["shapes"][field] = value
    path.write_text(json.dumps(kept))
    verdict._known.clear()
    assert verdict.verdict(tiny).shapes == SAFE and len(counted) == 2


def test_a_verdict_of_elsewhere_copied_here_is_not_believed(tiny, apart, counted):
    verdict.verdict(tiny)
    (path,) = (apart / "invariance").iterdir()
    kept = json.loads(path.read_text())
    kept["where"]["threads"] = 99
    path.write_text(json.dumps(kept))
    verdict._known.clear()
    verdict.verdict(tiny)
    assert len(counted) == 2


def test_quantized_in_another_way_is_measured_by_itself():
    def quantized(**how):
        model = tk.tiny()
        nn.quantize(model.module, **how)
        return verdict._signature(model)

    ways = [{"group_size": 32, "bits": 4}, {"group_size": 64, "bits": 4}, {"group_size": 64, "bits": 8}]
    assert len({quantized(**how) for how in ways}) == len(ways)
    assert quantized(**ways[0]) == quantized(**ways[0])


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(tiny, apart, counted, monkeypatch):
    (apart / "invariance").write_text("a file where the directory should be")
    with pytest.warns(UserWarning, match="could not keep the invariance verdict"):
        assert verdict.verdict(tiny).holds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict.verdict(tiny).holds
    assert len(counted) == 1, "this process remembers"


class Unsteady(nn.Linear):
    """A layer whose result depends on how many rows come with it."""

    def __call__(self, x):
        return super().__call__(x) * (1 + 1e-5 * x.size / x.shape[-1])


def unsteady():
    model = tk.tiny()
    for layer in model.module.model.layers:
        layer.mlp.up_proj.__class__ = Unsteady
    return model


def test_where_nothing_passes_true_refuses_and_auto_warns_once_and_says_so_in_results(apart):
    model = unsteady()
    request = tk.Request("abc", id="a", seed=1, max_tokens=2)
    with pytest.raises(
        ValueError, match=r'invariant=True: tiny is not .*linear 64 x 128 \(tile 512\).*sequential"'
    ):
        tk.Engine(model, invariant=True)
    with pytest.warns(UserWarning, match="tiny is not batch-invariant on this device: linear") as caught:
        done = tk.generate(model, [request])
    assert len(caught) == 1 and done["a"].invariant is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = tk.generate(model, [request])
    assert again["a"].invariant is False and again["a"].tokens == done["a"].tokens
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tk.generate(model, [request], invariant=False)["a"].invariant is False


def test_a_layer_that_the_probe_does_not_know_is_caught_by_the_whole_model(apart):
    class Hidden(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __call__(self, x):
            return self.inner(x) * (1 + 1e-5 * x.size / x.shape[-1])

    model = tk.tiny()
    for layer in model.module.model.layers:
        layer.mlp = Hidden(layer.mlp)
    found = verdict.verdict(model)
    assert not found.holds
    assert not any(c.differing for c in found.checks if not c.what.startswith("model"))
    with pytest.raises(ValueError, match="model: alone against in a batch"):
        tk.Engine(model, invariant=True)


def test_a_layer_whose_result_is_not_a_number_fails(apart):
    class Broken(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) + mx.where(x.size > 64 * 64, mx.nan, 0)

    model = tk.tiny()
    for layer in model.module.model.layers:
        layer.mlp.up_proj.__class__ = Broken
    _, checks = search.search(model)
    bad = [c for c in checks if c.differing]
    assert bad and np.isnan(bad[0].largest)


def test_a_model_that_cannot_run_packed_has_no_verdict(apart, monkeypatch):
    def refuse(*_):
        raise Unpackable("it keeps no keys")

    monkeypatch.setattr(search, "PackedForward", refuse)
    with pytest.raises(Unpackable):
        verdict.verdict(tk.tiny())
    assert not (apart / "invariance").exists()


def test_nothing_is_said_to_be_measured_of_a_model_that_cannot_run_packed(apart, capsys):
    with pytest.warns(UserWarning, match="can't run packed"):
        tk.Engine(tk.tiny(model_type="mamba"))
    assert "measuring" not in capsys.readouterr().err
    tk.Engine(tk.tiny())
    assert "measuring batch invariance of tiny" in capsys.readouterr().err


def test_a_layer_with_sinks_is_tried_with_sinks():
    found = PackedForward(tk.tiny(model_type="gpt_oss", sliding_window=16), PLAIN).attending
    assert found and all(sinks for *_, sinks in found)
    assert not any(sinks for *_, sinks in PackedForward(tk.tiny(), PLAIN).attending)
    with_, without = (Trial(*found[0][:2], sinks=sinks, longest=256) for sinks in (True, False))
    assert "sinks" in str(with_) and with_.narrow.sinks is not None and "sinks" not in str(without)
    assert np.abs(with_.call(np.arange(4), 64, 4) - without.call(np.arange(4), 64, 4)).min() > 0


def half_precision(trial, order_of):
    """The share of a trial's results that are another bfloat16 with one sum taken in the opposite order."""
    keys, at = 1024, np.arange(63, 1024, 64)
    q = np.array(trial.q[0, :keys, 0])[at]
    k, v = np.array(trial.k[0, 0, :keys]), np.array(trial.v[0, 0, :keys])

    def added(terms, axis, back):
        return np.cumsum(np.flip(terms, axis) if back else terms, axis, np.float32).take(-1, axis)

    outs = []
    for back in (False, True):
        scores = added(q[:, None] * k[None], 2, back and order_of == "scores") * np.float32(0.125)
        seen = np.arange(keys)[None] <= at[:, None]
        p = np.where(seen, np.exp(scores - scores.max(1, keepdims=True)), 0).astype(np.float32)
        p = np.array(mx.array(p).astype(mx.bfloat16).astype(mx.float32))  # as fused kernels do
        out = added(p[..., None] * v[None], 1, back and order_of == "values") / p.sum(1, keepdims=True)
        outs.append(np.array(mx.array(out.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32)))
    return float((outs[0] != outs[1]).any(1).mean())


@pytest.mark.parametrize("cancels", ["scores", "values"])
def test_in_half_precision_another_order_of_sums_shows_in_attentions_trials(cancels):
    trial = Trial(Geometry(1, 64, 1, 64, mx.float32), 1, longest=1024, cancels=cancels)
    plain = Trial(Geometry(1, 64, 1, 64, mx.float32), 1, longest=1024, cancels="nothing")
    assert half_precision(trial, cancels) > 0.9 > 0.3 > half_precision(plain, cancels)


@pytest.mark.parametrize("beside", [False, True])
def test_trials_lay_keys_out_as_the_slabs_do(monkeypatch, beside):
    def seen(queries, keys, values, *_):
        found.append((keys, values))
        return queries

    monkeypatch.setattr(attention, "attend", seen)
    layer = Geometry(2, 8, 2, 8, mx.float32)
    trial, found = Trial(layer, heads=4, longest=1024), []
    for cpu in (True, False):
        store = KVStore([layer], bucket=64, least=64, split=cpu)
        store.write("row", [(trial.k[0, :, :64], trial.v[0, :, :64])], 64)
        trial.cpu = cpu
        trial.call(np.arange(4), 64, 4, beside)
        (slab,) = store.slabs.values()
        for here, lines in zip(found.pop(), (slab.keys[0], slab.values[0]), strict=True):
            rows = in_rows(lines, 1, 64, 2, cpu)
            assert np.array_equal(here[-1:], rows)
            order = np.asarray(rows).strides[1] > np.asarray(rows).strides[2]
            assert (np.asarray(here).strides[1] > np.asarray(here).strides[2]) == order == cpu


def test_a_verdict_is_for_one_geometry_also_where_a_configuration_nests_it(tiny):
    def signature(**inner):
        return verdict._signature(replace(tiny, config={"text_config": inner, "layers": [1, 2]}))

    assert signature(heads=4) == signature(heads=4) != signature(heads=2)


def test_a_model_without_a_layer_that_can_be_tried_does_not_pass(tiny, monkeypatch):
    monkeypatch.setattr(search, "layers_of", lambda model: ({}, {}, False))
    _, checks = search.search(tiny)
    assert any(c.differing and "none of a kind" in c.what for c in checks)
