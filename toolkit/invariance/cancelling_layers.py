"""Twins: layers of a model's own kinds and shapes whose exact results are zero.

Kernels that sum in another order differ in the last bits of float32, which a result in half precision hides
nearly always: one in some thousand shows. So a layer is not compared with its own weights but with others
that cancel: half of the columns are the others' negatives, in mixed order, and a line has equal numbers
there, of very different sizes. What is left is rounding alone, and another order gives another number.
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

from ..forward.cuda_linear import is_head
from ..models.load import DTYPES, Model

EXPERTS, HEADS = (SwitchGLU, SwitchMLP), (MultiLinear, QuantizedMultiLinear)
LINEAR, EMBEDDING = (nn.Linear, nn.QuantizedLinear), (nn.Embedding, nn.QuantizedEmbedding)
EACH = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""What configurations call the number of experts that a token goes through."""
LOUD, SPREAD = 64.0, 5
"""How large a line's numbers are, so that what rounding leaves of them is no subnormal of float16; and how
many powers of two more or less, so that their sums need more than float32's 24 bits."""
PINNED = 2
"""Columns of a group that say what its scale is."""
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
            body |= {twin.name: twin for twin in (Twin(layer, dtype, part, each) for part in _parts(layer))}
        weight = layer.get("weight") if isinstance(layer, nn.Module) else None
        elsewhere |= weight is not None and weight.ndim > 2
        if isinstance(layer, HEADS):
            body.setdefault((twin := Twin(layer, dtype)).name, twin)
        if weight is None or weight.ndim != 2:
            continue
        if not isinstance(layer, LINEAR + EMBEDDING):
            if not mx.issubdtype(weight.dtype, mx.floating):
                elsewhere = True
                continue
            layer = _linear(weight)  # a router, which multiplies by it as this does
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


def _parts(experts: nn.Module) -> tuple[str, str]:
    """The first and the last of their layers; where there is a third, it is like the first."""
    return ("gate_proj", "down_proj") if isinstance(experts, SwitchGLU) else ("fc1", "fc2")


def _linear(weight: mx.array) -> nn.Linear:
    made = nn.Linear.__new__(nn.Linear)  # its own start would draw weights from the global generator
    nn.Module.__init__(made)
    made.weight = weight
    return made


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
        kept = inner.get("scales", inner.weight).dtype
        if kept != dtype and mx.issubdtype(kept, mx.floating):
            what += [str(kept).removeprefix("mlx.core.")]
        self.name = ", ".join(what + ["bias"] * ("bias" in inner))

    def lines(self, rng: np.random.Generator, count: int, cancel: bool = True) -> mx.array:
        """Lines whose exact result is zero, unless not to `cancel`: [count, width], heads side by side."""
        heads = self.parts if isinstance(self.original, HEADS) else 1
        first, second = _mirror(self.width, self.original[self.part] if self.part else self.original)
        numbers = rng.standard_normal((count * heads, self.width), dtype=np.float32)
        if cancel:
            sizes = rng.integers(-SPREAD, SPREAD + 1, (count * heads, len(first))).astype(np.float32)
            loud = LOUD * numbers[:, : len(first)] * np.exp2(sizes)
            numbers = np.zeros_like(numbers)
            numbers[:, first] = numbers[:, second] = loud
        return mx.array(numbers.reshape(count, -1)).astype(self.dtype)

    def make(self) -> nn.Module:
        """The twin: as large as the layer."""
        made = copy.copy(self.original)
        if not self.part:
            _cancel(made, self.dtype)
            return made
        first, _ = _parts(made)
        for name in ("gate_proj", "up_proj", "down_proj", "fc1", "fc2"):
            if name == self.part:
                made[name] = copy.copy(made[name])
                _cancel(made[name], self.dtype)
            elif name in made:  # what stands beside it hands on what it gets
                setattr(made, name, _same if self.part == first else _spread(self.each))
        made.activation = _other if self.part == first else _same
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
    rng, bits = np.random.default_rng(0), getattr(layer, "bits", 0)
    width = width * 32 // bits if bits else width
    first, second = _mirror(width, layer)
    made = rng.standard_normal((min(rows, ROWS), width), dtype=np.float32)
    names: tuple[str, ...] = ("weight", "scales", "biases")
    kept = layer.weight.dtype
    if bits:
        mode = getattr(layer, "mode", "affine")
        kept = layer.scales.dtype if mode == "affine" else dtype
        sizes, pinned = _exact(mode, bits)
        made = rng.choice(np.concatenate([np.negative(sizes), sizes]), made.shape).astype(np.float32)
        made.reshape(len(made), -1, layer.group_size)[..., :PINNED] = pinned  # no line has anything there
    made[:, second] = -made[:, first]
    block = mx.array(made).astype(kept)
    parts = mx.quantize(block, layer.group_size, bits, mode=mode) if bits else (block,)
    for name, part in zip(names, parts, strict=False):
        full = part[mx.arange(rows) % len(part)]
        layer[name] = mx.contiguous(mx.broadcast_to(full, (*most, *full.shape))) if most else full
    if "bias" in layer:
        bias = mx.random.normal(layer["bias"].shape, key=mx.random.key(0))
        layer["bias"] = (bias * 1e-3).astype(layer["bias"].dtype)


def _exact(mode: str, bits: int) -> tuple[Sequence[float], tuple[float, float]]:
    """What a quantization holds exactly, up to the sign, and what a group must hold for its scale to be 1."""
    if mode == "affine":
        half = 2 ** (bits - 1)
        return range(1, half), (-half, half - 1)
    if mode == "mxfp8":
        return range(1, 16), (448, 0)
    return (0.5, 1, 1.5, 2, 3, 4, 6), (6, 0)


def _mirror(width: int, layer: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Columns, and in the same order those that are their negatives."""
    free = np.arange(width)
    if hasattr(layer, "bits"):
        free = free[free % layer.group_size >= PINNED]
    mixed = np.random.default_rng(0).permutation(free)
    half = len(mixed) // 2
    return mixed[:half], mixed[half : 2 * half]
