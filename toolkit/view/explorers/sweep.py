"""Sweep explorer: a sweep's table along any of its axes. Runs no model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import ipywidgets as widgets

from ...study.sweep.run import Sweep
from ..charts.sweep import fitting, said, sweep, sweep_data
from ..charts.theme import Chart
from .base import Explorer, choice

NOTHING = "(nothing)"


class SweepExplorer(Explorer):
    """What is drawn up, along, and as lines. The controls offer what can be drawn.

    Parameters
    ----------
    made : Sweep
        Its table is read once.
    y, x : str
        A column and one of the grid's names, to begin with.
    names : sequence of str
        The grid's names, of which two are drawn at a time; a point is of all values of the others.
    how : str
        What a point is of the rows behind it.
    """

    def __init__(self, made: Sweep, *, y: str, x: str, names: Sequence[str], how: str = "mean"):
        self.frame, self.names = made.to_frame(), list(names)
        columns = [c for c in self.frame if c not in names and (c == y or fitting(self.frame[c]))]
        self.y = choice("Value", columns, y)
        self.how = choice("Of its rows", fitting(self.frame[y]) or [how], how)
        self.x = choice("Along", self.names, x)
        others = [NOTHING, *(name for name in names if name != x)]
        self.lines = choice("Lines", others, others[min(1, len(others) - 1)])
        # Before the picture follows a change, so that it never meets a pair that can't be drawn.
        self.y.observe(self._fit_how, "value")
        self.x.observe(self._fit_lines, "value")
        super().__init__([self.y, self.how, self.x, self.lines])

    def _fit_how(self, _: Any) -> None:
        self._offer(self.how, fitting(self.frame[self.y.value]))

    def _fit_lines(self, _: Any) -> None:
        self._offer(self.lines, [NOTHING, *(name for name in self.names if name != self.x.value)])

    def _offer(self, control: widgets.Dropdown, options: list[str]) -> None:
        """Other options; what was chosen stays chosen where it can."""
        if list(control.options) == options:
            return
        chosen = control.value
        control.unobserve(self._changed, "value")  # one change, one picture: the other control asks for it
        control.options = options
        control.value = chosen if chosen in options else options[0]
        control.observe(self._changed, "value")

    def show(self) -> str:
        y, how, x, lines = (c.value for c in (self.y, self.how, self.x, self.lines))
        color = lines if lines not in (NOTHING, x) else None
        chart = partial(sweep, self.frame, y=y, x=x, color=color, how=how)
        points = sweep_data(self.frame, y, x, color, how).dropna(subset="value")
        least, most = points.loc[points["value"].idxmin()], points.loc[points["value"].idxmax()]
        drawn = {name: axis for name, axis in ((x, "across"), (color, "series")) if name}
        low, high = (
            f"{p['value']:g} at {', '.join(f'{name} {p[axis]}' for name, axis in drawn.items())}"
            for p in (least, most)
        )
        same = least["value"] == most["value"]
        span = f"the same everywhere, {least['value']:g}" if same else f"from {low} to {high}"
        pooled = " and ".join(name for name in self.names if name not in drawn)
        over = f", each over all values of {pooled}" if pooled else ""
        count = f"{len(points)} point{'s' * (len(points) != 1)}"
        words = f"{said(y, how)}, {count}{over}: {span}."
        self.draw((y, how, x, color), chart, {}, words)
        return words

    def chart(self) -> Chart:
        """The picture as it is now, to show or to save."""
        return self._chart()
