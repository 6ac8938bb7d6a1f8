"""Timeline: a chart of an engine's trace, event by event, over the state of MLX's global generator."""

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from .theme import BLUE, GREEN, ORANGE, PURPLE, ROW, SKY, TEXT, VERMILLION, YELLOW, Chart, finish, labels

SHAPES = {
    "admit": "circle",
    "seed": "diamond",
    "forward": "square",
    "draw": "triangle-up",
    "finish": "cross",
    "cancel": "stroke",
}
COLOURS = {"admit": SKY, "seed": VERMILLION, "forward": TEXT, "draw": BLUE, "finish": GREEN, "cancel": PURPLE}


def timeline(trace: pd.DataFrame, *, width: int = 600, limit: int = 60, title: str = "") -> Chart:
    """Who was seeded, computed and drawn, in order, over the global generator's state.

    Parameters
    ----------
    trace : DataFrame
        One row per event: index, step, phase, event, row, seed, text, state; as `Trace.to_frame()` gives.
    limit : int
        Only the first events are drawn.
    """
    frame = trace.head(limit).reset_index(drop=True)
    frame = frame.assign(at=range(len(frame)), row=frame["row"].fillna("").replace("", "all rows"))
    rows = list(dict.fromkeys(frame["row"]))
    rows = [r for r in rows if r != "all rows"] + ["all rows"] * ("all rows" in rows)
    frame = frame.assign(says=[_says(event) for event in frame.to_dict("records")])
    step = max(9, width / max(1, len(frame)))
    x = alt.X("at:O", title="event, in order", axis=alt.Axis(labelAngle=0, labelOverlap=True, ticks=False))
    y = alt.Y("row:N", sort=rows, title=None, axis=alt.Axis(grid=True))
    key = alt.Legend(title=None, orient="top")
    points = (
        alt.Chart(frame)
        .mark_point(filled=True, size=110, opacity=1)
        .encode(
            x=x,
            y=y,
            shape=alt.Shape("event:N", legend=key, scale=_scale(SHAPES, frame)),
            color=alt.Color("event:N", legend=key, scale=_scale(COLOURS, frame)),
        )
    )
    said = alt.Chart(frame).transform_filter("datum.says != ''")
    words = said.mark_text(dy=-13, fontSize=11, color=TEXT).encode(x=x, y=y, text="says:N")
    lanes = alt.layer(points, words).properties(width=alt.Step(step), height=38 * max(1, len(rows)))
    strips = _phases(frame, step), _states(frame, step)
    chart = alt.vconcat(lanes, *strips, spacing=6).resolve_scale(color="independent", shape="independent")
    seeded = [f"{r} with {s}" for r, s in zip(frame["row"], frame["seed"], strict=True) if pd.notna(s)]
    sentence = f"{len(frame)} events. Seeded: {', '.join(_whole(seeded)) or 'nothing'}."
    return finish(chart, sentence, title)


def _scale(values: Mapping[str, str], frame: pd.DataFrame) -> alt.Scale:
    present = [event for event in values if event in set(frame["event"])]
    return alt.Scale(domain=present, range=[values[event] for event in present])


def _whole(seeded: list[str]) -> list[str]:
    return list(dict.fromkeys(text.removesuffix(".0") for text in seeded))


def _says(event: Mapping[str, Any]) -> str:
    if event["event"] == "seed" and pd.notna(event["seed"]):
        return f"{int(event['seed'])}"
    if event["event"] == "draw" and isinstance(event.get("text"), str):
        return labels([0], [event["text"]], limit=8)[0]
    return ""


def _strip(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Runs of equal neighbours: first and last event, and the value they share."""
    run = (frame[column] != frame[column].shift()).cumsum()
    parts = frame.groupby(run, sort=False)
    spans = parts.agg(first=("at", "min"), last=("at", "max"), value=(column, "first"))
    return spans.assign(stop=spans["last"] + 1).reset_index(drop=True)


def _band(spans: pd.DataFrame, events: int, step: float, name: str, **colour: Any) -> Chart:
    x = alt.X("first:Q", axis=None, scale=alt.Scale(domain=[0, events], nice=False))
    lane = alt.Y("lane:N", title=None, axis=alt.Axis(ticks=False, domain=False))
    base = alt.Chart(spans.assign(lane=name, middle=(spans["first"] + spans["stop"]) / 2))
    boxes = base.mark_rect(stroke=TEXT, strokeWidth=0.5).encode(x=x, x2="stop:Q", y=lane, **colour)
    words = base.mark_text(fontSize=11, color="black").encode(x="middle:Q", y=lane, text="short:N")
    return alt.layer(boxes, words).properties(width=step * events, height=ROW)


def _phases(frame: pd.DataFrame, step: float) -> Chart:
    spans = _strip(frame, "phase")
    spans = _named(spans, [str(phase).replace("_", " ") for phase in spans["value"]], step)
    return _band(spans, len(frame), step, "phase", color=alt.value("#BBBBBB"))


def _named(spans: pd.DataFrame, names: list[str], step: float) -> pd.DataFrame:
    """Names for the spans, cut to the room they have at about 6.5 points a letter."""
    room = ((spans["stop"] - spans["first"]) * step / 6.5).astype(int)
    cut = [n if len(n) <= r else (n[: r - 1] + "…") * (r > 2) for n, r in zip(names, room, strict=True)]
    return spans.assign(short=cut)


def _states(frame: pd.DataFrame, step: float) -> Chart:
    spans = _strip(frame, "state")
    # A state that a seeding made is named after the seed; others by their last digits, where there's room.
    seeds = {e["at"]: f"seed {int(e['seed'])}" for e in frame.to_dict("records") if e["event"] == "seed"}
    names = [seeds.get(at, str(state)[-4:]) for at, state in zip(spans["first"], spans["value"], strict=True)]
    spans = _named(spans, names, step)
    scale = alt.Scale(range=[ORANGE, SKY, PURPLE, YELLOW, GREEN])
    colour = alt.Color("value:N", legend=None, sort=None, scale=scale)
    return _band(spans, len(frame), step, "generator", color=colour)
