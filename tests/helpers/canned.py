"""An engine whose logits are given, so that a test of seeds varies seeds and nothing else, and is quick."""

from collections.abc import Callable, Hashable, Sequence

import mlx.core as mx

import toolkit as tk
from toolkit.forward.spans import Span


class Canned:
    """A forward that runs no model: `logits(id, choice, position)` is `[vocab]`."""

    name = "packed"
    can_batch = can_pad = True

    def __init__(self, logits: Callable[[str, int, int], mx.array]):
        self._logits = logits

    def run(self, spans: Sequence[Span], carry: mx.array | None = None) -> mx.array:
        return mx.stack([self._logits(*span.row, span.stop) for span in spans if span.sample])

    def state(self) -> list[mx.array]:
        return []

    def length(self, row: Hashable) -> int:
        return 0

    def release(self, row: Hashable, wipe: bool = True) -> None: ...


def engine(model: "tk.Model", policy: str, logits: Callable[[str, int, int], mx.array], **how) -> "tk.Engine":
    """An engine of the reference kind, padded cohorts planned as runs, with these logits in its forward."""
    made = tk.Engine(model, policy, "padded", **how)
    made.forward = Canned(logits)
    return made


def generate(model: "tk.Model", policy: str, logits: Callable[[str, int, int], mx.array], requests, **how):
    """Completions of requests that have ids."""
    made = engine(model, policy, logits, **how)
    for request in requests:
        made.submit(request)
    return made.run()
