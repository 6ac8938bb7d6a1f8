"""Charts: a function from a documented table to an Altair chart, with no state and no model.

Studies make the tables, `figure` shows the charts, `explorers` redraws them. Each function rounds what it
draws, so that a stored picture does not depend on the last bits of a logit, and says in one sentence, its
text alternative, what the picture shows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from .theme import (
    BLUE,
    GREEN,
    ON_DARK,
    ORANGE,
    PALETTE,
    ROW,
    TEXT,
    VERMILLION,
    Chart,
    decimals,
    finish,
    labels,
    significant,
)
from .timeline import timeline

__all__ = ["drift", "first_tokens", "margins", "plan", "plan_table", "reading", "seed_matrix", "timeline"]
SPARSE = alt.Axis(tickCount=4)
REST = "all other tokens"


def first_tokens(
    distribution: pd.DataFrame,
    observed: pd.DataFrame | None = None,
    *,
    top: int = 12,
    width: int = 165,
    title: str = "",
) -> Chart:
    """The exact distribution of a first token, beside what was drawn from it.

    Parameters
    ----------
    distribution : DataFrame
        One row per token: token, text, p (after the filters), p_raw (before them), kept (bool).
    observed : DataFrame, optional
        One row per draw: policy, token; a panel per policy.
    top : int
        Tokens shown; the others are added up in one last bar.
    """
    shown, order = _shown(distribution, top)
    shown = decimals(shown, p=3, p_raw=3)
    y = alt.Y("label:N", sort=order, title=None)
    filtered = not shown["kept"].all()
    base = alt.Chart(shown).encode(y=y)
    raw = base.mark_bar(filled=False, stroke=TEXT, strokeDash=[2, 2], strokeWidth=1, height=ROW - 7).encode(
        x=alt.X("p_raw:Q", title="probability", axis=SPARSE)
    )
    bars = base.mark_bar(height=ROW - 7).encode(
        x=alt.X("p:Q", title="probability", axis=SPARSE), color=alt.value(BLUE)
    )
    heading = "exact (dashed: before filters)" if filtered else "exact"
    panels = [
        alt.layer(*([raw, bars] if filtered else [bars])).properties(
            width=width, height=ROW * len(order), title=heading
        )
    ]
    sentence = f"Exact first-token distribution; the likeliest is {order[0]!r} at {shown['p'].iloc[0]:.3f}."
    if observed is not None:
        for policy, draws in observed.groupby("policy", sort=False):
            panels.append(_drawn(shown, order, draws, str(policy), width))
            seen = draws["token"].nunique()
            sentence += f" Under {policy}, {len(draws)} seeds gave {seen} distinct token{'s' * (seen > 1)}."
    if len(panels) == 1:
        return finish(panels[0].properties(title=title or heading), sentence)
    return finish(alt.hconcat(*panels, spacing=14), sentence, title)


def _shown(distribution: pd.DataFrame, top: int) -> tuple[pd.DataFrame, list[str]]:
    """The likeliest tokens, kept ones first, with labels, and one row for all the others."""
    # Ties at the printed precision go by id, so that the order doesn't hang on a logit's last bit.
    table = decimals(distribution, p=3, p_raw=3).sort_values(
        ["p", "p_raw", "token"], ascending=[False, False, True], kind="stable"
    )
    exact = distribution.loc[table.index]
    head = exact.head(top)[["token", "text", "p", "p_raw", "kept"]]
    head = head.assign(label=labels(head["token"], head["text"]))
    rest = exact.iloc[top:]
    if len(rest):
        other = {
            "token": -1,
            "text": "",
            "p": rest["p"].sum(),
            "p_raw": rest["p_raw"].sum(),
            "kept": True,
            "label": REST,
        }
        head = pd.concat([head, pd.DataFrame([other])], ignore_index=True)
    return head, list(head["label"])


def _drawn(shown: pd.DataFrame, order: list[str], draws: pd.DataFrame, policy: str, width: int) -> Chart:
    """One policy's panel: bars of what was drawn, a tick where the exact distribution puts it."""
    name = dict(zip(shown["token"], shown["label"], strict=True))
    count = draws["token"].map(lambda token: name.get(token, REST)).value_counts()
    table = shown.assign(count=[int(count.get(label, 0)) for label in order], draws=len(draws))
    table = decimals(table.assign(share=table["count"] / len(draws)), share=3)
    base = alt.Chart(table).encode(y=alt.Y("label:N", sort=order, title=None, axis=None))
    axis = f"share of {len(draws)} seeds"
    x = alt.X("share:Q", title=axis, axis=SPARSE)
    bars = base.mark_bar(color=ORANGE, height=ROW - 7).encode(x=x)
    possible = base.transform_filter("datum.p > 0")
    ticks = possible.mark_tick(color=BLUE, thickness=2, height=ROW - 3).encode(x=alt.X("p:Q", title=axis))
    words = (
        base.transform_filter("datum.count > 0")
        .mark_text(align="left", dx=5, color=TEXT)
        .encode(x=x, text="count:Q")
    )
    return alt.layer(bars, ticks, words).properties(width=width, height=ROW * len(order), title=policy)


def reading(matrix: pd.DataFrame) -> str:
    """What one policy's seed matrix shows, in words."""
    if matrix["token"].nunique() == 1:
        return "one token everywhere: neither seed moved it"
    rows = bool((matrix.groupby("seed")["token"].nunique() == 1).all())
    columns = bool((matrix.groupby("sibling_seed")["token"].nunique() == 1).all())
    if rows:
        return "every row is constant: only my own seed counts"
    return "every column is constant: only the sibling's seed counts" if columns else "both seeds count"


def seed_matrix(frame: pd.DataFrame, *, columns: int = 2, title: str = "") -> Chart:
    """My first token, for my own seed (down) and a sibling's (across), a panel per policy.

    Parameters
    ----------
    frame : DataFrame
        One row per cell: policy, row, sibling, seed, sibling_seed, token, text.
    """
    frame = frame.assign(label=labels(frame["token"], frame["text"], limit=7))
    # The commonest tokens get the palette's colours, the rest grey; the word in the cell always tells.
    common = sorted(frame["label"].value_counts().items(), key=lambda item: (-item[1], item[0]))
    domain = [label for label, _ in common[: len(PALETTE)]]
    frame = frame.assign(colour=frame["label"].map(lambda label: label if label in domain else "others"))
    scale = alt.Scale(domain=[*domain, "others"], range=[*PALETTE[: len(domain)], "#9A9A9A"])
    dark = [label for label, colour in zip(domain, PALETTE, strict=False) if colour in ON_DARK]
    on_dark = alt.FieldOneOfPredicate("label", dark)
    cell = min(56, max(34, 6 * int(frame["label"].str.len().max()) + 8))
    axis = alt.Axis(labelAngle=0, ticks=False, domain=False, labelPadding=5)
    panels, sentence = [], []
    for policy, part in frame.groupby("policy", sort=False):
        me, sibling = str(part["row"].iloc[0]), str(part["sibling"].iloc[0])
        base = alt.Chart(part).encode(
            x=alt.X("sibling_seed:O", title=f"{sibling}'s seed", axis=axis),
            y=alt.Y("seed:O", title=f"{me}'s own seed", axis=axis),
        )
        cells = base.mark_rect(stroke="#80808080").encode(
            color=alt.Color("colour:N", scale=scale, legend=None)
        )
        words = base.mark_text(fontSize=11).encode(
            text="label:N", color=alt.condition(on_dark, alt.value("white"), alt.value("black"))
        )
        said = reading(part)
        sentence.append(f"{policy}: {said}")
        panels.append(
            alt.layer(cells, words).properties(
                width=cell * part["sibling_seed"].nunique(),
                height=(ROW + 2) * part["seed"].nunique(),
                title=alt.TitleParams(str(policy), subtitle=said),
            )
        )
    chart = alt.concat(*panels, columns=columns, spacing=24)
    return finish(chart, "First token by own and sibling's seed. " + "; ".join(sentence) + ".", title)


def plan_table(plans: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Cohorts as a table: one line per row of each strategy's plan, as `plan` draws it.

    Parameters
    ----------
    plans : dict of str to list of Cohort
        By strategy, as `plan_cohorts` returns them.

    Returns
    -------
    DataFrame
        strategy, cohort, kind, at (place in the order of execution), row, tokens (computed for the row),
        padded (computed beyond that).
    """
    lines = []
    for strategy, cohorts in plans.items():
        at = 0
        for number, cohort in enumerate(cohorts):
            longest = max(row.remainder for row in cohort.rows)
            for row in cohort.rows:
                padded = longest - row.remainder if cohort.kind == "batched" else 0
                lines.append((strategy, number, cohort.kind, at, row.id, row.remainder, padded))
                at += 1
    return pd.DataFrame(lines, columns=["strategy", "cohort", "kind", "at", "row", "tokens", "padded"])


def plan(table: pd.DataFrame, *, width: int = 165, columns: int = 3, title: str = "") -> Chart:
    """How each strategy splits a window into cohorts, and what padding costs.

    Parameters
    ----------
    table : DataFrame
        As `plan_table` returns it.
    """
    most = int(table.groupby("strategy").size().max())
    height = max(2, min(ROW, 280 // most))
    limit = int((table["tokens"] + table["padded"]).max())
    panels, sentence = [], []
    for strategy, part in table.groupby("strategy", sort=False):
        tokens, padded = int(part["tokens"].sum()), int(part["padded"].sum())
        cohorts = part["cohort"].nunique()
        said = f"{cohorts} cohort{'s' * (cohorts != 1)}, {tokens + padded} computed for {tokens}"
        sentence.append(f"{strategy}: {said}")
        panels.append(_areas(part, limit, height, width, str(strategy), said))
    chart = alt.concat(*panels, columns=columns, spacing=18)
    return finish(chart, "Plans of one window. " + "; ".join(sentence) + ".", title)


def _areas(part: pd.DataFrame, limit: int, height: int, width: int, strategy: str, said: str) -> Chart:
    part = part.assign(end=part["tokens"] + part["padded"], group=[f"cohort {c}" for c in part["cohort"]])
    labelled = height >= 10
    name = [f"{c} · {r}" for c, r in zip(part["cohort"], part["row"], strict=True)]
    part = part.assign(place=name)
    axis = alt.Axis(ticks=False, domain=False) if labelled else None
    y = alt.Y("place:N", sort=name, title="cohort · row" if labelled else None, axis=axis)
    x = alt.X("tokens:Q", title="tokens", scale=alt.Scale(domain=[0, limit], nice=False))
    kinds = {"batched": BLUE, "sequential": ORANGE, "packed": GREEN}
    legend = alt.Legend(title="solid: tokens; dashed: padding", orient="bottom")
    colour = alt.Color(
        "kind:N", scale=alt.Scale(domain=list(kinds), range=list(kinds.values())), legend=legend
    )
    thick = max(1, height - 5)
    solid = alt.Chart(part).mark_bar(height=thick).encode(x=x, y=y, color=colour)
    padding = (
        alt.Chart(part[part["padded"] > 0])
        .mark_bar(height=thick, fillOpacity=0.15, fill=TEXT, stroke=TEXT, strokeDash=[3, 2], strokeWidth=1)
        .encode(x=x, x2="end:Q", y=y, tooltip=["row:N", "padded:Q"])
    )
    return alt.layer(solid, padding).properties(
        width=width, height=height * len(part), title=alt.TitleParams(strategy, subtitle=said)
    )


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
        says=["equal bits" if m == 0 else f"{m:.1g}" for m in frame["max_abs"]],
    )
    runs, order = list(dict.fromkeys(frame["run"])), list(dict.fromkeys(frame["composition"]))
    x = alt.X(
        "largest:Q",
        title="difference in logits (log scale)",
        axis=alt.Axis(format=".0e", tickCount=4),
        scale=alt.Scale(type="log", domainMin=low, nice=False),
    )
    y = alt.Y("composition:N", sort=order, title=None, axis=alt.Axis(grid=True))
    offset = alt.YOffset("run:N", sort=runs)
    shapes = ["circle", "square", "triangle-up", "diamond", "cross"]
    legend = alt.Legend(title=None, orient="top")
    colour = alt.Color("run:N", scale=alt.Scale(domain=runs, range=PALETTE[: len(runs)]), legend=legend)
    base = alt.Chart(frame).encode(y=y, yOffset=offset)
    lines = base.mark_rule(strokeWidth=2).encode(x="typical:Q", x2="largest:Q", color=colour)
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, color=colour, shape=alt.Shape("run:N", scale=alt.Scale(domain=runs, range=shapes[: len(runs)]))
    )
    words = base.mark_text(align="left", dx=8, fontSize=11, color=TEXT).encode(x=x, text="says:N")
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
        alt.Chart(frame)
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
        base = alt.Chart(line)
        layers.append(base.mark_rule(color=VERMILLION, strokeDash=[4, 3], strokeWidth=2).encode(x="drift:Q"))
        layers.append(
            base.mark_text(align="left", dx=5, baseline="top", color=TEXT).encode(
                x="drift:Q", y=alt.value(2), text="says:N"
            )
        )
    flips = int((frame["safe"] == "could flip").sum())
    sentence = f"{len(frame)} tokens" + (f"; {flips} could flip under the measured drift." if drift else ".")
    height = 34 * max(1, frame["id"].nunique())
    return finish(alt.layer(*layers).properties(width=width, height=height), sentence, title)
