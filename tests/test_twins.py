"""Twins: exact results are zero, what is left is rounding, and another order of sums shows in half
precision."""

from __future__ import annotations

import toolkit as tk  # isort: skip # it binds the BLAS, which must come before mlx

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from toolkit.forward import probe
from toolkit.forward.twins import Twin

LAYERS = {
    "linear": lambda: nn.Linear(576, 192, bias=False),
    "linear with bias": lambda: nn.Linear(577, 192),
    "4 bits": lambda: nn.Linear(576, 192).to_quantized(64, 4),
    "8 bits, one group": lambda: nn.Linear(64, 192).to_quantized(64, 8),
    "head": lambda: nn.Embedding(300, 96),
    "head in 4 bits": lambda: nn.Embedding(300, 128).to_quantized(32, 4),
    "latent heads": lambda: MultiLinear(96, 40, 4),
    "gated experts": lambda: SwitchGLU(64, 96, 8),
    "experts": lambda: SwitchMLP(64, 96, 8, bias=True),
}


def usual(layer: nn.Module, twin: Twin) -> float:
    """How large a result of the layer itself is."""
    same = Twin(layer, twin.each)
    same._made = layer
    x = np.random.default_rng(0).standard_normal((8, 1, twin.heads * twin.width), dtype=np.float32)
    return float(mx.abs(same(mx.array(x))).mean())


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_left_of_a_twin_is_rounding_alone(name):
    mx.random.seed(0)
    layer = LAYERS[name]()
    twin = Twin(layer, 2)
    x = twin.lines(np.random.default_rng(0), 8)
    out = np.array(twin(mx.array(x)[:, None]))
    assert out.shape[:2] == (8, 1) and x.any()
    own = usual(layer, twin)
    if name == "8 bits, one group":  # it has no other group that could cancel it
        assert np.abs(out).mean() > own / 20
    else:
        most = 1e-5 if "bits" not in name else 0.02  # scales are rounded, so quantized halves nearly cancel
        assert 0 < np.abs(out).mean() < most * own


@pytest.mark.parametrize("name", ["linear", "latent heads"])
def test_in_half_precision_another_order_of_sums_shows_in_a_twin_and_hardly_in_a_layer(name):
    def differ(layer: nn.Module, x: np.ndarray, heads: int) -> float:
        """The share of results that are another bfloat16 when columns are summed in the opposite order."""
        w = np.array(layer.weight).reshape(heads, -1, layer.weight.shape[-1])
        x = x.reshape(len(x), heads, -1)
        ways = []
        for step in (1, -1):
            total = np.zeros((len(x), heads, w.shape[1]), np.float32)
            for i in range(w.shape[2])[::step]:
                total += x[:, :, None, i] * w[None, :, :, i]
            ways.append(np.array(mx.array(total).astype(mx.bfloat16).astype(mx.float32)))
        return float((ways[0] != ways[1]).mean())

    mx.random.seed(0)
    layer = LAYERS[name]()
    twin = Twin(layer)
    rng = np.random.default_rng(0)
    own = differ(layer, rng.standard_normal((8, twin.heads * twin.width), dtype=np.float32), twin.heads)
    assert own < 0.02 and differ(twin.layer, twin.lines(rng, 8), twin.heads) > 0.8


def test_a_twin_leaves_the_layer_alone_and_is_the_same_every_time():
    layer = LAYERS["gated experts"]()
    before = [np.array(layer[n].weight) for n in ("gate_proj", "up_proj", "down_proj")]
    first, second = Twin(layer, 2), Twin(layer, 2)
    x = mx.array(first.lines(np.random.default_rng(0), 4))[:, None]
    assert mx.array_equal(first(x), second(x))
    assert all(np.array_equal(np.array(layer[n].weight), b) for n, b in
               zip(("gate_proj", "up_proj", "down_proj"), before, strict=True))  # fmt: skip


def test_every_kind_of_weight_in_a_model_is_tried():
    moe = tk.tiny(0, model_type="mixtral")
    body, head, elsewhere = probe.layers_of(moe)
    assert elsewhere and any("2 of 4 experts" in name for name in body) and len(head) == 1
    latent = tk.tiny(0, model_type="deepseek_v3")
    body, head, _ = probe.layers_of(latent)
    assert {"128 x 512, 4 heads", "512 x 128, 4 heads", "1536 x 768"} <= set(body)
    assert "64 x 258" in head and "64 x 258" not in body, "as many rows as tokens: it gives logits"
