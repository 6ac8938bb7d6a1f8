"""Bits: whether a row's tokens and log probabilities are the same, to the bit, in any company.

And whether the engine, made to follow mlx-lm's own greedy output, would have chosen the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..engine.engine import Engine
from ..forward.packed import PackedForward
from ..forward.spans import Span
from ..models.load import Model
from ..requests import Request
from . import workloads
from .measure import Check, Line, Skipped
from .rows import Job

FILTERS: tuple[dict[str, Any], ...] = (
    {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"repetition_penalty": 1.1},
    {"top_k": 100, "top_p": 0.95},
)  # fmt: skip
TEMPERATURES = (1.0, 0.7, 0.0)
TOKENS, FOLLOWED = 64, 8

Output = tuple[tuple[int, ...], bytes]


def bits(job: Job) -> Iterator[Line]:
    """The model as it is."""
    yield from check(job, job.model, job.engines[True])


def four_bits(job: Job) -> Iterator[Line]:
    """The random model, quantized to 4 bits."""
    if not job.gpu:
        yield Skipped("bits-4bit", "on a CPU, quantized matmuls run a thousand times slower")
        return
    model = workloads.random_qwen3(4)
    yield from check(job, model, Engine(model, max_rows=64, token_budget=job.budget), "bits-4bit")


def check(job: Job, model: Model, engine: Engine, name: str = "bits") -> Iterator[Line]:
    """The invariance matrix, then agreement with mlx-lm."""
    tokens = 6 if job.quick else TOKENS
    batch = requests(model, job.checked, tokens)
    what = f"{len(batch)} requests, {tokens} tokens, {model.dtype}" + (
        " 4-bit" if name == "bits-4bit" else ""
    )
    note = f"{engine.forward.shapes}" if isinstance(engine.forward, PackedForward) else engine.forward.name
    reference: dict[str, Output] = {}
    for way, run in ways(batch, engine).items():
        if job.clock.left < 20:
            yield Skipped(name, f"no time left for {way}")
            continue
        got = run()
        reference = reference or got
        same = sum(got[id] == reference[id] for id in reference)
        if got is not reference:
            worst = min(
                (_first(got[id], reference[id]) for id in reference if got[id] != reference[id]), default=None
            )
            yield Check(name, f"{what}: batch = {way}", len(reference), same, bool(engine.invariant),
                        note if worst is None else f"first difference at token {worst}; {note}")  # fmt: skip
    if isinstance(engine.forward, PackedForward) and job.clock.left > 20:
        yield from follow(model, engine.forward, batch[: 2 if job.quick else FOLLOWED], tokens, name)
    if job.clock.left > 30:
        plain = Engine(model, invariant=False, max_rows=64, token_budget=job.budget)
        some = [r.replace(max_tokens=min(tokens, 8)) for r in batch[:8]]
        each = list(ways(some, plain).values())
        together, alone = each[0](), each[1]()
        same = sum(together[id] == alone[id] for id in together)
        yield Check(
            name, f"control, rules off: {len(some)} requests: batch = alone", len(some), same, wanted=False
        )


def requests(model: Model, count: int, tokens: int) -> list[Request]:
    """Mixed requests: temperatures and filters in all combinations; a few rows outgrow 256 keys."""
    counts = [n + 180 if i % 8 == 7 else n for i, n in enumerate(workloads.lengths(3, 3, 181, count))]
    each = enumerate(workloads.prompts(counts, model.vocab_size, seed=3))
    return [Request(tokens=p, id=f"q{i}", seed=7919 * i, max_tokens=tokens, temperature=TEMPERATURES[i % 3],
                    **FILTERS[i // 3 % len(FILTERS)]) for i, p in each]  # fmt: skip


def ways(batch: Sequence[Request], engine: Engine) -> dict[str, Callable[[], dict[str, Output]]]:
    """The same requests, run in different company. All by one engine, which compiles a step once."""
    order = [int(i) for i in np.random.default_rng(4).permutation(len(batch))]
    late = [int(n) for n in np.random.default_rng(5).integers(0, 40, len(batch))]

    def run(some: Sequence[Request]) -> dict[str, Output]:
        for request in some:
            engine.submit(request)
        return {c.id: (c.tokens, np.array(c.logprobs, np.float32).tobytes()) for c in engine.run()}

    def narrow() -> dict[str, Output]:
        budget, engine.token_budget = engine.token_budget, 256
        try:
            return run(batch)
        finally:
            engine.token_budget = budget

    return {
        "batch": lambda: run(batch),
        "alone": lambda: {id: out for request in batch for id, out in run([request]).items()},
        "permuted": lambda: run([batch[i] for i in order]),
        "token budget 256": narrow,
        "arrivals at random": lambda: run(
            [r.replace(arrival=engine.time + n) for r, n in zip(batch, late, strict=True)]
        ),
    }


def _first(a: Output, b: Output) -> int:
    """The first token of which something differs."""
    pairs = zip(zip(a[0], np.frombuffer(a[1], np.int32), strict=True),
                zip(b[0], np.frombuffer(b[1], np.int32), strict=True), strict=False)  # fmt: skip
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a[0]), len(b[0])))


def follow(
    model: Model, forward: PackedForward, batch: Sequence[Request], tokens: int, name: str
) -> Iterator[Line]:
    """Feed mlx-lm's greedy tokens to our forward, side by side, and compare each step's best token.

    Where mlx-lm's own two best logits are within two ulps (1e-3 in fp32) either may win: counted apart.
    """
    prompts = [list(r.tokens or ()) for r in batch]
    greedy = [_greedy(model, prompt, tokens) for prompt in prompts]
    names = [("follow", i) for i in range(len(prompts))]
    chosen: list[np.ndarray] = []
    for step in range(tokens):
        spans = [Span(n, 0, p) if step == 0 else Span(n, len(p) + step - 1, [g[step - 1][0]])
                 for n, p, g in zip(names, prompts, greedy, strict=True)]  # fmt: skip
        chosen.append(np.array(mx.argmax(forward.run(spans), axis=-1)))
    for n in names:
        forward.release(n, wipe=False)
    steps = [(i, k) for i in range(len(prompts)) for k in range(tokens)]
    differ = [(i, k) for i, k in steps if chosen[k][i] != greedy[i][k][0]]
    ties = {(i, k) for i, k in steps if greedy[i][k][1]}
    wrong = [at for at in differ if at not in ties]
    words = f"{len(ties)} near ties, {len(differ) - len(wrong)} of them the other way"
    if wrong:
        words += "; differ at (row, step) " + ", ".join(map(str, wrong[:8]))
    yield Check(name, f"best token = mlx-lm's, made to follow its greedy output: {len(prompts)} rows",
                len(steps), len(steps) - len(wrong), note=words)  # fmt: skip


def _greedy(model: Model, prompt: list[int], tokens: int) -> list[tuple[int, bool]]:
    """mlx-lm's plain model, alone: each token, and whether another was about as good."""
    cache, ids, out = make_prompt_cache(model.module), prompt, []
    for _ in range(tokens):
        logits = model.module(mx.array([ids]), cache=cache)[0, -1]
        second, first = (float(x) for x in mx.sort(mx.topk(logits, 2)).astype(mx.float32).tolist())
        ids = [int(mx.argmax(logits))]
        out.append((ids[0], first - second <= _near(first, model.dtype)))
    return out


def _near(logit: float, dtype: str) -> float:
    digits = {"bfloat16": 7, "float16": 10}.get(dtype)
    if digits is None:
        return 1e-3
    return 2 * 2.0 ** (math.floor(math.log2(max(abs(logit), 1e-6))) - digits)
