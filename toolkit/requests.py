"""What a user asks for: `Request`, validated and frozen; JSON lines in; `check` against a model.

The first stop of the flow. A request that got past here has fields of the right type and range (the rules
are in `fields`), so no later module looks at them again; `check` adds what only the model can tell, its
vocabulary and context. What comes back, `Completion` and `Results`, is re-exported from `results`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Any

from . import jsonl
from .fields import INT32, Rules, refusal, show

__all__ = ["PRIORITIES", "Request", "named", "read_jsonl"]

PRIORITIES = ("high", "normal", "low")

_SOURCES = ("prompt", "messages", "tokens")
# field: least, most, advice
_INTEGERS = {
    "n": (1, 65_536, "1 gives one completion"),
    "top_k": (0, INT32, "0 turns the filter off"),
    "penalty_window": (0, INT32, "0 means the whole history"),
    "max_tokens": (1, INT32, "the default is 16"),
    "logprobs": (0, INT32, "alternatives reported for each token; 0 turns it off"),
    "cached": (0, INT32, "0 means that no prompt token is in the prefix cache"),
    "arrival": (0, INT32, "the engine step at which the request is submitted"),
}
# field: low, high, "(" where low is excluded, advice
_NUMBERS = {
    "temperature": (0, 100, "[", "0 is greedy, 1 leaves the distribution as it is"),
    "top_p": (0, 1, "(", "1 turns the filter off"),
    "min_p": (0, 1, "[", "0 turns the filter off"),
    "typical_p": (0, 1, "(", "1 turns the filter off"),
    "top_n_sigma": (0, 1_000, "[", "0 turns the filter off"),
    "xtc_probability": (0, 1, "[", "0 turns XTC off"),
    "xtc_threshold": (0, 0.5, "[", "above 0.5 no two tokens can reach it"),
    "repetition_penalty": (0.01, 100, "[", "1 turns the penalty off"),
    "presence_penalty": (-100, 100, "[", "0 turns the penalty off"),
    "frequency_penalty": (-100, 100, "[", "0 turns the penalty off"),
}
_LEAST_TEMPERATURE = 1e-6  # below it, scores leave float32's range

Processor = Callable[[list[int], Any], Any]


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Parameters
    ----------
    prompt : str
        Raw text. Give exactly one of `prompt`, `messages` (a chat, through the model's template: dicts with
        "role" and "content") and `tokens` (ids).
    id : str
        Names the request in results and errors; "" lets the engine number it.
    seed : int in [-2^63, 2^63), optional
        Distinct seeds give distinct streams. None: unseeded.
    n : int
        Completions wanted; choice 0 is what n=1 gives.
    temperature : float
        0 is greedy; otherwise from 1e-6 to 100.
    top_k, top_p, min_p, typical_p, top_n_sigma
        Filters; 0, 1, 0, 1 and 0 turn them off.
    xtc_probability, xtc_threshold : float
        XTC: with this probability, drop every token that reaches the threshold but the least likely of them.
    repetition_penalty : float
        Sees prompt and generated tokens; 1 is off.
    presence_penalty, frequency_penalty : float
        See generated tokens only; 0 is off.
    penalty_window : int
        How many of the last tokens the penalties see; 0 is all of them.
    logit_bias : mapping of token id to float
        Added to those logits; -inf ("-inf" in JSON) bans a token. Kept as a tuple of (id, bias) pairs sorted
        by id.
    allowed_tokens : ids, optional
        Only these may be drawn; None allows all. Kept sorted.
    max_tokens : int
        Most tokens to generate, those in `generated` included.
    stop : str or sequence of str
        Output ends before the first of these.
    logprobs : int
        Alternatives to report for each token.
    generated : ids
        Tokens that the request produced already; it goes on after them with the same positions, penalties
        and stream. Every choice goes on after the same ones.
    cached : int
        The first `cached` prompt tokens are in the prefix cache when the row is admitted.
    arrival : int
        Engine step at which it is submitted.
    priority : {"high", "normal", "low"}
    processors : sequence of callables
        `(tokens, logits [vocab]) -> logits [vocab]`, for this row alone; not part of the JSON form.

    Raises
    ------
    ValueError
        One line that names the argument, its value, what is allowed, and the request if it has an id.
    """

    prompt: str | None = None
    _: KW_ONLY
    messages: Sequence[Mapping[str, Any]] | None = field(default=None, hash=False)
    tokens: Sequence[int] | None = None
    id: str = ""
    seed: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0
    logit_bias: Any = ()
    allowed_tokens: Sequence[int] | None = None
    max_tokens: int = 16
    stop: Sequence[str] = ()
    logprobs: int = 0
    generated: Sequence[int] = ()
    cached: int = 0
    arrival: int = 0
    priority: str = "normal"
    processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        Rules("").text("id", self.id, "must be text; leave it out to have one made")
        rules = Rules(self.id)
        self._check_source(rules)
        if self.seed is not None:
            seed = rules.integer("seed", self.seed, -(2**63), 2**63 - 1, "None is unseeded", "[-2^63, 2^63)")
            put(self, "seed", seed)
        for name, (least, most, advice) in _INTEGERS.items():
            put(self, name, rules.integer(name, getattr(self, name), least, most, advice))
        for name, (low, high, opens, advice) in _NUMBERS.items():
            put(self, name, rules.number(name, getattr(self, name), low, high, opens, advice))
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            rule = f"must be 0 (greedy) or at least {_LEAST_TEMPERATURE:g}"
            raise rules.refuse("temperature", self.temperature, rule)
        put(self, "generated", rules.ids("generated", self.generated))
        if self.allowed_tokens is not None:
            put(self, "allowed_tokens", tuple(sorted(set(rules.ids("allowed_tokens", self.allowed_tokens)))))
        put(self, "logit_bias", rules.bias("logit_bias", self.logit_bias))
        put(self, "stop", rules.texts("stop", self.stop))
        put(self, "processors", rules.functions("processors", self.processors))
        if self.priority not in PRIORITIES:
            raise rules.refuse("priority", self.priority, 'must be "high", "normal" or "low"')
        if len(self.generated) > self.max_tokens:
            rule = f"must be at least {len(self.generated)}: it counts the tokens in generated"
            raise rules.refuse("max_tokens", self.max_tokens, rule)

    def _check_source(self, rules: Rules) -> None:
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(f"{name}={show(getattr(self, name), 20)}" for name in given) or "prompt=None"
            whose = f" for request {show(self.id)}" if self.id else ""
            raise ValueError(f"{what}{whose}: give exactly one of prompt, messages, tokens")
        if given == ["prompt"]:
            rules.text("prompt", self.prompt, "must be text; use tokens= for ids, messages= for a chat")
        elif given == ["tokens"]:
            object.__setattr__(self, "tokens", rules.ids("tokens", self.tokens))
        else:
            object.__setattr__(self, "messages", rules.chat("messages", self.messages))

    @property
    def source(self) -> str:
        """Which of prompt, messages and tokens it has."""
        return next(name for name in _SOURCES if getattr(self, name) is not None)

    @property
    def greedy(self) -> bool:
        """Whether the draw is the argmax, whatever the noise."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def seeded(self) -> bool:
        return self.seed is not None

    def replace(self, **changes: Any) -> Request:
        """A copy with these fields changed; a new prompt, messages or tokens takes the place of the old."""
        if any(name in changes for name in _SOURCES):
            changes = {**dict.fromkeys(_SOURCES), **changes}
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The fields that are not at their default, sorted, as JSON values; `from_json` reads it back."""
        if self.processors:
            rule = "functions have no JSON form; send the request without them"
            raise refusal(self.id, "processors", f"<{len(self.processors)}>", rule)
        line: dict[str, Any] = {}
        for name, value in self._told():
            if name == "logit_bias":
                value = {str(token): "-inf" if bias == -math.inf else bias for token, bias in value}
            elif name == "messages":
                value = copy.deepcopy(value)
            line[name] = list(value) if isinstance(value, tuple) else value
        return dict(sorted(line.items()))

    @classmethod
    def from_json(cls, line: Any, where: str = "") -> Request:
        """A request from a JSON object; null is a field left out.

        Parameters
        ----------
        line : dict
        where : str
            "file:line"; opens the message of any error.
        """
        try:
            if not isinstance(line, dict):
                raise ValueError(f"{show(line)}: must be an object with the fields of a request")
            for name in line:
                if name not in _JSON_FIELDS:
                    whose = line.get("id") if isinstance(line.get("id"), str) else ""
                    raise refusal(whose or "", _plain(name), line[name], f"no such field; {_nearest(name)}")
            fields = {name: value for name, value in line.items() if value is not None}
            if isinstance(fields.get("logit_bias"), dict):
                fields["logit_bias"] = [
                    (_id_key(key), -math.inf if bias == "-inf" else bias)  # which JSON has no number for
                    for key, bias in fields["logit_bias"].items()
                ]
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{where}: {error}" if where else str(error)) from None

    def __repr__(self) -> str:
        told = [f"{name}={show(value)}" for name, value in self._told() if name != "processors"]
        told += [f"processors=<{len(self.processors)}>"] if self.processors else []
        return f"Request({', '.join(told)})"

    def _told(self) -> list[tuple[str, Any]]:
        values = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        return [(name, value) for name, value, default in values if value != default]


_JSON_FIELDS = frozenset(f.name for f in dataclasses.fields(Request)) - {"processors"}


def _plain(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else show(name)


def _nearest(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower()[:40], _JSON_FIELDS, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(sorted(_JSON_FIELDS))}"


def _id_key(key: str) -> int | str:
    # int() would also read " 7", "+7", "7_0" and the digits of other scripts.
    return int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else key


def read_jsonl(source: jsonl.Source) -> list[Request]:
    """Requests from JSON lines.

    Parameters
    ----------
    source : path, "-" or open file
        "-" is standard input. UTF-8, one object a line; blank lines are skipped.

    Raises
    ------
    ValueError
        One line: file, line number, field, value, what is allowed.
    """
    requests: list[Request] = []
    seen: dict[str, str] = {}
    for where, line in jsonl.read(source):
        request = Request.from_json(line, where)
        if request.id in seen:
            rule = f"already the id of {seen[request.id]}; ids must differ"
            raise ValueError(f"{where}: {refusal('', 'id', request.id, rule)}")
        if request.id:
            seen[request.id] = where
        requests.append(request)
    return requests


def named(batch: Sequence[Request]) -> list[Request]:
    """The same requests, those without an id named "r0", "r1", ... by place, past names that are taken."""
    taken = {request.id for request in batch}
    result = []
    for place, request in enumerate(batch):
        if not request.id:
            id = next(name for n in count(place) if (name := f"r{n}") not in taken)
            taken.add(id)
            request = request.replace(id=id)
        result.append(request)
    return result
