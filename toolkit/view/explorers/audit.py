"""Audit explorer: choose an engine, see what an audit finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...study.audit.run import Audit, audit
from .. import charts
from ..charts.theme import Chart
from .base import Explorer, choice, whole


class AuditExplorer(Explorer):
    """The promise's checks of one of several targets.

    Parameters
    ----------
    targets : mapping of str to function
        By name, what makes a target for `toolkit.audit`, such as `lambda: Engine(model)`.
    tokens : int
        Length of each answer, to begin with.
    """

    def __init__(self, targets: Mapping[str, Callable[[], Any]], *, tokens: int = 6):
        self.targets = dict(targets)
        self.target = choice("Engine", list(self.targets), next(iter(self.targets)))
        self.trials = whole("Trials", 1, 1, 4)
        self.tokens = whole("Tokens", tokens, 2, 12)
        super().__init__([self.target, self.trials, self.tokens])

    def show(self) -> str:
        key = self.target.value, self.trials.value, self.tokens.value
        found = self.cached(key, lambda: self._asked(*key))
        words = f"{key[0]}: {found.reading}."
        self.draw(key, lambda: promise(found), {}, words)
        return words

    def chart(self) -> Chart:
        """The picture as it is now, to show or to save."""
        return self._chart()

    def _asked(self, name: str, trials: int, tokens: int) -> Audit:
        return audit(self.targets[name](), trials=trials, tokens=tokens)


def promise(found: Audit) -> Chart:
    """The checks of the promise alone: what lies beside it has unseeded requests, other ones every time."""
    checks = found.summary()
    return charts.audit(found.to_frame(), checks[checks["promise"]])
