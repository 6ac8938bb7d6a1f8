"""Which lengths to pad together: the cheapest grouping, by dynamic programming. Integers only.

Part of `plan`, for its "by-length" strategy. All windows are solved at once, because one is too small to
be worth a numpy call of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["least_padding"]

_NEVER = np.iinfo(np.int64).max


def least_padding(
    lengths: NDArray[np.int64],
    sizes: NDArray[np.int64],
    *,
    max_rows: int = 0,
    token_budget: int = 0,
    can_pad: bool = True,
    overhead: int = 0,
) -> NDArray[np.int64]:
    """Group the lengths of each window at least padded area plus `overhead` for each group.

    Parameters
    ----------
    lengths : int64, [rows]
        At least 1 each, in order of arrival, window after window.
    sizes : int64, [windows]
        How many lengths each window has; they add up to rows.
    max_rows, token_budget : int
        Most rows in a group, most padded tokens (rows x longest) in one of two rows or more; 0 is no limit.
    can_pad : bool
        False: only equal lengths share a group.
    overhead : int
        What one more group costs, in tokens.

    Returns
    -------
    int64, [rows]
        Where the group of each length begins: the place of its first member. A stable sort by this gives
        the groups in order of their first members, each in order of arrival.

    Notes
    -----
    It is enough to cut the *sorted* lengths into contiguous pieces. Take any allowed grouping, and in it
    the group, of c rows, that holds the longest row. Swap one of its other rows for a longer row of another
    group: its own area, c x longest, stays; the other group keeps its count, and its longest row does not
    grow. So no group breaks a limit that it kept and no area grows, and repeating this leaves it with the c
    longest rows. The same then goes for the rows that remain. With `can_pad` off, any two groups of one
    length can swap rows freely, so sorting loses nothing either.

    If the answer has k groups, no allowed grouping into k or fewer computes less, for its overhead is no
    higher. Ties go to fewer groups. Time grows with rows x min(window, max_rows).
    """
    widest = int(sizes.max(initial=0))
    if not widest:
        return np.zeros(0, np.int64)
    # Tables have a column for each window, so that a row of all windows is contiguous.
    inside = np.arange(widest) < sizes[:, None]
    table = np.full(inside.shape, _NEVER)  # what is not there sorts last
    table[inside] = lengths
    order = np.argsort(table, axis=1, kind="stable")
    table = np.ascontiguousarray(np.where(inside, np.take_along_axis(table, order, axis=1), 0).T)

    # best[j]: least cost of the j shortest rows; cut[j]: where the last of their groups begins. Costs are
    # in fractions of a token: a group costs one `tie` more, to decide between equal areas, and the lowest
    # digit, base `tie`, is the cut itself, so that one minimum finds both.
    tie = widest + 1
    table *= tie * tie
    best = np.zeros((widest + 1, len(sizes)), np.int64)
    cut = np.zeros_like(best)
    for j in range(1, widest + 1):
        first = max(0, j - max_rows) if max_rows else 0
        rows = np.arange(j - first, 0, -1)[:, None]
        area = rows * table[j - 1]
        cost = area + best[first:j]
        if token_budget:
            np.putmask(cost, (area > token_budget * tie * tie) & (rows > 1), _NEVER)
        if not can_pad:
            np.putmask(cost, table[first:j] != table[j - 1], _NEVER)
        least = cost.min(axis=0)
        cut[j] = least % tie
        best[j] = least - cut[j] + (overhead * tie + 1) * tie + j

    # Walk back from each window's end, all windows in step, marking where groups begin.
    begins = np.zeros((len(sizes), widest + 1), bool)
    windows, at = np.arange(len(sizes)), sizes
    while at.any():
        at = cut[at, windows]
        begins[windows, at] = True
    group = np.cumsum(begins[:, :widest][inside]) - 1

    # `inside` covers the first places of a window, so sorted places and arrivals fill the same cells.
    place = (order + (np.cumsum(sizes) - sizes)[:, None])[inside]
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    answer = np.empty(len(lengths), np.int64)
    answer[place] = np.minimum.reduceat(place, starts)[group]
    return answer
