"""Threads: row-wise NumPy work over the processor's cores. NumPy holds no lock while it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

_WORTH = 1 << 19  # elements of an array below which a split costs more than it saves


def split(rows: int, width: int) -> list[slice]:
    """Cut `rows` rows of `width` elements into as many parts as are worth running side by side."""
    parts = min(rows, max(2 * (os.cpu_count() or 1), rows * width // _WORTH)) if rows * width > _WORTH else 1
    ends = np.linspace(0, rows, max(parts, 1) + 1).astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


def run(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Results of `function` for each item, in order; in threads if there are several.

    `function` must use NumPy only: MLX's streams belong to a thread.
    """
    items = list(items)
    if len(items) < 2:
        return [_quietly(function, item) for item in items]
    return list(_pool().map(lambda item: _quietly(function, item), items))


def _quietly(function: Callable[[Any], Any], item: Any) -> Any:
    # Excluded ids are -inf, and what becomes of them in arithmetic is masked afterwards.
    with np.errstate(all="ignore"):
        return function(item)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="sampling")
