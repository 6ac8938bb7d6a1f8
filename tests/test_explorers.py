"""An explorer shows other data in a chart that it built before: it must be the chart they would have made."""

from functools import partial

import altair as alt
import pytest
from altair.utils.schemapi import SchemaValidationError

import toolkit as tk
from toolkit.view import figure
from toolkit.view.explorers import FirstTokenExplorer, SeedMatrixExplorer

ROWS = tk.Request("one two", id="a", seed=1), tk.Request("three", id="b", seed=2)


def same_chart(explorer):
    """Whether what is on the page is what the chart would be, made anew; its words travel beside it."""
    explorer.wait()
    whole = figure.spec(explorer._chart())
    ours, theirs = ({**s, "description": ""} for s in (explorer.picture.spec, figure.skeleton(whole)))
    return ours == theirs and explorer.picture.data == figure.named_data(whole)


def test_the_first_token_explorer_shows_the_chart_that_its_controls_ask_for(tiny):
    explorer = FirstTokenExplorer(tiny, ROWS, seeds=12)
    assert same_chart(explorer)
    first = explorer.picture.data
    for name, value in {
        "policy": "keyed", "temperature": 0.3, "top_k": 3, "min_p": 0.2, "top_p": 0.5, "seeds": 2,
    }.items():  # fmt: skip
        getattr(explorer, name).value = value
        assert same_chart(explorer), name
    explorer.temperature.value = 0
    assert same_chart(explorer) and "greedy" in explorer.words
    assert explorer.picture.data != first


def test_the_seed_matrix_explorer_shows_the_chart_that_its_controls_ask_for(tiny, monkeypatch):
    long = {"now": False}  # words at other seeds are longer: cells are as wide as the longest
    monkeypatch.setattr(type(tiny), "token_text", lambda _, t: f"abcd{t}" if long["now"] else f"{t}")
    explorer = SeedMatrixExplorer(tiny, ROWS, policy="keyed")
    assert same_chart(explorer)
    specs = [explorer.picture.spec]
    for name, value in {"first": 9, "policy": "global", "temperature": 0.4}.items():
        long["now"] = name != "policy"
        getattr(explorer, name).value = value
        assert same_chart(explorer), name
        specs.append(explorer.picture.spec)
    assert specs[0] != specs[1]
    explorer.size.value = 3
    assert same_chart(explorer)


def test_charts_are_checked_again_after_a_quick_one_also_if_it_fails():
    def chart(axis):
        return alt.Chart(alt.InlineData([{"x": 1}])).mark_bar().encode(x=alt.X("x:Q", axis=axis()))

    assert figure.quick(lambda: chart(alt.Axis)) == figure.spec(chart(alt.Axis))
    wrong = partial(alt.Axis, orient="nowhere")
    assert figure.quick(lambda: chart(wrong))  # nobody looks
    with pytest.raises(ZeroDivisionError):
        figure.quick(lambda: 1 / 0)
    with pytest.raises(SchemaValidationError):
        wrong()
