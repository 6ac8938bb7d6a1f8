"""Explorers: small interactive pictures for notebooks.

`base` has what they share. Here each reads its controls, asks a study, and says in one line what is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ipywidgets as widgets
import pandas as pd

from ...engine import policies
from ...engine.engine import Engine
from ...models.load import Model
from ...requests import Request, named
from ...study.seeds.first_draws import Tries
from ...study.seeds.prefilled import prefill
from .. import charts
from ..charts.theme import labels
from ..charts.timeline import states_left
from .base import Explorer, choice, number, seed, text, whole


class _Batch:
    """Controls of a batch: each row's prompt, seed and whether it takes part."""

    def __init__(self, requests: Sequence[Request]):
        self.requests = {r.id: r for r in named(requests)}
        self.prompts = {id: text(f"{id}'s prompt", r.prompt or "") for id, r in self.requests.items()}
        self.seeds = {id: seed(f"{id}'s seed", r.seed or 0) for id, r in self.requests.items()}
        self.present = {
            id: widgets.Checkbox(True, description=f"{id} is in the batch", indent=False)
            for id in self.requests
        }

    def controls(self, *, seeds: Sequence[str]) -> list[widgets.Widget]:
        out: list[widgets.Widget] = []
        for id in self.requests:
            out += [self.present[id], self.prompts[id], *([self.seeds[id]] if id in seeds else [])]
        return out

    def read(self) -> list[Request]:
        """The rows that take part, as the controls have them."""
        rows = []
        for id, request in self.requests.items():
            if self.present[id].value:
                rows.append(request.replace(id=id, prompt=self.prompts[id].value, seed=self.seeds[id].value))
        return rows


def _tries(explorer: Explorer, model: Model, rows: Sequence[Request]) -> Tries:
    """The rows' logits, computed once for each set of prompts."""
    key = tuple((r.id, r.prompt) for r in rows)
    tries: Tries = explorer.cached(key, lambda: Tries(prefill(model, rows, policy="global")))
    tries.batch = _reseeded(tries.batch, rows)
    return tries


def _reseeded(batch: Any, rows: Sequence[Request]) -> Any:
    return replace(batch, requests={r.id: r for r in rows})


class FirstTokenExplorer(Explorer):
    """One row's first token: the exact distribution, and what a number of seeds draw from it.

    Parameters
    ----------
    model : Model
    requests : sequence of Request
        Two or three rows. The first one is looked at; its own seed runs from 0.
    policy : str
        To begin with.
    seeds : int
        How many seeds are tried, to begin with.
    """

    def __init__(self, model: Model, requests: Sequence[Request], *, policy: str = "global", seeds: int = 60):
        self.model, self.batch = model, _Batch(requests)
        self.row = next(iter(self.batch.requests))
        self.batch.present[self.row].disabled = True
        self.policy = choice("Policy", policies.POLICIES, policy)
        self.seeds = whole("Seeds tried", seeds, 1, 200)
        self.temperature = number("Temperature", 1.0, 0.0, 2.0, 0.05)
        self.top_k = whole("Top-k (0 off)", 0, 0, 50)
        self.top_p = number("Top-p (1 off)", 1.0, 0.05, 1.0, 0.05)
        self.min_p = number("Min-p (0 off)", 0.0, 0.0, 0.5, 0.01)
        others = [id for id in self.batch.requests if id != self.row]
        super().__init__([
            self.policy, self.seeds, self.temperature, self.top_k, self.top_p, self.min_p,
            *self.batch.controls(seeds=others),
        ])  # fmt: skip

    def show(self) -> str:
        rows = self.batch.read()
        tries, policy, row = _tries(self, self.model, rows), self.policy.value, self.row
        changes = {
            row: {name: getattr(self, name).value for name in ("temperature", "top_k", "top_p", "min_p")}
        }
        tokens = tries.tokens(policy, row, [{row: s} for s in range(self.seeds.value)], changes)
        exact = tries.distribution(row, changes)
        # One name for all policies: another one is other data in the same picture.
        drawn = pd.DataFrame({"policy": "drawn", "token": tokens})
        data = charts.first_tokens_data(exact, drawn)
        distinct = len(set(tokens))
        words = self._words(rows, policy, tokens, distinct)
        chart = partial(charts.first_tokens, exact, drawn, width=190, outline=True)
        self.draw(len(data["exact"]), chart, data, words)
        return words

    def _words(self, rows: list[Request], policy: str, tokens: list[int], distinct: int) -> str:
        row, count = self.row, len(tokens)
        if self.temperature.value == 0 or self.top_k.value == 1:
            return f"{row} is greedy: it takes the likeliest token, whatever the seed."
        if distinct == 1 and count > 1:
            word = labels(tokens[:1], [self.model.token_text(tokens[0])])[0]
            last = [r.id for r in rows][-1]
            leak = policy == "global" and last != row
            why = f": {last} was seeded last and decides" if leak else ""
            return f"{count} seeds of {row}'s own gave one token, “{word}”{why}."
        return f"{count} seeds of {row}'s own gave {distinct} different tokens."


class SeedMatrixExplorer(Explorer):
    """My first token for every pair of my own seed and a sibling's, under a policy of choice.

    Parameters
    ----------
    model : Model
    requests : sequence of Request
        The first is looked at, the last is its sibling.
    policy : str
        To begin with.
    """

    def __init__(self, model: Model, requests: Sequence[Request], *, policy: str = "global"):
        self.model, self.batch = model, _Batch(requests)
        ids = list(self.batch.requests)
        self.row, self.sibling = ids[0], ids[-1]
        for id in (self.row, self.sibling):
            self.batch.present[id].disabled = True
        self.policy = choice("Policy", policies.POLICIES, policy)
        self.size = whole("Seeds each", 6, 2, 8)
        self.first = whole("First seed", 0, 0, 40)
        self.temperature = number("Temperature", 1.0, 0.05, 2.0, 0.05)
        super().__init__([
            self.policy, self.size, self.first, self.temperature, *self.batch.controls(seeds=ids[1:-1])
        ])  # fmt: skip

    def show(self) -> str:
        rows = self.batch.read()
        tries, policy, row, sibling = (
            _tries(self, self.model, rows),
            self.policy.value,
            self.row,
            self.sibling,
        )
        seeds = range(self.first.value, self.first.value + self.size.value)
        pairs = [(s, t) for s in seeds for t in seeds]
        changes = {row: {"temperature": self.temperature.value}}
        tokens = tries.tokens(policy, row, [{row: s, sibling: t} for s, t in pairs], changes)
        frame = pd.DataFrame(pairs, columns=["seed", "sibling_seed"]).assign(
            policy=f"{row}'s first token",
            row=row,
            sibling=sibling,
            token=tokens,
            text=[self.model.token_text(t) for t in tokens],
        )
        words = self._words(frame)
        chart = partial(charts.seed_matrix, frame, subtitles=False)
        data = charts.seed_matrix_data(frame)
        longest = max(len(line["label"]) for lines in data.values() for line in lines)  # cells fit it
        self.draw((self.size.value, longest), chart, data, words)
        return words

    def _words(self, frame: pd.DataFrame) -> str:
        def changed(fixed: str, moved: str) -> int:
            tokens = frame.sort_values([fixed, moved]).groupby(fixed)["token"]
            return int(tokens.apply(lambda t: int((t != t.shift()).sum()) - 1).sum())

        steps = len(frame) - frame["seed"].nunique()
        mine, theirs = changed("sibling_seed", "seed"), changed("seed", "sibling_seed")
        return (
            f"Of {steps} changes of {self.sibling}'s seed alone, {theirs} changed {self.row}'s token; "
            f"of {steps} changes of its own, {mine}."
        )


class StepExplorer(Explorer):
    """An engine's run, event by event: who seeds, who is computed, who draws, and the generator's state.

    Parameters
    ----------
    model : Model
    requests : sequence of Request
    policy : str
        To begin with.
    tokens : int
        How many tokens each row generates.
    """

    def __init__(self, model: Model, requests: Sequence[Request], *, policy: str = "global", tokens: int = 2):
        self.model, self.requests, self.tokens = model, list(requests), tokens
        self.policy = choice("Policy", policies.POLICIES, policy)
        self.back, self.on = widgets.Button(description="◀ Back"), widgets.Button(description="Step ▶")
        self.step = whole("Event", 0, 0, 1)
        self.back.on_click(lambda _: self._move(-1))
        self.on.on_click(lambda _: self._move(1))
        super().__init__([self.policy, self.step, widgets.HBox([self.back, self.on])])

    def _move(self, by: int) -> None:
        self.step.value = min(self.step.max, max(0, self.step.value + by))

    def _trace(self) -> pd.DataFrame:
        engine = Engine(self.model, self.policy.value, "padded", "runs")
        for request in self.requests:
            engine.submit(request.replace(max_tokens=self.tokens))
        engine.run()
        trace = engine.trace.to_frame()
        return trace.assign(state=states_left(trace.to_dict("records")))

    def show(self) -> str:
        trace = self.cached(self.policy.value, self._trace)
        self.step.max = len(trace) - 1
        at = min(self.step.value, len(trace) - 1)
        used = "" if trace["state"].any() else " The generator is never touched."
        words = f"Event {at} of {len(trace) - 1}: {_told(trace.iloc[at].to_dict())}{used}"
        data = {"cursor": [{"at": at}]}
        self.draw(self.policy.value, lambda: charts.timeline(trace, at=at), data, words)
        return words


def _told(event: dict[str, Any]) -> str:
    """An event as a sentence."""
    row, state = event["row"], event["state"]
    phase = event["phase"].replace("_", " ")
    match event["event"]:
        case "admit":
            said = f"{row} enters the batch."
        case "seed":
            said = f"In {phase}, {row} seeds the generator with {int(event['seed'])}."
        case "forward":
            said = f"One forward computes {event['shape']} ({', '.join(row.split())})."
        case "draw":
            said = f"In {phase}, {row} draws “{event['text'].strip()}”."
        case kind:
            said = f"{row}: {kind}."
    return said + (f" The generator's state is now {state}." if state else "")
