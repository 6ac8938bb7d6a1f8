"""Rules for a request's fields, one at a time: type, range, and an error that names all there is to know.

`Rules` knows whose fields they are; each method hands back a value in its canonical form or raises.
"""

from __future__ import annotations

import copy
import json
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["INT32", "Rules", "interrupted", "one_line", "refusal", "show"]

INT32 = 2**31 - 1
_MOST_BIAS = 10_000.0
_MESSAGE = 'must be {"role": text, "content": text}'


def refusal(request_id: str, name: str, value: Any, rule: str) -> ValueError:
    """The error for a field: argument, value, request, and what is allowed, on one line."""
    whose = f" for request {json.dumps(request_id)}" if request_id else ""
    return ValueError(f"{name}={show(value)}{whose}: {rule}")


def show(value: Any, limit: int = 60) -> str:
    """A value on one line that any terminal can print, cut where it is long."""
    if isinstance(value, str | list | tuple):
        value = value[: limit + 1]  # no need to write out a long prompt
    try:
        text = json.dumps(value) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # more digits than Python converts, or nested too deep
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    text = " ".join(text.encode("ascii", "backslashreplace").decode().split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def one_line(text: str) -> str:
    """Somebody else's words on one line that any terminal can print, cut where they are long."""
    text = " ".join(text[:1000].split())[:300]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt lies behind an error: it may strike in the middle of anything."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@dataclass(frozen=True)
class Rules:
    """Rules for the fields of one request."""

    request_id: str

    def refuse(self, name: str, value: Any, rule: str) -> ValueError:
        return refusal(self.request_id, name, value, rule)

    def text(self, name: str, value: Any, rule: str = "must be text") -> str:
        """A string of real characters."""
        if not isinstance(value, str):
            raise self.refuse(name, value, rule)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            rule = f"half a surrogate pair at character {error.start} is not text; mend its encoding"
            raise self.refuse(name, value, rule) from None
        return value

    def integer(self, name: str, value: Any, least: int, most: int, advice: str, allowed: str = "") -> int:
        allowed = f"in {allowed or f'[{least}, {most}]'}; {advice}"
        integer = _integer(value)
        if integer is None:
            raise self.refuse(name, value, f"must be an integer {allowed}")
        if not least <= integer <= most:
            raise self.refuse(name, value, f"must be {allowed}")
        return integer

    def number(self, name: str, value: Any, low: float, high: float, opens: str, advice: str) -> float:
        """A finite number between bounds; `opens` is "(" where the lower one is excluded, else "["."""
        allowed = f"in {opens}{low:g}, {high:g}]; {advice}"
        number = _number(value)
        if number is None:
            raise self.refuse(name, value, f"must be a number {allowed}")
        # Written so that NaN fails.
        if not low <= number <= high or (opens == "(" and number == low):
            raise self.refuse(name, value, f"must be {allowed}")
        return number

    def ids(self, name: str, given: Any) -> tuple[int, ...]:
        """Token ids, from a list or a one-dimensional array."""
        values = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise self.refuse(name, given, "must be a list of token ids")
        ids = tuple(values)
        for k, token in enumerate(ids):
            integer = token if type(token) is int else _integer(token)
            if integer is None or not 0 <= integer <= INT32:
                raise self.refuse(f"{name}[{k}]", token, "must be a token id: an integer in [0, 2^31)")
        return tuple(map(int, ids))

    def bias(self, name: str, given: Any) -> tuple[tuple[int, float], ...]:
        """Pairs (token id, bias), sorted: a mapping that is frozen, hashed and pickled like a tuple."""
        pairs = given.items() if isinstance(given, Mapping) else given
        if not isinstance(given, Mapping | list | tuple) or not all(
            isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
        ):
            raise self.refuse(name, given, "must map token ids to numbers")
        bias: dict[int, float] = {}
        for key, value in pairs:
            token, number = _integer(key), _number(value)
            if token is None or not 0 <= token <= INT32:
                raise self.refuse(f"{name} key", key, "must be a token id: an integer in [0, 2^31)")
            if number is None or not (abs(number) <= _MOST_BIAS or number == -math.inf):
                rule = f"must be a number in [-{_MOST_BIAS:g}, {_MOST_BIAS:g}], or -inf, which bans the token"
                raise self.refuse(f"{name}[{token}]", value, rule)
            if token in bias:
                raise self.refuse(f"{name} key", key, "is there twice; keep one")
            bias[token] = number
        return tuple(sorted(bias.items()))

    def texts(self, name: str, given: Any) -> tuple[str, ...]:
        """Non-empty strings; a lone one counts as a list of one."""
        given = (given,) if isinstance(given, str) else given
        if not isinstance(given, list | tuple):
            raise self.refuse(name, given, "must be text or a list of texts")
        for k, text in enumerate(given):
            if not self.text(f"{name}[{k}]", text):
                raise self.refuse(f"{name}[{k}]", text, "must have at least one character")
        return tuple(given)

    def chat(self, name: str, given: Any) -> tuple[dict[str, Any], ...]:
        """Messages, copied: a chat that grows in the caller's hands must not change a frozen request."""
        if not isinstance(given, list | tuple) or not given:
            raise self.refuse(name, given, 'must be a non-empty list of {"role": text, "content": text}')
        for k, message in enumerate(given):
            if not isinstance(message, Mapping):
                raise self.refuse(f"{name}[{k}]", message, _MESSAGE)
            for key in ("role", "content"):
                self.text(f"{name}[{k}].{key}", message.get(key))
        return tuple(copy.deepcopy(dict(message)) for message in given)

    def functions(self, name: str, given: Any) -> tuple[Callable[..., Any], ...]:
        if not isinstance(given, list | tuple) or not all(map(callable, given)):
            raise self.refuse(name, given, "must be a list of functions (tokens, logits) -> logits")
        return tuple(given)


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
