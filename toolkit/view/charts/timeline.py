"""Timeline: a chart of an engine's trace, event by event, over the state of MLX's global generator."""

from collections.abc import Sequence
from itertools import cycle, groupby, pairwise
from typing import Any

import altair as alt
import pandas as pd

from .theme import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    ROW,
    SKY,
    TEXT,
    TINTS,
    VERMILLION,
    YELLOW,
    Chart,
    Records,
    finish,
    labels,
    named,
)

MARKS = {
    "admit": ("circle", SKY),
    "seed": ("diamond", VERMILLION),
    "forward": ("square", TEXT),
    "draw": ("triangle-up", BLUE),
    "finish": ("cross", GREEN),
    "cancel": ("triangle-down", PURPLE),
    "preempt": ("triangle-left", ORANGE),
    "import": ("triangle-right", ORANGE),
    "export": ("triangle-left", PURPLE),
}
_UNUSED, GREY = "not used", "#BBBBBB"
_LETTER = 5  # points


def timeline(
    trace: pd.DataFrame, *, at: int | None = None, width: int = 510, limit: int = 60, title: str = ""
) -> Chart:
    """Who was seeded, computed and drawn, in order, over the global generator's state.

    Parameters
    ----------
    trace : DataFrame
        One row per event: phase, event, row, seed, text, state; as `Trace.to_frame()` gives.
    at : int, optional
        Place of an event to point out, counted from 0.
    limit : int
        Only the first events are drawn.
    """
    events = trace.head(limit).to_dict("records")
    step = max(9.0, width / max(1, len(events)))
    marks = _marks(events)
    rows = list(dict.fromkeys(mark["row"] for mark in marks))
    axis = alt.Axis(labelAngle=0, labelOverlap=True, ticks=False)
    x = alt.X("at:O", title="event, in order", axis=axis, scale=alt.Scale(domain=list(range(len(events)))))
    y = alt.Y("row:N", sort=rows, title=None, axis=alt.Axis(grid=True))
    kinds = [kind for kind in MARKS if any(mark["event"] == kind for mark in marks)]
    key = alt.Legend(title=None, orient="top")
    base = alt.Chart(named("events", marks)).encode(x=x, y=y)
    points = base.mark_point(filled=True, size=100, opacity=1).encode(
        shape=alt.Shape(
            "event:N", legend=key, scale=alt.Scale(domain=kinds, range=[MARKS[k][0] for k in kinds])
        ),
        color=alt.Color(
            "event:N", legend=key, scale=alt.Scale(domain=kinds, range=[MARKS[k][1] for k in kinds])
        ),
    )
    said = base.transform_filter("datum.says != ''")
    words = said.mark_text(aria=False, dy=-13, fontSize=11, color=TEXT).encode(text="says:N")
    together = base.transform_filter("datum.event == 'forward'").mark_line(
        aria=False, color=TEXT, strokeWidth=1.5
    )
    cursor = alt.Chart(named("cursor", [] if at is None else [{"at": at}]))
    here = cursor.mark_bar(color=YELLOW, opacity=0.45, width=alt.RelativeBandSize(1)).encode(x=x)
    layers = alt.layer(here, together.encode(detail="at:O"), points, words)
    lanes = layers.properties(width=alt.Step(step), height=38 * max(1, len(rows)))
    strips = [_band(name, lines, len(events), step) for name, lines in _strips(events, step).items()]
    chart = alt.vconcat(lanes, *strips, spacing=6).resolve_scale(color="independent", shape="independent")
    seeded = dict.fromkeys(f"{e['row']} with {int(e['seed'])}" for e in events if e["event"] == "seed")
    sentence = f"{len(events)} events. Seeded: {', '.join(seeded) or 'nothing'}."
    return finish(chart, sentence, title)


def _marks(events: Sequence[dict[str, Any]]) -> Records:
    """A mark for each event; of a forward, one on each of its rows."""
    everyone = list(dict.fromkeys(e["row"] for e in events if e["event"] != "forward" and e["row"]))
    out = []
    for at, event in enumerate(events):
        rows = [event["row"]]
        if event["event"] == "forward":
            rows = [row for row in everyone if row in event["row"].split(" ")] or everyone
        for row in rows:
            out.append({"at": at, "row": row, "event": event["event"], "says": _says(event)})
    return out


def _says(event: dict[str, Any]) -> str:
    if event["event"] == "seed":
        return str(int(event["seed"]))
    return labels([0], [event["text"]], limit=8)[0] if event["event"] == "draw" else ""


def _strips(events: Sequence[dict[str, Any]], step: float) -> dict[str, Records]:
    """Runs of events in the same phase, and over the same state of the generator."""
    phases = _runs([str(e["phase"]).replace("_", " ") for e in events])
    states = _runs(_known(states_left(events)))
    # A state that a seeding made is named after the seed; another by its last digits.
    seeds = {at: f"seed {int(e['seed'])}" for at, e in enumerate(events) if e["event"] == "seed"}
    # Equal states have equal colours; grey is a generator that nobody here has touched.
    reached = dict.fromkeys(state for state, _, _ in states if state not in ("", "before"))
    colours = dict(zip(reached, cycle([ORANGE, SKY, PURPLE, YELLOW, GREEN, *TINTS]), strict=False))
    out: dict[str, Records] = {"phase": [], "generator": []}
    for value, first, stop in phases:
        out["phase"].append(_box(first, stop, value, GREY, step))
    for value, first, stop in states:
        name = seeds.get(first, value if value == "before" else f"…{value[-4:]}") if value else _UNUSED
        out["generator"].append(_box(first, stop, name, colours.get(value, GREY), step))
    return out


def states_left(events: Sequence[dict[str, Any]]) -> list[str]:
    """The state after each event. A seeding is recorded with its draw's state; here it gets its seed's."""
    out: list[str] = [e["state"] for e in events]
    for at, (event, later) in enumerate(pairwise(events)):
        if event["event"] == "seed" and later["event"] == "draw" and out[at] and out[at] == out[at + 1]:
            high, low = divmod(int(event["seed"]), 2**32)
            out[at] = f"{high:08x}-{low:08x}"
    return out


def _known(states: Sequence[str]) -> list[str]:
    """The state at each event: what the last event that touched the generator left."""
    out, last = [], "before" if any(states) else ""
    for state in states:
        last = state or last
        out.append(last)
    return out


def _runs(values: Sequence[str]) -> list[tuple[str, int, int]]:
    out, first = [], 0
    for value, group in groupby(values):
        stop = first + len(list(group))
        out.append((value, first, stop))
        first = stop
    return out


def _box(first: int, stop: int, name: str, colour: str, step: float) -> dict[str, Any]:
    room = int((stop - first) * step / _LETTER)
    short = name if len(name) <= room else (name[: room - 1] + "…") * (room > 2)
    return {
        "first": first,
        "stop": stop,
        "middle": (first + stop) / 2,
        "name": name,
        "short": short,
        "fill": colour,
    }


def _band(name: str, lines: Records, events: int, step: float) -> Chart:
    x = alt.X("first:Q", axis=None, scale=alt.Scale(domain=[0, events], nice=False))
    lane = alt.Y("lane:N", title=None, axis=alt.Axis(ticks=False, domain=False))
    base = alt.Chart(named(name, [{**line, "lane": name} for line in lines]))
    fill = alt.Color("fill:N", scale=None)
    boxes = base.mark_rect(stroke=TEXT, strokeWidth=0.5).encode(
        x=x, x2="stop:Q", y=lane, color=fill, tooltip="name:N"
    )
    words = base.mark_text(aria=False, fontSize=10, color="black").encode(
        x="middle:Q", y=lane, text="short:N"
    )
    return alt.layer(boxes, words).properties(width=step * events, height=ROW)
