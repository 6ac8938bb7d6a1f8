"""`toolkit.view.charts`, without a browser: every chart compiles, says what it shows and stays as it was."""

import json
import os
import struct
import zlib
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
import pytest
import vl_convert
from helpers.chart_tables import all_charts, distribution, matrix, observed, tokens

from toolkit.view import charts, figure, png
from toolkit.view.charts import seeds, theme
from toolkit.view.charts.sweep import sweep_data

SNAPSHOTS = Path(__file__).parents[2] / "snapshots"
CHARTS = all_charts()


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_compiles_to_svg_with_the_vega_lite_that_jupyterlab_has(name):
    svg = figure.svg(CHARTS[name])
    assert svg.startswith("<svg") and "aria-label" in svg
    assert "NaN" not in svg and "undefined" not in svg
    assert "<title>" not in svg


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_what_its_snapshot_says(name):
    """Set UPDATE_SNAPSHOTS=1 to accept a change, then look at the picture."""
    text = json.dumps(figure.spec(CHARTS[name]), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    path = SNAPSHOTS / f"{name}.json"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_a_stored_chart_is_small_and_carries_a_text_alternative():
    data, metadata = figure.Figure(CHARTS["seed_matrix"])._repr_mimebundle_()
    assert set(data) == {figure.MIME, "image/png", "text/plain"}
    assert (
        len(data["image/png"]) < 100_000
    )  # 40,156 without system fonts; unsqueezed it is several times that
    assert data[figure.MIME]["$schema"].endswith("v5.json")
    assert "global: every column is constant" in data["text/plain"]
    assert metadata[figure.MIME]["embed_options"]["renderer"] == "svg"


def test_altair_shows_any_chart_offline_once_the_view_is_imported():
    assert alt.renderers.active == "toolkit"
    data, _ = alt.Chart(pd.DataFrame({"x": [1]})).mark_point().encode(x="x")._repr_mimebundle_()
    assert figure.MIME in data and "text/html" not in data


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html", ".json"])
def test_a_figure_saves_by_suffix_and_leaves_no_part_behind(tmp_path, suffix):
    path = figure.show(CHARTS["margins"]).save(tmp_path / f"picture{suffix}")
    assert path.stat().st_size > 1000
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_saved_page_needs_no_network(tmp_path):
    text = figure.show(CHARTS["margins"]).save(tmp_path / "picture.html").read_text()
    assert "<script src=" not in text


def test_an_unknown_suffix_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"suffix '.bmp' of 'a.bmp': must be"):
        figure.show(CHARTS["margins"]).save(tmp_path / "a.bmp")


def test_last_bits_of_a_logit_do_not_change_a_picture():
    moved = distribution().assign(p=lambda t: t["p"] * (1 + 3e-5), p_raw=lambda t: t["p_raw"] * (1 - 3e-5))
    assert figure.spec(charts.first_tokens(moved)) == figure.spec(charts.first_tokens(distribution()))
    other = distribution().assign(p=lambda t: t["p"] * 1.01)
    assert figure.spec(charts.first_tokens(other)) != figure.spec(charts.first_tokens(distribution()))


def test_excluded_tokens_stay_in_sight():
    drawn = figure.svg(charts.first_tokens(distribution(top_k=2)))
    assert "kite" in drawn and "dashed: unfiltered" in drawn


def test_other_numbers_are_another_filling_of_the_same_chart():
    one, other = observed(), observed().assign(token=lambda t: (t["token"] * 7) % 13 + 100)
    moved = distribution().assign(p=lambda t: t["p"][::-1].to_numpy())
    charts_of = [charts.first_tokens(distribution(), one), charts.first_tokens(moved, other)]
    bare = [figure.skeleton(figure.spec(chart)) for chart in charts_of]
    assert {**bare[0], "description": ""} == {**bare[1], "description": ""}
    assert "values" not in json.dumps(bare[0])
    assert charts.first_tokens_data(distribution(), one) != charts.first_tokens_data(moved, other)


def test_the_matrix_is_put_into_words():
    frame = matrix()
    said = {policy: charts.reading(part) for policy, part in frame.groupby("policy")}
    assert said["global"].startswith("every column is constant")
    assert said["keyed"].startswith("every row is constant")
    assert charts.reading(frame.assign(token=1)).startswith("one token everywhere")
    mixed = frame.assign(token=frame["seed"] + frame["sibling_seed"])
    assert charts.reading(mixed) == "both seeds count"


def test_observed_tokens_outside_the_picture_are_counted_as_others():
    frame = observed().assign(token=999)
    assert f"label: {seeds.REST}; " in figure.svg(charts.first_tokens(distribution(), frame))


def test_labels_are_distinct_and_readable():
    assert theme.labels([1, 2, 3], [" toy", "toy", "\n"]) == ["toy #1", "toy #2", "\\n"]
    assert theme.labels([1, 1], [" toy", " toy"]) == ["toy", "toy"]
    assert theme.labels([4, 5, 6, 7], ["", " ", "   ", "\x00"]) == ["(empty)", "space", "3 spaces", "?"]
    assert len(theme.labels([8], [" antidisestablishment"])[0]) == 14


def test_margins_count_what_could_flip_and_skip_what_is_undefined():
    words = figure.spec(charts.margins(tokens(), drift=1e-3))["description"]
    assert words == "36 tokens; 8 could flip under the measured drift."


def test_squeezing_a_png_keeps_its_size_and_every_opaque_colour():
    spec = figure.spec(CHARTS["plan"])
    big = vl_convert.vegalite_to_png(spec, vl_version=figure.VERSION)
    small = png.squeeze(big)
    assert len(small) < len(big) / 4
    assert small[16:24] == big[16:24]  # width and height
    parts = dict(png._chunks(small))
    colours = {parts[b"PLTE"][i : i + 3] for i in range(0, len(parts[b"PLTE"]), 3)}
    assert {bytes.fromhex(c[1:]) for c in (theme.BLUE, theme.ORANGE, theme.GREEN)} <= colours
    width, height = struct.unpack(">II", small[16:24])
    assert len(zlib.decompress(parts[b"IDAT"])) == height * (width + 1)
    assert png.squeeze(small) == small


def test_a_sum_of_nothing_is_no_point_at_zero():
    frame = pd.DataFrame({"policy": ["global", "global", "keyed"], "margin": [np.nan, np.nan, 2.0]})
    data = sweep_data(frame, "margin", "policy", None, "sum").set_index("across")["value"]
    assert np.isnan(data["global"]) and data["keyed"] == 2.0
