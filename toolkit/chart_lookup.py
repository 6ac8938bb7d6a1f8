"""Charts of results, looked up when one is drawn: the one place below `view` that reaches up to it.

A result's `.chart()` asks here, so that results need neither Altair nor `view` until somebody looks at one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["chart_function"]


def chart_function(name: str) -> Callable[..., Any]:
    """The function of that name in `view.charts`; importing it loads Altair."""
    from .view import charts

    function: Callable[..., Any] = getattr(charts, name)
    return function
