"""Rows: what is drawn for whom (`Draw`), what comes of it (`Drawn`), and requests' parameters as columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..requests import Request

ORDER = ("top_n_sigma", "typical_p", "top_k", "top_p", "min_p", "xtc", "temperature")


@dataclass(frozen=True, eq=False)
class Draw:
    """One row's next draw: whose parameters, which stream, where in the sequence, after which tokens.

    Attributes
    ----------
    request : Request
    seed : int or None
        None only where the global generator draws.
    choice : int
    position : int
        Logical position of the token being drawn.
    prompt, generated : ids
        Read by penalties and processors only; rows without them may leave both empty.
    """

    request: Request
    seed: int | None
    choice: int = 0
    position: int = 0
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Drawn:
    """One token a row. Arrays are of MLX, [rows], lazy on a GPU; NaN is undefined.

    Attributes
    ----------
    tokens : int32
        Within the vocabulary even where the row is bad.
    logprobs : float32
        Natural log probability after the chain; of a greedy row, after mask, bias and penalties.
    margins : float32
        Gap to the runner-up's perturbed score, in nats; of a greedy row, between the two best logits.
        Undefined for a single survivor, and where the global generator drew.
    max_drift : float32
        Lower bound, in the sup norm, on the error of the model's logits that could change the token.
        Undefined where the global generator drew or a logits processor, which may do anything, had a say.
    bad : bool
        No token can be drawn: NaN among the logits, or nothing left to draw from.
    top : (ids int32 [rows, n], logprobs float32 [rows, n]) or None
        The n most probable ids, best first, where a row's request asks for `logprobs`, of the distribution
        that `logprobs` is of; n is the largest number asked for, and what is missing has id -1 and -inf.
    errors : mapping of row to text
        Rows whose logits processor raised, with its message; they are bad.
    """

    tokens: mx.array
    logprobs: mx.array
    margins: mx.array
    max_drift: mx.array
    bad: mx.array
    top: tuple[mx.array, mx.array] | None
    errors: Mapping[int, str]
    _logits: mx.array = field(repr=False)

    @cached_property
    def raw_logprobs(self) -> mx.array:
        """Log probability of each token by the model's own logits: float32 [rows]."""
        return logprobs_at(self._logits, self.tokens)

    def arrays(self) -> list[mx.array]:
        """All arrays, for one `mx.eval`."""
        return [self.tokens, self.logprobs, self.margins, self.max_drift, self.bad, *(self.top or ())]


def logprobs_at(logits: mx.array, tokens: mx.array) -> mx.array:
    """Log probabilities [rows] of tokens [rows] under logits [rows, V], all of it in float32."""
    if library() is np:
        raw = host(logits)
        best = raw.max(axis=-1, keepdims=True)
        at = np.take_along_axis(raw, np.asarray(tokens)[:, None], axis=-1) - best
        with np.errstate(all="ignore"):
            return mx.array((at - np.log(np.exp(raw - best).sum(axis=-1, keepdims=True)))[:, 0])
    raw = logits.astype(mx.float32)
    at = mx.take_along_axis(raw, tokens[:, None], axis=-1)
    return (at - mx.logsumexp(raw, axis=-1, keepdims=True))[:, 0]


def library() -> Any:
    """What computes a draw: NumPy, at once, where MLX's default device is the CPU; otherwise MLX, lazily."""
    return np if mx.default_device().type == mx.DeviceType.cpu else mx


def host(array: mx.array) -> np.ndarray:
    """A float32 array of MLX as one of NumPy, without a copy where it is float32 already; read only."""
    view = np.asarray(array if array.dtype == mx.float32 else array.astype(mx.float32)).view()
    view.flags.writeable = False
    return view


# Each filter: the column of its parameter, and the value that turns it off there (see `filters.Settings`).
_COLUMNS: dict[str, tuple[Callable[[Request], Any], Any, Any]] = {
    "top_n_sigma": (lambda r: r.top_n_sigma or np.inf, np.inf, np.float32),
    "typical_p": (lambda r: r.typical_p if r.typical_p < 1 else 2.0, 2.0, np.float32),
    "top_k": (lambda r: r.top_k or 1 << 30, 1 << 30, np.int32),
    "top_p": (lambda r: r.top_p if r.top_p < 1 else 2.0, 2.0, np.float32),
    "min_p": (lambda r: np.log(r.min_p) if r.min_p else -np.inf, -np.inf, np.float32),
    "xtc": (lambda r: r.xtc_threshold if r.xtc_probability else 2.0, 2.0, np.float32),
}


def columns(requests: Sequence[Request]) -> dict[str, np.ndarray]:
    """Columns [rows, 1] of the filters that some request uses."""
    made = {}
    for name, (value, off, dtype) in _COLUMNS.items():
        column = np.array([[value(r)] for r in requests], dtype=dtype)
        if (column != dtype(off)).any():
            made[name] = column
    return made


def filtered(request: Request) -> bool:
    """Whether a request uses any filter."""
    return any(value(request) != off for value, off, _ in _COLUMNS.values())


def check_order(order: Sequence[str]) -> tuple[str, ...]:
    """The order of filters and temperature, each once."""
    if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(ORDER):
        raise ValueError(f"order={order!r}: must be a permutation of {ORDER!r}")
    return tuple(order)
