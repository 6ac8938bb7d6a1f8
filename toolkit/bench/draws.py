"""Draws: one step's sampling on its own, against MLX's shared draw and mlx-lm's sampler on the same logits.

`benchmarks/draw.py` and `benchmarks/gpu_draw.py` take the same apart further.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from ..requests import Request
from ..sampling import Draw, Sampler
from .measure import Figure, Line, medians
from .rows import Job

QUEUE = 20
"""Draws in flight on a GPU, where a decode loop doesn't wait for each."""
MIXED: tuple[dict[str, Any], ...] = (
    {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}, {"temperature": 0.0},
    {"top_n_sigma": 1.5}, {"min_p": 0.05, "top_p": 0.95},
)  # fmt: skip


def draw(job: Job) -> Iterator[Line]:
    """Keyed draws with margins: plain, filtered, and every row with other parameters."""
    vocab = job.model.vocab_size if job.quick else 151_936 if job.gpu else 49_152
    for rows, goal in ((64, 0.5), (256, 0.4)) if job.gpu else ((8 if job.quick else 64, 1.2),):
        logits = 3 * mx.random.normal((rows, vocab), key=mx.random.key(7))
        if job.gpu:
            logits = logits.astype(mx.bfloat16)
        mx.eval(logits)
        sides: dict[str, Callable[[], Any]] = {
            "shared": partial(_drawn, mx.random.categorical, logits),
            "mlx-lm, top-p .95": partial(_drawn, make_sampler(temp=1.0, top_p=0.95), logits),
            "keyed": _keyed(rows, logits, lambda i: {}),
            "keyed, top-k 40": _keyed(rows, logits, lambda i: {"top_k": 40}),
            "keyed, top-p .95": _keyed(rows, logits, lambda i: {"top_p": 0.95}),
            "keyed, mixed": _keyed(rows, logits, _mixed),
        }
        taken = medians({name: _queue(side, QUEUE if job.gpu else 1) for name, side in sides.items()},
                        1 if job.quick else 2 * job.rounds + 1)  # fmt: skip
        pairs: list[tuple[str, str, float | None]] = [("keyed", "shared", goal)]
        if not job.gpu:
            pairs += [
                ("keyed, top-k 40", "shared", 0.5),
                ("keyed, top-p .95", "mlx-lm, top-p .95", 0.5),
                ("keyed, mixed", "keyed", 2.0),
            ]
        for name, against, most in pairs:
            yield Figure("draw", f"[{rows}, {vocab:,}] {name}", taken[name], taken[against], against, 1, "ms",
                         1 / most if most else None)  # fmt: skip


def _drawn(sample: Callable[[mx.array], mx.array], logits: mx.array) -> mx.array:
    return sample(logits.astype(mx.float32))


def _mixed(i: int) -> dict[str, Any]:
    return {"temperature": 0.5 + i / 64} | MIXED[i % len(MIXED)]


def _keyed(rows: int, logits: mx.array, parameters: Callable[[int], dict[str, Any]]) -> Callable[[], Any]:
    sampler = Sampler([Draw(Request(tokens=[0], seed=i, **parameters(i)), i) for i in range(rows)])
    return lambda: sampler.draw(logits, range(rows)).arrays()


def _queue(make: Callable[[], Any], count: int) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        for _ in range(count):
            mx.async_eval(make())
        mx.synchronize()
        return (time.perf_counter() - start) / count

    return run
