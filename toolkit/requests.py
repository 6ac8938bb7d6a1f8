"""What a user asks for: `Request`, validated and frozen; JSON lines in; `check` against a model.

The first stop of the flow. A request that got past here has fields of the right type and range, so no
later module looks at them again; `check` adds what only the model can tell (vocabulary, context).
`Completion` and `Results`, what comes back, live in `results` and are re-exported here.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .results import Completion, Results

if TYPE_CHECKING:
    from .models import Model

__all__ = ["PRIORITIES", "Completion", "Request", "Results", "check", "read_jsonl"]

PRIORITIES = ("high", "normal", "low")

_INT32 = 2**31 - 1

# field: (least, most, advice)
_INTEGERS: dict[str, tuple[int, int, str]] = {
    "n": (1, 65_536, "1 gives one completion"),
    "top_k": (0, _INT32, "0 turns the filter off"),
    "penalty_window": (0, _INT32, "0 means the whole history"),
    "max_tokens": (1, _INT32, "the default is 16"),
    "logprobs": (0, _INT32, "the number of alternatives reported for each token; 0 turns it off"),
    "cached": (0, _INT32, "0 means that no prompt token is in the prefix cache"),
    "arrival": (0, _INT32, "the engine step at which the request is submitted"),
}
_FLOATS: dict[str, tuple[float, float, bool, str]] = {
    "temperature": (0, 100, False, "0 is greedy, 1 leaves the distribution as it is"),
    "top_p": (0, 1, True, "1 turns the filter off"),
    "min_p": (0, 1, False, "0 turns the filter off"),
    "typical_p": (0, 1, True, "1 turns the filter off"),
    "top_n_sigma": (0, 1_000, False, "0 turns the filter off"),
    "xtc_probability": (0, 1, False, "0 turns XTC off"),
    "xtc_threshold": (0, 0.5, False, "above 0.5 no two tokens can reach it"),
    "repetition_penalty": (0.01, 100, False, "1 turns the penalty off"),
    "presence_penalty": (-100, 100, False, "0 turns the penalty off"),
    "frequency_penalty": (-100, 100, False, "0 turns the penalty off"),
}
# Below this a temperature divides logits out of float32's range.
_LEAST_TEMPERATURE = 1e-6
_MOST_BIAS = 10_000.0

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
        Added to those logits. Kept as a tuple of (id, bias) pairs sorted by id.
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
        The first so many prompt tokens are in the prefix cache when the row is admitted.
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
        if not isinstance(self.id, str):
            bad, _id = self.id, put(self, "id", "")
            raise self._error("id", bad, "must be text; leave it out to have one made")
        self._text("id", self.id)
        self._source()
        if self.seed is not None:
            put(
                self, "seed", self._integer("seed", -(2**63), 2**63 - 1, "[-2^63, 2^63)", "None for unseeded")
            )
        for name, (least, most, advice) in _INTEGERS.items():
            put(self, name, self._integer(name, least, most, f"[{least}, {most}]", advice))
        for name, (low, high, open_, advice) in _FLOATS.items():
            put(self, name, self._number(name, low, high, open_, advice))
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise self._error(
                "temperature", self.temperature, f"must be 0 (greedy) or at least {_LEAST_TEMPERATURE}"
            )
        put(self, "generated", self._ids("generated", self.generated))
        if self.allowed_tokens is not None:
            put(self, "allowed_tokens", tuple(sorted(set(self._ids("allowed_tokens", self.allowed_tokens)))))
        put(self, "logit_bias", self._bias())
        put(self, "stop", self._stop())
        if self.priority not in PRIORITIES:
            raise self._error("priority", self.priority, 'must be "high", "normal" or "low"')
        put(self, "processors", self._processors())
        if len(self.generated) >= self.max_tokens:
            raise self._error(
                "max_tokens",
                self.max_tokens,
                f"must exceed the {len(self.generated)} tokens in generated, which it counts",
            )

    @property
    def greedy(self) -> bool:
        """Whether the draw is the argmax, whatever the noise."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def seeded(self) -> bool:
        return self.seed is not None

    def replace(self, **changes: Any) -> Request:
        """A copy with these fields changed; a new prompt, messages or tokens takes the place of the old."""
        sources = ("prompt", "messages", "tokens")
        if any(name in changes for name in sources):
            changes = {**dict.fromkeys(sources), **changes}
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The fields that are not at their default, sorted, as JSON values; `from_json` reads it back."""
        if self.processors:
            raise self._error("processors", self.processors, "are Python functions and have no JSON form")
        line: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value == f.default or f.name == "processors":
                continue
            if f.name == "logit_bias":
                value = {str(token): bias for token, bias in value}
            elif f.name == "messages":
                value = copy.deepcopy(list(value))
            line[f.name] = list(value) if isinstance(value, tuple) else value
        return dict(sorted(line.items()))

    @classmethod
    def from_json(cls, line: Any, where: str = "") -> Request:
        """A request from a JSON object; `where` ("file:line") opens the message of any error."""
        try:
            if not isinstance(line, dict):
                raise ValueError(f"{_show(line)}: must be a JSON object with the fields of a request")
            line = dict(line)
            for name in line:
                if name not in _JSON_FIELDS:
                    raise ValueError(f"{name}={_show(line[name])}: unknown field{_closest(name)}")
            bias = line.get("logit_bias")
            if isinstance(bias, dict):
                pairs = [(_token_key(key), value) for key, value in bias.items()]
                line["logit_bias"] = pairs
            return cls(**line)
        except ValueError as error:
            raise ValueError(f"{where}: {error}" if where else str(error)) from None

    def __repr__(self) -> str:
        # The fields that say something; a long prompt or list of tokens is cut.
        parts = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "processors":
                if value:
                    parts.append(f"processors=<{len(value)}>")
            elif value != f.default:
                parts.append(f"{f.name}={_show(value)}")
        return f"Request({', '.join(parts)})"

    # Validation. Each returns the value in its canonical form.

    def _error(self, name: str, value: Any, rule: str) -> ValueError:
        return _error(self.id, name, value, rule)

    def _text(self, name: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            rule = f"has half of a surrogate pair at character {error.start}, which is not text; mend its encoding"
            raise self._error(name, value, rule) from None
        return value

    def _source(self) -> None:
        given = [name for name in ("prompt", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            where = f' for request "{self.id}"' if self.id else ""
            raise ValueError(f"{what} given{where}: give exactly one of prompt, messages, tokens")
        if self.prompt is not None:
            if not isinstance(self.prompt, str):
                raise self._error(
                    "prompt", self.prompt, "must be text; use tokens= for ids, messages= for a chat"
                )
            self._text("prompt", self.prompt)
        elif self.tokens is not None:
            object.__setattr__(self, "tokens", self._ids("tokens", self.tokens))
        else:
            object.__setattr__(self, "messages", self._chat())

    def _chat(self) -> tuple[dict[str, Any], ...]:
        given = self.messages
        rule = 'must be a non-empty list of {"role": text, "content": text}'
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise self._error("messages", given, rule)
        # Copied, so that a chat that grows in the caller's hands does not change a frozen request.
        chat = tuple(copy.deepcopy(dict(m)) if isinstance(m, Mapping) else m for m in given)
        if not chat:
            raise self._error("messages", given, rule)
        for k, message in enumerate(chat):
            name = f"messages[{k}]"
            if not isinstance(message, dict):
                raise self._error(name, message, 'must be {"role": text, "content": text}')
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise self._error(f"{name}.{key}", message.get(key), "must be text")
                self._text(f"{name}.{key}", message[key])
        return chat

    def _integer(self, name: str, least: int, most: int, allowed: str, advice: str) -> int:
        value = getattr(self, name)
        integer = _integer(value)
        if integer is None:
            raise self._error(name, value, f"must be an integer in {allowed}; {advice}")
        if not least <= integer <= most:
            raise self._error(name, value, f"must be in {allowed}; {advice}")
        return integer

    def _number(self, name: str, low: float, high: float, open_: bool, advice: str) -> float:
        value = getattr(self, name)
        allowed = f"in {'(' if open_ else '['}{low:g}, {high:g}]; {advice}"
        number = _number(value)
        if number is None:
            raise self._error(name, value, f"must be a number {allowed}")
        # Written so that NaN fails.
        if not (low <= number <= high) or (open_ and number == low):
            raise self._error(name, value, f"must be {allowed}")
        return number

    def _ids(self, name: str, given: Any) -> tuple[int, ...]:
        if hasattr(given, "tolist"):
            given = given.tolist()
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
            raise self._error(name, given, "must be a list of token ids")
        ids = tuple(given)
        for k, token in enumerate(ids):
            if type(token) is not int or not 0 <= token <= _INT32:
                integer = _integer(token)
                if integer is None or not 0 <= integer <= _INT32:
                    raise self._error(f"{name}[{k}]", token, "must be a token id: an integer in [0, 2^31)")
        return tuple(int(token) for token in ids)

    def _bias(self) -> tuple[tuple[int, float], ...]:
        given = self.logit_bias
        rule = "must map token ids to numbers"
        pairs: Iterable[Any]
        if isinstance(given, Mapping):
            pairs = given.items()
        elif isinstance(given, list | tuple):
            pairs = given
        else:
            raise self._error("logit_bias", given, rule)
        bias: dict[int, float] = {}
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise self._error("logit_bias", given, rule)
            token, number = _integer(pair[0]), _number(pair[1])
            if token is None or not 0 <= token <= _INT32:
                raise self._error("logit_bias", pair[0], "keys must be token ids: integers in [0, 2^31)")
            if number is None or not abs(number) <= _MOST_BIAS:
                rule = (
                    f"must be a number in [-{_MOST_BIAS:g}, {_MOST_BIAS:g}]; allowed_tokens excludes outright"
                )
                raise self._error(f"logit_bias[{token}]", pair[1], rule)
            if token in bias:
                raise self._error("logit_bias", pair[0], "names this token twice")
            bias[token] = number
        return tuple(sorted(bias.items()))

    def _stop(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(given, list | tuple):
            raise self._error("stop", given, "must be text or a list of texts")
        for k, text in enumerate(given):
            if not isinstance(text, str) or not text:
                raise self._error(f"stop[{k}]", text, "must be text of at least one character")
            self._text(f"stop[{k}]", text)
        return tuple(given)

    def _processors(self) -> tuple[Processor, ...]:
        given = self.processors
        if not isinstance(given, list | tuple) or not all(callable(p) for p in given):
            raise self._error("processors", given, "must be a list of functions (tokens, logits) -> logits")
        return tuple(given)


_JSON_FIELDS = frozenset(f.name for f in dataclasses.fields(Request)) - {"processors"}


def _integer(value: Any) -> int | None:
    # bool is an int to Python, and True as a seed or a token id is always a mistake.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _show(value: Any, limit: int = 60) -> str:
    """A value on one line, in ASCII if it must be, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=True) if isinstance(value, str) else repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = f"an integer of {value.bit_length()} bits"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _error(request_id: str, name: str, value: Any, rule: str) -> ValueError:
    whose = f" for request {json.dumps(request_id)}" if request_id else ""
    return ValueError(f"{name}={_show(value)}{whose}: {rule}")


def _closest(name: str) -> str:
    close = difflib.get_close_matches(name, _JSON_FIELDS, n=1)
    return f"; did you mean {close[0]}?" if close else f"; the fields are {', '.join(sorted(_JSON_FIELDS))}"


def _token_key(key: str) -> int | str:
    # int() would also read " 7", "+7", "7_0" and digits of other scripts.
    return int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else key


def read_jsonl(source: Any) -> list[Request]:
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
    name, lines = _lines(source)
    requests: list[Request] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        request = _parse(line, where, first=number == 1)
        if request is None:
            continue
        if request.id and request.id in seen:
            rule = f"already used on line {seen[request.id]}; ids must differ"
            raise ValueError(f"{where}: id={_show(request.id)}: {rule}")
        seen[request.id] = number
        requests.append(request)
    return requests


def _lines(source: Any) -> tuple[str, Iterable[bytes | str]]:
    if source == "-":
        return "<stdin>", getattr(sys.stdin, "buffer", sys.stdin)
    if hasattr(source, "read"):
        return str(getattr(source, "name", "<stream>")), source
    try:
        # Bytes, because text mode and str.splitlines also break lines inside JSON strings (U+2028, form feed).
        return str(source), Path(source).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"{source}: {error.strerror}; give a file of JSON lines, or - for standard input"
        ) from None


def _parse(line: bytes | str, where: str, first: bool) -> Request | None:
    try:
        text = line.decode("utf-8") if isinstance(line, bytes) else line
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    if first:
        text = text.removeprefix("\ufeff")  # the byte order mark that some editors put first
    if not text.strip():
        return None
    try:
        # NaN and Infinity are let through here: the field's own rule refuses them, and names the field.
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: column {error.colno} is not JSON ({error.msg}); one object a line"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error).split(";")[0]
        raise ValueError(f"{where}: {reason}") from None
    return Request.from_json(value, where)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{_show(twice)} is there twice; keep one")
    return value


def check(request: Request, model: Model) -> list[int]:
    """The prompt's token ids, once the model can run the request.

    Parameters
    ----------
    request : Request
    model : Model
        For its tokenizer, chat template, vocabulary and context.

    Returns
    -------
    list of int, at least one

    Raises
    ------
    ValueError
        One line: an empty prompt, a token id outside the vocabulary, more tokens than the context holds,
        `cached` that leaves no token to run, or nothing allowed to be drawn.
    """
    ids = _prompt_ids(request, model)

    def refuse(name: str, value: Any, rule: str) -> ValueError:
        return _error(request.id, name, value, rule)

    source = next(s for s in ("prompt", "messages", "tokens") if getattr(request, s) is not None)
    if not ids:
        raise refuse(source, getattr(request, source), "has no tokens; give at least one")
    vocab = model.vocab_size
    for name, given in (
        (source, ids),
        ("generated", request.generated),
        ("allowed_tokens", request.allowed_tokens or ()),
        ("logit_bias", [token for token, _ in request.logit_bias]),
    ):
        if given and max(given) >= vocab:
            worst = max(given)
            raise refuse(
                f"{name} id", worst, f"outside the model's vocabulary; ids run from 0 to {vocab - 1}"
            )
    if request.logprobs > vocab:
        raise refuse("logprobs", request.logprobs, f"the model has only {vocab} tokens")
    start = len(ids) + len(request.generated)
    if request.allowed_tokens == ():
        raise refuse(
            "allowed_tokens", [], f"nothing may be drawn at position {start}; None allows every token"
        )
    if request.cached >= len(ids):
        rule = f"must be under the prompt's {len(ids)} tokens: the last one runs, to give the first logits"
        raise refuse("cached", request.cached, rule)
    if model.context is not None:
        if start > model.context:
            rule = f"{start} tokens with the generated ones, and the model's context holds {model.context}; shorten it"
            raise refuse(source, getattr(request, source), rule)
        # The last token drawn is never run, so it needs no place in the context.
        room = model.context - len(ids) + 1
        if request.max_tokens > room:
            rule = f"must be at most {room}: {len(ids)} prompt tokens in a context of {model.context}"
            raise refuse("max_tokens", request.max_tokens, rule)
    return ids


def _prompt_ids(request: Request, model: Model) -> list[int]:
    if request.tokens is not None:
        return list(request.tokens)
    if request.prompt is not None:
        return [int(token) for token in model.encode(request.prompt)]
    assert request.messages is not None
    try:
        return [int(token) for token in model.chat(copy.deepcopy(list(request.messages)))]
    except Exception as error:  # templates raise errors of their own: a role they don't know, for one
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _error(request.id, "messages", f"<{len(request.messages)}>", reason) from None
