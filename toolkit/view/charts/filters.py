"""Chains: charts of a distribution filter by filter, what seeds draw from it, and how safe a draw is."""

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from .theme import BLUE, FONT, ORANGE, ROW, TEXT, VERMILLION, Chart, Records, finish, labels, named

GREY = "#9A9A9A"
_RANK = alt.EncodingSortField(field="rank", op="min", order="ascending")
_AXIS = alt.Axis(tickCount=3, format="~g")
_WHOLE = "datum.value % 1 ? '' : format(datum.value, ',d')"
THREAD = 0.01  # logits; a draw that a smaller error could change hangs by a thread
_LEAST, _MOST = 1e-4, 20.0  # logits, ends of the strip of draws


def stages(frame: pd.DataFrame, *, width: int = 94, title: str = "") -> Chart:
    """A distribution after each filter: a panel each, what is excluded in grey at its last length.

    Parameters
    ----------
    frame : DataFrame
        One row per stage and token: stage, token, text, p, kept; as `Stages.to_frame()` gives.
    """
    panels, sentence = [], []
    last: dict[str, float] = {}
    for place, (stage, part) in enumerate(frame.groupby("stage", sort=False)):
        lines = _lines(part)
        for line in lines:
            line["state"] = "kept" if line["kept"] else "excluded"
            line["p"] = line["p"] if line["kept"] else last.get(line["label"], 0.0)
            line["says"] = "" if line["kept"] else "✕"
            last[line["label"]] = line["p"]
        panels.append(_bars(f"stage {place}", str(stage), lines, width, first=place == 0))
        sentence.append(f"{stage}: likeliest {max(li['p'] for li in lines if li['kept']):.3f}")
    chart = alt.hconcat(*panels, spacing=10).resolve_scale(x="shared")
    return finish(chart, "The distribution after each filter. " + "; ".join(sentence) + ".", title)


def chain(data: dict[str, Records], *, seeds: int, width: int = 215, title: str = "") -> Chart:
    """A distribution before and after the chain, what seeds drew over it, and how safe each draw is.

    Parameters
    ----------
    data : dict
        As `chain_data` makes it.
    seeds : int
        How many drew.
    """
    before = _bars("before", "before the filters", data["before"], width, first=True)
    base = alt.Chart(named("after", data["after"])).encode(
        y=alt.Y("label:N", sort=_RANK, title=None, axis=None)
    )
    bars = base.mark_bar(height=ROW - 7, color=BLUE).encode(x=alt.X("p:Q", title="probability", axis=_AXIS))
    points = base.transform_filter("datum.count > 0").mark_point(
        filled=True, shape="diamond", size=70, opacity=1, color=ORANGE, stroke="black", strokeWidth=0.6
    )
    words = base.mark_text(aria=False, align="left", dx=8, fontSize=11, color=TEXT).encode(
        x="end:Q", text="says:N"
    )
    drawn = points.encode(x="share:Q", tooltip=["label:N", "count:Q", "expected:Q"])
    said = f"◆ share of {seeds:,} seed{'s' * (seeds > 1)}; drawn / expected"
    after = alt.layer(bars, drawn, words).properties(
        width=width,
        height=ROW * len(data["after"]),
        title=alt.TitleParams("after the filters", subtitle=said, subtitleFont=FONT),
    )
    top = alt.hconcat(before, after, spacing=12).resolve_scale(x="shared")
    chart = alt.vconcat(top, _strip(data["threads"], 2 * width + 12), spacing=14)
    *shown, _ = data["before"]  # the last line is all others
    kept = sum(line["state"] == "kept" for line in shown)
    sentence = f"Before and after the filters: {kept} of {len(shown)} tokens shown are kept."
    return finish(chart.resolve_scale(color="independent", shape="independent"), sentence, title)


def chain_data(
    ids: np.ndarray,
    texts: list[str],
    before: np.ndarray,
    after: np.ndarray,
    removed: list[str],
    drawn: np.ndarray,
    threads: pd.DataFrame,
) -> dict[str, Records]:
    """What `chain` draws: "before", "after" and "threads".

    Parameters
    ----------
    ids, texts
        Tokens shown, in order.
    before, after : [vocab]
        Probabilities.
    removed : list of str
        The filter that excluded each token shown, or "".
    drawn : int array, [seeds]
        Tokens.
    threads : DataFrame
        One row a seed: seed, text, max_drift (NaN where only one token was left).
    """
    names, total = labels(ids, texts), len(drawn)
    count = {int(i): int((drawn == i).sum()) for i in ids}
    left, right = [], []
    for rank, (id, name, gone) in enumerate(zip(ids, names, removed, strict=True)):
        p, now, seen = float(before[id]), float(after[id]), count[int(id)]
        state = "excluded" if gone else "kept"
        left.append({"rank": rank, "label": name, "p": round(p, 4), "state": state, "says": gone})
        right.append(_drawn(rank, name, now, seen, total))
    shown = np.asarray(ids)
    others = int((after > 0).sum() - (after[shown] > 0).sum())
    name = f"{others:,} others" if others else "others"
    rest = float(1 - before[shown].sum()), max(0.0, float(1 - after[shown].sum()))
    left.append(
        {"rank": len(ids), "label": name, "p": 0.0, "state": "kept", "says": f"{rest[0]:.3f} in all others"}
    )
    seen = total - sum(count.values())
    line = _drawn(len(ids), name, rest[1] if others else 0.0, seen, total)
    said = f"{rest[1]:.3f} in all others: {line['says']}" if others else "none left"
    right.append({**line, "p": 0.0, "end": 0.0, "share": 0.0, "count": 0, "says": said})
    return {"before": left, "after": right, "threads": _safety(threads)}


def _safety(threads: pd.DataFrame) -> Records:
    """How many draws are how safe, in tenths of a decade; the least safe one by name."""
    near = threads.dropna(subset=["max_drift"]).sort_values("max_drift")
    tenths = np.round(10 * np.log10(np.clip(near["max_drift"], _LEAST, _MOST)))
    out: Records = []
    for tenth in sorted(set(tenths)):
        some = near[tenths == tenth]
        word = labels([0], [some["text"].iloc[0]])[0]
        says = "" if out else f"seed {some['seed'].iloc[0]}: {word}"
        drift = float(f"{10 ** (tenth / 10):.2g}")
        out.append({"drift": drift, "draws": len(some), "says": says, "thread": drift < THREAD})
    return out


def _drawn(rank: int, name: str, p: float, seen: int, total: int) -> dict[str, Any]:
    expected, share = p * total, seen / total
    says = f"{seen:,} / {expected:,.1f}" if p > 0 else ""
    return {
        "rank": rank, "label": name, "p": round(p, 4), "share": round(share, 4), "count": seen,
        "expected": round(expected, 1), "end": round(max(p, share), 4), "says": says,
    }  # fmt: skip


def _lines(part: pd.DataFrame) -> Records:
    shown = part[part["token"] >= 0]
    names = labels(shown["token"], shown["text"])
    told = zip(names, shown["p"], shown["kept"], strict=True)
    return [
        {"rank": r, "label": n, "p": round(float(p), 4), "kept": bool(k)} for r, (n, p, k) in enumerate(told)
    ]


def _bars(name: str, heading: str, lines: Records, width: int, *, first: bool) -> Chart:
    """Bars, blue where a token is kept, grey with a word where it is excluded."""
    axis = alt.Axis(ticks=False, domain=False) if first else None
    base = alt.Chart(named(name, lines)).encode(y=alt.Y("label:N", sort=_RANK, title=None, axis=axis))
    x = alt.X("p:Q", title="probability", axis=_AXIS)
    scale = alt.Scale(domain=["kept", "excluded"], range=[BLUE, GREY])
    bars = base.mark_bar(height=ROW - 7).encode(
        x=x,
        color=alt.Color("state:N", scale=scale, legend=None),
        opacity=alt.condition("datum.state == 'kept'", alt.value(1), alt.value(0.55)),
    )
    words = base.mark_text(aria=False, align="left", dx=5, fontSize=11, color=TEXT).encode(x=x, text="says:N")
    return alt.layer(bars, words).properties(width=width, height=ROW * len(lines), title=heading)


def _strip(bins: Records, width: int) -> Chart:
    """Draws along a log axis of the logit error that could change them."""
    scale = alt.Scale(type="log", domain=[_LEAST, _MOST], nice=False)
    x = alt.X(
        "drift:Q", title="smallest logit error that could change the draw (log scale)", scale=scale,
        axis=alt.Axis(values=[1e-4, 1e-3, 1e-2, 0.1, 1, 10], format="~g"),
    )  # fmt: skip
    y = alt.Y("draws:Q", title="draws", axis=alt.Axis(tickCount=2, labelExpr=_WHOLE))
    base = alt.Chart(named("threads", bins)).encode(x=x)
    colour = alt.condition("datum.thread", alt.value(VERMILLION), alt.value(BLUE))
    bars = base.mark_bar(width=max(4, width / 62)).encode(y=y, color=colour)
    words = base.mark_text(aria=False, dy=-9, fontSize=11, color=TEXT).encode(y=y, text="says:N")
    rule = alt.Chart(named("edge", [{"drift": THREAD}])).mark_rule(aria=False, color=TEXT, strokeDash=[4, 3])
    said = "left of the dashed line they hang by a thread"
    heading = alt.TitleParams("how safe the draws are", subtitle=said)
    return alt.layer(bars, words, rule.encode(x=x)).properties(width=width, height=56, title=heading)
