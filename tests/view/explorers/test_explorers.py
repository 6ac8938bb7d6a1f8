"""An explorer shows other data in a chart that it built before: it must be the chart they would have made."""

import math
from functools import partial

import altair as alt
import pytest
from altair.utils.schemapi import SchemaValidationError

import toolkit as tk
from toolkit.view import figure
from toolkit.view.charts.sweep import HOW
from toolkit.view.explorers.audit import AuditExplorer
from toolkit.view.explorers.seeds import FirstTokenExplorer, SeedMatrixExplorer
from toolkit.view.explorers.sweep import SweepExplorer

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


def test_the_audit_explorer_shows_the_promise_and_names_the_cause(tiny):
    engines = {
        "global": lambda: tk.Engine(tiny, "global", forward="padded"),
        "keyed": lambda: tk.Engine(tiny),
    }
    explorer = AuditExplorer(engines, tokens=3)
    assert explorer.words.startswith("global: the promise to seeded requests is broken: last seed wins")
    checks = {mark["check"] for mark in explorer.picture.data["audit"]}
    assert {sign["verdict"] for sign in explorer.picture.data["verdicts"]} == {"kept", "broken"}
    assert any(name.startswith("own seed") for name in checks)
    assert not any(name.startswith("unseeded together") for name in checks)
    explorer.target.value = "keyed"
    explorer.wait()
    assert explorer.words == "keyed: the promise to seeded requests is kept." and same_chart(explorer)
    assert all(mark["check"].endswith(": kept") for mark in explorer.picture.data["audit"])
    assert {sign["verdict"] for sign in explorer.picture.data["verdicts"]} == {"kept"}


def test_the_sweep_explorer_draws_a_table_along_any_axis(tiny):
    grid = {"policy": ["global", "keyed"], "temperature": [0.5, 1.0]}

    def study(policy, temperature):
        return {"answers": len(policy) + temperature, "word": policy, "none": math.nan, "one": 1}

    explorer = SweepExplorer(tk.sweep(study, grid, progress=False), y="answers", x="policy", names=list(grid))
    assert explorer.words == (
        "Mean answers, 4 points: from 5.5 at policy keyed, temperature 0.5 to 7 at policy global, "
        "temperature 1.0."
    )
    assert same_chart(explorer)
    for name, value in {"x": "temperature", "how": "max", "lines": "policy"}.items():
        getattr(explorer, name).value = value
        assert same_chart(explorer), name
    explorer.lines.value = "(nothing)"
    assert same_chart(explorer) and explorer.words == (
        "Largest answers, 2 points, each over all values of policy: from 6.5 at temperature 0.5 to 7 at "
        "temperature 1.0."
    )
    explorer.y.value = "one"
    explorer.wait()
    assert explorer.words.endswith("each over all values of policy: the same everywhere, 1.")


def test_the_sweep_explorer_offers_only_what_can_be_drawn(tiny):
    grid = {"policy": ["global", "keyed"], "temperature": [0.5, 1.0], "top_k": [0, 1]}

    def study(policy, temperature, top_k):
        some = math.nan if policy == "global" else 1.0
        return {"number": 1.0, "word": policy, "none": math.nan, "some": some}

    made = tk.sweep(study, grid, progress=False)
    explorer = SweepExplorer(made, y="number", x="policy", names=list(grid))
    assert explorer.y.options == ("number", "word", "some")
    explorer.how.value = "max"
    for value, how in (("word", "nunique"), ("some", "nunique")):
        explorer.y.value = value
        explorer.wait()
        assert explorer.how.value == how
    assert explorer.how.options == tuple(HOW)  # numbers again, so all of them
    explorer.how.value = "max"
    explorer.wait()
    explorer.x.value = "temperature"
    explorer.wait()
    assert explorer.lines.options == ("(nothing)", "policy", "top_k") and explorer.lines.value == "(nothing)"
    explorer.lines.value = "policy"
    explorer.wait()
    assert explorer.words == (
        "Largest some, 2 points, each over all values of top_k: the same everywhere, 1."
    )  # of four, two are of no number
    for x in grid:  # whatever was chosen before
        explorer.x.value = x
        assert same_chart(explorer) and explorer.lines.value != x
