"""Precision: the same weights in another type, one layer at a time.

On a CPU only float32 matmuls reach the BLAS; 16-bit and quantized ones run scalar loops that are a hundred
to a thousand times slower, so `load` converts there unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm.auto import tqdm


@contextmanager
def untouched_generator() -> Iterator[None]:
    """Layers draw their initial weights from MLX's global generator: put it back as it was."""
    before = np.array(mx.random.state[0])
    try:
        yield
    finally:
        # The state can't be assigned, but its array can be written in place.
        mx.random.state[0][:] = mx.array(before)
        mx.eval(mx.random.state[0])


def dtype_of(module: nn.Module) -> mx.Dtype:
    """The floating type that most of the weights (of a quantized layer, the scales) have."""
    sizes: dict[mx.Dtype, int] = {}
    for _, array in tree_flatten(module.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return max(sizes, key=lambda kind: sizes[kind])


def bits_of(module: nn.Module) -> str:
    """ "4-bit" or the like where layers are quantized, else ""."""
    bits = {layer.bits for _, layer in module.named_modules() if _quantized(layer)}
    return "/".join(f"{b}-bit" for b in sorted(bits))


def convert(module: nn.Module, dtype: mx.Dtype, *, dequantize: bool, progress: bool = True) -> None:
    """Convert a module's floating-point weights in place, quantized layers too where `dequantize`."""
    layers = [(name, layer) for name, layer in module.named_modules() if not layer.children() and name]
    title = f"Converting to {name_of(dtype)}"
    for name, layer in tqdm(layers, desc=title, disable=not progress, leave=False):
        new = _dequantized(name, layer, dtype) if dequantize and _quantized(layer) else layer
        new.set_dtype(dtype)
        mx.eval(new.parameters())
        if new is not layer:
            module.update_modules(tree_unflatten([(name, new)]))
    module.set_dtype(dtype)  # arrays that blocks hold themselves
    mx.eval(module.parameters())


def name_of(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _quantized(layer: Any) -> bool:
    return "scales" in layer and hasattr(layer, "bits")


def _dequantized(name: str, layer: Any, dtype: mx.Dtype) -> nn.Module:
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    kinds = {nn.QuantizedLinear: nn.Linear, nn.QuantizedEmbedding: nn.Embedding,
             QuantizedSwitchLinear: SwitchLinear, QuantizedMultiLinear: MultiLinear}  # fmt: skip
    plain = kinds.get(type(layer))
    if plain is None:
        raise ValueError(f"layer {name} ({type(layer).__name__}) can't be dequantized; pass dequantize=False")
    scales, biases = layer.scales, layer.get("biases")
    if layer.mode == "affine":
        # Scales first: with 16-bit ones the products would be rounded to 16 bits before the cast.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = mx.dequantize(layer.weight, scales, biases, layer.group_size, layer.bits, layer.mode,
                           layer.get("global_scale"), mx.float32).astype(dtype)  # fmt: skip
    options = {"bias": "bias" in layer} if plain in (nn.Linear, SwitchLinear) else {}
    new = plain(*weight.shape[::-1], **options)
    new.weight = weight
    if "bias" in layer:
        new.bias = layer.bias
    return new
