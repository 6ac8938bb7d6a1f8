"""The harness itself, on a scratch notebook: pictures, controls, themes, and the gate to the network."""

import nbformat
import pytest
from lab import Lab
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SLIDER = """
import ipywidgets as widgets
from toolkit.view.picture import Picture
import threading
slider = widgets.IntSlider(value=3, min=0, max=9, description="Height")
slider.add_class("probe")
picture, threads = Picture(selector="path"), set()
def draw(_=None):
    threads.add(threading.current_thread().name)
    h = slider.value
    picture.draw(f'<svg width="100" height="50" viewBox="0 0 100 50"><path d="M0,0h{10 * h}v9h-90Z" '
                 f'aria-roledescription="bar" aria-label="height: {h}"/></svg>', f"a bar of height {h}")
slider.observe(draw, "value")
draw()
picture.observe(lambda c: setattr(slider, "value", 9), "clicked")
widgets.HBox([slider, picture])
"""
CHART = """
import sys; sys.path.insert(0, {tests!r})
from chart_tables import all_charts
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
    picture = page.picture()
    handle = page.page.locator(".probe .noUi-handle")
    assert picture.figures() == ["height: 3"]
    for expected in (4, 5):
        spent = picture.after(lambda: handle.press("ArrowRight"))
        assert picture.figures() == [f"height: {expected}"]
        assert picture.words() == f"a bar of height {expected}"
        assert 0 < spent < 2000
    picture.after(lambda: page.page.locator(".toolkit-picture path").click())
    assert picture.figures() == ["height: 9"]


def test_stored_charts_show_their_figures_in_both_themes_and_widths(opened, scratch):
    page = opened(scratch)
    page.run_all()
    drawn = page.page.locator(".jp-RenderedVegaCommon5 svg, .jp-RenderedVegaLite svg, .vega-embed svg")
    drawn.nth(2).wait_for()
    labels = page.page.locator(".vega-embed [aria-roledescription=bar]")
    assert any("toy #100" in (label.get_attribute("aria-label") or "") for label in labels.all())
    for dark in (False, True):
        page.theme(dark)
        for width in (1280, 800):
            page.page.set_viewport_size({"width": width, "height": 900})
            assert page.pages(f"scratch_{width}_{'dark' if dark else 'light'}")
