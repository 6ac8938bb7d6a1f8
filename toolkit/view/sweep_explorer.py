"""Sweep explorer: a sweep's table along any of its axes. Runs no model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd

from ..study.sweep import Sweep
from .explorer import Explorer, choice
from .sweeps import HOW, sweep, sweep_data
from .theme import Chart

NOTHING = "(nothing)"


class SweepExplorer(Explorer):
    """What is drawn up, along, and as lines.

    Parameters
    ----------
    made : Sweep
        Its table is read once.
    y, x : str
        A column and one of the grid's names, to begin with.
    names : sequence of str
        The grid's names, of which two are drawn at a time.
    how : str
        What a point is of the rows behind it.
    """

    def __init__(self, made: Sweep, *, y: str, x: str, names: Sequence[str], how: str = "mean"):
        self.frame = made.to_frame()
        columns = [c for c in self.frame if c not in names]
        self.y = choice("Value", columns, y)
        self.how = choice("Of its rows", list(HOW), how)
        self.x = choice("Along", list(names), x)
        other = next((name for name in names if name != x), NOTHING)
        self.lines = choice("Lines", [NOTHING, *names], other)
        super().__init__([self.y, self.how, self.x, self.lines])

    def show(self) -> str:
        y, how, x, lines = (c.value for c in (self.y, self.how, self.x, self.lines))
        color = lines if lines not in (NOTHING, x) else None
        chart = partial(sweep, self.frame, y=y, x=x, color=color, how=how)
        points: pd.DataFrame = sweep_data(self.frame, y, x, color, how)
        least, most = points.loc[points["value"].idxmin()], points.loc[points["value"].idxmax()]
        where = [
            ", ".join(f"{name} {p[axis]}" for name, axis in ((x, "across"), (color, "series")) if name)
            for p in (least, most)
        ]
        words = (
            f"{len(points)} points: from {least['value']:g} at {where[0]} to {most['value']:g} at {where[1]}."
        )
        self.draw((y, how, x, color), chart, {}, words)
        return words

    def chart(self) -> Chart:
        """The picture as it is now, to show or to save."""
        return self._chart()
