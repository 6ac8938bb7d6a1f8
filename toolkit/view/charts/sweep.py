"""Sweeps: a number for each combination of a grid, against one or two of its parameters."""

from collections.abc import Hashable
from numbers import Real
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from .theme import PALETTE, Chart, finish, named

HOW = {"mean": "mean", "max": "largest", "min": "least", "sum": "sum of", "nunique": "distinct values of"}
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke"]


def sweep_data(frame: pd.DataFrame, y: str, x: str, color: str | None, how: str = "mean") -> pd.DataFrame:
    """One row a point: `across` and `series` (x and color), `value` (four digits), `observations`.

    Raises
    ------
    ValueError
        One line: an unknown `how`, one parameter for both, no numbers, or none that is defined.
    """
    if color == x:
        raise ValueError(f'color="{color}": must be another parameter than x; leave it out for one line')
    if how not in HOW:
        raise ValueError(f'how="{how}": must be one of {", ".join(HOW)}')
    numbers = y in frame and (how == "nunique" or pd.api.types.is_numeric_dtype(frame[y]))
    if not numbers:
        fit = [name for name in frame if pd.api.types.is_numeric_dtype(frame[name])]
        raise ValueError(f'y="{y}": must be a column of numbers: {", ".join(fit) or "there is none"}')
    # Names of its own: a grid's may be words that grouping or a picture has already.
    by = {"across": x} | ({"series": color} if color else {})
    # Parameters of any type: those that can't be hashed or compared are distinguished by their text.
    given = {axis: frame[name].tolist() for axis, name in by.items()}
    numeric = all(isinstance(v, Real) and not isinstance(v, bool) for v in given["across"])
    keys = pd.DataFrame(
        {axis: v if axis == "across" and numeric else [str(one) for one in v] for axis, v in given.items()}
    )
    values = frame[y].tolist() if how == "nunique" else frame[y].to_numpy("float64", na_value=np.nan)
    table = keys.assign(value=values)
    rows = table.groupby(list(by), sort=False, dropna=False)["value"]
    point = rows.sum(min_count=1) if how == "sum" else rows.agg(how)  # a sum of nothing is nothing, not 0
    made = pd.DataFrame({how: point, "size": rows.size()}).reset_index()
    made = made.rename(columns={how: "value", "size": "observations"})
    made = made.assign(value=[float(f"{float(v):.4g}") for v in made["value"]])
    if made["value"].isna().all():
        raise ValueError(f'y="{y}": has no number in it; draw another column')
    return made


def fitting(column: pd.Series) -> list[str]:
    """The entries of `HOW` that a column allows: all for numbers, the number of distinct values otherwise."""
    if not column.notna().any():
        return []
    if pd.api.types.is_numeric_dtype(column):
        return list(HOW)
    return ["nunique"] if all(isinstance(value, Hashable) for value in column.tolist()) else []


def said(y: str, how: str) -> str:
    """What a point is, in words."""
    words = f"{HOW[how]} {y}"
    return words[0].upper() + words[1:]


def sweep(
    frame: pd.DataFrame,
    *,
    y: str,
    x: str,
    color: str | None = None,
    how: str = "mean",
    width: int = 380,
    title: str = "",
) -> Chart:
    """A column's mean (or largest, ...) for each value of one parameter, a line for each of another.

    Parameters
    ----------
    frame : DataFrame
        As `Sweep.to_frame` gives it.
    y, x, color : str
        A column, and one or two parameters.
    how : {"mean", "max", "min", "sum", "nunique"}
        What a point is of its rows.
    """
    data = sweep_data(frame, y, x, color, how)
    numeric = pd.api.types.is_numeric_dtype(data["across"])
    kind, order = ("Q", None) if numeric else ("N", list(dict.fromkeys(data["across"])))
    scale = alt.Scale(zero=False)
    across = (
        alt.X(f"across:{kind}", title=x, scale=scale)
        if numeric
        else alt.X("across:N", title=x, sort=order, axis=alt.Axis(labelAngle=0))
    )
    says = f"{HOW[how]} {y}"
    base = alt.Chart(named("cells", data)).encode(
        x=across, y=alt.Y("value:Q", title=says, scale=scale, axis=alt.Axis(grid=True))
    )
    tooltip = [f"across:{kind}", "value:Q", "observations:Q"]
    look: dict[str, Any] = {"color": alt.value(PALETTE[5])}
    if color:
        series = list(dict.fromkeys(data["series"]))
        legend = alt.Legend(title=color, orient="top")
        colours = [PALETTE[k % len(PALETTE)] for k in range(len(series))]
        shapes = [_SHAPES[k % len(_SHAPES)] for k in range(len(series))]
        look["color"] = alt.Color("series:N", scale=alt.Scale(domain=series, range=colours), legend=legend)
        look["shape"] = alt.Shape("series:N", scale=alt.Scale(domain=series, range=shapes), legend=legend)
        tooltip.insert(0, "series:N")
    points = base.mark_point(filled=True, size=80, opacity=1).encode(tooltip=tooltip, **look)
    line = base.mark_line(strokeWidth=2).encode(color=look["color"])
    layers = alt.layer(line, points) if numeric else points
    low, high = data["value"].min(), data["value"].max()
    of = f"{x} and {color}" if color else x
    sentence = f"{said(y, how)} by {of}: {len(data)} points, from {low:g} to {high:g}."
    return finish(layers.properties(width=width, height=220), sentence, title)
