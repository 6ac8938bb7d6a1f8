"""Layout: where each span's tokens go in a step, and which attention calls run them. NumPy only, no MLX.

Tokens of single-token spans come first, in the order of their slab's slots, so that a decode step's queries
are a plain slice. Spans whose shapes agree share an attention call. What shapes alone don't determine is
returned as small integer arrays; the rest, `Group`s, is static, so that a step can be compiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .kv_cache import steps
from .shapes import Shapes, round_up


@dataclass(frozen=True)
class Placed:
    """A span, and where its row's keys and values are."""

    start: int
    count: int
    capacity: int
    slot: int

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Group:
    """One attention call.

    Attributes
    ----------
    slab : str
        Capacity of the slab whose keys it reads.
    keys, rows, queries : int
        Its shape: number of keys, of rows, and of queries per row.
    slot : int
        Its rows are the slab's slots from here on; -1: slots are gathered.
    token : int
        Its queries are the step's tokens from here on; -1: tokens are gathered.
    """

    slab: str
    keys: int
    rows: int
    queries: int
    slot: int
    token: int


@dataclass(frozen=True)
class Layout:
    """Where everything is: `first[i]`, span i's first token; `size`, tokens with the tile's padding."""

    first: list[int]
    size: int
    groups: tuple[Group, ...]
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class _Piece:
    token: int
    position: int
    count: int
    slot: int


def plan(
    spans: Sequence[Placed], slots: dict[int, int], shapes: Shapes, *, piece: int, coarse: bool
) -> Layout:
    """Lay a step out.

    Parameters
    ----------
    spans : sequence of Placed
    slots : dict of capacity to int
        How many slots, from the first, a call over a slab's own rows covers.
    shapes : Shapes
    piece : int
        Longer spans are attended to in pieces of this many queries, so that early ones don't meet keys that
        come later.
    coarse : bool
        Few distinct shapes, for a GPU, where each new one costs a plan and padding costs little.

    Returns
    -------
    Layout
        Its arrays: `q{i}` [rows, queries], the token that each query of group i is, where gathered; `p{i}`
        [rows or 1, queries], its position; `s{i}` [rows], its slot, where gathered; `back` [size], where each
        token's result lies among all groups' results, unless that is where the token lies.
    """
    single, long = defaultdict(list), []
    for i, span in enumerate(spans):
        if span.count == 1:
            single[span.capacity].append(i)
        else:
            long.append(i)
    total = sum(s.count for s in spans)
    # Slots of a slab that have no token this step can stand as padding, where the tile has padding to spare.
    holes = sum(slots[c] - len(m) for c, m in single.items() if _whole(len(m), slots[c]))
    spare = round_up(total + holes, shapes.tile) == round_up(total, shapes.tile)
    first, at = [0] * len(spans), 0
    starts: dict[int, int] = {}
    for capacity, members in single.items():
        members.sort(key=lambda i: spans[i].slot)
        whole = _whole(len(members), slots[capacity])
        if whole and (spare or len(members) == slots[capacity]):
            starts[capacity] = at
            for i in members:
                first[i] = at + spans[i].slot
            at += slots[capacity]
        else:
            for i in members:
                first[i], at = at, at + 1
    for i in long:
        first[i], at = at, at + spans[i].count
    size = round_up(at, shapes.tile)

    groups: list[Group] = []
    arrays: dict[str, np.ndarray] = {}
    back = np.zeros(size, np.int32)
    base = 0
    for capacity, queries, keys, pieces in _calls(spans, first, single, long, shapes, piece, coarse):
        covered = slots[capacity]
        whole = _whole(len(pieces), covered) if queries == 1 or coarse else len(pieces) == covered
        rows = covered if whole else steps(len(pieces)) if coarse else len(pieces)
        token = starts.get(capacity, -1) if queries == 1 else -1
        slot = 0 if whole else pieces[0].slot if rows == 1 and not coarse else -1
        index, where = np.zeros((rows, queries), np.int32), np.zeros((rows, queries), np.int32)
        if queries == 1:  # the same in one go: a decode step's host time counts
            lines = np.array([p.slot for p in pieces]) if whole else np.arange(len(pieces))
            tokens = [p.token for p in pieces]
            index[lines, 0], where[lines, 0] = tokens, [p.position for p in pieces]
            back[tokens] = base + lines
        else:
            for order, p in enumerate(pieces):
                row = p.slot if whole else order
                index[row, : p.count] = np.arange(p.token, p.token + p.count)
                where[row, : p.count] = np.arange(p.position, p.position + p.count)
                back[p.token : p.token + p.count] = base + row * queries + np.arange(p.count)
        i = len(groups)
        if queries > 1 and not any(p.position for p in pieces):
            where = np.arange(queries, dtype=np.int32)[None]  # one mask for all
        arrays[f"p{i}"] = where
        if token < 0:
            arrays[f"q{i}"] = index
        if slot < 0:
            gathered = np.zeros(rows, np.int32)
            gathered[: len(pieces)] = [p.slot for p in pieces]
            arrays[f"s{i}"] = gathered
        groups.append(Group(str(capacity), keys, rows, queries, slot, token))
        base += rows * queries
    if not np.array_equal(back, np.arange(base)):
        arrays["back"] = back
    return Layout(first, size, tuple(groups), arrays)


def _whole(count: int, covered: int) -> bool:
    """Whether a call over all of a slab's slots is better than gathering these."""
    return 2 * count >= covered


def _calls(
    spans: Sequence[Placed],
    first: list[int],
    single: dict[int, list[int]],
    long: list[int],
    shapes: Shapes,
    piece: int,
    coarse: bool,
) -> list[tuple[int, int, int, list[_Piece]]]:
    """What shares a call: `(capacity, queries, keys, pieces)`."""
    calls = []
    for capacity, members in single.items():
        keys = min(capacity, capacity if coarse else shapes.keys(max(spans[i].stop for i in members)))
        calls.append(
            (capacity, 1, keys, [_Piece(first[i], spans[i].start, 1, spans[i].slot) for i in members])
        )
    shared: dict[tuple[int, ...], list[_Piece]] = defaultdict(list)
    for i in long:
        span = spans[i]
        for skip in range(0, span.count, piece):
            p = _Piece(first[i] + skip, span.start + skip, min(piece, span.count - skip), span.slot)
            key = (skip,) if coarse else (round_up(p.count, shapes.block), shapes.keys(p.position + p.count))
            shared[span.capacity, *key].append(p)
    step = shapes.bucket if coarse else shapes.block
    for (capacity, *_), pieces in sorted(shared.items()):
        queries = round_up(max(p.count for p in pieces), step)
        keys = min(capacity, shapes.keys(max(p.position + p.count for p in pieces)))
        calls.append((capacity, queries, keys, pieces))
    return calls
