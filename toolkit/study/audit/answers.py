"""Answers and the `Target` that gives them: one question, these requests together, please.

A target counts what it was asked and remembers what it failed to answer; whether an answer is right is not
its business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...requests import Request

Answers = dict[tuple[str, int], "Answer"]
Fail = Callable[[str, str], object]  # called with a request's id and why it has no answer


@dataclass(frozen=True)
class Answer:
    """One choice of one request. `tokens` are ids, or words or characters where a server returns no ids."""

    tokens: tuple[int | str, ...]
    text: str = ""
    logprobs: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        # Half a surrogate pair, which no file and no terminal takes.
        object.__setattr__(self, "text", self.text.encode("utf-8", "replace").decode())


class Excused(str):
    """Why there is no answer, where load, a crash or a lost connection is why: it says nothing of seeds."""


class Unanswered(OSError):
    """A target that gave no answer, and why, in one line."""

    status: int | None = None  # of HTTP
    late = False
    excused = False  # see `Excused`
    wait: float | None = None  # seconds that it asks for, by Retry-After

    @property
    def why(self) -> str:
        return Excused(self) if self.excused else str(self)


class Target:
    """What is audited."""

    name = ""
    kind = ""
    unit = "token"

    def __init__(self) -> None:
        self.asked = 0
        self.failures: list[str] = []

    def ask(self, requests: Sequence[Request], optional: bool = False) -> Answers:
        """Answers to requests that go out together; a request may lack one, which counts as a failure.

        Parameters
        ----------
        requests : sequence of Request
            Each with an id.
        optional : bool
            Whether a target may refuse; if not, that counts as a failure.

        Raises
        ------
        Unanswered
            If there is no answer at all.
        """
        failed: dict[str, str] = {}  # by id, so that a request fails once; "" is for their order
        try:
            answers = self._ask(requests, failed.setdefault)
            for r in requests:
                if (r.id, 0) not in answers:
                    failed.setdefault(r.id, f'request "{r.id}" of {len(requests)} got no answer')
            return answers
        except Unanswered as error:
            failed = {r.id: error.why for r in requests}
            raise
        finally:
            if not optional:
                self.asked += len(requests)
                self.failures += failed.values()

    def _ask(self, requests: Sequence[Request], fail: Fail) -> Answers:
        raise Unanswered(f"target={self.name}: nothing to ask")

    def notes(self) -> list[str]:
        """What a reader should know of how it was asked."""
        return []

    def close(self) -> None:
        """Let go of what it holds; it is asked nothing more."""
