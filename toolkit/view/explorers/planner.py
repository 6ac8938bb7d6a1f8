"""Planner: an explorer of windows, cohorts and padding. Runs no model."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
import pandas as pd

from ...cohorts.plan import compare
from ...cohorts.types import Row
from ...requests import PRIORITIES
from .. import charts
from .base import STYLE, WIDE, Explorer, whole


class PlanExplorer(Explorer):
    """An editable window, and the three strategies' plans of it side by side.

    Parameters
    ----------
    window : str
        One row a line: a name, the prompt's length, and if need be "cached" and a number, "decode", "high"
        or "low".
    token_budget : int
        To begin with; 0 is no limit.
    """

    def __init__(self, window: str, *, token_budget: int = 0):
        self.window = widgets.Textarea(
            window, description="Window", rows=9, continuous_update=False, layout=WIDE, style=STYLE
        )
        self.max_rows = whole("Most rows", 0, 0, 16)
        self.token_budget = whole("Token budget", token_budget, 0, 1024, 32)
        self.can_pad = widgets.Checkbox(True, description="The model can pad", indent=False)
        super().__init__([self.window, self.max_rows, self.token_budget, self.can_pad])

    def show(self) -> str:
        rows = read_window(self.window.value)
        compared = compare(rows, max_rows=self.max_rows.value, token_budget=self.token_budget.value,
                           can_pad=self.can_pad.value)  # fmt: skip
        table = pd.concat([plan.to_frame() for plan in compared.plans])
        said = [f"{p.strategy} computes {p.padded_tokens:,} in {len(p.cohorts)}" for p in compared.plans]
        words = f"For {compared.plans[0].tokens:,} tokens: {', '.join(said)} cohorts."
        self.draw(len(rows), lambda: charts.plan(table, subtitles=False), charts.plan_data(table), words)
        return words


def read_window(lines: str) -> list[Row]:
    """Rows from text, one per line: `a 50`, `b 40 cached 33`, `c 7 high`, `d 90 decode`."""
    rows = []
    for line in filter(None, map(str.strip, lines.splitlines())):
        name, *words = line.split()
        values: dict[str, Any] = {}
        while words:
            word = words.pop(0)
            if word.isdecimal() and "length" not in values:
                values["length"] = int(word)
            elif word == "cached" and words and words[0].isdecimal():
                values["cached"] = int(words.pop(0))
            elif word == "decode":
                values["decode"] = True
            elif word in PRIORITIES:
                values["priority"] = word
            else:
                raise ValueError(
                    f'"{word}" in line "{line}": must be a length, "cached" N, "decode" or a priority'
                )
        if "length" not in values:
            raise ValueError(f'line "{line}": must have a length, as in "{name} 50"')
        rows.append(Row(name, **values))
    if not rows:
        raise ValueError('an empty window: give a row a line, as in "a 50"')
    return rows
