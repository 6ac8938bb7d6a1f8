"""What every test of a notebook in the browser does: press, read the figures, time them, take pictures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from browser.lab import Live, Notebook
from playwright.sync_api import Locator

RUN_ALL = 25  # seconds
CACHED, FRESH = 120, 1500  # milliseconds from a control to the picture, at the 95th percentile


def drag(page: Notebook, picture: Live, label: str, *keys: str, nth: int = 0) -> list[float]:
    """Press keys on a slider or list, one at a time; the figures must change with each."""
    return [changed(picture, lambda key=key: page.control(label, nth).press(key)) for key in keys]


def changed(picture: Live, action: Callable[[], None]) -> float:
    before = picture.figures(), picture.words()
    spent = picture.after(action)
    assert (picture.figures(), picture.words()) != before
    return spent


def chosen(picture: Live, control: Locator, *names: str) -> list[float]:
    """Choose from a list, one after the other; the figures must change with each."""
    return [changed(picture, lambda name=name: control.select_option(name)) for name in names]


def typed(
    page: Notebook, label: str, *texts: str, watch: Callable[[Callable[[], None]], float]
) -> list[float]:
    """Fill in a text field and press Enter, for each text; `watch` does the pressing and times it."""
    spent = []
    for text in texts:
        page.control(label).fill(text)
        spent.append(watch(lambda: page.control(label).press("Enter")))
    return spent


def finished(page: Notebook, name: str, cached: list[float], fresh: list[float]) -> None:
    """The end of a notebook's test: times told, no error on the page, pictures taken."""
    timed("cached", cached, CACHED)
    if fresh:
        timed("fresh", fresh, FRESH)
    assert page.errors() == []
    looked_at(page, name)


def timed(what: str, spent: list[float], limit: float) -> None:
    p95 = float(np.percentile(spent, 95))
    print(f"{what}: median {np.median(spent):.0f} ms, 95th percentile {p95:.0f} ms of {limit:.0f}")


def looked_at(page: Notebook, name: str) -> list[Path]:
    shots = []
    for dark in (False, True):
        page.theme(dark)
        for width in (1280, 800):
            page.page.set_viewport_size({"width": width, "height": 900})
            shots += page.pages(f"{name}_{width}_{'dark' if dark else 'light'}")
    return shots
