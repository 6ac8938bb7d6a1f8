"""Workloads: prompts of seeded lengths, and a model of a known shape with random weights and no tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..models.dtype import untouched_generator
from ..models.load import Model

SHORT = 96, 8, 200, 16
"""Seed, least, upper end and number: 16 prompts of 1,847 tokens in all."""
MIXED = 0, 16, 1024, 64
"""64 prompts of 33,885 tokens in all."""
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960,
}  # fmt: skip
SPREAD = 2.0
"""Standard deviation of the random model's logits: uncertain, as a language model's are."""


def lengths(seed: int, least: int, end: int, count: int) -> list[int]:
    """Prompt lengths in [least, end)."""
    return [int(n) for n in np.random.default_rng(seed).integers(least, end, count)]


def prompts(counts: Sequence[int], vocab: int, seed: int = 1) -> list[list[int]]:
    """Token ids of prompts of those lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in counts]


def endless(model: Model) -> Model:
    """The same model, to which no token ends an output, so that every row runs to its last one."""
    return replace(model, eos_ids=frozenset())


@dataclass(frozen=True)
class Numbers:
    """Stands in for a tokenizer: a token's text is its number."""

    size: int
    bos_token: None = None
    has_chat_template: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return self.size

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(token)


def random_qwen3(bits: int = 0, dtype: mx.Dtype = mx.bfloat16, **changes: int) -> Model:
    """A model of the shape of Qwen3-0.6B with random weights.

    Parameters
    ----------
    bits : int
        Quantize the linear layers and the embedding; 0 for none.
    dtype : mx.Dtype
    **changes : int
        To the configuration.
    """
    from mlx_lm.models import qwen3

    config = QWEN3 | changes
    with untouched_generator():
        module = qwen3.Model(qwen3.ModelArgs.from_dict(config))
        module.eval()
        old = tree_flatten(module.parameters())
        keys = mx.random.split(mx.random.key(0), len(old))
        module.update(tree_unflatten([(name, _weight(name, array, key).astype(dtype))
                                      for (name, array), key in zip(old, keys, strict=True)]))  # fmt: skip
        if bits:
            nn.quantize(module, bits=bits)
        mx.eval(module.parameters())
    name = f"qwen3 0.6B shape{f', {bits} bits' if bits else ''}" if not changes else "qwen3, small"
    return Model(
        name=name,
        module=module,
        tokenizer=Numbers(config["vocab_size"]),
        vocab_size=config["vocab_size"],
        context=config["max_position_embeddings"],
        eos_ids=frozenset(),
        config=config,
        dtype=str(dtype).rpartition(".")[2],
    )


def _weight(name: str, old: mx.array, key: mx.array) -> mx.array:
    if old.ndim < 2:
        return mx.ones(old.shape)  # norms
    wanted = SPREAD if "embed" in name else 1.0  # tied: the embedding is the head
    return mx.random.normal(old.shape, key=key) * (wanted / math.sqrt(old.shape[-1]))
