"""Company: a chart of rows that come and go, step by step: what each computed, and which token it drew."""

from typing import Any

import altair as alt
import pandas as pd

from .theme import GREEN, ORANGE, PURPLE, SKY, TEXT, VERMILLION, YELLOW, Chart, Records, finish, labels, named

ACTIONS = {
    "arrive": ("triangle-right", GREEN),
    "pause": ("square", ORANGE),
    "resume": ("triangle-up", PURPLE),
    "preempt": ("triangle-left", YELLOW),
    "cancel": ("cross", VERMILLION),
}
PLAIN = "#CFCFCF"
_CELL, _LANE = 54, 36  # points
_SHOWN = 12  # steps


def company(
    frame: pd.DataFrame,
    actions: pd.DataFrame,
    *,
    row: str = "",
    reference: pd.DataFrame | None = None,
    rows: list[str] | None = None,
    steps: int = 9,
    title: str = "",
) -> Chart:
    """Rows down, steps along; a cell is a token that a row drew, over the tokens computed for it.

    Parameters
    ----------
    frame : DataFrame
        One line per row and step: step, row, index, span, token, text; as `Company.to_frame()` gives.
    actions : DataFrame
        One line per command: step, action, row.
    row : str
        Who is followed.
    reference : DataFrame, optional
        What that row draws alone: index, token, text. Shown above it; where the two differ, both have a
        thick frame and "≠".
    rows : list of str, optional
        Lanes, in order; default: as they come.
    steps : int
        Least number of steps shown; of more than 12, the last 12 are shown.
    """
    data = company_data(frame, actions, row=row, reference=reference, rows=rows)
    lanes, last = data["lanes"][0]["order"], data["lanes"][0]["last"]
    first = max(0, last - _SHOWN)
    steps = max(steps, last - first)
    x = alt.X(
        "first:Q", title="engine step", scale=alt.Scale(domain=[first, first + steps], nice=False),
        axis=alt.Axis(tickMinStep=1, format="d", tickCount=steps),
    )  # fmt: skip
    y = alt.Y("lane:N", sort=lanes, scale=alt.Scale(domain=lanes, paddingInner=0.12), title=None,
              axis=alt.Axis(ticks=False, domain=False, labelPadding=11))  # fmt: skip
    cells = alt.Chart(named("cells", data["cells"])).encode(x=x, y=y)
    boxes = cells.mark_rect(stroke=TEXT, strokeWidth=0.5).encode(
        x2="stop:Q", color=alt.Color("fill:N", scale=None), tooltip=["text:N", "span:Q"]
    )
    odd = cells.transform_filter("datum.differs").mark_rect(
        aria=False, filled=False, stroke=VERMILLION, strokeWidth=3
    )
    middle = alt.X("middle:Q")
    words = cells.mark_text(aria=False, fontSize=11, color="black", dy=-4).encode(x=middle, text="text:N")
    spans = cells.mark_text(aria=False, fontSize=10, color="black", dy=9).encode(x=middle, text="says:N")
    kinds = list(ACTIONS)
    marks = alt.Chart(named("actions", data["actions"])).mark_point(
        filled=True, size=90, opacity=1, stroke="black", strokeWidth=0.6
    )
    legend = alt.Legend(title=None, orient="top", symbolStrokeWidth=0.6)
    points = marks.encode(
        x=x,
        y=y,
        shape=alt.Shape(
            "action:N", legend=legend, scale=alt.Scale(domain=kinds, range=[ACTIONS[k][0] for k in kinds])
        ),
        color=alt.Color(
            "action:N", legend=legend, scale=alt.Scale(domain=kinds, range=[ACTIONS[k][1] for k in kinds])
        ),
    )
    layers = alt.layer(boxes, odd.encode(x2="stop:Q"), words, spans, points).resolve_scale(
        color="independent", shape="independent"
    )
    chart = layers.properties(width=_CELL * steps, height=_LANE * len(lanes))
    differ = sum(cell["differs"] for cell in data["cells"] if cell["lane"] == row)
    sentence = f"{len(data['cells'])} cells in {last} steps."
    if reference is not None:
        sentence += f" {differ} of {row}'s tokens differ from those it draws alone."
    return finish(chart, sentence, title)


def company_data(
    frame: pd.DataFrame,
    actions: pd.DataFrame,
    *,
    row: str = "",
    reference: pd.DataFrame | None = None,
    rows: list[str] | None = None,
) -> dict[str, Records]:
    """What `company` draws: "cells", "actions" and "lanes"."""
    order = rows or list(dict.fromkeys([*frame["row"], *actions["row"]]))
    mine = frame[frame["row"] == row].set_index("index")
    other = {} if reference is None else dict(zip(reference["index"], reference["token"], strict=True))
    last = int(max([-1, *frame["step"]])) + 1
    cells: Records = []
    columns = (frame[c] for c in ("step", "row", "index", "span", "token", "text"))
    for step, who, index, span, token, text in zip(*columns, strict=True):
        differs = who == row and bool(other) and other.get(index) != token
        cells.append(_cell(step, who, text, differs, int(span)))
    if reference is not None:
        order = [lane for who in order for lane in ([f"{row} alone", row] if who == row else [who])]
        for index, token, text in zip(*(reference[c] for c in ("index", "token", "text")), strict=True):
            if index in mine.index:
                here = mine.loc[index]
                cells.append(_cell(here["step"], f"{row} alone", text, here["token"] != token, 0))
    shown = max(0, last - _SHOWN)
    marks = [
        {"first": int(s), "lane": w, "action": a}
        for s, a, w in zip(*(actions[c] for c in ("step", "action", "row")), strict=True)
        if s >= shown
    ]
    lanes = [{"order": order, "last": last}]
    return {"cells": [c for c in cells if c["first"] >= shown], "actions": marks, "lanes": lanes}


def _cell(step: int, lane: str, text: str, differs: bool, span: int) -> dict[str, Any]:
    word = labels([0], [text], limit=6)[0]
    return {
        "first": int(step), "stop": int(step) + 1, "middle": int(step) + 0.5, "lane": lane, "text": word,
        "span": span, "differs": bool(differs), "fill": SKY if span > 1 else PLAIN,
        "says": ("≠ " if differs else "") + (f"{span} in" if span > 1 else ""),
    }  # fmt: skip
