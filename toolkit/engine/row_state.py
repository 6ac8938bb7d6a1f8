"""Live: a row while it is in the engine, from admission to its last token. Only `engine` changes one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .. import noise
from ..cohorts.types import Row
from ..forward.spans import Span
from ..models.load import Model
from ..requests import Request
from ..results import Completion
from ..sampling import Draw, Drawn
from ..sampling.logits_processors import penalised
from .stop_strings import Watch


@dataclass(eq=False)
class Live:
    """One choice of one request, on its way.

    Attributes
    ----------
    prompt : int
        How many tokens its prompt has.
    tokens : list of int
        Prompt, then the tokens generated, known so far.
    issued : int
        Tokens drawn or being drawn: `len(tokens)` plus those still on the device.
    kept : int
        How many of the row's tokens have been given to the forward, so keep keys and values there.
    source : int or None
        Where in the newest step's draw the row's last token is, while it is still on the device.
    begun, drawn : bool
        Whether it has been through begin_prefill, and through finish_prefill.
    pairs : list or None
        Keys and values of its kept tokens that came with it from elsewhere, until it is admitted.
    key : tuple
        The row's name in the forward.
    looks_back : bool
        Whether its next draw depends on its last token, beside the logits.
    """

    request: Request
    id: str
    choice: int
    order: int
    prompt: int
    seed: int | None
    tokens: list[int]
    exclusive: bool = False
    issued: int = 0
    kept: int = 0
    cached: int = 0
    source: int | None = None
    begun: bool = False
    drawn: bool = False
    cohort: int = 0
    kind: str = ""
    place: int = 0
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    max_drift: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    pairs: list[Any] | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        self.issued = len(self.tokens)
        self.key = (self.id, self.choice)
        self.looks_back = penalised(self.request)

    @property
    def priority(self) -> str:
        return self.request.priority

    @property
    def remainder(self) -> int:
        """Tokens that have not been given to the forward yet; a decode row has one."""
        return self.issued - self.kept

    @property
    def decoding(self) -> bool:
        """Whether its first token has been drawn, so that it takes one token a step."""
        return self.drawn and self.issued - self.kept == 1

    @property
    def full(self) -> bool:
        """Whether every token it may generate is drawn or being drawn."""
        return self.issued - self.prompt >= self.request.max_tokens

    @property
    def generated(self) -> list[int]:
        """Ids generated so far, those that it was resumed with included."""
        return self.tokens[self.prompt :]

    @property
    def end(self) -> str:
        """Why it is finished, as far as its known tokens tell: "stop", "length", or "" where it goes on."""
        if self.watch is not None and self.watch.found is not None:
            return "stop"
        return "length" if len(self.tokens) - self.prompt >= self.request.max_tokens else ""

    def save(self) -> tuple[Any, ...]:
        """What `restore` takes."""
        came = (self.kept, self.cached) if self.pairs is not None else (0, 0)
        return len(self.tokens), len(self.logprobs), self.pairs, came, (self.cohort, self.kind, self.place)

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go back to the tokens known when `saved` was made, with none of them given to the forward."""
        known, drawn, self.pairs, (self.kept, self.cached), (self.cohort, self.kind, self.place) = saved
        del self.tokens[known:]
        for column in (self.logprobs, self.margins, self.max_drift, self.top):
            del column[drawn:]
        self.issued, self.source, self.begun, self.drawn = known, None, False, drawn > 0

    def plan(self) -> Row:
        """What cohort planning needs to know."""
        name = f"{self.id}/{self.choice}"
        return Row(name, len(self.tokens), self.kept, priority=self.priority, exclusive=self.exclusive)

    def draw(self, whole: bool = False) -> Draw:
        """What sampling needs to know for the row's next token; its history only where that counts."""
        if whole or self.looks_back:
            prompt, generated = self.tokens[: self.prompt], self.generated
            return Draw(self.request, self.seed, self.choice, self.issued, prompt, generated)
        return Draw(self.request, self.seed, self.choice, self.issued)

    def span(self, chunk: int) -> Span:
        """Its next `chunk` tokens."""
        if self.source is not None:
            return Span(self.key, self.kept, (), source=self.source)
        stop = self.kept + chunk
        return Span(self.key, self.kept, self.tokens[self.kept : stop], sample=stop == self.issued)

    def take(
        self, token: int, logprob: float, margin: float, drift: float, top: tuple[tuple[int, float], ...]
    ) -> None:
        """Add what was drawn for it, the oldest that it has not seen."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.margins.append(margin)
        self.max_drift.append(drift)
        self.top.append(top)
        if self.watch is not None:
            self.watch.add(token)
        if len(self.tokens) == self.issued:
            self.source = None

    def error(self, why: str | None) -> str:
        """What to say when its next token can't be drawn."""
        whose = f"request {json.dumps(self.id)}" + (f" choice {self.choice}" if self.request.n > 1 else "")
        why = why or "no token can be drawn: its logits are NaN or +inf, or everything is excluded"
        return f"{whose}, position {len(self.tokens)}: {why}"

    def completion(self, model: Model, reason: str, **how: Any) -> Completion:
        """The row's result; `how` are further fields of it."""
        resumed, count = len(self.request.generated), len(self.generated)
        text = model.decode(self.generated)
        if reason == "stop" and self.watch is not None:
            count, text = self.watch.kept, self.watch.text[: self.watch.found]
        if resumed:
            text = text[len(model.decode(self.request.generated)) :]
        tokens = self.generated[resumed:count]
        n = len(tokens)
        return Completion(
            id=self.id,
            choice=self.choice,
            tokens=tuple(tokens),
            text=text,
            finish_reason=reason,
            seed=self.seed,
            prompt_tokens=self.prompt,
            cached=self.cached,
            resumed=resumed,
            cohort=self.cohort,
            cohort_kind=self.kind,
            cohort_index=self.place,
            logprobs=tuple(self.logprobs[:n]),
            margins=tuple(self.margins[:n]),
            max_drift=tuple(self.max_drift[:n]),
            top_logprobs=tuple(self.top[:n]) if self.request.logprobs else (),
            pieces=tuple(map(model.token_text, tokens)),
            stream=noise.STREAM,
            **how,
        )


def alternatives(rows: Sequence[Live], drawn: Drawn) -> list[tuple[tuple[int, float], ...]]:
    """Each row's most likely tokens, as many as its request asked for and as can be drawn."""
    if drawn.top is None:
        return [()] * len(rows)
    ids, logprobs = (a.tolist() for a in drawn.top)
    pairs = (
        islice(zip(i, p, strict=True), n.request.logprobs)
        for n, i, p in zip(rows, ids, logprobs, strict=True)
    )
    return [tuple(pair for pair in row if pair[0] >= 0) for row in pairs]
