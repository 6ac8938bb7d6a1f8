"""Live: a row while it is in the engine, from admission to its last token. Only `engine` changes one."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import noise
from .cohorts import Row
from .models import Model
from .requests import Request
from .results import Completion
from .sampling import Draw


@dataclass(eq=False)
class Live:
    """One choice of one request, on its way.

    Attributes
    ----------
    tokens : list of int
        Prompt, then the tokens generated, known so far.
    issued : int
        Tokens drawn or being drawn: `len(tokens)` plus those still on the device.
    kept : int
        How many of the row's tokens have been given to the forward, so keep keys and values there.
    source : int or None
        Where in the newest step's draw the row's last token is, while it is still on the device.
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

    def __post_init__(self) -> None:
        self.issued = len(self.tokens)

    @property
    def key(self) -> tuple[str, int]:
        """The row's name in the forward and the prefix cache."""
        return self.id, self.choice

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
        return self.drawn and self.remainder == 1

    @property
    def full(self) -> bool:
        """Whether every token it may generate is drawn or being drawn."""
        return self.issued - self.prompt >= self.request.max_tokens

    @property
    def generated(self) -> list[int]:
        """Ids generated so far, those that it was resumed with included."""
        return self.tokens[self.prompt :]

    def plan(self, cached: int) -> Row:
        """What cohort planning needs to know, `cached` tokens being in the prefix cache."""
        return Row(f"{self.id}/{self.choice}", len(self.tokens), cached, priority=self.priority, exclusive=self.exclusive)

    def draw(self) -> Draw:
        """What sampling needs to know for the row's next token."""
        prompt, generated = self.tokens[: self.prompt], self.generated
        return Draw(self.request, self.seed, self.choice, self.issued, prompt, generated)

    def completion(self, model: Model, reason: str, *, stop: int | None = None, error: str | None = None,
                   policy: str = "", forward: str = "", invariant: bool | None = None) -> Completion:
        """The row's result; `stop` is where, in the generated text, a stop string begins."""
        resumed = len(self.request.generated)
        tokens = self.generated[resumed:]
        text = model.decode(self.generated)[len(model.decode(self.generated[:resumed])) :] if resumed else model.decode(tokens)
        if stop is not None:
            text = model.decode(self.generated)[:stop]
            count = next(n for n in range(len(self.generated) + 1) if len(model.decode(self.generated[:n])) > stop) - 1
            tokens = self.generated[resumed:count]
            text = text[len(model.decode(self.generated[:resumed])) :] if resumed else text
        n = len(tokens)
        return Completion(
            id=self.id, choice=self.choice, tokens=tuple(tokens), text=text, finish_reason=reason, seed=self.seed,
            prompt_tokens=self.prompt, cached=self.cached, resumed=resumed, cohort=self.cohort,
            cohort_kind=self.kind, cohort_index=self.place, logprobs=tuple(self.logprobs[:n]),
            margins=tuple(self.margins[:n]), max_drift=tuple(self.max_drift[:n]), policy=policy, forward=forward,
            invariant=invariant, stream=noise.STREAM, error=error, top_logprobs=tuple(self.top[:n]) if self.request.logprobs else (),
            pieces=tuple(model.token_text(t) for t in tokens))
