"""Crowd: the keyed draws of very many seeds at one position, exact, fast enough to follow a slider.

A seed's noise does not depend on logits, so it is made once: densely for the likeliest ids, as far as they
survive the filters, and for all others only where it is large. An unlikely id needs large noise to win; a
seed whose best draw is not above what the noise left out could reach is drawn in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ... import noise
from ...sampling import process
from .prefilled import Prefilled

if TYPE_CHECKING:
    import pandas as pd

_BLOCK, _BLOCKS = 128, 8  # ids a block of dense noise; blocks at most
_CHUNK = 256  # seeds whose whole noise is in memory at one time
_LARGE = 5.5  # nats: 1 id in 245 has noise above it
_WORD = np.uint32(np.exp(-np.exp(-_LARGE)) * 2.0**32)


class Crowd:
    """Seeds that all draw from one distribution.

    Parameters
    ----------
    seeds : sequence of int
    position : int
        Logical position of the token drawn.
    likeliest : int array, [vocab]
        All ids, in the order in which dense noise is made for them; any order gives the same tokens.
    """

    def __init__(self, seeds: Sequence[int], position: int, likeliest: np.ndarray):
        count = len(seeds)
        self.order = likeliest.astype(np.int32)
        self._keys = noise.row_keys(seeds, [0] * count, [position] * count)
        self._dense: list[np.ndarray] = []
        self._sparse: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def tokens(self, scores: np.ndarray) -> np.ndarray:
        """Each seed's token: int32 [seeds], from scores float32 [vocab], -inf where excluded."""
        count = len(self._keys)
        ranked = scores[self.order]
        alive = int(np.flatnonzero(np.isfinite(ranked))[-1]) + 1
        best, token = np.full(count, -np.inf, np.float32), np.zeros(count, np.int32)
        for block in range(min(_BLOCKS, -(-alive // _BLOCK))):
            first = block * _BLOCK
            perturbed = self._block(block) + ranked[first : first + _BLOCK]
            place = perturbed.argmax(axis=1)
            value = perturbed[np.arange(count), place]
            token = np.where(value > best, self.order[first + place], token)
            best = np.maximum(value, best)
        if alive > _BLOCK * _BLOCKS:
            token = self._with_others(scores, ranked[_BLOCK * _BLOCKS :].max(), best, token)
        return token

    def _block(self, block: int) -> np.ndarray:
        while len(self._dense) <= block:
            first = len(self._dense) * _BLOCK
            ids = mx.array(self.order[first : first + _BLOCK])[None]
            shape = len(self._keys), ids.shape[1]
            self._dense.append(np.array(noise.gumbel_at(mx.array(self._keys), mx.broadcast_to(ids, shape))))
        return self._dense[block]

    def _with_others(
        self, scores: np.ndarray, highest: float, best: np.ndarray, token: np.ndarray
    ) -> np.ndarray:
        """Let the unlikely ids compete: those with large noise, or all of them where that can't decide."""
        starts, ids, large = self._others()
        perturbed = scores[ids] + large
        filled = np.flatnonzero(np.diff(starts))
        value = np.maximum.reduceat(perturbed, starts[filled])
        won = filled[value > best[filled]]
        best, token = best.copy(), token.copy()
        for seed in won:
            part = slice(starts[seed], starts[seed + 1])
            place = perturbed[part].argmax()
            best[seed], token[seed] = perturbed[part][place], ids[part][place]
        unsure = np.flatnonzero(best <= highest + _LARGE)
        for first in range(0, len(unsure), _CHUNK):
            some = unsure[first : first + _CHUNK]
            whole = noise.gumbel(self._keys[some], len(scores)) + mx.array(scores)
            token[some] = np.array(mx.argmax(whole, axis=-1))
        return token

    def _others(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Large noise of all ids: where each seed's begins [seeds + 1], the ids, their noise."""
        if self._sparse is None:
            vocab, counts, ids, words = len(self.order), [], [], []
            for first in range(0, len(self._keys), _CHUNK):
                some = np.array(noise.bits(self._keys[first : first + _CHUNK], vocab))
                row, id = np.nonzero(some >= _WORD)
                counts.append(np.bincount(row, minlength=len(some)))
                ids.append(id.astype(np.int32))
                words.append(some[row, id])
            starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
            large = np.array(noise.gumbel_from_bits(mx.array(np.concatenate(words))))
            self._sparse = starts, np.concatenate(ids), large
        return self._sparse


def tally(batch: Prefilled, row: str, seeds: Sequence[int], *, top: int = 12) -> pd.DataFrame:
    """What many seeds draw first, under keyed noise, beside what the exact distribution expects.

    Parameters
    ----------
    batch : Prefilled
    row : str
    seeds : sequence of int
    top : int
        Number of likeliest tokens listed; the others are added up as token -1.

    Returns
    -------
    pandas.DataFrame
        `token, text, p, drawn, expected`, likeliest first.
    """
    import pandas as pd

    draw, logits = batch.draw(row, 0), batch.logits[row]
    scores = process(logits[None], [draw])[0]
    p, order = np.array(mx.softmax(scores)), np.argsort(-np.array(logits.astype(mx.float32)), kind="stable")
    tokens = Crowd(seeds, draw.position, order).tokens(np.array(scores))
    ids = [int(i) for i in np.argsort(-p, kind="stable")[:top] if p[i] > 0]
    text = batch.model.token_text
    lines = [(i, text(i), float(p[i]), int((tokens == i).sum())) for i in ids]
    rest = max(0.0, 1 - sum(line[2] for line in lines)), len(tokens) - sum(line[3] for line in lines)
    if np.count_nonzero(p) > len(ids):
        lines.append((-1, "all others", *rest))
    frame = pd.DataFrame(lines, columns=["token", "text", "p", "drawn"])
    return frame.assign(expected=frame["p"] * len(tokens))
