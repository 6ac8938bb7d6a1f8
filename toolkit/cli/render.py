"""Render: studies as text for a terminal, at most 100 columns wide, in colour where that is welcome."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..token_labels import labels

if TYPE_CHECKING:
    from ..study.seeds.first_token import FirstTokens
    from ..study.seeds.seed_matrix import SeedMatrix

POLICIES = {
    "global": "every row seeds one shared generator, then each draws from it",
    "reseed": "each row seeds the shared generator again right before its first draw",
    "isolate": "each seeded row runs by itself, from its seeding to its last token",
    "keyed": "each row's noise is made of its own seed, position and token ids; no generator",
}
_WIDEST = 100
_MOST_TOKENS = 20
# Background and text of the commonest tokens, of the 256-colour set: the charts' palette, then lighter ones.
_COLOURS = ((214, 16), (74, 16), (36, 16), (175, 16), (227, 16), (25, 231), (166, 231), (152, 16), (223, 16),
            (183, 16), (108, 16), (250, 16))  # fmt: skip


def width() -> int:
    """Columns to fill."""
    return min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)


def colourful() -> bool:
    """Whether standard output takes colours: a terminal, and NO_COLOR not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def seed_matrix(matrix: SeedMatrix) -> str:
    """The matrix, own seeds down and the sibling's along, and one sentence that says what it shows."""
    frame = matrix.to_frame()
    own, theirs = (list(dict.fromkeys(frame[name])) for name in ("seed", "sibling_seed"))
    corner = f"{_cut(matrix.row, 12)}'s seed"
    left = max(map(len, [corner, *map(str, own)]))
    room = width() - left
    wide = min(9, max(4, room // len(theirs) - 2))
    shown = theirs[: max(1, room // (wide + 2))]
    for limit in range(wide, 2, -1):  # tokens that read alike get their ids added, which takes room
        names = labels(frame["token"], frame["text"], limit=limit)
        if max(map(_columns, names)) <= wide:
            break
    text = dict(zip(zip(frame["seed"], frame["sibling_seed"], strict=True), names, strict=True))
    wide = max(_columns(_cut(name, wide)) for name in [*names, *map(str, shown)])
    paint = _paints(names)
    lines = [f"{matrix.policy}: {POLICIES[matrix.policy]}", " " * left + f"  {matrix.sibling}'s seed"]
    lines.append(corner.rjust(left) + "".join(f"  {_cell(str(seed), wide)}" for seed in shown))
    for seed in own:
        cells = [paint(text[seed, other], f" {_cell(text[seed, other], wide)} ") for other in shown]
        lines.append(f"{seed:>{left}} {''.join(cells)}")
    if shown != theirs:
        lines.append(f"({len(theirs) - len(shown)} more columns; --out writes them all)")
    return "\n".join(line.rstrip() for line in [*lines, matrix.reading])


def first_tokens(study: FirstTokens) -> str:
    """The commonest tokens, how often they came and how often they should."""
    counts, seeds = study.counts(), len(study.to_frame())
    names = labels(counts["token"], counts["text"], limit=24)
    lines = [f"{study.policy}: first token of {study.row} for {seeds} seeds, {len(counts)} distinct"]
    wide = max(map(_columns, ["token", *names[:_MOST_TOKENS]]))
    lines.append(f"{'token':{wide}}  seeds  expected")
    counted = list(zip(names, counts["count"], counts["expected"], strict=True))
    for name, count, expected in counted[:_MOST_TOKENS]:
        lines.append(f"{_cell(name, wide)}  {count:>5}  {expected:>8.1f}")
    if len(names) > _MOST_TOKENS:
        lines.append(f"({len(names) - _MOST_TOKENS} more; --out writes every seed's)")
    return "\n".join(lines)


def _paints(names: list[str]) -> Callable[[str, str], str]:
    """A function (name, text) -> text, coloured if the name is one of the commonest."""
    common = sorted(set(names), key=lambda name: (-names.count(name), names.index(name)))
    colours = dict(zip(common, _COLOURS, strict=False)) if colourful() else {}

    def paint(name: str, text: str) -> str:
        if name not in colours:
            return text
        back, front = colours[name]
        return f"\x1b[48;5;{back};38;5;{front}m{text}\x1b[0m"

    return paint


def _columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _cell(text: str, columns: int) -> str:
    """A text cut or padded to `columns` columns."""
    text = _cut(text, columns)
    return text + " " * (columns - _columns(text))


def _cut(text: str, columns: int) -> str:
    if _columns(text) <= columns:
        return text
    while _columns(text) > columns - 1:
        text = text[:-1]
    return text + "…"
