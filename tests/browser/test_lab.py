"""The harness itself, on a scratch notebook: pictures, controls, themes, and the gate to the network."""

import nbformat
import pytest
from browser.lab import Lab
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SLIDER = """
import altair as alt
import ipywidgets as widgets
from toolkit.view.explorers.base import Explorer, whole
from toolkit.view.charts.theme import finish, named

class Probe(Explorer):
    def __init__(self):
        self.height = whole("Height", 3, 0, 9)
        super().__init__([self.height], selector=".mark-rect path")
        self.picture.observe(lambda _: setattr(self.height, "value", 9), "clicked")
    def show(self):
        lines = [{"name": "bar", "height": self.height.value}]
        bars = alt.Chart(named("bars", lines)).mark_bar().encode(x="height:Q", y="name:N")
        words = f"A bar of height {self.height.value}."
        self.draw("bar", lambda: finish(bars, "bar"), {"bars": lines}, words)
        return words

probes = Probe(), Probe()
widgets.VBox([probe.box for probe in probes])
"""
CHART = """
import sys; sys.path.insert(0, {tests!r})
from helpers.chart_tables import all_charts
from toolkit.view import show
show(all_charts()[{name!r}])
"""


@pytest.fixture
def scratch(lab: Lab, request: pytest.FixtureRequest) -> str:
    tests = str(request.config.rootpath / "tests")
    charts = [CHART.format(tests=tests, name=name) for name in ("first_tokens", "timeline", "plan")]
    stray = "from IPython.display import HTML\nHTML('<img src=\"https://example.org/x.png\">')"
    cells = [new_markdown_cell("# Scratch"), *(new_code_cell(s) for s in (SLIDER, *charts, stray))]
    # Without a kernel's name JupyterLab opens a dialog and waits for an answer.
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), lab.directory / "scratch.ipynb")
    return "scratch.ipynb"


def test_a_control_moved_twice_redraws_twice_and_nothing_leaves_the_loopback(opened, scratch):
    page = opened(scratch)
    page.run_all()
    assert page.errors() == []
    assert set(page.strays) == {"https://example.org/x.png"}
    first, second = page.picture(0), page.picture(1)
    handle = page.control("Height")
    assert first.figures() == ["height: 3; name: bar"]
    for expected in (4, 5):
        spent = first.after(lambda: handle.press("ArrowRight"))
        assert first.figures() == [f"height: {expected}; name: bar"]
        assert first.words() == f"A bar of height {expected}."
        container = first.place.locator("[role=graphics-document]").first
        assert container.get_attribute("aria-label") == first.words()  # not the first picture's
        assert 0 < spent < 2000
    first.after(lambda: first.place.locator(".mark-rect path").click())
    assert first.figures() == ["height: 9; name: bar"]
    first.after(lambda: handle.press("ArrowLeft"))
    first.after(lambda: first.place.locator(".mark-rect path").press("Enter"))
    assert first.figures() == ["height: 9; name: bar"]
    assert second.figures() == ["height: 3; name: bar"]  # two live side by side


def test_an_explorer_works_again_after_a_restart_of_the_kernel(opened, scratch):
    page = opened(scratch)
    page.run_all()
    page.restart()
    page.run_all()
    assert page.errors() == []
    picture = page.picture()
    picture.after(lambda: page.control("Height").press("ArrowRight"))
    assert picture.figures() == ["height: 4; name: bar"]


def test_stored_charts_show_their_figures_in_both_themes_and_widths(opened, scratch):
    page = opened(scratch)
    page.run_all()
    page.page.locator(".jp-OutputArea .vega-embed svg").nth(4).wait_for()
    labels = page.page.locator(".vega-embed [aria-roledescription=bar]")
    assert any("toy #100" in (label.get_attribute("aria-label") or "") for label in labels.all())
    for dark in (False, True):
        page.theme(dark)
        for width in (1280, 800):
            page.page.set_viewport_size({"width": width, "height": 900})
            assert page.pages(f"scratch_{width}_{'dark' if dark else 'light'}")
