"""Apart: charts of equal bits under shape rules, and of drift beside what it takes to change a token."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from .theme import BLUE, GREEN, ORANGE, SKY, TEXT, VERMILLION, Chart, Records, finish, named

LOW, HIGH = 1e-7, 10.0  # logits; what is smaller stands at the left edge
EQUAL, RULES = 2e-7, (2e-7, 2e-3)  # where a difference of 0 stands on a log axis that begins there
FATES = ("safe", "could change", "did change")


def rules(frame: pd.DataFrame, *, width: int = 330, title: str = "") -> Chart:
    """The largest difference of each composition, with no rules and with some.

    Parameters
    ----------
    frame : DataFrame
        One row per run: composition, rules ("no rules" or "these rules"), max_abs (in logits).
    """
    data = rules_data(frame)["runs"]
    order = list(dict.fromkeys(frame["composition"]))
    names, colours = ["no rules", "these rules"], [VERMILLION, BLUE]
    legend = alt.Legend(title=None, orient="top")
    x = alt.X(
        "x:Q",
        title="largest difference in logits (log scale)",
        axis=alt.Axis(format=".0e", values=[1e-6, 1e-5, 1e-4, 1e-3]),
        scale=alt.Scale(type="log", domain=list(RULES), nice=False),
    )
    base = alt.Chart(named("runs", data)).encode(
        x=x,
        y=alt.Y("composition:N", sort=order, title=None, axis=alt.Axis(grid=True, labelLimit=220)),
        yOffset=alt.YOffset("rules:N", sort=names),
    )
    points = base.mark_point(filled=True, size=90, opacity=1).encode(
        color=alt.Color("rules:N", scale=alt.Scale(domain=names, range=colours), legend=legend),
        shape=alt.Shape(
            "rules:N", scale=alt.Scale(domain=names, range=["triangle-up", "circle"]), legend=legend
        ),
    )
    words = base.mark_text(aria=False, align="left", dx=9, fontSize=11, color=TEXT).encode(text="says:N")
    equal = int((frame["max_abs"] == 0).sum())
    chart = alt.layer(points, words).properties(width=width, height=36 * len(order))
    return finish(chart, f"{equal} of {len(frame)} runs have the alone run's bits.", title)


def rules_data(frame: pd.DataFrame) -> dict[str, Records]:
    """What `rules` draws, by the names of its data."""
    lines = [
        {"composition": c, "rules": r, "x": max(EQUAL, min(RULES[1], float(f"{m:.2g}"))), "says": _says(m)}
        for c, r, m in frame[["composition", "rules", "max_abs"]].itertuples(index=False)
    ]
    return {"runs": lines}


def _says(largest: float) -> str:
    return "equal bits" if largest == 0 else f"{largest:.0e}".replace("e-0", "e-")


def equality(frame: pd.DataFrame, *, cell: int = 92, title: str = "") -> Chart:
    """A table of rules by compositions: equal bits, or the largest difference.

    Parameters
    ----------
    frame : DataFrame
        One row per run: rules, composition, max_abs (in logits).
    """
    rows, columns = (list(dict.fromkeys(frame[name])) for name in ("rules", "composition"))
    data = frame.assign(
        says=[_says(m) for m in frame["max_abs"]], equal=[str(m == 0) for m in frame["max_abs"]]
    )[["rules", "composition", "says", "equal"]]
    base = alt.Chart(named("table", data)).encode(
        x=alt.X(
            "composition:N",
            sort=columns,
            title=None,
            axis=alt.Axis(
                orient="top",
                labelAngle=0,
                labelExpr="split(datum.label, ', ')",
                labelPadding=20,
                domain=False,
                ticks=False,
            ),
        ),
        y=alt.Y("rules:N", sort=rows, title=None, axis=alt.Axis(domain=False, ticks=False)),
    )
    colour = alt.Color("equal:N", legend=None, scale=alt.Scale(domain=["True", "False"], range=[SKY, ORANGE]))
    cells = base.mark_rect(cornerRadius=3, xOffset=1, x2Offset=-1, yOffset=1, y2Offset=-1).encode(
        color=colour
    )
    words = base.mark_text(aria=False, fontSize=12, color="black").encode(text="says:N")
    equal = int((frame["max_abs"] == 0).sum())
    chart = alt.layer(cells, words).properties(width=cell * len(columns), height=30 * len(rows))
    return finish(chart, f"{equal} of {len(frame)} runs have the alone run's bits.", title)


def reach(data: dict[str, Records], *, width: int = 430, title: str = "") -> Chart:
    """How far logits moved, above how far they'd have to move to change each seed's token: one axis for both.

    Parameters
    ----------
    data : dict
        As `reach_data` makes it.
    """
    scale = alt.Scale(type="log", domain=[LOW, HIGH], nice=False)
    ticks: dict[str, Any] = {"format": ".0e", "values": [1e-6, 1e-4, 1e-2, 1], "grid": True}
    ticks["labelExpr"] = "datum.value == 1 ? '1' : datum.label"
    above = alt.Axis(**ticks, labels=False, ticks=False, title=None)
    below = alt.Axis(**ticks)
    bars = (
        alt.Chart(named("moved", data["moved"]))
        .mark_rect(color=GREEN, stroke=TEXT, strokeWidth=0.5)
        .encode(
            x=alt.X("low:Q", scale=scale, axis=above),
            x2="high:Q",
            y=alt.Y("share:Q", title="share of logits", axis=alt.Axis(format="%", tickCount=3)),
            y2="zero:Q",
        )
    )
    says = (
        alt.Chart(named("says", data["says"]))
        .mark_text(aria=False, align="right", baseline="bottom", color=TEXT, fontSize=12)
        .encode(x=alt.value(width), y=alt.value(-6), text="says:N")
    )
    line = alt.Chart(named("line", data["line"])).mark_rule(
        color=VERMILLION, strokeDash=[4, 3], strokeWidth=2
    )
    edge = line.encode(x=alt.X("largest:Q", scale=scale))
    legend = alt.Legend(title=None, orient="bottom")
    dots = (
        alt.Chart(named("seeds", data["seeds"]))
        .mark_point(filled=True, size=55, opacity=0.9)
        .encode(
            x=alt.X("reach:Q", scale=scale, axis=below, title="difference in logits (log scale)"),
            y=alt.Y("lane:Q", title="seeds", axis=None, scale=alt.Scale(domain=[-1, 10])),
            color=alt.Color(
                "fate:N", scale=alt.Scale(domain=FATES, range=[BLUE, ORANGE, VERMILLION]), legend=legend
            ),
            shape=alt.Shape(
                "fate:N", scale=alt.Scale(domain=FATES, range=["circle", "square", "cross"]), legend=legend
            ),
            tooltip=["seed:Q", "reach:Q", "fate:N"],
        )
    )
    heads = [
        ("How far the logits moved", 110),
        ("How far they may move before a seed's token could change", 130),
    ]
    layers = ([bars, edge, says], [dots, edge])
    panels = [
        alt.layer(*some).properties(
            width=width, height=height, title=alt.TitleParams(head, fontWeight="normal")
        )
        for some, (head, height) in zip(layers, heads, strict=True)
    ]
    fates = [seed["fate"] for seed in data["seeds"]]
    counts = ", ".join(f"{fates.count(fate)} {fate}" for fate in FATES)
    sentence = f"Of {len(fates)} seeds' tokens: {counts}."
    return finish(alt.vconcat(*panels, spacing=8), sentence, title)


def reach_data(apart: Any, *, bins: int = 4) -> dict[str, Records]:
    """What `reach` draws, by the names of its data.

    Parameters
    ----------
    apart : Apart
        One run against the alone run.
    bins : int
        For each power of ten.
    """
    moved = apart.differences[apart.differences > 0]
    edges = np.geomspace(LOW, HIGH, round(bins * np.log10(HIGH / LOW)) + 1)
    counts, _ = np.histogram(np.clip(moved, LOW, HIGH * 0.999), edges)
    total = apart.differences.size
    equal = total - len(moved)
    bars = [
        {"low": float(f"{a:.3g}"), "high": float(f"{b:.3g}"), "share": round(n / total, 3), "zero": 0}
        for a, b, n in zip(edges, edges[1:], counts.tolist(), strict=False)
        if n / total >= 0.0005
    ]
    says = (
        f"equal to the bit: all {total:,}" if equal == total else f"equal to the bit: {equal:,} of {total:,}"
    )
    seeds: Records = []
    for seed, (far, could, did) in enumerate(zip(apart.reach, apart.could, apart.changed, strict=True)):
        fate = FATES[2] if did else FATES[1] if could else FATES[0]
        if np.isfinite(far):
            place = float(np.clip(far, LOW, HIGH))
            seeds.append({"seed": seed, "reach": float(f"{place:.2g}"), "fate": fate, "lane": seed % 10})
    seeds.sort(key=lambda seed: FATES.index(seed["fate"]))  # the rare ones are drawn on top
    line = [{"largest": float(f"{apart.largest:.2g}")}] if apart.largest >= LOW else []
    return {"moved": bars, "says": [{"says": says}], "line": line, "seeds": seeds}
