"""Company: a live engine whose rows come and go on command, and a table of what each row did in each step.

The engine does the work; here are the commands by name, the rows that are paused outside of it, and its trace
as one line for each row and step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..chart_lookup import chart_function
from ..engine import policies
from ..engine.engine import Engine
from ..models.load import Model
from ..requests import Request, named

if TYPE_CHECKING:
    import pandas as pd

ACTIONS = ("arrive", "pause", "resume", "preempt", "cancel")
_FROM = {
    "arrive": ("away",), "pause": ("in the batch",), "resume": ("paused",), "preempt": ("in the batch",),
    "cancel": ("in the batch", "paused"),
}  # fmt: skip


class Company:
    """Rows that arrive, pause, resume and leave while an engine steps.

    Parameters
    ----------
    model : Model
    requests : sequence of Request
        Who may come. Nobody is there to begin with.
    policy : str
    forward : str, optional
        Default: "packed"; under a policy that shares a generator "padded", as in the engines that have one.

    Attributes
    ----------
    engine : Engine
    status : dict of str to str
        "away", "in the batch", "paused", "finished" or "cancelled", by row.
    """

    def __init__(
        self, model: Model, requests: Sequence[Request], policy: str = "keyed", forward: str | None = None
    ):
        self.requests = {r.id: r for r in named(requests)}
        forward = forward or ("padded" if policies.get(policy).shares else "packed")
        self.engine = Engine(model, policy, forward, pipeline=False)
        self.status = dict.fromkeys(self.requests, "away")
        self._actions: list[tuple[int, str, str]] = []

    def act(self, action: str, row: str) -> None:
        """Let a row arrive, pause, resume, be preempted or be cancelled, before the next step.

        A paused row leaves the engine and keeps only its tokens: `resume` submits it again with
        `Request(generated=...)`. A preempted one stays in the queue, and is back with the next step.

        Raises
        ------
        ValueError
            If that row can't do that now.
        """
        if row not in self.requests or action not in ACTIONS:
            known = f"{', '.join(ACTIONS)} of {', '.join(self.requests)}"
            raise ValueError(f'action="{action}" of row "{row}": must be one of {known}')
        if self.status[row] not in _FROM[action]:
            raise ValueError(f"{row} can't {action} now: it is {self.status[row]}")
        if action == "arrive":
            self.engine.submit(self.requests[row])
        elif action == "resume":
            self.engine.submit(self.requests[row].replace(generated=self.tokens(row)))
        elif action == "preempt":
            self.engine.preempt(row)
        elif self.status[row] == "in the batch":
            self.engine.cancel(row)
        self.status[row] = {"pause": "paused", "cancel": "cancelled"}.get(action, "in the batch")
        self._actions.append((self.engine.time, action, row))

    def step(self) -> None:
        """One step of the engine."""
        for completion in self.engine.step():
            if self.status[completion.id] == "in the batch" and completion.finish_reason != "cancelled":
                self.status[completion.id] = "finished"

    def play(self, schedule: str) -> Company:
        """Commands in a line, such as "arrive a, step 3, arrive b, step, cancel b, step 2"."""
        for command in filter(None, map(str.strip, schedule.split(","))):
            word, *rest = command.split()
            if word == "step":
                for _ in range(int(rest[0]) if rest else 1):
                    self.step()
            else:
                self.act(word, " ".join(rest))
        return self

    def tokens(self, row: str) -> tuple[int, ...]:
        """What a row has drawn so far."""
        events = self.engine.trace
        return tuple(e.token for e in events if e.event == "draw" and e.row == row and e.token is not None)

    def to_frame(self) -> pd.DataFrame:
        """One line for each row and step: `step, row, index, position, span, token, text`.

        `index` counts the row's own tokens from 0; `span` is how many tokens the step computed for it: 1
        where it only went on, more where its prompt, or all of it again, had to be computed.
        """
        import pandas as pd

        lines, kept, drawn = [], dict.fromkeys(self.requests, 0), dict.fromkeys(self.requests, 0)
        for e in self.engine.trace:
            if e.event in ("preempt", "cancel", "finish"):
                kept[e.row] = 0
            elif e.event == "draw":
                position = int(e.position or 0)
                span = position - kept[e.row]
                lines.append((e.step, e.row, drawn[e.row], position, span, e.token, e.text))
                kept[e.row], drawn[e.row] = position, drawn[e.row] + 1
        return pd.DataFrame(lines, columns=["step", "row", "index", "position", "span", "token", "text"])

    def actions(self) -> pd.DataFrame:
        """One line a command: `step` (before which it came), `action`, `row`."""
        import pandas as pd

        return pd.DataFrame(self._actions, columns=["step", "action", "row"])

    def chart(self, **options: Any) -> Any:
        """Rows down, steps along: what each computed and drew."""
        return chart_function("company")(self.to_frame(), self.actions(), **options)

    def __repr__(self) -> str:
        rows = ", ".join(f"{row} {status}" for row, status in self.status.items())
        return f"Company(step {self.engine.time}, {self.engine.policy.name}: {rows})"

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>"


def alone(
    model: Model, request: Request, policy: str = "keyed", forward: str | None = None
) -> tuple[int, ...]:
    """What a row draws with nobody else there: its tokens, an end of sequence included."""
    company = Company(model, [request], policy, forward)
    (row,) = company.requests
    company.act("arrive", row)
    while company.status[row] == "in the batch":
        company.step()
    return company.tokens(row)
