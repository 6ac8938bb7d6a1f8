"""Seeds: charts of what seeds do to a first token, its distribution and its matrix over two seeds.

Everything that depends on the numbers (order, colours, words) travels with the data, so that the picture of
another composition is the same specification over other rows.
"""

from collections.abc import Iterable
from typing import Any

import altair as alt
import pandas as pd

from .theme import BLUE, ON_DARK, ORANGE, PALETTE, ROW, TEXT, TINTS, Chart, Records, finish, labels, named

REST = "all other tokens"
SPARSE = alt.Axis(tickCount=4)
_RANK = alt.EncodingSortField(field="rank", op="min", order="ascending")


def first_tokens(
    distribution: pd.DataFrame,
    observed: pd.DataFrame | None = None,
    *,
    top: int = 12,
    width: int = 150,
    outline: bool = False,
    title: str = "",
) -> Chart:
    """The exact distribution of a first token, beside what was drawn from it.

    Parameters
    ----------
    distribution : DataFrame
        One row per token: token, text, p (after the filters), p_raw (before them), kept (bool). A row of
        token -1 stands for tokens added up beforehand.
    observed : DataFrame, optional
        One row per draw: policy, token; a panel per policy.
    top : int
        Tokens shown; the others are added up in one last bar.
    outline : bool
        Have room for the unfiltered distribution also where it is the same.
    """
    data = first_tokens_data(distribution, observed, top=top)
    exact = data.pop("exact")
    filtered = outline or any(line["before"] is not None for line in exact)
    base = alt.Chart(named("exact", exact)).encode(y=alt.Y("label:N", sort=_RANK, title=None))
    x = alt.X("p:Q", title="probability (dashed: unfiltered)" if filtered else "probability", axis=SPARSE)
    bars = base.mark_bar(height=ROW - 7, color=BLUE).encode(x=x)
    before = base.transform_filter("isValid(datum.before)").mark_bar(
        filled=False, stroke=TEXT, strokeDash=[2, 2], strokeWidth=1, height=ROW - 7
    )
    layers = alt.layer(bars, before.encode(x=alt.X("before:Q"))) if filtered else bars
    panels = [layers.properties(width=width, height=ROW * len(exact), title="exact")]
    sentence = (
        f"Exact first-token distribution; the likeliest is {exact[0]['label']!r} at {exact[0]['p']:.3f}."
    )
    drawn = {} if observed is None else observed.groupby("policy")["token"].nunique().to_dict()
    for name, lines in data.items():
        panels.append(_drawn(name, lines, width))
        seeds = sum(line["count"] for line in lines)
        distinct = drawn[name]
        sentence += f" Under {name}, {seeds} seeds gave {distinct} distinct token{'s' * (distinct > 1)}."
    if observed is None:
        return finish(panels[0].properties(title=title or "exact"), sentence)
    return finish(alt.hconcat(*panels, spacing=14), sentence, title)


def first_tokens_data(
    distribution: pd.DataFrame, observed: pd.DataFrame | None = None, *, top: int = 12
) -> dict[str, Records]:
    """What `first_tokens` draws: "exact", and one list per policy."""
    exact = _shown(distribution, top)
    data = {"exact": exact}
    if observed is not None:
        for policy, draws in observed.groupby("policy", sort=False):
            data[str(policy)] = _counted(exact, draws["token"])
    return data


def _shown(distribution: pd.DataFrame, top: int) -> Records:
    """The likeliest tokens, kept ones first, with labels, and one line for all the others."""
    lines = distribution[["token", "text", "p", "p_raw", "kept"]].to_dict("records")
    # Ties at the printed precision go by id, so that the order doesn't hang on a logit's last bit.
    lines.sort(key=lambda t: (t["token"] < 0, -round(t["p"], 3), -round(t["p_raw"], 3), t["token"]))
    head, rest = [t for t in lines[:top] if t["token"] >= 0], [t for t in lines[top:]]
    rest += [t for t in lines[:top] if t["token"] < 0]
    names = labels([t["token"] for t in head], [t["text"] for t in head])
    out = [(t["token"], name, t["p"], t["p_raw"]) for t, name in zip(head, names, strict=True)]
    if rest:
        out.append((-1, REST, sum(t["p"] for t in rest), sum(t["p_raw"] for t in rest)))
    changed = any(round(p, 3) != round(raw, 3) for _, _, p, raw in out)
    return [
        {
            "rank": rank,
            "token": int(token),
            "label": label,
            "p": round(float(p), 3),
            "before": round(float(raw), 3) if changed else None,
        }
        for rank, (token, label, p, raw) in enumerate(out)
    ]


def _counted(exact: Records, tokens: Iterable[int]) -> Records:
    shown = {line["token"] for line in exact}
    count: dict[int, int] = {}
    for token in tokens:
        token = int(token) if token in shown else -1
        count[token] = count.get(token, 0) + 1
    total = max(1, sum(count.values()))
    return [
        {
            "rank": line["rank"],
            "label": line["label"],
            "p": line["p"],
            "count": count.get(line["token"], 0),
            "share": round(count.get(line["token"], 0) / total, 3),
            "end": max(round(count.get(line["token"], 0) / total, 3), line["p"]),  # of bar and tick
        }
        for line in exact
    ]


def _drawn(policy: str, lines: Records, width: int) -> Chart:
    """One policy's panel: bars of what was drawn, a tick where the exact distribution puts it."""
    base = alt.Chart(named(policy, lines)).encode(y=alt.Y("label:N", sort=_RANK, title=None, axis=None))
    x = alt.X("share:Q", title="share of seeds (tick: exact)", axis=SPARSE)
    bars = base.mark_bar(color=ORANGE, height=ROW - 7).encode(x=x, tooltip=["label:N", "count:Q", "p:Q"])
    possible = base.transform_filter("datum.p > 0")
    ticks = possible.mark_tick(aria=False, color=BLUE, thickness=2, height=ROW - 3, opacity=1).encode(x="p:Q")
    seen = base.transform_filter("datum.count > 0")
    words = seen.mark_text(aria=False, align="left", dx=5, color=TEXT).encode(x="end:Q", text="count:Q")
    return alt.layer(bars, ticks, words).properties(width=width, height=ROW * len(lines), title=policy)


def reading(matrix: pd.DataFrame) -> str:
    """What one policy's seed matrix shows, in words."""
    if matrix["token"].nunique() == 1:
        return "one token everywhere: neither seed moved it"
    rows = bool((matrix.groupby("seed")["token"].nunique() == 1).all())
    columns = bool((matrix.groupby("sibling_seed")["token"].nunique() == 1).all())
    if rows:
        return f"every row is constant: only {matrix['row'].iloc[0]}'s own seed counts"
    if columns:
        return f"every column is constant: only {matrix['sibling'].iloc[0]}'s seed counts"
    return "both seeds count"


def seed_matrix(frame: pd.DataFrame, *, columns: int = 2, subtitles: bool = True, title: str = "") -> Chart:
    """A row's first token, for its own seed (down) and a sibling's (across), a panel per policy.

    Parameters
    ----------
    frame : DataFrame
        One row per cell: policy, row, sibling, seed, sibling_seed, token, text.
    columns : int
        Panels side by side.
    subtitles : bool
        Say over each panel what it shows.
    """
    axis = alt.Axis(labelAngle=0, ticks=False, domain=False, labelPadding=5)
    me, sibling = frame["row"].iloc[0], frame["sibling"].iloc[0]
    data = seed_matrix_data(frame)
    longest = max(len(line["label"]) for lines in data.values() for line in lines)
    cell = max(34, 6 * longest + 2)  # two panels of six seeds fit beside each other on a narrow page
    panels, sentence = [], []
    for place, (policy, part) in enumerate(frame.groupby("policy", sort=False)):
        said = reading(part)
        sentence.append(f"{policy}: {said}")
        base = alt.Chart(named(str(policy), data[str(policy)])).encode(
            x=alt.X("sibling_seed:O", title=f"{sibling}'s seed", axis=axis),
            y=alt.Y("seed:O", title=None if place % columns else f"{me}'s own seed", axis=axis),
        )
        cells = base.mark_rect(stroke="#80808080").encode(
            color=alt.Color("fill:N", scale=None), tooltip="label:N"
        )
        words = base.mark_text(aria=False, fontSize=10).encode(
            text="label:N", color=alt.Color("ink:N", scale=None)
        )
        panels.append(
            alt.layer(cells, words).properties(
                width=cell * part["sibling_seed"].nunique(),
                height=(ROW + 2) * part["seed"].nunique(),
                title=alt.TitleParams(str(policy), subtitle=said if subtitles else alt.Undefined),
            )
        )
    chart = alt.concat(*panels, columns=columns, spacing=18)
    return finish(chart, "First token by own and sibling's seed. " + "; ".join(sentence) + ".", title)


def seed_matrix_data(frame: pd.DataFrame) -> dict[str, Records]:
    """What `seed_matrix` draws: one list per policy."""
    names = labels(frame["token"], frame["text"], limit=7)
    count: dict[str, int] = {}
    for name in names:
        count[name] = count.get(name, 0) + 1
    # The commonest tokens get the palette's colours, then its tints, the rest grey; the word always tells.
    common = sorted(count, key=lambda name: (-count[name], name))
    fill: dict[str, Any] = dict(zip(common, PALETTE + TINTS, strict=False))
    data: dict[str, Records] = {}
    columns = (frame[c] for c in ("policy", "seed", "sibling_seed"))
    for policy, seed, theirs, name in zip(*columns, names, strict=True):
        colour = fill.get(name, "#9A9A9A")
        ink = "white" if colour in ON_DARK else "black"
        line = {"seed": int(seed), "sibling_seed": int(theirs), "label": name, "fill": colour, "ink": ink}
        data.setdefault(str(policy), []).append(line)
    return data
