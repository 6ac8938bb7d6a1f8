"""Sweeps on the tiny model: here, on two engines of a real cluster, interrupted and gone on with. Their
tables must be the same to the bit."""

import functools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import toolkit as tk
from toolkit import backend
from toolkit.cli import main
from toolkit.cli import sweep as commands
from toolkit.study.sweep import cells, fingerprint
from toolkit.view import figure
from toolkit.view.explorers.sweep import SweepExplorer

ROOT = Path(__file__).parents[3]
A = tk.Request("The children were playing with a", id="a", seed=7)
B = tk.Request("Yesterday I went to the", id="b", seed=3)
GRID = {"policy": ["global", "keyed"], "temperature": [0.7, 1.3]}
quiet = functools.partial(tk.sweep, progress=False)


def first(policy, temperature, seeds=range(6)):
    batch = [A.replace(temperature=temperature), B]
    return tk.first_tokens(tk.loaded("tiny"), batch, row="a", seeds=seeds, policy=policy)


def matrix(policy):
    how = {"row": "a", "sibling": "b", "seeds": range(3), "sibling_seeds": range(3)}
    return tk.seed_matrix(tk.loaded("tiny"), [A, B], policy=policy, **how)


def moved(amplify):
    return tk.drift(
        tk.loaded("tiny"), A, {"beside": [B]}, forwards=["packed"], seeds=range(4), amplify=amplify
    )


def square(x):
    return {"square": x * x, "half": x / 2}


def same(one, other):
    """Equal to the bit, types and missing values included."""
    pd.testing.assert_frame_equal(one, other, check_exact=True)
    for name in one:
        if one[name].dtype == np.float64:
            np.testing.assert_array_equal(one[name].to_numpy().view("u8"), other[name].to_numpy().view("u8"))
    return True


class Calls:
    """Counts, in a file: a number or a list in it would be one of the study's settings, and change them."""

    def __init__(self, path):
        self.path = path

    def next(self):
        with self.path.open("a") as lines:
            lines.write("call\n")
        return self.count

    @property
    def count(self):
        return len(self.path.read_text().splitlines())


def counting(study):
    """A study, and the list of the calls it got."""
    calls = []

    @functools.wraps(study)
    def counted(**point):
        calls.append(point)
        return study(**point)

    return counted, calls


def interrupting(study, after):
    """A study that meets Ctrl-C at one of its calls."""
    calls = []

    def first(**point):
        calls.append(point)
        if len(calls) > after:
            raise KeyboardInterrupt
        return study(**point)

    return first


# Here


def test_the_table_is_the_studies_tables_one_under_the_other_with_the_grid_first():
    made = quiet(first, GRID)
    frame = made.to_frame()
    assert made.ok
    assert len(made.failed) == len(made.missing) == 0
    assert repr(made) == "Sweep(first: 4 cells: 4 done)"
    assert list(frame.columns)[:4] == [
        "policy",
        "temperature",
        "row",
        "seed",
    ]  # the study's policy is there once
    assert list(zip(frame["policy"][::6], frame["temperature"][::6], strict=True)) == [
        ("global", 0.7), ("global", 1.3), ("keyed", 0.7), ("keyed", 1.3)]  # fmt: skip
    for (policy, temperature), part in frame.groupby(["policy", "temperature"]):
        alone = first(policy, temperature).to_frame()
        same(
            part.drop(columns="temperature").reset_index(drop=True),
            alone[list(frame.columns.drop("temperature"))],
        )
    # They differ where they should: seeds count under keyed only, and temperature always.
    assert frame.groupby("policy")["token"].nunique().to_dict()["global"] <= 2
    assert frame.groupby(["policy", "temperature"])["logprob"].first().nunique() == 4
    assert "<table" in made._repr_html_()


@pytest.mark.parametrize(
    ("study", "grid"), [(matrix, {"policy": ["keyed", "reseed"]}), (moved, {"amplify": [1, 1000.0]})]
)
def test_any_study_with_a_table_can_be_swept(study, grid):
    made = quiet(study, grid)
    assert made.ok
    name, values = next(iter(grid.items()))
    lone = pd.concat([study(v).to_frame() for v in values], ignore_index=True)
    frame = made.to_frame()
    assert next(iter(frame.columns)) == name
    same(frame.drop(columns=name), lone.drop(columns=name))


def test_completions_frames_and_dicts_are_tables_too():
    def run(max_tokens):
        return tk.generate(tk.loaded("tiny"), [A.replace(max_tokens=max_tokens)])

    frame = quiet(run, {"max_tokens": [2, 3]}).to_frame()
    assert list(frame["max_tokens"]) == [2, 2, 3, 3, 3]
    assert list(quiet(square, {"x": [2, 3]}).to_frame()["square"]) == [4, 9]
    assert list(quiet(lambda x: pd.DataFrame({"y": [x] * x}), {"x": [1, 2]}).to_frame()["y"]) == [1, 2, 2]
    assert len(quiet(lambda x: pd.DataFrame({"y": []}), {"x": [1, 2]}).to_frame()) == 0
    failed = quiet(lambda x: 3, {"x": [1]}).failed
    assert "must return a result with to_frame(), a DataFrame, or a dict" in failed["error"].item()


def test_a_combination_that_fails_costs_itself_only():
    made = quiet(lambda x: {"inverse": 1 / x}, {"x": [1, 0, 2]})
    assert not made.ok
    assert made.failed.to_dict("records") == [{"x": 0, "error": "ZeroDivisionError: division by zero"}]
    assert list(made.to_frame()["inverse"]) == [1, 0.5]
    assert "3 cells: 2 done, 1 failed, 0 not run" in repr(made)
    assert "ZeroDivisionError" in made._repr_html_()
    assert list(quiet(lambda x: 1 / 0, {"x": [1]}).to_frame().columns) == ["x"]


def test_a_grid_is_a_product_or_a_list_and_values_may_be_of_any_kind():
    made = quiet(square, {"x": (x for x in range(3))}).to_frame()
    assert list(made["x"]) == [0, 1, 2]
    assert list(quiet(square, [{"x": 5}, {"x": 4}]).to_frame()["x"]) == [5, 4]
    frame = quiet(
        lambda stop, top: {"n": len(stop)}, {"stop": [["a"], ["a", "b"]], "top": [None, 3]}
    ).to_frame()
    assert frame["stop"].tolist() == [["a"], ["a"], ["a", "b"], ["a", "b"]]
    assert frame["top"].tolist() == [None, 3, None, 3]
    big = quiet(lambda seed: {"is_none": seed is None}, {"seed": [2**63 - 1, None]}).to_frame()
    assert big["seed"].tolist() == [2**63 - 1, None]  # a float would have lost bits
    nan = quiet(lambda x: {"n": math.isnan(x)}, {"x": [math.nan, 1.0]}).to_frame()
    assert nan["n"].tolist() == [True, False]
    assert math.isnan(nan["x"][0])
    kinds = quiet(lambda x: {"kind": type(x).__name__}, {"x": [1, 1.0, True, "1"]}).to_frame()
    assert kinds["kind"].tolist() == ["int", "float", "bool", "str"]  # equal to Python, not to a grid
    keys = [{1: 2}, {"1": 2}, {True: 2}, {None: 2}, {"null": 2}, {(1, "a"): 2}, {1: 2, "1": 2}, {"a": {1: 2}}]
    texts = quiet(lambda x: {"n": len(x)}, {"x": [*keys, {"a": {"1": 2}}]})  # one twice would be refused
    assert texts.to_frame()["n"].tolist() == [1] * 6 + [2, 1, 1]
    with pytest.raises(ValueError, match="is there twice"):
        quiet(lambda x: {}, {"x": [{1: 2, "b": 3}, {"b": 3, 1: 2}]})
    assert quiet(lambda r: {"id": r.id}, {"r": [A, B]}).to_frame()["id"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("study", "grid", "message"),
    [
        (square, {}, "has no combination"),
        (square, [], "has no combination"),
        (square, {"x": []}, r'grid\["x"\]: has no values'),
        (square, {"x": "abc"}, r'grid\["x"\]="abc": must be a list of values'),
        (square, {"x": 3}, r'grid\["x"\]=3: must be a list of values'),
        (square, 3, "grid=3: must map names to values"),
        (square, {"x": [1, 2, 1]}, "x=1 is there twice"),
        (square, {"x": [math.nan, float("nan")]}, "x=nan is there twice"),
        (square, {"x": [[1], [1]]}, r"x=\[1\] is there twice"),
        (square, {"y": [1]}, r"grid: square\(x\) can't be called with y=1"),
        (square, {"x": [1], "y": [1]}, "can't be called with x=1, y=1"),
        (square, {"not a name": [1]}, "is no keyword"),
        (square, [{"x": 1}, {"y": 1}], r"grid\[1\]: names y; grid\[0\] names x"),
        (square, [{"x": 1}, 2], r"grid\[1\]=2: must be a dict"),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_be_run_is_refused_before_anything_runs(study, grid, message):
    counted, calls = counting(study)
    with pytest.raises(ValueError, match=message) as error:
        quiet(counted, grid)
    assert calls == []
    assert "\n" not in str(error.value)


def test_a_clash_of_names_is_told_at_the_first_cell():
    counted, calls = counting(lambda seed: first("keyed", 1.0))
    with pytest.raises(ValueError, match=r"has a column seed of its own \(0 where the grid has 5\)"):
        quiet(counted, {"seed": [5, 6, 7]})
    assert len(calls) == 1
    assert quiet(lambda x: {"x": x * 1.0}, {"x": [1]}).ok  # the same value is no clash


def test_an_interrupt_keeps_what_is_done_and_says_so():
    with pytest.warns(UserWarning, match="interrupted: 3 of 4 cells are there"):
        made = quiet(interrupting(first, 3), GRID)
    assert not made.ok
    assert made.missing.to_dict("records") == [{"policy": "keyed", "temperature": 1.3}]
    assert len(made.failed) == 0
    same(made.to_frame(), quiet(first, GRID).to_frame()[:18])
    assert "3 done, 0 failed, 1 not run" in repr(made)


def test_a_study_that_catches_the_interrupt_itself_is_interrupted_all_the_same(interrupted):
    interrupted("toolkit.study.drift.study", "_run", 5)
    with pytest.warns(UserWarning, match="interrupted: 1 of 3 cells are there"):
        made = quiet(moved, {"amplify": [1.0, 2.0, 3.0]})
    assert list(made.missing["amplify"]) == [2.0, 3.0]


def test_the_chart_has_a_point_for_each_combination():
    made = quiet(first, GRID)
    out = figure.spec(made.chart("token", how="nunique", x="temperature"))
    points = figure.named_data(out)["cells"]
    assert len(points) == 4
    assert "4 points" in out["description"]
    assert figure.svg(made.chart("margin", x="policy", color="temperature"))
    assert (
        {p["series"]: p["value"] for p in points}["global"]
        == 1
        < {p["series"]: p["value"] for p in points}["keyed"]
    )
    assert made.chart("logprob").to_dict()["description"].startswith("Mean logprob by policy and temperature")
    assert (
        quiet(square, {"x": [1, 2]})
        .chart("square")
        .to_dict()["description"]
        .startswith("Mean square by x: 2")
    )
    with pytest.raises(ValueError, match='y="text": must be a column of numbers'):
        made.chart("text")
    with pytest.raises(ValueError, match='x="seed": must be one of policy, temperature'):
        made.chart("token", x="seed")


@pytest.mark.parametrize("name", ["size", "value", "observations", "mean", "across", "series", "index"])
def test_a_chart_takes_parameters_of_any_name(name):
    def study(other, **point):
        return {"y": point[name] * other, "none": math.nan, "some": math.nan if other == 1 else 1.0}

    made = quiet(study, {name: [1, 2], "other": [1, 2]})
    for x, color in ((name, "other"), ("other", name)):
        points = figure.named_data(figure.spec(made.chart("y", x=x, color=color)))["cells"]
        assert {(p["across"], p["series"]): p["value"] for p in points} == {
            (1, "1"): 1, (1, "2"): 2, (2, "1"): 2, (2, "2"): 4}  # fmt: skip
    with pytest.raises(ValueError, match=rf'color="{name}": must be another parameter than x') as error:
        made.chart("y", x=name, color=name)
    assert "\n" not in str(error.value)
    for draw in (made.chart, explored(made, name)):
        with pytest.raises(ValueError, match='y="none": has no number in it; draw another column'):
            draw("none")
    assert len(figure.named_data(figure.spec(made.chart("some", x=name)))["cells"]) == 4
    assert (
        explored(made, name)("y")
        == f"Mean y, 4 points: from 1 at {name} 1, other 1 to 4 at {name} 2, other 2."
    )
    assert explored(made, name)("some").startswith("Mean some, 2 points: the same everywhere, 1.")


def explored(made, x):
    def draw(y):
        return SweepExplorer(made, y=y, x=x, names=[x, "other"]).words

    return draw


# Kept


def test_an_interrupted_sweep_goes_on_where_it_was_stopped_and_the_bits_are_the_same(tmp_path):
    whole = quiet(first, GRID).to_frame()
    calls = Calls(tmp_path / "calls")

    def study(policy, temperature):
        if calls.next() == 3:
            raise KeyboardInterrupt
        return first(policy, temperature)

    kept = tmp_path / "cells"
    with pytest.warns(UserWarning, match="2 of 4 cells are there; they are kept in"):
        quiet(study, GRID, out=kept)
    assert not list(kept.glob(".*"))
    made = quiet(study, GRID, out=kept)
    assert made.ok
    assert calls.count == 3 + 2
    same(made.to_frame(), whole)
    same(quiet(study, GRID, out=kept).to_frame(), whole)
    wider = GRID | {"temperature": [1.3, 2.0, 0.7]}
    assert quiet(study, wider, out=kept).ok
    assert calls.count == 5 + 2  # a wider grid runs what is new


def test_cells_of_another_sweep_are_refused_in_one_line(tmp_path):
    kept = tmp_path / "cells"
    assert quiet(square, {"x": [1]}, out=kept).ok

    def cube(x):
        return {"square": x**3}

    renamed = functools.partial(first, seeds=range(2))
    others = [(cube, {"x": [1]}, "study"), (renamed, GRID, "study, grid, code or settings")]
    for study, grid, what in others:
        with pytest.raises(ValueError, match=rf"holds cells of another sweep \(its {what}") as error:
            quiet(study, grid, out=kept)
        assert "\n" not in str(error.value)
    for seeds, fine in ((range(2), True), (range(2), True), (range(3), False)):
        study = functools.partial(first, seeds=seeds)
        if fine:
            assert quiet(study, GRID, out=tmp_path / "other").ok
        else:
            with pytest.raises(ValueError, match="its code or settings of the study"):
                quiet(study, GRID, out=tmp_path / "other")
    about = json.loads((kept / "sweep.json").read_text())
    for name, value, what in [
        ("machine", about["machine"] | {"blas": "another"}, "machine"),
        ("toolkit", "0.0.1", "version of the toolkit"),  # its studies may answer otherwise
        ("stream", 0, "stream"),  # and seeds give other numbers
    ]:
        (kept / "sweep.json").write_text(json.dumps(about | {name: value}))
        with pytest.raises(ValueError, match=rf"of another sweep \(its {what}\)"):
            quiet(square, {"x": [1]}, out=kept)
    (kept / "sweep.json").write_text(json.dumps(about))
    assert quiet(square, {"x": [1]}, out=kept).ok


HELPERS = """
import functools
LIMIT = {limit}

def deep():
    return {deep}

def helper(n={default}):
    return deep() + LIMIT + n

class Thing:
    def __init__(self, attribute):
        self.attribute = attribute
    def __call__(self, x):
        return {{"y": {called}}}
    def method(self, x):
        return {{"y": {method}}}

def study(x):
    return {{"y": helper()}}

def nested(x):
    return {{"y": sum(one + LIMIT for one in [1, 2])}}

@functools.cache
def remembered(x):
    return {cached}

def calling(x):
    return {{"y": remembered(x)}}
"""
PLAIN_HELPERS = {"limit": 1, "deep": 1, "default": 1, "called": 1, "method": 1, "cached": 1}


def module(**changes):
    """A module's names, as another version of its file would have them."""
    found = {"__name__": "helpers"}
    exec(HELPERS.format(**PLAIN_HELPERS | changes), found)
    return found


def over(value):
    return lambda x: {"y": str(value)[:0]}


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


def table(middle):
    return pd.DataFrame({"z": np.where(np.arange(1000) == 500, middle, 0)})


def looped(value):
    ring = [value]
    ring.append(ring)
    return ring


TOLD = {
    "another model in a closure": (lambda: over(tk.tiny(0)), lambda: over(tk.tiny(1))),
    "another model in a partial": (
        lambda: functools.partial(lambda model, x: {}, tk.tiny(0)),
        lambda: functools.partial(lambda model, x: {}, tk.tiny(1)),
    ),
    "another object's method": (lambda: module()["Thing"](1).method, lambda: module()["Thing"](2).method),
    "a method's code": (lambda: module()["Thing"](1).method, lambda: module(method=2)["Thing"](1).method),
    "a callable's code": (lambda: module()["Thing"](1), lambda: module(called=2)["Thing"](1)),
    "a callable's attribute": (lambda: module()["Thing"](1), lambda: module()["Thing"](2)),
    "a helper's helper": (lambda: module()["study"], lambda: module(deep=2)["study"]),
    "a helper's constant": (lambda: module()["study"], lambda: module(limit=2)["study"]),
    "a helper's default": (lambda: module()["study"], lambda: module(default=2)["study"]),
    "a comprehension's constant": (lambda: module()["nested"], lambda: module(limit=2)["nested"]),
    "a cached helper": (lambda: module()["calling"], lambda: module(cached=2)["calling"]),
    "a dict that holds an object": (
        lambda: over({"a": Slotted(1), "b": 1}),
        lambda: over({"a": Slotted(1), "b": 2}),
    ),
    "an object in a list": (lambda: over([Slotted(1)]), lambda: over([Slotted(2)])),
    "the middle of a table": (lambda: over(table(0)), lambda: over(table(1))),
    "the middle of a series": (lambda: over(table(0)["z"]), lambda: over(table(1)["z"])),
    "the middle of an array": (
        lambda: over(table(0)["z"].to_numpy()),
        lambda: over(table(1)["z"].to_numpy()),
    ),
    "a value in a ring": (lambda: over(looped(1)), lambda: over(looped(2))),
    "a generator's state": (lambda: over(random.Random(1)), lambda: over(random.Random(2))),
    "NumPy's generator's": (lambda: over(np.random.default_rng(1)), lambda: over(np.random.default_rng(2))),
    "a key's type": (lambda: over({1: 2}), lambda: over({"1": 2})),
    "a pattern": (lambda: over(re.compile("a" * 300 + "b")), lambda: over(re.compile("a" * 300 + "c"))),
}


@pytest.mark.parametrize("what", TOLD)
def test_a_study_is_another_one_where_anything_that_it_holds_or_names_differs(tmp_path, what):
    one, other = TOLD[what]
    kept = tmp_path / "cells"
    assert quiet(one(), {"x": [1]}, out=kept).ok
    assert quiet(one(), {"x": [1, 2]}, out=kept).ok  # made again it is the same one
    with pytest.raises(ValueError, match="code or settings of the study"):
        quiet(other(), {"x": [1]}, out=kept)


def test_a_study_reads_the_same_in_another_process():
    """Sets and hashes of text have another order there."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import tests.study.sweep.test_sweep as t; "
        "print(*map(t.fingerprint.digest, t.read_elsewhere()))"
    )
    run = [sys.executable, "-c", code, str(ROOT)]
    said = subprocess.run(run, env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, check=True)
    here = [fingerprint.digest(study) for study in read_elsewhere()]
    assert said.stdout.decode().split() == here
    assert len(set(here)) == len(here)


def read_elsewhere():
    return first, over(set("abcdef")), over(tk.tiny(1)), commands.sweep


def test_a_study_that_holds_what_cannot_be_told_again_is_refused_and_the_value_is_named(tmp_path):
    with (tmp_path / "log").open("w") as log:
        for value in (threading.Lock(), object(), log, (x for x in [1]), [1, {"k": object()}]):
            with pytest.raises(ValueError, match=r"can't tell value.*=.* again: it would not") as error:
                quiet(over(value), {"x": [1]}, out=tmp_path / "cells")
            assert "\n" not in str(error.value)
    assert r'value["k"]=' in str(error.value)
    assert not (tmp_path / "cells").exists()
    assert quiet(over(value), {"x": [1]}).ok  # without out= nothing need be told


def test_an_out_that_cannot_be_used_is_refused_before_anything_runs(tmp_path):
    counted, calls = counting(square)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for out, message in [
        (tmp_path / "full", "has no sweep's cells in it"),
        (tmp_path / "full" / "mine.txt", "has no sweep's cells in it"),
        (tmp_path / "nowhere" / "cells", "there is no directory"),
        (tmp_path / "nowhere" / "t.csv", "there is no directory"),
    ]:
        with pytest.raises(ValueError, match=message):
            quiet(counted, {"x": [1]}, out=out)
    with pytest.raises(ValueError, match=r"can't tell x=.* again"):
        quiet(counted, {"x": [object()]}, out=tmp_path / "cells")
    assert calls == []
    assert [p.name for p in tmp_path.rglob("*")] == ["full", "mine.txt"]
    kept = tmp_path / "cells"
    assert quiet(square, {"x": [1]}, out=kept).ok
    next(kept.glob("cell-*")).write_text("{")
    with pytest.raises(ValueError, match="is not this cell's table; delete the file"):
        quiet(square, {"x": [1]}, out=kept)


def test_a_table_that_cannot_be_kept_costs_its_own_cell(tmp_path):
    def study(x):
        odd = {
            2: pd.DataFrame({"y": [pd.Timestamp(2020, 1, 1)]}),
            3: pd.DataFrame({"y": [object()]}),
            4: pd.DataFrame([[1, 2]], columns=["y", "y"]),
            5: pd.DataFrame([[1, 2]], columns=["x", "x"]),
        }
        return odd.get(x, {"y": x})

    made = quiet(study, {"x": range(1, 7)}, out=tmp_path / "cells")
    assert made.to_frame()["y"].tolist() == [1, 6]
    lines = made.failed["error"].tolist()
    assert all("can't be kept; give plain numbers and text" in line for line in lines[:2])
    assert lines[2:] == [
        f"ValueError: the study's table has two columns {c}; give each its own name" for c in "yx"
    ]
    assert quiet(study, {"x": [2]}).ok  # without out= a date is as good as a number
    assert quiet(study, {"x": range(1, 7)}, out=tmp_path / "cells").failed.equals(made.failed)


def test_a_study_with_a_name_that_is_not_there_yet_can_be_kept(tmp_path):
    def study(x):
        return {"y": later if x > 1 else 0}

    made = quiet(study, {"x": [1, 2]}, out=tmp_path / "cells")
    assert "NameError" in made.failed["error"].item()
    cells.portable(study, [{"x": 1}])  # as before cells are sent to engines
    later = 3
    with pytest.raises(ValueError, match="code or settings of the study"):
        quiet(study, {"x": [1, 2]}, out=tmp_path / "cells")


@pytest.mark.parametrize("name", ["cells", "t.csv"])
def test_a_study_that_was_mended_before_it_had_a_cell_may_use_the_same_place(tmp_path, name):
    out = tmp_path / name

    def study(x):
        return 1 / 0

    assert not quiet(study, {"x": [1, 2]}, out=out).ok
    assert [p.name for p in tmp_path.iterdir()] == (["cells"] if name == "cells" else [])
    with pytest.raises(ValueError, match="a column x of its own"):
        quiet(lambda x: {"x": -x}, {"x": [1]}, out=out)
    assert [p.name for p in tmp_path.iterdir()] == (["cells"] if name == "cells" else [])
    with pytest.warns(UserWarning, match="interrupted: 0 of 1 cells are there$"):
        quiet(interrupting(square, 0), {"x": [1]}, out=out)
    assert quiet(square, {"x": [1, 2]}, out=out).ok
    if name == "cells":
        with pytest.raises(ValueError, match="holds cells of another sweep"):  # now it has some
            quiet(study, {"x": [1, 2]}, out=out)


def test_what_is_kept_comes_back_with_its_types_and_bits(tmp_path):
    odd = pd.DataFrame({
        "f": [0.1 + 0.2, math.nan, math.inf], "i": [2**62 + 1, 0, -1], "b": [True, False, True],
        "s": ["é\n", None, "x"], "n": pd.array([2**62 + 1, None, 3], dtype="Int64"),
        "o": pd.Series([None, True, False], dtype=object), "h": np.array([0.1, 2, 3], np.float32),
    })  # fmt: skip
    frames = [
        quiet(lambda x: odd, {"x": [1.5, math.nan]}, out=tmp_path / "cells").to_frame() for _ in range(2)
    ]
    same(frames[0], frames[1])
    same(frames[0].drop(columns="x")[:3], odd)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_file_is_written_once_all_have_run_and_cells_wait_beside_it(tmp_path, suffix):
    file = tmp_path / f"t{suffix}"
    file.write_text("old")
    with pytest.warns(UserWarning, match=r"interrupted: 2 of 4 cells are there; they are kept in .*\.cells"):
        quiet(interrupting(first, 2), GRID, out=file)
    assert file.read_text() == "old"
    calls = Calls(tmp_path / "calls")

    def again(policy, temperature):
        if calls.next() == 2:
            raise RuntimeError("no")
        return first(policy, temperature)

    file = tmp_path / f"u{suffix}"
    made = quiet(again, GRID, out=file)  # one fails: the others are written, and kept for another try
    assert len(made.failed) == 1
    assert len(list((tmp_path / f"u{suffix}.cells").glob("cell-*"))) == 3
    assert quiet(again, GRID, out=file).ok
    assert calls.count == 5
    assert not (tmp_path / f"u{suffix}.cells").exists()
    read = {
        ".jsonl": functools.partial(pd.read_json, lines=True),
        ".csv": pd.read_csv,
        ".parquet": pd.read_parquet,
    }
    frame = read[suffix](file)
    assert list(frame["token"]) == list(quiet(first, GRID).to_frame()["token"])


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_file_has_every_bit_of_a_float64_and_the_shortest_form_of_a_float32(tmp_path, suffix):
    values = [1.0, 1.00000001, 1 / 3, 1e300, 5e-324]

    def study(x):
        return pd.DataFrame({"y": [x / 3], "single": np.array([0.1], np.float32), "none": [math.inf]})

    file = tmp_path / f"t{suffix}"
    made = quiet(study, {"x": values}, out=file).to_frame()
    read = {
        ".jsonl": lambda f: pd.DataFrame(map(json.loads, f.read_text().splitlines())),
        ".csv": pd.read_csv,
        ".parquet": pd.read_parquet,
    }
    frame = read[suffix](file)
    assert frame["x"].tolist() == values
    assert frame["y"].tolist() == made["y"].tolist() == [x / 3 for x in values]
    assert frame["single"].astype("float32").tolist() == made["single"].tolist()
    if suffix == ".jsonl":
        assert '"none": null, "single": 0.1' in file.read_text()


# The command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(r.to_json()) + "\n" for r in (A, B)))
    return path


@pytest.fixture
def cli(capfd, file):
    def run(*args):
        status = main(["sweep", str(file), "--model", "tiny", *map(str, args)])
        return status, *capfd.readouterr()

    return run


FIRST = (
    "--study",
    "first-tokens",
    "--grid",
    "policy=global,keyed",
    "--grid",
    "temperature=0.7,1.3",
    "--seeds",
    "0:6",
)


def test_the_command_asks_what_the_function_asks(cli, tmp_path):
    status, out, err = cli(*FIRST, "--json")
    assert (status, err) == (0, "")
    frame, lines = quiet(first, GRID).to_frame(), [json.loads(line) for line in out.splitlines()]
    assert [line["token"] for line in lines] == list(frame["token"])
    assert [np.float32(line["logprob"]) for line in lines] == list(frame["logprob"].astype(np.float32))
    for args, table in [
        (FIRST, 4),
        (("--study", "matrix", "--grid", "policy=global,keyed", "--seeds", "0:3"), 2),
    ]:
        status, out, err = cli(*args)
        assert (status, err) == (0, "")
        assert len(out.splitlines()) == 1 + table
    assert "Every column is constant" in out and "Every row is constant" in out
    drift = ("--study", "drift", "--grid", "amplify=1,2", "--grid", "forward=packed,padded", "--seeds", "0:4")
    status, out, err = cli(*drift, "--chart", tmp_path / "d.svg", "--out", tmp_path / "d.parquet")
    assert (status, out, err) == (0, "", "")
    assert "</svg>" in (tmp_path / "d.svg").read_text()
    assert set(pd.read_parquet(tmp_path / "d.parquet")["amplify"]) == {1.0, 2.0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--grid", "policy=global,kyed"),
            '--grid policy="kyed": must be one of global, reseed, isolate, keyed',
        ),
        (("--grid", "top_p=1.5"), "--grid top_p=1.5: must be in (0, 1]; 1 turns the filter off"),
        (("--grid", "temperature=nan"), "--grid temperature=nan: must be in [0, 100]"),
        (("--grid", "top_k=1.5"), '--grid top_k="1.5": must be an integer'),
        (
            ("--grid", "polcy=keyed"),
            "must be one of policy, forward, planner, invariant for matrix, or of a req",
        ),
        (
            ("--grid", "max_tokens=3"),
            '--grid "max_tokens=3": must be one of',
        ),  # a first token doesn't heed it
        (("--grid", "policy"), '--grid "policy": must be like policy=global,keyed'),
        (("--grid", "top_k=1", "--grid", "top_k=2"), '--grid "top_k=2": top_k is there twice'),
        (("--grid", "cached=900"), 'cached=900 for request "a": must be under the prompt\'s'),
        (("--grid", "top_k=1", "--engines", "-1"), "--engines -1: must be in [0, 256]"),
        (("--grid", "top_k=1", "--row", "z"), '--row "z": must be one of a, b'),
        (("--grid", "top_k=1", "--sibling", "a"), '--sibling "a": must be another row than --row'),
        (("--grid", "top_k=1", "--out", "t.txt"), "--out t.txt: must end in .parquet, .csv or .jsonl"),
    ],
)
def test_what_the_command_cannot_run_is_one_line_and_exit_2(cli, args, message):
    status, out, err = cli("--study", "matrix", *args)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_the_command_interrupted_says_how_to_go_on_and_goes_on(cli, tmp_path, monkeypatch):
    real, calls = commands.FileStudy.__call__, Calls(tmp_path / "calls")

    def interrupted(self, **point):
        if calls.next() == 3:
            raise KeyboardInterrupt
        return real(self, **point)

    out = tmp_path / "t.csv"
    monkeypatch.setattr(commands.FileStudy, "__call__", interrupted)
    status, printed, err = cli(*FIRST, "--out", out)
    assert (status, printed) == (130, "")
    assert f"interrupted: 2 of 4 cells are done; they are kept in {out}.cells, and the same" in err
    assert not out.exists()
    status, _, err = cli(*FIRST[:-1], "0:7", "--out", out)
    assert status == 2
    assert "holds cells of another sweep (its code or settings of the study)" in err
    assert cli(*FIRST, "--out", out) == (0, "", "")
    assert calls.count == 3 + 2
    assert len(pd.read_csv(out)) == 24
    assert not out.with_name("t.csv.cells").exists()


def test_a_cell_that_fails_is_a_line_and_exit_1(cli, monkeypatch):
    real = commands.FileStudy.__call__

    def failing(self, **point):
        if point["temperature"] == 1.3:
            raise RuntimeError("no")
        return real(self, **point)

    monkeypatch.setattr(commands.FileStudy, "__call__", failing)
    status, out, err = cli(*FIRST)
    assert status == 1
    assert len(out.splitlines()) == 3
    assert 'toolkit: policy="keyed", temperature=1.3: RuntimeError: no\n' in err


def test_the_command_starts_an_engine_and_stops_it(cli, tmp_path):
    pytest.importorskip("ipyparallel", reason="sweeps over engines need the extra `distributed`")
    assert cli(*FIRST, "--engines", 1, "--out", tmp_path / "t.csv") == (0, "", "")
    assert cli(*FIRST, "--out", tmp_path / "u.csv") == (0, "", "")
    assert (tmp_path / "t.csv").read_bytes() == (tmp_path / "u.csv").read_bytes()
    import psutil  # which ipyparallel brings

    assert not [
        p for p in psutil.Process().children(recursive=True) if "ipyparallel" in " ".join(p.cmdline())
    ]


# On engines


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Two engines on this machine, and a client of them; this file is a module that they can import."""
    ipyparallel = pytest.importorskip(
        "ipyparallel", reason="sweeps over engines need the extra `distributed`"
    )
    path = str(ROOT)
    cluster = ipyparallel.Cluster(n=2, profile_dir=str(tmp_path_factory.mktemp("profile")), log_level=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        client = cluster.start_and_connect_sync(activate=False)
    yield client
    client.close()
    cluster.stop_cluster_sync()


def where(x):
    blas = backend.info()
    once = tk.loaded("tiny") is tk.loaded("tiny")
    return {
        "pid": os.getpid(),
        "blas": blas.blas,
        "version": blas.blas_version,
        "late": blas.note,
        "once": once,
    }


def nap(x, directory, seconds=0.3):
    time.sleep(seconds)
    (Path(directory) / f"ran-{x}").touch()
    return {"x2": 2 * x}


def dying(x, at, directory):
    if x == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return nap(x, directory, 0.05)


def test_many_engines_give_the_bits_that_one_process_gives(engines):
    for study, grid in (
        (first, GRID),
        (matrix, {"policy": ["global", "keyed"]}),
        (moved, {"amplify": [1.0, 2.0]}),
    ):
        here, there = quiet(study, grid), quiet(study, grid, engines)
        assert there.ok
        same(there.to_frame(), here.to_frame())
        assert repr(there) == repr(here)
    assert (
        not quiet(first, GRID).to_frame().equals(quiet(first, GRID | {"temperature": [0.8, 1.3]}).to_frame())
    )


def test_the_table_is_in_the_grids_order_whichever_cell_ends_first(engines, tmp_path):
    grid = [{"x": k, "seconds": 0.4 - 0.1 * k} for k in range(4)]
    study = functools.partial(nap, directory=str(tmp_path))
    assert list(quiet(study, grid, engines[:]).to_frame()["x"]) == [0, 1, 2, 3]
    assert list(quiet(study, grid, engines.load_balanced_view()).to_frame()["x2"]) == [0, 2, 4, 6]


def test_engines_bind_the_blas_that_is_bound_here_and_load_a_model_once(engines):
    frame = quiet(where, {"x": range(8)}, engines).to_frame()
    here = backend.info()
    assert os.getpid() not in set(frame["pid"])
    assert set(frame["blas"]) == {here.blas}
    assert set(frame["version"]) == {here.blas_version}
    assert set(frame["late"]) == {here.note}
    assert frame["once"].all()


def test_an_engine_that_computes_otherwise_is_told_and_its_cells_are_not_kept(engines, monkeypatch, tmp_path):
    kept = tmp_path / "cells"
    assert quiet(square, {"x": [1]}, engines, out=kept).ok
    assert len(list(kept.glob("cell-*"))) == 1
    monkeypatch.setattr(backend, "fingerprint", lambda: {"blas": "another"})
    with pytest.warns(UserWarning, match="computes otherwise than this process.*blas: .*, here another"):
        made = quiet(square, {"x": [1, 2]}, engines, out=tmp_path / "other")
    assert list(made.to_frame()["square"]) == [1, 4]
    assert not list((tmp_path / "other").glob("cell-*"))


def test_a_notebooks_function_brings_its_closure_and_a_failing_cell_says_what_it_lacks(engines):
    batch = [A, B]

    def study(seed):
        import toolkit as tk

        return tk.first_tokens(tk.loaded("tiny"), batch, row="a", seeds=[seed + 1])

    study.__module__ = "__main__"
    with pytest.raises(ValueError, match="seed of its own"):
        quiet(study, {"seed": [1, 2]}, engines)

    def lacking(x):
        return {"y": undefined(x)} if x else {"y": 0}  # noqa: F821

    lacking.__module__ = "__main__"
    made = quiet(lacking, {"x": [0, 1]}, engines)
    assert list(made.to_frame()["y"]) == [0]
    error = made.failed["error"].item()
    assert error.startswith(
        "NameError: name 'undefined' is not defined; variables of the notebook don't exist on the engines"
    )


def test_a_model_is_not_sent_to_engines(engines, tiny):
    studies = [functools.partial(lambda model, x: {"x": x}, tiny), lambda x: {"name": tiny.name}]
    for study in studies:
        with pytest.raises(
            ValueError, match=r'a Model isn.t sent to engines; call tk.loaded\("tiny"\)'
        ) as error:
            quiet(study, {"x": [1]}, engines)
        assert "\n" not in str(error.value)
    assert quiet(studies[1], {"x": [1]}).ok  # here it may be used
    with pytest.raises(ValueError, match="grid's model=Model"):
        quiet(lambda model: {}, {"model": [tiny]}, engines)
    for executor in (3, "client"):
        with pytest.raises(ValueError, match="must be None, an ipyparallel Client or a view"):
            quiet(square, {"x": [1]}, executor)


def test_ctrl_c_keeps_what_is_done_and_drops_what_is_queued_and_the_sweep_goes_on_later(engines, tmp_path):
    (tmp_path / "ran").mkdir()
    study = functools.partial(nap, directory=str(tmp_path / "ran"))
    grid, kept = {"x": range(12)}, tmp_path / "cells"

    def strike():  # once some cells are done, whatever the machine is busy with
        while len(list(kept.glob("cell-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=strike, daemon=True).start()
    with pytest.warns(UserWarning, match="interrupted: .* of 12 cells are there; they are kept in"):
        made = quiet(study, grid, engines, out=kept)
    done = len(made.to_frame())
    assert 2 <= done < 12
    assert len(made.missing) == 12 - done
    engines[:].apply_sync(os.getpid)  # the engines are free again
    time.sleep(0.5)
    ran = len(list((tmp_path / "ran").iterdir()))
    assert done <= ran < 12  # what ran then is lost, what was queued never ran
    for file in (tmp_path / "ran").iterdir():
        file.unlink()
    made = quiet(study, grid, engines, out=kept)
    assert made.ok
    assert len(list((tmp_path / "ran").iterdir())) == 12 - done
    assert list(made.to_frame()["x2"]) == list(range(0, 24, 2))


def test_an_engine_that_dies_loses_only_the_cell_that_it_ran(engines, tmp_path):
    """The last test with engines: one of them is gone after it."""
    study = functools.partial(dying, at=1, directory=str(tmp_path))
    made = quiet(study, {"x": range(8)}, engines)
    assert made.failed.to_dict("records") == [{"x": 1, "error": "its engine died"}]
    assert list(made.to_frame()["x"]) == [0, 2, 3, 4, 5, 6, 7]
    assert len(engines.ids) == 1
    study = functools.partial(dying, at=0, directory=str(tmp_path))
    made = quiet(study, {"x": range(3)}, engines)
    assert len(made.failed) == 3
    assert set(made.failed["error"]) <= {"its engine died", "no engine is left to run it"}
    with pytest.raises(ValueError, match="has no engines; start some"):
        quiet(square, {"x": [1]}, engines)


def test_what_is_no_study_or_names_no_place_is_one_line_before_anything_runs(tmp_path):
    ran = []

    def study(a):
        ran.append(a)
        return {"v": a}

    for given in (None, 5, "tk"):
        with pytest.raises(ValueError, match=r"^study=.*: must be a function of the grid's names$"):
            tk.sweep(given, {"a": [1]}, progress=False)
    for out in (5, [], True, b"x", "", "x\0y"):
        with pytest.raises(ValueError, match=r"^out=.*: must name a directory or a file$"):
            tk.sweep(study, {"a": [1]}, out=out, progress=False)
    assert not ran and not list(tmp_path.iterdir())


def test_a_study_that_exits_costs_its_own_cell():
    def study(a):
        return sys.exit(3) if a == 2 else {"v": a}

    made = tk.sweep(study, {"a": [1, 2, 3]}, progress=False)
    assert made.to_frame()["v"].tolist() == [1, 3] and made.failed["error"].tolist() == ["SystemExit: 3"]
