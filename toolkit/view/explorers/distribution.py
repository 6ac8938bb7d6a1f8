"""Distributions: an explorer of one next-token distribution, its filters, its seeds, and what comes after."""

from __future__ import annotations

from functools import partial
from typing import Any

import ipywidgets as widgets
import mlx.core as mx
import numpy as np
import pandas as pd

from ...models.load import Model
from ...requests import Request
from ...sampling import Draw, draw_keyed, process
from ...study.seeds.filter_stages import stages
from ...study.seeds.many_seeds import Crowd
from ...study.seeds.prefilled import prefill
from ...token_labels import labels
from ..charts import filters
from ..charts.theme import Chart
from .base import STYLE, WIDE, Explorer, choice, number, seed, text, whole

_FIELDS = ("temperature", "top_k", "top_p", "min_p")
_CLOSE = 100  # seeds whose margins are told
_NONE = -1


class ChainExplorer(Explorer):
    """A next-token distribution before and after its filters, and what seeds draw from it.

    A bar that is clicked, or a token chosen from the list, is forced: the request goes on after it.

    Parameters
    ----------
    model : Model
    request : Request
        To begin with.
    seeds : {"1", "100", "10,000"}
    top : int
        Tokens shown.
    """

    def __init__(self, model: Model, request: Request, *, seeds: str = "100", top: int = 12):
        self.model, self.request, self.top = model, request.replace(id="a"), top
        self.forced = tuple(request.generated)
        self.prompt = text("Prompt", request.prompt or "")
        self.temperature = number("Temperature", request.temperature, 0.0, 2.0, 0.05)
        self.top_k = whole("Top-k (0 off)", request.top_k, 0, 100)
        self.top_p = number("Top-p (1 off)", request.top_p, 0.05, 1.0, 0.05)
        self.min_p = number("Min-p (0 off)", request.min_p, 0.0, 0.5, 0.01)
        self.many = choice("Seeds", ("1", "100", "10,000"), seeds)
        self.first = seed("First seed", request.seed or 0)
        self.force = widgets.Dropdown(description="Go on with", layout=WIDE, style=STYLE)
        self.back = widgets.Button(description="◀ Take one back", layout=widgets.Layout(width="140px"))
        self._tokens: dict[str, int] = {}
        super().__init__(
            [self.prompt, self.temperature, self.top_k, self.top_p, self.min_p, self.many, self.first,
             self.force, self.back],
            selector=".mark-rect path",
        )  # fmt: skip
        self.force.observe(self._chosen, "value")
        self.picture.observe(self._clicked, "clicked")
        self.prompt.observe(lambda _: self._go(()), "value")
        self.back.on_click(lambda _: self._go(self.forced[:-1]))

    # Going on

    def _go(self, forced: tuple[int, ...]) -> None:
        self.forced = forced
        if self.many.value == self.many.options[-1]:  # new noise for so many would take seconds
            self.many.value = self.many.options[1]
        self._submit()

    def _chosen(self, change: dict[str, Any]) -> None:
        if change["new"] not in (None, _NONE):
            self.force.value = _NONE
            self._go((*self.forced, change["new"]))

    def _clicked(self, change: dict[str, Any]) -> None:
        said = f"; {change['new'].get('label', '')};"
        for label, token in self._tokens.items():
            if f"; label: {label};" in said:
                self._go((*self.forced, token))

    # What is shown

    def show(self) -> str:
        prompt, forced = self.prompt.value, self.forced
        values = {name: getattr(self, name).value for name in _FIELDS}
        base = self.request.replace(prompt=prompt, generated=forced, max_tokens=len(forced) + 1)
        batch = self.cached(("logits", prompt, forced), lambda: prefill(self.model, [base]))
        request = base.replace(**values)
        staged = self.cached(
            ("stages", prompt, forced, *values.values()), lambda: stages(batch, "a", request)
        )
        ids, removed = staged.shown(self.top), staged.removed()
        names = ["", *(name.rsplit(" ", 1)[0] for name in staged.names[1:])]
        seeds = range(self.first.value, self.first.value + int(self.many.value.replace(",", "")))
        key = "draws", prompt, forced, seeds.start, len(seeds), *values.values()
        draws, threads = self.cached(key, lambda: self._draw(batch, request, seeds, staged.p[0]))
        texts = [self.model.token_text(int(i)) for i in ids]
        gone = [names[removed[i]] for i in ids]
        data = filters.chain_data(ids, texts, staged.p[0], staged.p[-1], gone, draws, threads)
        words = self._words(staged.p[0], staged.p[-1], draws, threads)
        self._offer(ids, texts)
        chart = partial(filters.chain, data, seeds=len(seeds))
        self.draw((len(seeds), len(ids)), chart, data, words)
        return words

    def chart(self) -> Chart:
        """The picture as it is now, to show or to save."""
        return self._chart()

    def _draw(
        self, batch: Any, request: Request, seeds: range, likely: np.ndarray
    ) -> tuple[np.ndarray, pd.DataFrame]:
        """All seeds' tokens; and of the first hundred, how safe they are."""
        close = [batch.first("a", request.replace(seed=s), s) for s in seeds[:_CLOSE]]
        logits = mx.broadcast_to(batch.logits["a"][None], (len(close), len(likely)))
        drawn = draw_keyed(logits, close)
        mx.eval(drawn.tokens, drawn.max_drift)
        tokens = np.array(drawn.tokens)
        threads = pd.DataFrame({
            "seed": seeds[:_CLOSE],
            "text": [self.model.token_text(int(t)) for t in tokens],
            "max_drift": np.array(drawn.max_drift),
        })  # fmt: skip
        if len(seeds) > _CLOSE:
            tokens = self._many(request, close[0], batch.logits["a"], seeds, likely)
        return tokens, threads

    def _many(
        self, request: Request, draw: Draw, logits: mx.array, seeds: range, likely: np.ndarray
    ) -> np.ndarray:
        key = "crowd", request.prompt, request.generated, seeds.start, len(seeds)
        order = partial(np.argsort, -likely, kind="stable")
        crowd = self.cached(key, lambda: Crowd(seeds, draw.position, order()))
        scores = process(logits[None], [draw])[0]
        if request.greedy:
            return np.full(len(seeds), int(mx.argmax(scores)))
        tokens: np.ndarray = crowd.tokens(np.array(scores))
        return tokens

    def _offer(self, ids: np.ndarray, texts: list[str]) -> None:
        names = labels(ids, texts)
        self._tokens = dict(zip(names, (int(i) for i in ids), strict=True))
        options = [("choose a token", _NONE), *self._tokens.items()]
        if tuple(options) != tuple(self.force.options):
            self.force.options = options

    def _words(self, before: np.ndarray, after: np.ndarray, draws: np.ndarray, threads: pd.DataFrame) -> str:
        left = int((after > 0).sum())
        said = self.prompt.value + self.model.decode(list(self.forced)) if self.forced else self.prompt.value
        words = f"After “{said}” {left:,} of {len(after):,} tokens {'is' if left == 1 else 'are'} left"
        words += f", which held {before[after > 0].sum():.0%} before." if left < len(after) else "."
        if len(draws) == 1:
            word = labels([0], [self.model.token_text(int(draws[0]))])[0]
            words += f" Seed {self.first.value} draws “{word}”."
        else:
            words += f" {len(draws):,} seeds drew {len(np.unique(draws)):,} different ones."
        near = threads.dropna(subset=["max_drift"])
        if len(near) > 1:
            nearest = near.loc[near["max_drift"].idxmin()]
            word = labels([0], [nearest["text"]])[0]
            words += f" Nearest to another token: seed {nearest['seed']}, “{word}”,"
            words += f" by {nearest['max_drift']:.1g} in its logits."
        return words
