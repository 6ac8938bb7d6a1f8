"""Ours: what is timed of this toolkit. An engine is kept from turn to turn, as a service keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..engine.engine import Engine
from ..requests import Request


def requests(prompts: Sequence[Sequence[int]], tokens: int, **parameters: Any) -> list[Request]:
    """Keyed requests at temperature 1, one per prompt, each with a seed of its own."""
    return [Request(tokens=list(p), id=f"q{i}", seed=i, max_tokens=tokens, **parameters)
            for i, p in enumerate(prompts)]  # fmt: skip


def whole(engine: Engine, batch: Sequence[Request]) -> float:
    """Seconds from handing over the requests until all are done."""
    start = time.perf_counter()
    for request in batch:
        engine.submit(request)
    engine.run()
    return time.perf_counter() - start


def decode(engine: Engine, batch: Sequence[Request], begin: Callable[[], None] = lambda: None) -> float:
    """Seconds from all first tokens being known until all last ones are; `begin` is called in between."""
    for request in batch:
        engine.submit(request)
    while engine.queue or not all(len(row.tokens) > row.prompt for row in engine.running.values()):
        engine.step()
    begin()
    start = time.perf_counter()
    engine.run()
    return time.perf_counter() - start


def profile(engine: Engine, batch: Sequence[Request], decoding: bool) -> dict[str, float]:
    """Where the time of `whole`, or of `decode`, goes, as shares of it.

    Returns
    -------
    dict
        "build", making the graph of each forward; "forward", computing it; "draw"; "rest", the engine around
        them. Each is waited for, so work that overlaps in a real run does not here.
    """
    nothing = {"build": 0.0, "forward": 0.0, "draw": 0.0}
    spent = dict(nothing)
    forward, policy, pipeline = engine.forward, engine.policy, engine.pipeline
    run, draw = forward.run, policy.decode

    def timed_run(*args: Any) -> mx.array:
        start = time.perf_counter()
        logits = run(*args)
        built = time.perf_counter()
        mx.eval(logits, forward.state())
        spent["build"] += built - start
        spent["forward"] += time.perf_counter() - built
        return logits

    def timed_draw(*args: Any) -> Any:
        start = time.perf_counter()
        drawn = draw(*args)
        mx.eval(drawn.arrays())
        spent["draw"] += time.perf_counter() - start
        return drawn

    forward.run, policy.decode, engine.pipeline = timed_run, timed_draw, False  # type: ignore[assignment,method-assign]
    try:
        total = decode(engine, batch, lambda: spent.update(nothing)) if decoding else whole(engine, batch)
    finally:
        del forward.run, policy.decode
        engine.pipeline = pipeline
    return {name: t / total for name, t in (spent | {"rest": total - sum(spent.values())}).items()}
