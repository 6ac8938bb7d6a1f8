"""Flips: the tokens that many seeds draw from one row of logits, and how many change with it.

A seed's noise does not depend on the logits, so it is made once and added to each run's scores. Used by
`drift`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from ... import noise
from ...requests import Request
from ...sampling import Draw, draw_keyed, process

BLOCK = 32
"""Seeds that are drawn for at a time."""
KEPT = 256 << 20
"""Bytes of noise that are kept for the next run."""
ROUNDING = 4e-6
"""What float32 may make of a score, in nats: half a unit in the last place of 64."""


class Flips:
    """Draws of one request at one position, for many seeds; of a greedy one, for one.

    Parameters
    ----------
    request : Request
    prompt : sequence of int
        Its token ids; `generated` ones follow, then the token drawn.
    seeds : sequence of int
    """

    def __init__(self, request: Request, prompt: Sequence[int], seeds: Sequence[int]):
        self.request, self.prompt = request, prompt
        self.position = len(prompt) + len(request.generated)
        self.seeds = list(seeds)[:1] if request.greedy else list(seeds)
        self._noise: dict[int, mx.array] = {}
        self._of: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}

    def of(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each seed's token, and its `max_drift` (NaN where there is no bound)."""
        key = logits.tobytes()
        if key not in self._of:
            bounds = [np.zeros(0, np.float32)]
            for draws in self._blocks():
                drawn = draw_keyed(mx.broadcast_to(mx.array(logits), (len(draws), logits.size)), draws)
                bounds.append(np.array(drawn.max_drift))
            self._of[key] = self._tokens(logits), np.concatenate(bounds)
        return self._of[key]

    def between(self, known: tuple[np.ndarray, np.ndarray], logits: np.ndarray, apart: float
                ) -> tuple[int, int, int]:  # fmt: skip
        """How many tokens are others from these logits; of how many draws; and how many could be.

        Parameters
        ----------
        known : pair of arrays
            What `of` said of the logits to compare with.
        logits : float32, [vocab]
        apart : float
            The largest difference between the two.
        """
        if not apart:  # equal bits draw equal tokens
            return 0, len(self.seeds), 0
        tokens, bound = known
        reach = apart + ROUNDING * max(1.0, self.request.temperature)
        flipped = self._tokens(logits) != tokens
        return int(flipped.sum()), len(self.seeds), int((~(bound > reach)).sum())

    def _tokens(self, logits: np.ndarray) -> np.ndarray:
        row = mx.array(logits)[None]
        if self.request.greedy or self.request.xtc_probability:  # the gate is another for each seed
            wide = ((mx.broadcast_to(row, (len(draws), logits.size)), draws) for draws in self._blocks())
            found = [np.array(draw_keyed(rows, draws).tokens) for rows, draws in wide]
        else:
            scores = process(row, [self._draw(0)])
            found = [np.array(mx.argmax(scores + added, axis=-1)) for added in self._added(logits.size)]
        return np.concatenate([*found, np.zeros(0, np.int32)])

    def _added(self, vocab: int) -> Iterator[mx.array]:
        """Noise, `[seeds of a block, vocab]`."""
        for first in range(0, len(self.seeds), BLOCK):
            kept = self._noise.get(first)
            if kept is None:
                seeds = self.seeds[first : first + BLOCK]
                keys = noise.row_keys(seeds, [0] * len(seeds), [self.position] * len(seeds))
                kept = noise.gumbel(keys, vocab)
                if sum(a.nbytes for a in self._noise.values()) < KEPT:
                    mx.eval(kept)
                    self._noise[first] = kept
            yield kept

    def _blocks(self) -> Iterator[list[Draw]]:
        for first in range(0, len(self.seeds), BLOCK):
            yield [self._draw(seed) for seed in self.seeds[first : first + BLOCK]]

    def _draw(self, seed: int) -> Draw:
        return Draw(self.request, seed, 0, self.position, self.prompt, self.request.generated)
