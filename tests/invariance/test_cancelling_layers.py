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
from ways import Setting

from toolkit.invariance import cancelling_layers
from toolkit.invariance.cancelling_layers import LOUD, Twin

LAYERS = {
    "linear": lambda: nn.Linear(576, 192, bias=False),
    "linear with bias": lambda: nn.Linear(577, 192),
    "many rows": lambda: nn.Linear(64, 2500, bias=False),
    "4 bits": lambda: nn.Linear(576, 192).to_quantized(64, 4),
    "3 bits": lambda: nn.Linear(576, 192).to_quantized(32, 3),
    "mxfp4": lambda: nn.Linear(576, 192).to_quantized(mode="mxfp4"),
    "nvfp4": lambda: nn.Linear(576, 192).to_quantized(mode="nvfp4"),
    "mxfp8": lambda: nn.Linear(576, 192).to_quantized(mode="mxfp8"),
    "8 bits, one group": lambda: nn.Linear(64, 192).to_quantized(64, 8),
    "head": lambda: nn.Embedding(300, 96),
    "head in 4 bits": lambda: nn.Embedding(300, 128).to_quantized(32, 4),
    "latent heads": lambda: MultiLinear(96, 40, 4),
    "latent heads in 4 bits": lambda: MultiLinear(256, 40, 4).to_quantized(64, 4),
    "gated experts, first": lambda: SwitchGLU(64, 96, 8),
    "gated experts, last": lambda: SwitchGLU(64, 96, 8),
    "experts with bias, first": lambda: SwitchMLP(64, 96, 8, bias=True),
    "experts with bias, last": lambda: SwitchMLP(64, 96, 8, bias=True),
    "experts in mxfp4, last": lambda: quantized(SwitchGLU(256, 192, 8), group_size=32, bits=4, mode="mxfp4"),
}


def quantized(layer: nn.Module, **how) -> nn.Module:
    nn.quantize(layer, **how)
    return layer


def twin_of(name: str) -> Twin:
    mx.random.seed(0)
    layer = LAYERS[name]()
    parts = {"first": ("fc1", "gate_proj"), "last": ("fc2", "down_proj")}.get(name.rpartition(" ")[2], ())
    return Twin(layer, mx.float32, next((p for p in parts if p in layer), ""), 2)


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_left_of_a_twin_is_rounding_alone(name):
    twin = twin_of(name)
    layer, rng = twin.make(), np.random.default_rng(0)
    x, other = twin.lines(rng, 40), twin.lines(rng, 40, cancel=False)
    out, usual = (np.array(twin.run(layer, lines[:, None])) for lines in (x, LOUD * other))
    assert out.shape[:2] == (40, 1) and np.array(x).any(1).all()
    assert 0 < np.abs(out).mean() < 1e-5 * np.abs(usual).mean()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", ["linear", "linear with bias", "latent heads", "4 bits", "3 bits", "mxfp4",
                                  "nvfp4", "mxfp8", "8 bits, one group"])  # fmt: skip
def test_in_half_precision_another_order_of_sums_shows_in_a_twin_and_hardly_in_a_layer(name, dtype):
    def differ(layer: nn.Module, x: mx.array, heads: int) -> float:
        """The share of results that are another number when columns are summed in the opposite order."""
        w = layer.weight
        if "scales" in layer:
            how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            w = mx.dequantize(w, layer.scales, layer.get("biases"), **how)
        w = np.array(w.astype(mx.float32)).reshape(heads, -1, w.shape[-1])
        x = np.array(x.astype(mx.float32)).reshape(len(x), heads, -1)
        ways = []
        for step in (1, -1):
            total = np.zeros((len(x), heads, w.shape[1]), np.float32)
            for i in range(w.shape[2])[::step]:
                total += x[:, :, None, i] * w[None, :, :, i]
            total += np.array(layer.bias.astype(mx.float32)) if "bias" in layer else 0
            ways.append(np.array(mx.array(total).astype(dtype).astype(mx.float32)))
        return float((ways[0] != ways[1]).mean())

    mx.random.seed(0)
    layer = LAYERS[name]()
    layer.set_dtype(dtype, lambda kept: mx.issubdtype(kept, mx.floating))
    twin = Twin(layer, dtype)
    rng = np.random.default_rng(0)
    heads = twin.parts
    own = differ(layer, twin.lines(rng, 8, cancel=False), heads)
    assert own < 0.02 and differ(twin.make(), twin.lines(rng, 8), heads) > 0.5


def test_a_bias_added_after_rounding_shows():
    twin = twin_of("linear with bias")
    layer, x = twin.make(), twin.lines(np.random.default_rng(0), 8)
    before = (x @ layer.weight.T + layer.bias).astype(mx.bfloat16)
    after = (x @ layer.weight.T).astype(mx.bfloat16) + layer.bias.astype(mx.bfloat16)
    assert float((before != after).mean()) > 0.1


def test_a_twin_leaves_the_layer_alone_and_is_the_same_every_time():
    twin = twin_of("gated experts, last")
    layer = twin.original
    before = [np.array(layer[n].weight) for n in ("gate_proj", "up_proj", "down_proj")]
    x = twin.lines(np.random.default_rng(0), 4)[:, None]
    assert mx.array_equal(twin.run(twin.make(), x), twin.run(twin.make(), x))
    assert all(np.array_equal(np.array(layer[n].weight), b) for n, b in
               zip(("gate_proj", "up_proj", "down_proj"), before, strict=True))  # fmt: skip


def test_experts_latent_heads_and_wide_layers_of_a_small_model_are_tried():
    moe = tk.tiny(0, model_type="mixtral")
    body, head, elsewhere = cancelling_layers.layers_of(moe)
    assert elsewhere and len(head) == 1
    assert {"64 x 128, 2 of 4 experts", "128 x 64, 2 of 4 experts"} <= set(body)
    latent = tk.tiny(0, model_type="deepseek_v3")
    body, head, _ = cancelling_layers.layers_of(latent)
    assert {"128 x 512, 4 heads", "512 x 128, 4 heads", "1536 x 768"} <= set(body)
    assert "64 x 258" in head and "64 x 258" not in body, "as many rows as tokens: it gives logits"
    assert "64 x 4" in cancelling_layers.layers_of(Setting("architecture", "glm4_moe").model())[0], (
        "a router's own matrix"
    )


def test_the_number_of_experts_is_found_where_configurations_keep_it():
    for config, each in (({}, 1), ({"num_experts_per_tok": 4}, 4), ({"moe_topk": [2, 8]}, 2),
                         ({"text_config": {"num_experts_per_tok": 8}}, 8), ({"moe_k": None}, 1)):  # fmt: skip
        assert cancelling_layers._each(config) == each


def test_looking_for_layers_leaves_the_global_generator_alone():
    routed = Setting("architecture", "glm4_moe").model()
    mx.random.seed(7)
    before = [np.array(a) for a in mx.random.state]
    body, _, _ = cancelling_layers.layers_of(routed)
    for twin in body.values():
        twin.make()
    assert all(np.array_equal(a, b) for a, b in zip(mx.random.state, before, strict=True))
    mx.eval(mx.random.normal((2,)))
    assert not all(np.array_equal(a, b) for a, b in zip(mx.random.state, before, strict=True))
