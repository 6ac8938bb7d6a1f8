"""Plans: a chart of how each strategy splits a window into cohorts, padding drawn to scale."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from .theme import BLUE, GREEN, ORANGE, ROW, TEXT, Chart, finish, named


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
    part = part.assign(end=part["tokens"] + part["padded"])
    labelled = height >= 10
    name = [f"{c} · {r}" for c, r in zip(part["cohort"], part["row"], strict=True)]
    part = part.assign(place=name)
    axis = alt.Axis(ticks=False, domain=False, labelPadding=4) if labelled else None
    y = alt.Y("place:N", sort=name, title="cohort · row" if labelled else None, axis=axis)
    x = alt.X("tokens:Q", title="tokens", scale=alt.Scale(domain=[0, limit], nice=False))
    kinds = {"batched": BLUE, "sequential": ORANGE, "packed": GREEN}
    legend = alt.Legend(title="solid: tokens; dashed: padding", orient="bottom")
    colour = alt.Color(
        "kind:N", scale=alt.Scale(domain=list(kinds), range=list(kinds.values())), legend=legend
    )
    thick = max(1, height - 5)
    data = alt.Chart(named(strategy, part))
    solid = data.mark_bar(height=thick).encode(x=x, y=y, color=colour)
    padding = (
        data.transform_filter("datum.padded > 0")
        .mark_bar(height=thick, fillOpacity=0.15, fill=TEXT, stroke=TEXT, strokeDash=[3, 2], strokeWidth=1)
        .encode(x=x, x2="end:Q", y=y, tooltip=["row:N", "padded:Q"])
    )
    return alt.layer(solid, padding).properties(
        width=width, height=height * len(part), title=alt.TitleParams(strategy, subtitle=said)
    )
