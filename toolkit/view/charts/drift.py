"""Drifts: charts of how far logits moved, and how far each token was from being another one."""

import altair as alt
import pandas as pd

from .theme import BLUE, PALETTE, TEXT, VERMILLION, Chart, finish, labels, named, significant


def drift(frame: pd.DataFrame, *, width: int = 380, title: str = "") -> Chart:
    """Largest and typical logit difference of each composition against the request alone.

    Parameters
    ----------
    frame : DataFrame
        One row per run: composition, forward, invariant, max_abs, mean_abs (in logits), flips, draws.
    """
    frame = significant(frame, "max_abs", "mean_abs")
    moved = frame.loc[frame["max_abs"] > 0, ["max_abs", "mean_abs"]]
    low = float(moved[moved > 0].min().min()) / 4 if len(moved) else 1e-8
    # A difference of exactly 0 has no place on a log axis: it stands at the left edge, with a word.
    frame = frame.assign(
        run=frame["forward"] + ["; invariant" * bool(i) for i in frame["invariant"]],
        largest=frame["max_abs"].clip(lower=low),
        typical=frame["mean_abs"].clip(lower=low),
        says=["equal bits" if m == 0 else f"{m:.1g}".replace("e-0", "e-") for m in frame["max_abs"]],
    )
    runs, order = list(dict.fromkeys(frame["run"])), list(dict.fromkeys(frame["composition"]))
    x = alt.X(
        "largest:Q",
        title="difference in logits (log scale)",
        axis=alt.Axis(format=".0e", tickCount=4),
        scale=alt.Scale(type="log", domainMin=low, nice=False),
    )
    y = alt.Y("composition:N", sort=order, title=None, axis=alt.Axis(grid=True, labelLimit=220))
    offset = alt.YOffset("run:N", sort=runs)
    shapes = ["circle", "square", "triangle-up", "diamond", "cross"]
    legend = alt.Legend(title=None, orient="top")
    colour = alt.Color("run:N", scale=alt.Scale(domain=runs, range=PALETTE[: len(runs)]), legend=legend)
    base = alt.Chart(named("runs", frame)).encode(y=y, yOffset=offset)
    lines = base.mark_rule(strokeWidth=2).encode(x="typical:Q", x2="largest:Q", color=colour)
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, color=colour, shape=alt.Shape("run:N", scale=alt.Scale(domain=runs, range=shapes[: len(runs)]))
    )
    words = base.mark_text(aria=False, align="left", dx=8, fontSize=11, color=TEXT).encode(x=x, text="says:N")
    equal = int((frame["max_abs"] == 0).sum())
    sentence = (
        f"{equal} of {len(frame)} runs have the alone run's bits; the largest difference is "
        f"{frame['max_abs'].max():.1g} logits."
    )
    height = max(26, 17 * len(runs)) * len(order)
    return finish(alt.layer(lines, points, words).properties(width=width, height=height), sentence, title)


def margins(frame: pd.DataFrame, drift: float | None = None, *, width: int = 460, title: str = "") -> Chart:
    """How far each token was from being another one, against the drift that was measured.

    Parameters
    ----------
    frame : DataFrame
        One row per generated token: id, index, text, max_drift (in logits; NaN where undefined).
    drift : float, optional
        A largest logit difference; tokens to its left could flip.
    """
    frame = significant(frame.dropna(subset=["max_drift"]), "max_drift")
    frame = frame[frame["max_drift"] > 0]
    frame = frame.assign(
        label=labels(range(len(frame)), frame["text"]),
        safe=["safe" if drift is None or m > drift else "could flip" for m in frame["max_drift"]],
    )
    low = float(min([*frame["max_drift"], drift or 1.0])) / 3
    x = alt.X(
        "max_drift:Q",
        title="smallest logit error that could change the token (log scale)",
        axis=alt.Axis(format=".0e", tickCount=5),
        scale=alt.Scale(type="log", domainMin=low, nice=False),
    )
    domain, colours = ["safe", "could flip"], [BLUE, VERMILLION]
    legend = alt.Legend(title=None, orient="top") if drift else None
    points = (
        alt.Chart(named("tokens", frame))
        .mark_point(filled=True, size=70, opacity=0.8)
        .encode(
            x=x,
            y=alt.Y("id:N", title=None, axis=alt.Axis(grid=True)),
            color=alt.Color("safe:N", scale=alt.Scale(domain=domain, range=colours), legend=legend),
            shape=alt.Shape(
                "safe:N", scale=alt.Scale(domain=domain, range=["circle", "triangle-up"]), legend=legend
            ),
            tooltip=["label:N", "index:Q", "max_drift:Q"],
        )
    )
    layers: list[Chart] = [points]
    if drift:
        line = pd.DataFrame({"drift": [float(f"{drift:.2g}")], "says": ["measured drift"]})
        base = alt.Chart(named("drift", line))
        layers.append(base.mark_rule(color=VERMILLION, strokeDash=[4, 3], strokeWidth=2).encode(x="drift:Q"))
        layers.append(
            base.mark_text(aria=False, align="left", dx=5, baseline="top", color=TEXT).encode(
                x="drift:Q", y=alt.value(2), text="says:N"
            )
        )
    flips = int((frame["safe"] == "could flip").sum())
    sentence = f"{len(frame)} tokens" + (f"; {flips} could flip under the measured drift." if drift else ".")
    height = 34 * max(1, frame["id"].nunique())
    return finish(alt.layer(*layers).properties(width=width, height=height), sentence, title)
