"""Targets: whatever is audited, as one question: these requests together, please. Answers by id and choice.

An engine and a callable live here; a server, which needs `httpx`, in `servers`. A target counts what it was
asked and remembers what it failed to answer; whether an answer is right is not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from ...engine.engine import Engine
from ...fields import one_line, show
from ...requests import Request
from ...results import Completion
from .answers import Answer, Answers, Fail, Target, Unanswered


class EngineTarget(Target):
    kind = "engine"

    def __init__(self, engine: Engine):
        super().__init__()
        if not engine.idle:
            raise ValueError("target: the engine has requests in it; let it finish, or give a fresh one")
        self.engine = engine
        self.name = f"engine of {engine.model.name}, {engine.policy.name}, {engine.forward.name}"

    def _ask(self, requests: Sequence[Request], fail: Fail) -> Answers:
        now = self.engine.time  # arrivals count from the engine's first step
        for request in requests:
            self.engine.submit(request.replace(arrival=now + request.arrival if request.arrival else 0))
        done = self.engine.run()
        if any(completion.finish_reason == "cancelled" for completion in done):
            raise KeyboardInterrupt
        return _answers(done, fail)

    def notes(self) -> list[str]:
        if self.engine.max_rows == 1:
            return ["max_rows=1: the engine never had two rows in a batch."]
        return []


class CallableTarget(Target):
    kind = "callable"

    def __init__(self, function: Callable[[list[Request]], Sequence[Completion]]):
        super().__init__()
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def _ask(self, requests: Sequence[Request], fail: Fail) -> Answers:
        try:
            done = list(self.function([copy(r) for r in requests]))  # its own, to spoil
        except Exception as error:  # somebody else's code: whatever it raises is the finding
            words = one_line(f"{type(error).__name__}: {error}")
            raise Unanswered(f"target={self.name}: raised {words}") from error
        odd = next((c for c in done if not isinstance(c, Completion)), None)
        if odd is not None:
            raise ValueError(f"target={self.name}: returned {show(odd)}; must return a list of Completion")
        return _in_order(requests, done, fail)


def _in_order(requests: Sequence[Request], done: Sequence[Completion], fail: Fail) -> Answers:
    """By id where the completions have our ids; by place where they have none."""
    wanted = [(r.id, choice) for r in requests for choice in range(r.n)]
    ids = {r.id for r in requests}
    if not all(c.id in ids for c in done):
        return {key: _answer(c) for key, c in zip(wanted, done, strict=False) if _fine(c, key[0], fail)}
    got = [(c.id, c.choice) for c in done]
    answers = _answers(done, fail)
    if got != [key for key in wanted if key in got]:
        fail("", f"answers came in the order {', '.join(id for id, _ in got)}, not in that of the requests")
    return answers


def _answers(done: Sequence[Completion], fail: Fail) -> Answers:
    return {(c.id, c.choice): _answer(c) for c in done if _fine(c, c.id, fail)}


def _fine(completion: Completion, id: str, fail: Fail) -> bool:
    if completion.finish_reason == "error":
        fail(id, one_line(completion.error or "") or f'request "{id}" ended with an error')
    return completion.finish_reason != "error"


def _answer(completion: Completion) -> Answer:
    return Answer(completion.tokens, completion.text, completion.logprobs)


def target_of(target: Any, model: str | None, timeout: float, **server: Any) -> Target:
    """An engine, a callable or a base URL as a target; `server` has what only a server takes."""
    if isinstance(target, str):
        from .servers import ServerTarget

        return ServerTarget(target, model, timeout, **server)
    for name, value in server.items():
        if value:
            raise ValueError(f"{name}: is for a server; an engine or callable takes none")
    if model is not None:
        raise ValueError(f"model={show(model)}: names a server's model; an engine or callable has its own")
    if isinstance(target, Engine):
        return EngineTarget(target)
    if callable(target):
        return CallableTarget(target)
    raise ValueError(f"target={show(target)}: must be an Engine, a callable or a base URL")
