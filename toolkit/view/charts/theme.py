"""Theme: the colours, sizes and number formats that every chart shares.

Charts stand on a transparent page with mid-grey text, so that one stored picture reads in JupyterLab's
light and dark themes alike. Colours are Okabe and Ito's, which stay apart for colour-blind readers; no
chart relies on them alone, and each gives a shape, a place or a word as well.
"""

import json
from typing import Any, TypeAlias

import altair as alt
import pandas as pd

from ...token_labels import labels as labels

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
TEXT = "#808080"  # 3.9 : 1 on white and 4.8 : 1 on JupyterLab's dark page
# A single, layered or concatenated chart. Altair's own annotations refuse much that its manual recommends.
Chart: TypeAlias = Any
Records: TypeAlias = list[dict[str, Any]]
ROW = 20  # height of a row of bars, in points
FAINT = "#80808055"
PALETTE = [ORANGE, SKY, GREEN, PURPLE, YELLOW, BLUE, VERMILLION]
# The same hues, lighter, for more categories than the palette has; a label distinguishes each pair.
TINTS = ["#FFD98A", "#BFE1F6", "#8FD9C4", "#EFCFE1", "#FAF6BE", "#9CC3E2", "#F2BD98"]
# Text drawn on top of a palette colour: black, but white on the two dark ones.
ON_DARK = [BLUE, VERMILLION]
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"

_AXIS = {
    "labelColor": TEXT,
    "titleColor": TEXT,
    "tickColor": TEXT,
    "domainColor": TEXT,
    "gridColor": FAINT,
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": "normal",
    "labelFont": FONT,
    "titleFont": FONT,
    "grid": False,
    "labelLimit": 140,
}
CONFIG = {
    "background": "transparent",
    "font": FONT,
    "view": {"stroke": None},
    "axis": _AXIS,
    "header": {"labelColor": TEXT, "titleColor": TEXT, "labelFontSize": 12, "titleFontSize": 12},
    "legend": {
        "labelColor": TEXT,
        "titleColor": TEXT,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "symbolStrokeWidth": 2,
    },
    "title": {
        "color": TEXT,
        "subtitleColor": TEXT,
        "fontSize": 13,
        "subtitleFontSize": 12,
        "fontWeight": "bold",
        "anchor": "start",
        "frame": "group",
    },
    "text": {"color": TEXT, "fontSize": 12, "font": FONT},
    "range": {"category": PALETTE},
}


def finish(chart: Chart, description: str, title: str = "", subtitle: str = "") -> Chart:
    """Give a chart the shared look, its title and its text alternative; every chart function ends here."""
    if title:
        chart = chart.properties(title=alt.TitleParams(title, subtitle=subtitle or alt.Undefined))
    return chart.properties(description=description, padding=4).configure(**CONFIG)


def named(name: str, lines: pd.DataFrame | Records) -> alt.InlineData:
    """Data under a name of its own, by which an explorer replaces them."""
    if isinstance(lines, pd.DataFrame):
        lines = json.loads(lines.to_json(orient="records", double_precision=15))
    return alt.InlineData(values=lines, name=name)


def significant(frame: pd.DataFrame, *names: str, digits: int = 2) -> pd.DataFrame:
    """A copy with the named columns rounded to a number of significant digits (NaN and 0 stay)."""

    def rounded(x: float) -> float:
        return float(f"{float(x):.{digits}g}")

    return frame.assign(**{name: frame[name].map(rounded) for name in names})
