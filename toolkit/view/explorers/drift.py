"""Explorers of drift: who runs beside a request, by which rules, and what that does to its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ipywidgets as widgets
import pandas as pd

from ...forward.shapes import PLAIN, Shapes
from ...invariance import verdict
from ...models.load import Model
from ...requests import Request
from ...study.drift.compositions import SIBLINGS, Composition
from ...study.drift.rounded_model import rounded
from ...study.drift.runs import Runs, Way, rules
from ..charts import equal_bits as pictures
from .base import Explorer, choice, whole

__all__ = ["DriftExplorer", "RulesExplorer"]

AMPLIFIED = {"as measured": 1.0, "100 times": 1e2, "10,000 times": 1e4, "100,000 times": 1e5}


class _Chooser:
    """Controls of a composition."""

    def __init__(self, length: int, siblings: Sequence[str], others: int):
        self.siblings = tuple(siblings)
        self.others = whole("Others", others, 0, len(self.siblings))
        self.last = widgets.Checkbox(False, description="others come first", indent=False)
        self.chunk = whole("Chunks of", 0, 0, length - 1)
        self.cached = whole("Cached", 0, 0, length - 1)
        self.decode = whole("Decoded", 0, 0, length - 1)

    def controls(self) -> list[widgets.Widget]:
        return [self.others, self.last, self.chunk, self.cached, self.decode]

    def read(self) -> Composition:
        siblings = self.siblings[: self.others.value]
        return Composition(
            siblings,
            self.last.value and bool(siblings),
            self.chunk.value,
            self.cached.value,
            self.decode.value,
        )


class DriftExplorer(Explorer):
    """How far a request's logits move in company, above how far they may move before a token could change.

    Parameters
    ----------
    model : Model
        In float32.
    request : Request
    siblings : sequence of str
        Prompts that may run beside it.
    arithmetic : {"float32", "16-bit results"}
        To begin with.
    seeds : int
        How many draw a token from each run.
    """

    def __init__(self, model: Model, request: Request, *, siblings: Sequence[str] = SIBLINGS,
                 arithmetic: str = "float32", seeds: int = 100):  # fmt: skip
        exact = Runs(model, request, seeds)
        self.runs = {"float32": exact, "16-bit results": Runs(rounded(model), request, seeds)}
        self.runs["16-bit results"].flips = exact.flips  # the same noise
        self.found = verdict.verdict(model).shapes
        self.chooser = _Chooser(len(exact.mine), siblings, len(siblings))
        self.arithmetic = choice("Arithmetic", list(self.runs), arithmetic)
        self.forward = choice("Forward", ["packed", "packed, rules on", "padded", "sequential"], "packed")
        self.amplify = choice("Drift", list(AMPLIFIED), "as measured")
        super().__init__([self.arithmetic, self.forward, self.amplify, *self.chooser.controls()])

    def show(self) -> str:
        these, how = self.runs[self.arithmetic.value], self.chooser.read()
        way: Way = {"packed": PLAIN, "packed, rules on": self.found}.get(
            self.forward.value, self.forward.value
        )
        times = AMPLIFIED[self.amplify.value]
        key = self.arithmetic.value, way, how, times
        apart = self.cached(key, lambda: these.apart(way, how, times))
        data = self.cached((*key, "data"), lambda: pictures.reach_data(apart))
        count, could, did = len(apart.changed), int(apart.could.sum()), int(apart.changed.sum())
        label = "" if times == 1 else f" (drift amplified {self.amplify.value})"
        if not apart.largest:
            words = f"Run {how.name}: every logit has the bits of the alone run, so no token can change."
        else:
            words = (
                f"Run {how.name}: logits moved by up to {apart.largest:.1g}{label}; of {count} seeds' tokens "
                f"{could} could change, {did} did."
            )
        self.draw("", lambda: pictures.reach(data, width=400), data, words)
        return words


class RulesExplorer(Explorer):
    """Three rules to switch on and off, and the drift that is left, for some compositions and your own.

    Parameters
    ----------
    model : Model
    request : Request
    siblings : sequence of str
        Prompts that may run beside it.
    on : sequence of {"tile", "block", "bucket"}
        Rules that are on to begin with.
    known : Runs, optional
        What has been run before.
    """

    def __init__(self, model: Model, request: Request, *, siblings: Sequence[str] = SIBLINGS,
                 on: Sequence[str] = (), known: Runs | None = None):  # fmt: skip
        self.runs = Runs(model, request, 0, known)
        self.found = verdict.verdict(model).shapes
        found, length = self.found, len(self.runs.mine)
        told = {
            "tile": f"Tile: tokens in groups of {found.tile}",
            "block": f"Block: queries in groups of {found.block}",
            "bucket": f"Bucket: keys in groups of {found.bucket}",
        }
        self.rules = {
            name: widgets.Checkbox(name in on, description=text, indent=False) for name, text in told.items()
        }
        self.chooser = _Chooser(length, siblings, 1)
        self.button = widgets.Button(description="Time these rules", tooltip="Run with and without them")
        self._wanted = False
        self.button.on_click(self._time)
        self.usual = compositions(siblings, length)
        super().__init__([*self.rules.values(), *self.chooser.controls(), self.button])

    def _time(self, _: widgets.Button) -> None:
        self._wanted = True
        self._submit()

    def show(self) -> str:
        timed, self._wanted = self._wanted, False
        shapes = rules(self.found, **{name: box.value for name, box in self.rules.items()})
        mine = self.chooser.read()
        runs = self.usual | {"your own": mine}
        frame = pd.DataFrame(
            [(name, said, self.runs.largest(way, how)) for name, how in runs.items()
             for said, way in (("no rules", PLAIN), ("these rules", shapes))],
            columns=["composition", "rules", "max_abs"],
        )  # fmt: skip
        names = [name for name, box in self.rules.items() if box.value]
        equal = int((frame.loc[frame["rules"] == "these rules", "max_abs"] == 0).sum())
        said = f"With {' and '.join(names)}" if names else "With no rules"
        words = f"{said}, {equal} of {len(runs)} runs have the alone run's bits; your own is run {mine.name}."
        if timed:
            words += self._price(shapes, mine)
        data = pictures.rules_data(frame)
        self.draw("", lambda: pictures.rules(frame), data, words)
        return words

    def _price(self, shapes: Shapes, how: Composition) -> str:
        off, on = self.runs.seconds((PLAIN, shapes), how)
        return f" It took {1e3 * on:.0f} ms with these rules, {1e3 * off:.0f} ms without."


def compositions(siblings: Sequence[str], length: int) -> dict[str, Composition]:
    """Four that rules are tried on, by name."""
    some = Composition(tuple(siblings))
    return {
        c.name: c
        for c in (some, replace(some, last=True), replace(some, chunk=length // 2), replace(some, decode=2))
    }
