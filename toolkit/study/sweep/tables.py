"""Tables: of a sweep's cells and combinations, joined to one, and made fit for a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from ...fields import show
from . import grid

if TYPE_CHECKING:
    import pandas as pd


def joined(
    points: Sequence[grid.Combination], frames: Sequence[pd.DataFrame], names: list[str]
) -> pd.DataFrame:
    """Studies' tables one under the other, the grid's columns first."""
    import pandas as pd

    if not frames:
        return pd.DataFrame(columns=names)
    bare = [_without(point, frame) for point, frame in zip(points, frames, strict=True)]
    some = [frame for frame in bare if len(frame)] or bare[:1]  # an empty table's types would count
    joined = pd.concat(some, ignore_index=True)
    lengths = [len(frame) for frame in frames]
    for place, name in enumerate(names):
        values = [point[name] for point, many in zip(points, lengths, strict=True) for _ in range(many)]
        joined.insert(place, name, _column(values))
    return joined


def _without(point: grid.Combination, frame: pd.DataFrame) -> pd.DataFrame:
    """A study's table without the columns that say the combination again."""
    for name, value in point.items():
        if name in frame and not all(_equal(v, value) for v in frame[name].tolist()):
            seen = next(v for v in frame[name].tolist() if not _equal(v, value))
            raise ValueError(
                f"grid: the study's table has a column {name} of its own ({show(seen)} where the grid has "
                f"{show(value)}); give the study's argument another name"
            )
    return frame.drop(columns=[name for name in point if name in frame])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Real) and isinstance(other, Real) and one == other:
        return True
    return grid.text(one) == grid.text(other)


def _column(values: list[Any]) -> Any:
    import pandas as pd

    # Beside None pandas would make floats of integers, and of lists of numbers as it likes.
    plain = all(isinstance(v, str | bool | int | float) for v in values)
    return pd.Series(values, dtype=None if plain else object)


def listed(points: Iterable[grid.Combination], names: Iterable[str]) -> pd.DataFrame:
    """Combinations as a table."""
    import pandas as pd

    points = list(points)
    return pd.DataFrame({name: _column([point[name] for point in points]) for name in names})


def flat(frame: pd.DataFrame) -> pd.DataFrame:
    """A table for a file: columns of mixed or nested values, for which no format has a type, as text."""
    texts = {}
    for name in frame:
        kinds = (
            {type(v) for v in frame[name].tolist() if v is not None} if frame[name].dtype == object else set()
        )
        if len(kinds) > 1 or not kinds <= {str, bool, int, float}:
            texts[name] = [grid.text(v) for v in frame[name].tolist()]
    return frame.assign(**texts)
