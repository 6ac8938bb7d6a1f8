"""Plans: a chart of how each strategy splits a window into cohorts, padding drawn to scale."""

import altair as alt
import pandas as pd

from .theme import BLUE, GREEN, ORANGE, ROW, TEXT, Chart, Records, finish, named

KINDS = {"batched": BLUE, "sequential": ORANGE, "packed": GREEN}


def plan(
    table: pd.DataFrame, *, width: int = 140, columns: int = 3, subtitles: bool = True, title: str = ""
) -> Chart:
    """How each strategy splits a window into cohorts, and what padding costs.

    Parameters
    ----------
    table : DataFrame
        One line per row of each plan: strategy, cohort, kind, id, tokens (computed for it), padding
        (computed beside them); as `Plan.to_frame()` gives.
    columns : int
        Panels side by side.
    subtitles : bool
        Say over each panel what it costs.
    """
    data = plan_data(table)
    height = max(2, min(ROW, 280 // max(len(lines) for lines in data.values())))
    panels, sentence = [], []
    for strategy, part in table.groupby("strategy", sort=False):
        tokens, padding = int(part["tokens"].sum()), int(part["padding"].sum())
        cohorts = part["cohort"].nunique()
        said = f"{cohorts} cohort{'s' * (cohorts != 1)}, {tokens + padding:,} for {tokens:,}"
        sentence.append(f"{strategy}: {said}")
        heading = alt.TitleParams(str(strategy), subtitle=said if subtitles else alt.Undefined)
        areas = _areas(str(strategy), data[str(strategy)], height)
        panels.append(areas.properties(width=width, title=heading))
    chart = alt.concat(*panels, columns=columns, spacing=18).resolve_scale(x="shared")
    return finish(chart, "Plans of one window, tokens computed. " + "; ".join(sentence) + ".", title)


def plan_data(table: pd.DataFrame) -> dict[str, Records]:
    """What `plan` draws: one list per strategy, in running order."""
    data: dict[str, Records] = {}
    columns = (table[c] for c in ("strategy", "cohort", "kind", "id", "tokens", "padding"))
    for strategy, cohort, kind, id, tokens, padding in zip(*columns, strict=True):
        lines = data.setdefault(str(strategy), [])
        lines.append({
            "at": len(lines), "place": f"{cohort} · {id}", "kind": kind, "tokens": int(tokens),
            "padding": int(padding), "end": int(tokens + padding),
        })  # fmt: skip
    return data


def _areas(strategy: str, lines: Records, height: int) -> Chart:
    labelled = height >= 10
    axis = alt.Axis(ticks=False, domain=False, labelPadding=4) if labelled else None
    base = alt.Chart(named(strategy, lines)).encode(
        x=alt.X("tokens:Q", title="tokens", axis=alt.Axis(tickCount=3)),
        y=alt.Y("place:N", sort=alt.EncodingSortField(field="at", op="min"), title=None, axis=axis),
    )
    place = "a bar: cohort · row; " if labelled else ""
    legend = alt.Legend(title=f"{place}solid: tokens; dashed: padding", orient="bottom", titleLimit=400)
    scale = alt.Scale(domain=list(KINDS), range=list(KINDS.values()))
    thick = max(1, height - 5)
    solid = base.mark_bar(height=thick).encode(color=alt.Color("kind:N", scale=scale, legend=legend))
    padded = base.transform_filter("datum.padding > 0").mark_bar(
        height=thick, fillOpacity=0.15, fill=TEXT, stroke=TEXT, strokeDash=[3, 2], strokeWidth=1
    )
    return alt.layer(solid, padded.encode(x2="end:Q")).properties(height=height * len(lines))
