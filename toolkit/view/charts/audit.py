"""Audits: a chart of an audit's answers, token by token: how many pairs are still the same."""

import altair as alt
import pandas as pd

from .theme import BLUE, ROW, TEXT, VERMILLION, YELLOW, Chart, Records, finish, named

_SAME = {"all the same": BLUE, "some differ": YELLOW, "all differ": VERMILLION}
# A sign for each verdict, drawn as a path: few fonts have a check mark.
_VERDICTS = {"kept": "M-1,0L-0.3,0.8L1,-0.8", "broken": "M-1,-1L1,1M-1,1L1,-1", "not testable": "M-1,0L1,0"}
_ROOM = 24  # for the sign, between a row's label and its cells
_SHOWN = 16  # tokens


def audit(frame: pd.DataFrame, checks: pd.DataFrame, *, title: str = "") -> Chart:
    """Checks down, tokens along; a cell shows how many pairs of answers are equal up to that token.

    Equal answers are good in some rows and bad in others, so a verdict is no colour but a sign and a word.

    Parameters
    ----------
    frame : DataFrame
        One line per pair: check, compared, first; as `Audit.to_frame()` gives.
    checks : DataFrame
        One line per check: name, verdict, expects, promise; as `Audit.summary()` gives.
    """
    # Where seeds count, different answers are what a check wants; a word in its name says so.
    names = {
        name: f"{name.replace('_', ' ')}{' (must differ)' * (expects == 'different')}: {verdict}"
        for name, verdict, expects in zip(checks["name"], checks["verdict"], checks["expects"], strict=True)
        if name != "answered"
    }
    order = list(names.values())
    verdicts = [
        {"check": names[name], "verdict": verdict}
        for name, verdict in zip(checks["name"], checks["verdict"], strict=True)
        if name in names
    ]
    cells = audit_data(frame, names)
    x = alt.X(
        "token:O", title="token of the answer (0 is the first)", axis=alt.Axis(labelAngle=0, ticks=False)
    )
    weight = {
        "condition": {"test": "indexof(datum.label, ': broken') > 0", "value": "bold"},
        "value": "normal",
    }
    y = alt.Y("check:N", sort=order, scale=alt.Scale(domain=order), title=None,
              axis=alt.Axis(ticks=False, domain=False, labelLimit=300, labelPadding=_ROOM,
                            labelFontWeight=weight))  # fmt: skip
    base = alt.Chart(named("audit", cells)).encode(x=x, y=y)
    colours = alt.Scale(domain=list(_SAME), range=list(_SAME.values()))
    boxes = base.mark_rect(stroke=TEXT, strokeWidth=0.5).encode(
        color=alt.Color("says:N", scale=colours, legend=alt.Legend(title=None, orient="top")),
        tooltip=["check:N", "token:O", "same:Q", "of:Q"],
    )
    ink = alt.condition("datum.says == 'some differ'", alt.value("black"), alt.value("white"))
    words = base.mark_text(aria=False, fontSize=11).encode(text="share:N", color=ink)
    signs = alt.Chart(named("verdicts", verdicts)).mark_point(
        aria=False, filled=False, stroke=TEXT, strokeWidth=2, size=90, opacity=1
    )
    shapes = alt.Scale(domain=list(_VERDICTS), range=list(_VERDICTS.values()))
    shape = alt.Shape("verdict:N", scale=shapes, legend=None)
    signs = signs.encode(y=y, x=alt.value(-_ROOM / 2), shape=shape)
    width = 40 * max(1, len({cell["token"] for cell in cells}))
    chart = alt.layer(boxes, words, signs).properties(width=width, height=ROW * len(order))
    # What the picture shows: `answered` has no tokens to compare, so no row.
    counts = checks.loc[checks["promise"] & checks["name"].isin(list(names)), "verdict"].value_counts()
    said = ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in _VERDICTS)
    answered = "".join(
        f" Not drawn: answered, {v}." for v in checks.loc[checks["name"] == "answered", "verdict"]
    )
    return finish(chart, f"Of {counts.sum()} checks of the promise: {said}.{answered}", title)


def audit_data(frame: pd.DataFrame, names: dict[str, str]) -> Records:
    """What `audit` draws: for each check and token, the pairs that agree up to it, and of how many."""
    cells: Records = []
    for check, part in frame[frame["check"].isin(list(names))].groupby("check", sort=False):
        ends = [compared if pd.isna(first) else int(first) for compared, first in
                zip(part["compared"], part["first"], strict=True)]  # fmt: skip
        for token in range(min(_SHOWN, int(part["compared"].max()))):
            # A pair that ended alike before this token has not come to differ.
            same = sum(pd.isna(f) or end > token for end, f in zip(ends, part["first"], strict=True))
            says = list(_SAME)[0 if same == len(part) else 1 if same else 2]
            cells.append({"check": names[str(check)], "token": token, "same": same, "of": len(part),
                          "share": f"{same}/{len(part)}", "says": says})  # fmt: skip
    return cells
