"""Streams: an explorer of a live engine: rows arrive, pause, resume and leave while one is followed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import ipywidgets as widgets
import pandas as pd

from ...engine import policies
from ...models.load import Model
from ...requests import Request, named
from ...study.live_batch import ACTIONS, Company, alone
from ..charts.live_batch import company, company_data
from ..charts.theme import Chart
from .base import Explorer, choice

_HALF = widgets.Layout(width="138px")


class StreamExplorer(Explorer):
    """Steps a live engine; under another policy, the same commands are played again from the start.

    Parameters
    ----------
    model : Model
    requests : sequence of Request
        The first is followed; it is compared with its own run alone.
    policy : str
        To begin with.
    schedule : str
        Played first; see `Company.play`.
    """

    def __init__(
        self, model: Model, requests: Sequence[Request], *, policy: str = "keyed", schedule: str = ""
    ):
        self.model, self.requests = model, named(requests)
        self.rows = [r.id for r in self.requests]
        self._opening = schedule.split(",")
        self._commands = list(self._opening)
        self._live: tuple[str, Company] | None = None
        self._played = 0
        self.policy = choice("Policy", [p for p in policies.POLICIES if p != "isolate"], policy)
        self.step = self._button("Step ▶", lambda: "step")
        self.who = choice("Row", self.rows, self.rows[min(1, len(self.rows) - 1)])
        self.buttons = [self._button(a.capitalize(), partial(self._of_row, a)) for a in ACTIONS]
        again = self._button("Start over", lambda: "")
        super().__init__([
            self.policy,
            widgets.HBox([self.step, again]),
            self.who,
            *(widgets.HBox(self.buttons[i : i + 2]) for i in range(0, len(self.buttons), 2)),
        ])  # fmt: skip

    def _button(self, label: str, command: Callable[[], str]) -> widgets.Button:
        button = widgets.Button(description=label, layout=_HALF)
        button.on_click(lambda _: self._push(command()))
        return button

    def _of_row(self, action: str) -> str:
        return f"{action} {self.who.value}"

    def _push(self, command: str) -> None:
        if command:
            self._commands.append(command)
        else:
            self._commands, self._live = list(self._opening), None
        self._submit()

    def _company(self) -> Company:
        """The engine, after all commands; begun anew where the policy is another."""
        policy = self.policy.value
        if self._live is None or self._live[0] != policy:
            self._live, self._played = (policy, Company(self.model, self.requests, policy)), 0
        live = self._live[1]
        while self._played < len(self._commands):
            command = self._commands[self._played]
            try:
                live.play(command)
            except ValueError:
                if self._played == len(self._commands) - 1:
                    self._commands.pop()
                    raise
                # Played again under another policy, a row may have finished earlier: the command is idle.
            self._played += 1
        return live

    def show(self) -> str:
        live, row = self._company(), self.rows[0]
        policy = self.policy.value
        own = self.cached(policy, lambda: alone(self.model, self.requests[0].replace(id=row), policy))
        reference = pd.DataFrame({
            "index": range(len(own)), "token": own, "text": [self.model.token_text(t) for t in own],
        })  # fmt: skip
        frame, actions = live.to_frame(), live.actions()
        data = company_data(frame, actions, row=row, reference=reference, rows=self.rows)
        words = self._words(live, own)
        last = max(12, data.pop("lanes")[0]["last"])  # what is left are the picture's own data
        self.draw(
            last,
            partial(company, frame, actions, row=row, reference=reference, rows=self.rows, steps=12),
            data,
            words,
        )
        return words

    def chart(self) -> Chart:
        """The picture as it is now, to show or to save."""
        return self._chart()

    def _words(self, live: Company, own: tuple[int, ...]) -> str:
        row = self.rows[0]
        drawn = live.tokens(row)
        there = [r for r, status in live.status.items() if status == "in the batch"]
        words = f"Before step {live.engine.time}, {', '.join(there) or 'nobody'} in the batch. "
        if not drawn:
            return words + f"{row} has drawn nothing yet."
        differs = next((i for i, t in enumerate(drawn) if i >= len(own) or own[i] != t), None)
        many = f"{len(drawn)} token{'s' * (len(drawn) > 1)}"
        if differs is None:
            return words + f"{row} has drawn {many}, the same as alone."
        return (
            words
            + f"{row} has drawn {many}; from its {_nth(differs + 1)} on they are not those it draws alone."
        )


def _nth(n: int) -> str:
    return f"{n}{'th' if 10 <= n % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"
