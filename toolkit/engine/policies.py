"""Policies: who seeds, and when. Four ways to give a request its randomness, three of them the peers'.

A policy is called at three points of a row's life: `begin_prefill`, before its cohort's forward;
`finish_prefill`, with the row's own logits, where its first token is drawn, whichever path led there; and
`decode`, for all rows that decode together. `global`, `reseed` and `isolate` use MLX's real global generator
of the calling thread; `keyed` neither reads nor writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from .. import noise
from ..requests import Request
from ..sampling import Draw, Drawn, Sampler, draw_shared

POLICIES = ("global", "reseed", "isolate", "keyed")


class Policy(Protocol):
    """When a row's randomness is set, and where it comes from."""

    name: str
    shares: bool
    """Whether draws use MLX's global generator."""

    def exclusive(self, request: Request) -> bool:
        """Whether the row runs by itself from its seeding to its last token."""
        ...

    def begin_prefill(self, draw: Draw) -> bool:
        """Called for every row of a cohort, before the cohort's forward. Returns whether it seeded."""
        ...

    def finish_prefill(self, logits: mx.array, draw: Draw) -> tuple[Drawn, bool]:
        """Draw a row's first token from its `[1, vocab]` logits. Also returns whether it seeded."""
        ...

    def decode(self, logits: mx.array, draws: Sequence[Draw]) -> Drawn:
        """Draw the next token of rows that decode together, `[rows, vocab]`."""
        ...


class Global:
    """Seeds the global generator in `begin_prefill`, for every seeded row, before any row draws.

    The last seeded row's seed wins, even a greedy row's: by the time the first row draws, every other row of
    the cohort has seeded over it.
    """

    name = "global"
    shares = True

    def exclusive(self, request: Request) -> bool:
        return False

    def begin_prefill(self, draw: Draw) -> bool:
        return _seed(draw)

    def finish_prefill(self, logits: mx.array, draw: Draw) -> tuple[Drawn, bool]:
        return draw_shared(logits, [draw], together=False), False

    def decode(self, logits: mx.array, draws: Sequence[Draw]) -> Drawn:
        return draw_shared(logits, draws, together=True)


class Reseed(Global):
    """Seeds again right before the row's own first draw: that one ignores siblings, later ones don't."""

    name = "reseed"

    def finish_prefill(self, logits: mx.array, draw: Draw) -> tuple[Drawn, bool]:
        seeded = _seed(draw)
        return draw_shared(logits, [draw], together=False), seeded


class Isolate(Global):
    """A seeded row that samples runs by itself, nothing else drawing in between: safe, and no batch."""

    name = "isolate"

    def exclusive(self, request: Request) -> bool:
        return request.seeded and not request.greedy

    def begin_prefill(self, draw: Draw) -> bool:
        """Seeds, and for a row that goes on moves the generator past the draws that it has had."""
        seeded = super().begin_prefill(draw)
        numbers = 2 if draw.request.xtc_probability > 0 else 1
        for _ in range(numbers * len(draw.generated) if seeded else 0):
            mx.random.uniform()
        return seeded


class Keyed:
    """Noise is a pure function of (seed, choice, purpose, position, token id); no generator is involved."""

    name = "keyed"
    shares = False

    def __init__(self) -> None:
        self._rows: list[tuple[Request, int | None, int]] = []
        self._sampler: Sampler | None = None

    def reset(self) -> None:
        """Forget the sampler of the last batch, which an exception may have left half made."""
        self._rows, self._sampler = [], None

    def exclusive(self, request: Request) -> bool:
        return False

    def begin_prefill(self, draw: Draw) -> bool:
        return False

    def finish_prefill(self, logits: mx.array, draw: Draw) -> tuple[Drawn, bool]:
        return self.decode(logits, [draw]), False

    def decode(self, logits: mx.array, draws: Sequence[Draw]) -> Drawn:
        rows = [(d.request, d.seed, d.choice) for d in draws]
        if self._sampler is None or not _same(rows, self._rows):  # the batch has changed
            self._rows, self._sampler = rows, Sampler(draws)
        histories = [(d.prompt, d.generated) for d in draws] if self._sampler.needs_history else None
        return self._sampler.draw(logits, [d.position for d in draws], histories)


def get(name: str) -> Policy:
    """The policy of that name."""
    known: dict[str, type[Policy]] = {p.name: p for p in (Global, Reseed, Isolate, Keyed)}
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"policy={name!r}: must be one of {', '.join(POLICIES)}")
    return known[name]()


def generator_state() -> str:
    """The calling thread's global generator, as two hexadecimal words."""
    high, low = mx.random.state[0].tolist()
    return f"{high:08x}-{low:08x}"


def generator_seed(seed: int, choice: int) -> int:
    """What a row seeds the global generator with: its seed, or for a further choice a word made of both.

    Never `seed + choice`: that would be another request's stream.
    """
    if choice:
        high, low = (int(word) for word in noise.row_keys([seed], [choice], [0])[0])
        return high << 32 | low
    return seed % 2**64


def _seed(draw: Draw) -> bool:
    if draw.seed is None:
        return False
    mx.random.seed(generator_seed(draw.seed, draw.choice))
    return True


def _same(rows: list[tuple[Request, int | None, int]], others: list[tuple[Request, int | None, int]]) -> bool:
    return len(rows) == len(others) and all(
        a[0] is b[0] and a[1:] == b[1:] for a, b in zip(rows, others, strict=True)
    )
