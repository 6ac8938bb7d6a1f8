"""Which lengths to pad together: the cheapest grouping, by dynamic programming. Integers only.

Part of `cohorts`, for its "by-length" strategy; many windows are solved at once, because a window is too
small to be worth a numpy call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["group_by_length"]


def group_by_length(
    windows: Sequence[Sequence[int]], *, max_rows: int = 0, token_budget: int = 0, can_pad: bool = True,
    overhead: int = 0,
) -> list[list[list[int]]]:  # fmt: skip
    """Split each window into groups of least padded area plus `overhead` for each group.

    Parameters
    ----------
    windows : sequence of sequences of int
        Lengths, at least 1, in the order of arrival.
    max_rows, token_budget : int
        Most rows in a group, most padded tokens (rows x longest) in one of two rows or more; 0 is no limit.
    can_pad : bool
        False: only equal lengths share a group.
    overhead : int
        What one more group costs, in tokens.

    Returns
    -------
    list, one entry a window
        Its groups: places in the window, ascending in each group, groups by their first place.

    Notes
    -----
    It is enough to cut the *sorted* lengths into contiguous pieces. Take any allowed grouping and in it the
    group, of c rows, that holds the longest row. Swap one of its other rows for a longer row of another
    group: its own area, c x longest, stays; the other group keeps its count and its longest row does not
    grow. So no group breaks a limit that it kept and no area grows, and repeating this leaves it with the c
    longest rows. The same then goes for the rows that remain. With `can_pad` off the argument is the same
    within each length.

    With k groups in the answer, no grouping into k or fewer computes less: their overhead is no higher.
    Ties go to fewer groups. Time grows with rows x min(window, max_rows).
    """
    longest_window = max(map(len, windows), default=0)
    if not longest_window:
        return [[] for _ in windows]
    width = min(longest_window, max_rows or longest_window)
    counts = np.fromiter(map(len, windows), np.int64, len(windows))
    lengths = np.full((len(windows), longest_window), np.iinfo(np.int64).max)
    inside = np.arange(longest_window) < counts[:, None]
    lengths[inside] = np.fromiter((length for window in windows for length in window), np.int64)
    order = np.argsort(lengths, axis=1, kind="stable")
    lengths = np.take_along_axis(np.where(inside, lengths, 0), order, axis=1)

    # best[:, j]: least cost of the j shortest rows; cut[:, j]: where its last group begins. Costs are scaled
    # so that the number of groups decides between equal areas.
    scale = longest_window + 1
    best = np.zeros((len(windows), longest_window + 1), np.int64)
    cut = np.zeros_like(best)
    for j in range(1, longest_window + 1):
        first = max(0, j - width)
        sizes = np.arange(j - first, 0, -1)
        areas = lengths[:, j - 1, None] * sizes
        costs = best[:, first:j] + areas * scale
        if token_budget:
            costs[(areas > token_budget) & (sizes > 1)] = np.iinfo(np.int64).max
        if not can_pad:
            costs[lengths[:, first:j] != lengths[:, j - 1, None]] = np.iinfo(np.int64).max
        where = np.argmin(costs, axis=1)
        cut[:, j] = first + where
        best[:, j] = np.take_along_axis(costs, where[:, None], axis=1)[:, 0] + overhead * scale + 1

    answer = []
    for places, cuts, j in zip(order.tolist(), cut.tolist(), counts.tolist(), strict=True):
        groups = []
        while j:
            groups.append(sorted(places[cuts[j] : j]))
            j = cuts[j]
        groups.sort()
        answer.append(groups)
    return answer
