"""Rounded: a model that computes in float32 and keeps 16-bit results, as a GPU's matrix units do.

On a CPU a 16-bit model runs scalar loops, a row at a time, so it is slow and does not drift at all. This one
runs the fast kernels, whose sums depend on the batch in their last bits, and rounds what each layer gives:
now and then a sum falls to the other side of a rounding step, which is how drift of 16-bit size comes about.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...models.load import DTYPES, Model

_LAYERS = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, nn.RMSNorm, nn.LayerNorm)


def rounded(model: Model, dtype: str = "bfloat16") -> Model:
    """The same weights, every linear, embedding and norm layer's result rounded to 16 bits.

    Parameters
    ----------
    model : Model
        In float32; it is not changed, and the weights are shared.
    dtype : {"bfloat16", "float16"}

    Returns
    -------
    Model
        Named "smollm2, rounded to bfloat16" or the like.
    """
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f'dtype="{dtype}": must be bfloat16 or float16')
    if model.dtype != "float32":
        raise ValueError(f"dtype={model.dtype} of {model.name}: must be float32; it is rounded afterwards")
    note = f"computed in float32; results of linear, embedding and norm layers rounded to {dtype}"
    name = f"{model.name}, rounded to {dtype}"
    return replace(
        model, name=name, module=_copied(model.module, dtype), note=f"{model.note}; {note}".lstrip("; ")
    )


def _copied(part: Any, dtype: str) -> Any:
    """Modules copied, arrays shared."""
    if isinstance(part, nn.Module):
        made = copy.copy(part)
        for name, inner in part.items():
            made[name] = _copied(inner, dtype)
        if isinstance(part, _LAYERS):
            kind: Any = type(part)
            made.__class__ = _rounding(kind, dtype)
        return made
    if isinstance(part, list | tuple):
        return type(part)(_copied(inner, dtype) for inner in part)
    if isinstance(part, dict):
        return {name: _copied(inner, dtype) for name, inner in part.items()}
    return part


@cache
def _rounding(kind: Any, dtype: str) -> Any:
    def round_(x: mx.array) -> mx.array:
        return x.astype(DTYPES[dtype]).astype(x.dtype)

    def call(self: Any, *args: Any, **options: Any) -> mx.array:
        return round_(kind.__call__(self, *args, **options))

    methods: dict[str, Any] = {"__call__": call, "__module__": kind.__module__}
    if hasattr(kind, "as_linear"):
        methods["as_linear"] = lambda self, x: round_(kind.as_linear(self, x))
    return type(f"{kind.__name__}RoundedTo{dtype.title()}", (kind,), methods)
