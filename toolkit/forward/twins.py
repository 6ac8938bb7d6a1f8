"""Twins: layers of a model's own kinds and shapes whose exact results are zero.

Kernels that sum in another order differ in the last bits of float32, which a result in half precision hides
nearly always: one in some thousand shows. So a layer is not compared with its own weights but with others
that cancel: half of the columns are the others' negatives, in mixed order, and a line has equal numbers
there. What is left is rounding alone, and another order gives another number.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

EXPERTS, HEADS = (SwitchGLU, SwitchMLP), (MultiLinear, QuantizedMultiLinear)
LINEAR, EMBEDDING = (nn.Linear, nn.QuantizedLinear), (nn.Embedding, nn.QuantizedEmbedding)
KINDS = (*EXPERTS, *HEADS, *LINEAR, *EMBEDDING)


class Twin:
    """A layer like another, and lines for it.

    Parameters
    ----------
    layer : nn.Module
        Of one of `KINDS`; an embedding is taken for the head that shares its weights.
    each : int
        Experts that a token goes through, for experts.

    Attributes
    ----------
    layer : nn.Module
        The twin.
    width, rows : int
        Numbers of a line, and of its result (an expert's first layer's; one head's).
    name : str
        "576 x 1536, 4 bits, bias", "64 x 128, 2 of 8 experts": width, rows and what else a kernel depends on.
    """

    def __init__(self, layer: nn.Module, each: int = 1):
        self.each, self.heads = each, 1
        inner = layer.gate_proj if isinstance(layer, SwitchGLU) else getattr(layer, "fc1", layer)
        shape = inner.weight.shape
        self.width = shape[-1] * 32 // inner.bits if hasattr(inner, "bits") else shape[-1]
        self.rows = shape[-2]
        what = f"{self.rows}"
        if isinstance(layer, EXPERTS):
            self.each = min(each, shape[0])
            what += f", {self.each} of {shape[0]} experts"
        elif isinstance(layer, HEADS):
            self.heads = shape[0]
            what += f", {shape[0]} heads"
        what += f", {inner.bits} bits" if hasattr(inner, "bits") else ""
        what += ", bias" if "bias" in inner else ""
        self.name, self.original = f"{self.width} x {what}", layer
        self._made: nn.Module | None = None

    @property
    def layer(self) -> nn.Module:
        """Made when first asked for: it takes as much memory as the layer itself."""
        if self._made is None:
            self._made = _twin(self.original)
        return self._made

    def lines(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Lines whose exact result is zero: float32 [count, heads x width]."""
        group = 1 if isinstance(self.original, EXPERTS) else _group(self.original)
        half, order = _mirror(self.width, group)
        shape = (count, self.heads, self.width - half)
        return _mixed(rng.standard_normal(shape, dtype=np.float32), half, order).reshape(count, -1)

    def __call__(self, x: mx.array) -> mx.array:
        """Lines side by side, as in a packed step: [n, 1, heads x width] to [n, 1, ...]."""
        layer, count = self.layer, x.shape[0]
        if isinstance(layer, EMBEDDING):
            return layer.as_linear(x)
        if isinstance(layer, HEADS):
            out = layer(x.reshape(count, self.heads, 1, self.width))
        elif isinstance(layer, EXPERTS):
            experts = (layer.gate_proj if isinstance(layer, SwitchGLU) else layer.fc1).num_experts
            scores = mx.tile(x, -(-experts // self.width))[..., :experts]  # a line chooses by itself
            out = layer(x, mx.argsort(scores, axis=-1)[..., : self.each])
        else:
            return layer(x)
        return out.reshape(count, 1, -1)


def _twin(layer: nn.Module) -> nn.Module:
    made = copy.copy(layer)
    if not isinstance(layer, EXPERTS):
        _cancel(made)
        return made
    # Experts: first layers whose rows come in equal pairs, and a last one that takes one off the other.
    last = "down_proj" if isinstance(layer, SwitchGLU) else "fc2"
    for name in ("gate_proj", "up_proj", "fc1", "fc2", "down_proj"):
        if name in layer:
            made[name] = copy.copy(layer[name])
            _cancel(made[name], rows=None if name == last else _group(layer[last]))
    return made


def _cancel(layer: nn.Module, rows: int | None = None) -> None:
    """Give it weights that cancel by columns; or rows in equal pairs, in groups of so many."""
    group, dtype = _group(layer), layer.get("scales", layer.weight).dtype
    *most, width = layer.weight.shape
    if hasattr(layer, "bits"):
        width = width * 32 // layer.bits
    key = mx.random.key(0)
    if rows is None:
        half, order = _mirror(width, group)
        numbers = mx.random.normal((*most, width - half), key=key).astype(dtype)
        weight = _mixed(numbers, half, order, -1)
    else:
        half, order = _mirror(most[-1], rows)
        numbers = mx.random.normal((*most[:-1], width, most[-1] - half), key=key).astype(dtype)
        weight = mx.contiguous(_mixed(numbers, half, order).swapaxes(-1, -2))
    weight = weight * width**-0.5
    if hasattr(layer, "bits"):
        made = mx.quantize(weight, layer.group_size, layer.bits, mode=getattr(layer, "mode", "affine"))
        layer["weight"], layer["scales"] = made[:2]
        if len(made) > 2:
            layer["biases"] = made[2]
    else:
        layer["weight"] = weight
    if "bias" in layer:
        layer["bias"] = mx.zeros_like(layer["bias"])


def _group(layer: nn.Module) -> int:
    """Columns that share a scale cancel as one."""
    return layer.group_size if hasattr(layer, "bits") else 1


def _mirror(width: int, group: int) -> tuple[int, np.ndarray]:
    """How many of the columns have a mirror image, and the order in which both halves and the rest stand."""
    half = width // (2 * group) * group
    blocks = np.random.default_rng(0).permutation(2 * half // group)
    order = (blocks[:, None] * group + np.arange(group)).reshape(-1)
    return half, np.concatenate([order, np.arange(2 * half, width)]).astype(np.int32)


def _mixed(numbers: Any, half: int, order: Sequence[int] | np.ndarray, sign: int = 1) -> Any:
    """Columns, their mirror images, and the rest, in that order."""
    library = np if isinstance(numbers, np.ndarray) else mx
    first, rest = numbers[..., :half], numbers[..., half:]
    rest = 0 * rest if sign > 0 and half else rest  # in a line, unless there is nothing else
    both = library.concatenate([first, sign * first, rest], -1)
    return both[..., order if library is np else mx.array(order)]
