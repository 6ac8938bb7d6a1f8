"""Compositions: who runs beside a request, and in which pieces its prompt is run. Used by `drift`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...requests import Request

SIBLINGS = (
    "Yesterday I went to the",
    "My favourite thing is",
    "In the middle of the night the old man got up, lit a candle and went down to see who was at the",
)


@dataclass(frozen=True)
class Composition:
    """Who runs beside a request, and in which pieces its prompt is run.

    Attributes
    ----------
    siblings : tuple of Request or str
        The rest of the batch.
    last : bool
        Whether the request comes after its siblings.
    chunk : int
        Every prompt is run `chunk` tokens at a time; 0: whole.
    cached : int
        The request's first `cached` tokens are run before, by themselves, and adopted.
    decode : int
        Every prompt's last `decode` tokens are run one at a time, as generated tokens are.
    """

    siblings: tuple[Request | str, ...] = ()
    last: bool = False
    chunk: int = 0
    cached: int = 0
    decode: int = 0

    def __post_init__(self) -> None:
        for name in ("chunk", "cached", "decode"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"{name}={value!r} of a composition: must be a whole number of tokens; 0 is none"
                )

    @property
    def name(self) -> str:
        """In words."""
        n = len(self.siblings)
        others = f"{n} other{'s' * (n > 1)}"
        parts = [
            n and (f"after {others}" if self.last else f"with {others}"),
            self.chunk and f"in chunks of {self.chunk}",
            self.cached and f"{self.cached} tokens cached",
            self.decode and f"last {self.decode} decoded",
        ]
        return ", ".join(str(part) for part in parts if part) or "alone, again"

    def cuts(self, length: int) -> list[int]:
        """Where a prompt of `length` tokens is cut: the ends of its pieces."""
        ends = {length, *range(self.chunk or length, length, self.chunk or length)}
        ends |= {length - n for n in range(1, self.decode + 1) if length > n}
        return sorted(ends)


def standard(siblings: Iterable[Request | str], length: int) -> dict[str, Composition]:
    """The usual compositions, by name, for a prompt of `length` tokens."""
    everyone, some = tuple(siblings), max(1, length // 2)
    made = [Composition(everyone[:n]) for n in sorted({0, 1, len(everyone)}) if n <= len(everyone)]
    made += [Composition(everyone, last=True)] if everyone else []
    if length > 2:
        made += [Composition(everyone, chunk=some), Composition(everyone, cached=some)]
        made += [Composition(everyone, decode=min(3, length - 1))]
    return {c.name: c for c in made}


def named(compositions: Any, length: int) -> dict[str, Composition]:
    """What `drift` was given, as compositions by name; None is the usual ones."""
    if compositions is None:
        return standard(SIBLINGS, length)
    pairs: Iterable[tuple[str, Any]]
    pairs = compositions.items() if isinstance(compositions, Mapping) else (("", how) for how in compositions)
    named: dict[str, Composition] = {}
    for name, how in pairs:
        if isinstance(how, str | Request):
            raise ValueError(f"compositions: {how!r:.60} must be in a list of siblings, or a Composition")
        made = how if isinstance(how, Composition) else Composition(tuple(how))
        name = name or made.name
        same = sum(other.partition("; ")[0] == name for other in named)
        named[f"{name}; {same + 1}" if same else name] = made
    if not named:
        raise ValueError("compositions: must not be empty; None takes the usual ones")
    return named
