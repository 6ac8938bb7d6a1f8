"""Spans: what a step is made of, and what every forward can do with them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx


@dataclass(frozen=True)
class Span:
    """Some consecutive tokens of one row.

    Parameters
    ----------
    row : hashable
        The row's name.
    start : int
        Logical position of the first token (0 is the first prompt token).
    tokens : sequence of int
        The tokens; empty where `source` says where to find the one.
    sample : bool
        Whether the logits after the last token are wanted.
    source : int, optional
        Index into the step's `carry`: the token is still on the device.
    """

    row: Hashable
    start: int
    tokens: Sequence[int]
    sample: bool = True
    source: int | None = None

    @property
    def count(self) -> int:
        return 1 if self.source is not None else len(self.tokens)

    @property
    def stop(self) -> int:
        return self.start + self.count


class Forward(Protocol):
    """Runs spans; keeps each row's keys and values in between."""

    name: str
    can_batch: bool
    can_pad: bool

    def run(self, spans: Sequence[Span], carry: mx.array | None = None) -> mx.array: ...
    def state(self) -> list[mx.array]: ...
    def length(self, row: Hashable) -> int: ...
    def release(self, row: Hashable, wipe: bool = True) -> None: ...
