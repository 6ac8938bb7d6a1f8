"""Sweeps: a number for each combination of a grid, against one or two of its parameters."""

from numbers import Real
from typing import Any

import altair as alt
import pandas as pd

from .theme import PALETTE, Chart, finish, named

_HOW = {"mean": "mean", "max": "largest", "min": "least", "sum": "sum of", "nunique": "distinct values of"}
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke"]


def sweep_data(frame: pd.DataFrame, y: str, x: str, color: str | None, how: str = "mean") -> pd.DataFrame:
    """One row a point: the grid's parameters, `value` (four significant digits) and `observations`."""
    if how not in _HOW:
        raise ValueError(f'how="{how}": must be one of {", ".join(_HOW)}')
    numbers = y in frame and (how == "nunique" or pd.api.types.is_numeric_dtype(frame[y]))
    if not numbers:
        fit = [name for name in frame if pd.api.types.is_numeric_dtype(frame[name])]
        raise ValueError(f'y="{y}": must be a column of numbers: {", ".join(fit) or "there is none"}')
    by = [x] + ([color] if color else [])
    # Parameters as they come: what can't be hashed or compared is told apart by its text.
    given = {name: frame[name].tolist() for name in by}
    numeric = all(isinstance(v, Real) and not isinstance(v, bool) for v in given[x])
    keys = pd.DataFrame(
        {name: v if name == x and numeric else [str(one) for one in v] for name, v in given.items()}
    )
    table = keys.assign(value=frame[y].tolist())
    made = table.groupby(by, sort=False, dropna=False)["value"].agg([how, "size"]).reset_index()
    made = made.rename(columns={how: "value", "size": "observations"})
    return made.assign(value=[float(f"{float(v):.4g}") for v in made["value"]])


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
    numeric = pd.api.types.is_numeric_dtype(data[x])
    kind, order = ("Q", None) if numeric else ("N", list(dict.fromkeys(data[x])))
    # Names that hold a dot or a bracket would be read as a path.
    data = data.rename(columns={x: "across"} | ({color: "series"} if color else {}))
    scale = alt.Scale(zero=False)
    across = (
        alt.X(f"across:{kind}", title=x, scale=scale)
        if numeric
        else alt.X("across:N", title=x, sort=order, axis=alt.Axis(labelAngle=0))
    )
    says = f"{_HOW[how]} {y}"
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
    sentence = f"{says[0].upper()}{says[1:]} by {of}: {len(data)} points, from {low:g} to {high:g}."
    return finish(layers.properties(width=width, height=220), sentence, title)
