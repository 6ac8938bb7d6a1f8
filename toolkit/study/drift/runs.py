"""Apart: one request run in many ways, each run kept. Under the explorers of drift and of the shape rules.

`drift` makes a table of many runs at once; here one run is made when it is asked for, with any rules.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from ...engine.admission import check
from ...forward.packed import PackedForward
from ...forward.shapes import PLAIN, Shapes
from ...forward.spans import Forward
from ...invariance.build import build
from ...models.load import Model
from ...requests import Request
from .compositions import Composition
from .flips import ROUNDING, Flips
from .study import _run as run
from .study import _tokens as ids_of

Way = Shapes | str
"""Packed with these rules; or one of the other forwards, by name."""


def rules(found: Shapes, *, tile: bool = True, block: bool = True, bucket: bool = True) -> Shapes:
    """Some of the rules that the probe found: the output head goes with the tile, `skip` with the bucket."""
    shapes = replace(PLAIN, tile=found.tile, head=found.head) if tile else PLAIN
    shapes = replace(shapes, block=found.block) if block else shapes
    return replace(shapes, bucket=found.bucket, skip=found.skip) if bucket else shapes


@dataclass(frozen=True, eq=False)
class Apart:
    """One run against the alone run.

    Attributes
    ----------
    differences : float32, [vocab]
        In logits, absolute, amplified.
    reach : float32, [seeds]
        By how much logits may differ before a seed's token could change (NaN where that is unknown).
    changed : bool, [seeds]
        Whose token did change.
    """

    differences: np.ndarray
    reach: np.ndarray
    changed: np.ndarray

    @property
    def largest(self) -> float:
        """In logits."""
        return float(self.differences.max())

    @property
    def could(self) -> np.ndarray:
        """Whose token the largest difference could change, the rounding of scores included; bool, [seeds]."""
        if not self.largest:
            return np.zeros(len(self.reach), bool)
        return np.asarray(~(self.reach > self.largest + ROUNDING))


class Runs:
    """A request's logits, by how it is run and who runs beside it.

    Parameters
    ----------
    model : Model
    request : Request
    seeds : int
        How many seeds draw a token from each run.
    known : Runs, optional
        Of the same model and request: its logits so far are taken over, for use on another thread.
    """

    def __init__(self, model: Model, request: Request, seeds: int = 100, known: Runs | None = None):
        self.model, self.request = model, request
        self.prompt = check(request, model)
        self.mine = [*self.prompt, *request.generated]
        self.flips = Flips(request, self.prompt, range(seeds))
        self._forwards: dict[Way, Forward] = {}
        self._logits: dict[tuple[Way, Composition], np.ndarray] = dict(known._logits) if known else {}

    def logits(self, way: Way, how: Composition) -> np.ndarray:
        """After the request's last token, float32 `[vocab]`."""
        if (way, how) not in self._logits:
            self._logits[way, how] = self._run(way, how)
        return self._logits[way, how]

    def largest(self, way: Way, how: Composition) -> float:
        """The largest difference from the alone run, in logits."""
        return float(np.abs(self.logits(way, how) - self.logits(way, Composition())).max())

    def apart(self, way: Way, how: Composition, amplify: float = 1.0) -> Apart:
        """The run against the alone run, and what the seeds draw from both."""
        alone, found = self.logits(way, Composition()), self.logits(way, how)
        after = alone + np.float32(amplify) * (found - alone) if amplify != 1 else found
        tokens, reach = self.flips.of(alone)
        changed = np.zeros(len(tokens), bool)
        if (after != alone).any():
            changed = self.flips._tokens(after) != tokens
        return Apart(np.abs(after - alone), reach, changed)

    def seconds(self, ways: tuple[Way, ...], how: Composition, repeats: int = 2) -> list[float]:
        """The best of some runs, taken in turns, for each way."""
        spent: list[list[float]] = [[] for _ in ways]
        for _ in range(repeats):
            for times, way in zip(spent, ways, strict=True):
                start = time.perf_counter()
                self._run(way, how)
                times.append(time.perf_counter() - start)
        return [min(times) for times in spent]

    def _run(self, way: Way, how: Composition) -> np.ndarray:
        if way not in self._forwards:
            made = (
                build(self.model, way, False)[0] if isinstance(way, str) else PackedForward(self.model, way)
            )
            self._forwards[way] = made
        siblings = [ids_of(sibling, self.model) for sibling in how.siblings]
        return run(self._forwards[way], self.mine, siblings, how)
