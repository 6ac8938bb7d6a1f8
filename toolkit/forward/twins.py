"""Twins: layers of a model's own kinds and shapes whose exact results are zero.

Kernels that sum in another order differ in the last bits of float32, which a result in half precision hides
nearly always: one in some thousand shows. So a layer is not compared with its own weights but with others
that cancel: half of the columns are the others' negatives, in mixed order, and a line has equal numbers
there. What is left is rounding alone, and another order gives another number.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from ..models import DTYPES, Model
from .narrow import is_head

EXPERTS, HEADS = (SwitchGLU, SwitchMLP), (MultiLinear, QuantizedMultiLinear)
LINEAR, EMBEDDING = (nn.Linear, nn.QuantizedLinear), (nn.Embedding, nn.QuantizedEmbedding)
EACH = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""What configurations call the number of experts that a token goes through."""
LOUD = 256.0
"""Numbers of a line are this large, so that what rounding leaves of them is no subnormal of float16."""
ROWS = 1024
"""Rows that are made; a layer has them again and again, since a kernel knows shapes, not values."""


def layers_of(model: Model) -> tuple[dict[str, Twin], dict[str, Twin], bool]:
    """Twins by name: the body's, those that give logits; and whether weights are elsewhere too."""
    body: dict[str, Twin] = {}
    head: dict[str, Twin] = {}
    tied: dict[str, Twin] = {}
    each, elsewhere, dtype = _each(model.config), False, DTYPES.get(model.dtype, mx.float32)
    for path, layer in model.module.named_modules():
        if isinstance(layer, EXPERTS):
            parts = ("gate_proj", "down_proj") if isinstance(layer, SwitchGLU) else ("fc1", "fc2")
            body |= {twin.name: twin for twin in (Twin(layer, dtype, part, each) for part in parts)}
        weight = layer.get("weight") if isinstance(layer, nn.Module) else None
        elsewhere |= weight is not None and weight.ndim > 2
        if isinstance(layer, HEADS):
            body.setdefault((twin := Twin(layer, dtype)).name, twin)
        if weight is None or weight.ndim != 2 or not isinstance(layer, LINEAR + EMBEDDING):
            continue
        twin = Twin(layer, dtype)
        if isinstance(layer, EMBEDDING):
            if twin.rows >= model.vocab_size:
                tied.setdefault(twin.name, twin)
            continue
        if twin.rows >= model.vocab_size:  # a wide layer of a small model's body may be such too
            head.setdefault(twin.name, twin)
        if not is_head(path, layer, model.vocab_size):
            body.setdefault(twin.name, twin)
    return body, head or tied, elsewhere


def _each(config: dict[str, Any]) -> int:
    inner = (config.get(name) for name in ("text_config", "ffn_config"))
    for part in (config, *(c for c in inner if isinstance(c, dict))):
        for key in EACH:
            found = part.get(key)
            counts = found if isinstance(found, list) else [found]
            if counts and all(isinstance(n, int) for n in counts):
                return max(1, min(counts))
    return 1


class Twin:
    """A layer like another, and lines for it.

    Parameters
    ----------
    layer : nn.Module
        Linear, latent heads, experts, or an embedding, taken for the head that shares its weights.
    dtype : mx.Dtype
        Of the lines.
    part : str
        Which layer of experts.
    each : int
        Experts that a token goes through.

    Attributes
    ----------
    width, rows : int
        Numbers of a line, and of its result; of one head, one expert.
    name : str
        "576 x 1536, 4 bits, bias", "64 x 128, 2 of 8 experts": width, rows and what else a kernel depends on.
    """

    def __init__(self, layer: nn.Module, dtype: mx.Dtype, part: str = "", each: int = 1):
        self.original, self.dtype, self.part = layer, dtype, part
        inner = layer[part] if part else layer
        *most, self.rows, width = inner.weight.shape
        self.width = width * 32 // inner.bits if hasattr(inner, "bits") else width
        self.parts = most[0] if most else 1
        self.each = min(each, self.parts)
        what = [f"{self.width} x {self.rows}"]
        if most:
            what += [f"{self.each} of {self.parts} experts" if part else f"{self.parts} heads"]
        if hasattr(inner, "bits"):
            packing = (inner.group_size, getattr(inner, "mode", "affine"))
            usual = packing == (64, "affine")
            what += [f"{inner.bits} bits" + ("" if usual else f" in {packing[0]} ({packing[1]})")]
        elif inner.weight.dtype != dtype:
            what += [str(inner.weight.dtype).removeprefix("mlx.core.")]
        self.name = ", ".join(what + ["bias"] * ("bias" in inner))

    def lines(self, rng: np.random.Generator, count: int) -> mx.array:
        """Lines whose exact result is zero: [count, width]; of latent heads, [count, heads x width]."""
        heads = self.parts if isinstance(self.original, HEADS) else 1
        group = _group(self.original[self.part] if self.part else self.original)
        half, order = _mirror(self.width // group)
        numbers = rng.standard_normal((count, heads, self.width // group - half, group), dtype=np.float32)
        rest = numbers[..., half:, :] * (half == 0)  # nothing takes it off
        both = np.concatenate([numbers[..., :half, :], numbers[..., :half, :], rest], -2)[..., order, :]
        return mx.array(LOUD * both.reshape(count, -1)).astype(self.dtype)

    def make(self) -> nn.Module:
        """The twin: as large as the layer."""
        made = copy.copy(self.original)
        if not self.part:
            _cancel(made, self.dtype)
            return made
        first, last = ("gate_proj", "down_proj") if isinstance(made, SwitchGLU) else ("fc1", "fc2")
        for name in ("gate_proj", "up_proj", "down_proj", "fc1", "fc2"):
            if name == self.part:
                made[name] = copy.copy(made[name])
                _cancel(made[name], self.dtype)
            elif name in made:  # what stands before it, or after it, hands on what it gets
                setattr(made, name, _spread(self.each) if self.part == last else _same)
        if self.part == first and isinstance(made, SwitchGLU):
            made.up_proj = _same
        made.activation = _other if self.part == first else lambda x, *_: x
        return made

    def run(self, layer: nn.Module, x: mx.array) -> mx.array:
        """Lines through a layer that was made, as in a packed step: [n, 1, width] to [n, 1, ...]."""
        if isinstance(layer, EMBEDDING):
            return layer.as_linear(x)
        if isinstance(layer, HEADS):
            out = layer(x.reshape(len(x), self.parts, 1, self.width))
        elif self.part:
            scores = mx.tile(x, -(-self.parts // self.width))[..., : self.parts]  # a line chooses by itself
            out = layer(x, mx.argsort(scores, axis=-1)[..., : self.each])
        else:
            return layer(x)
        return out.reshape(len(x), 1, -1)


# Experts but for one of their layers. mlx-lm's own code around them sorts lines by expert, or doesn't.
def _same(x: mx.array, *_: Any, **__: Any) -> mx.array:
    return x


def _other(x: mx.array, *gate: mx.array) -> mx.array:
    return gate[0] if gate else x


def _spread(each: int) -> Any:
    def call(x: mx.array, *_: Any, sorted_indices: bool = False) -> mx.array:
        return x if sorted_indices else mx.contiguous(mx.repeat(x, each, axis=-3))

    return call


def _cancel(layer: nn.Module, dtype: mx.Dtype) -> None:
    """Give it weights that cancel by columns, and a bias of the size of what is left."""
    *most, rows, width = layer.weight.shape
    group, key = _group(layer), mx.random.key(0)
    if not hasattr(layer, "bits"):
        half, order = _mirror(width)
        numbers = mx.random.normal((min(rows, ROWS), width - half), key=key).astype(layer.weight.dtype)
        layer["weight"] = _full(_mixed(numbers[..., None], -numbers[..., None], half, order), most, rows)
    else:
        half, order = _mirror(width * 32 // layer.bits // group)
        mode = getattr(layer, "mode", "affine")
        size = width * 32 // layer.bits - half * group
        numbers = mx.random.normal((min(rows, ROWS), size), key=key).astype(dtype)
        words, scales, *biases = mx.quantize(numbers, group, layer.bits, mode=mode)
        words, negative = words.reshape(*scales.shape, -1), words.reshape(*scales.shape, -1)
        if not biases:  # floating point: a bit of each number is its sign
            negative = words ^ mx.array({4: 0x88888888, 8: 0x80808080}[layer.bits], words.dtype)
        layer["weight"] = _full(_mixed(words, negative, half, order), most, rows)
        for name, of in zip(("scales", "biases"), (scales, *biases), strict=False):
            other = -of if biases else of
            layer[name] = _full(_mixed(of[..., None], other[..., None], half, order), most, rows)
    if "bias" in layer:
        layer["bias"] = mx.random.normal(layer["bias"].shape, key=key).astype(layer["bias"].dtype) * 1e-3


def _full(block: mx.array, most: list[int], rows: int) -> mx.array:
    block = block[mx.arange(rows) % len(block)]
    return mx.contiguous(mx.broadcast_to(block, (*most, *block.shape))) if most else block


def _mixed(numbers: mx.array, negative: mx.array, half: int, order: np.ndarray) -> mx.array:
    """Groups of columns, [rows, groups, ...], their mirror images and the rest in order: [rows, ...]."""
    both = mx.concatenate([numbers[:, :half], negative[:, :half], numbers[:, half:]], 1)
    return both[:, mx.array(order)].reshape(len(both), -1)


def _group(layer: nn.Module) -> int:
    """Columns that share a scale cancel as one."""
    return layer.group_size if hasattr(layer, "bits") else 1


def _mirror(groups: int) -> tuple[int, np.ndarray]:
    """How many groups have a mirror image, and the order in which both halves and the rest stand.

    None where they are few: one and its image may cancel exactly, whatever the order within.
    """
    half = groups // 2 if groups >= 4 else 0
    order = np.random.default_rng(0).permutation(2 * half)
    return half, np.concatenate([order, np.arange(2 * half, groups)]).astype(np.int32)
