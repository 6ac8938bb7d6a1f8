"""Peers: what is timed of mlx-lm, through its `BatchGenerator`, as its own server uses it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from ..models.load import Model

Prompts = Sequence[Sequence[int]]


def first_tokens(model: Model, prompts: Prompts, prefill_batch_size: int = 8) -> float:
    """Seconds from handing over the prompts until all first tokens are known. Greedy, its fastest draw."""
    start = time.perf_counter()
    generator = BatchGenerator(model.module, max_tokens=1, prefill_batch_size=prefill_batch_size)
    generator.insert([list(p) for p in prompts])
    seen = 0
    while seen < len(prompts):
        seen += len(generator.next_generated())
    taken = time.perf_counter() - start
    generator.close()
    return taken


def decode(model: Model, prompts: Prompts, tokens: int) -> float:
    """Seconds from all first tokens being known until all last ones are; all rows start together."""
    rows = len(prompts)
    generator = BatchGenerator(
        model.module, max_tokens=tokens, prefill_batch_size=rows, completion_batch_size=rows
    )
    generator.insert([list(p) for p in prompts])
    seen: dict[int, int] = {}
    start = time.perf_counter()
    while sum(seen.values()) < rows * tokens:
        everyone = len(seen) == rows
        for response in generator.next_generated():
            seen[response.uid] = seen.get(response.uid, 0) + 1
        if not everyone and len(seen) == rows:
            start = time.perf_counter()
    taken = time.perf_counter() - start
    generator.close()
    return taken


def backbone(model: Model, rows: int, length: int) -> float:
    """Seconds that the model's layers take for `[rows, length]` tokens, without a cache or a head."""
    ids = mx.array([[(7 * i + j) % model.vocab_size for j in range(length)] for i in range(rows)])
    mx.eval(ids)
    start = time.perf_counter()
    mx.eval(model.module.model(ids))
    return time.perf_counter() - start
