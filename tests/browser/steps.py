"""What every test of a notebook in the browser does: press, read the figures, time them, take pictures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from lab import Live, Notebook

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
