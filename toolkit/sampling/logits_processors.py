"""Logits processors: what changes single logits before any filter. Allowed ids, bias, penalties, processors.

In that order, and only for rows that use them. Penalties follow the peers: repetition divides a positive
logit and multiplies a negative one, for ids of prompt and generated tokens (Keskar et al. 2019); frequency
and presence subtract, for generated ids only (OpenAI's definition). `penalty_window` keeps that many of the
last tokens of either history. A row's history is its own list, so there is no padding to count by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .. import fields
from ..requests import Request
from .ranking import namespace

History = tuple[Sequence[int], Sequence[int]]  # prompt, generated


def penalised(request: Request) -> bool:
    """Whether a request's logits depend on the tokens so far."""
    r = request
    return bool(r.repetition_penalty != 1 or r.presence_penalty or r.frequency_penalty or r.processors)


def adjusted(request: Request) -> bool:
    """Whether anything here concerns a request."""
    return penalised(request) or bool(request.logit_bias) or request.allowed_tokens is not None


def adjust(
    logits: Any, requests: Sequence[Request], histories: Sequence[History], mask: Any = None
) -> tuple[Any, np.ndarray, dict[int, str]]:
    """Logits [rows, V] of rows that use any of this, adjusted.

    `mask` is `allowed(requests, V)`, of the library of the logits; it is the same at every step.

    Returns
    -------
    logits : float32, [rows, V]
        A new array, of the library of the one given.
    stretch : float32, [rows, 1]
        How much larger an error of the model's logits can be afterwards; NaN where a processor ran.
    errors : dict
        Row to message, where a processor raised; its logits are NaN.
    """
    xp, vocab = namespace(logits), logits.shape[-1]
    if mask is not None:
        logits = xp.where(mask, logits, xp.array(-np.inf, dtype=xp.float32))
    sparse = [_sparse(r, h, vocab) for r, h in zip(requests, histories, strict=True)]
    if any(len(ids) for ids, *_ in sparse):
        logits = _apply(xp, logits, *_padded(sparse))
    stretch = np.ones((len(requests), 1), dtype=np.float32)
    errors: dict[int, str] = {}
    for row, (request, history) in enumerate(zip(requests, histories, strict=True)):
        theta = request.repetition_penalty
        if any(history):
            stretch[row] = max(theta, 1 / theta)
        if request.processors:
            stretch[row] = np.nan
            logits = _process(xp, logits, row, request, history, errors)
    return logits, stretch, errors


def allowed(requests: Sequence[Request], vocab: int) -> np.ndarray | None:
    """Which ids each row may draw: bool [rows, V], or None if all may draw all."""
    if all(r.allowed_tokens is None for r in requests):
        return None
    mask = np.ones((len(requests), vocab), dtype=bool)
    for row, request in enumerate(requests):
        if request.allowed_tokens is not None:
            mask[row] = False
            mask[row, _inside(request.allowed_tokens, vocab, "allowed_tokens", request)] = True
    return mask


def _inside(ids: Sequence[int], vocab: int, name: str, request: Request) -> np.ndarray:
    array = np.asarray(ids, dtype=np.int64)
    if array.size and (array.max() >= vocab or array.min() < 0):
        whose = f" for request {fields.show(request.id)}" if request.id else ""
        worst = int(array.max() if array.max() >= vocab else array.min())
        raise ValueError(f"{name}: {worst}{whose}: must be a token id in [0, {vocab})")
    return array


def _sparse(request: Request, history: History, vocab: int) -> tuple[np.ndarray, ...]:
    """ids, bias, repetition factor and amount to subtract, for the ids that any of these concerns."""
    prompt, generated = (list(part) for part in history)
    window = request.penalty_window
    repeated: Sequence[int] = ()
    counted: Sequence[int] = ()
    if request.repetition_penalty != 1:
        repeated = (prompt + generated)[-window:]
    if request.presence_penalty or request.frequency_penalty:
        counted = generated[-window:]
    bias_ids = [token for token, _ in request.logit_bias]
    parts = [
        _inside(ids, vocab, name, request)
        for ids, name in ((bias_ids, "logit_bias"), (repeated, "history"), (counted, "history"))
    ]
    ids = np.unique(np.concatenate(parts))
    bias, theta, less = np.zeros(len(ids)), np.ones(len(ids)), np.zeros(len(ids))
    bias[np.searchsorted(ids, parts[0])] = [value for _, value in request.logit_bias]
    theta[np.searchsorted(ids, parts[1])] = request.repetition_penalty
    seen, times = np.unique(parts[2], return_counts=True)
    less[np.searchsorted(ids, seen)] = request.presence_penalty + request.frequency_penalty * times
    return ids, bias, theta, less


def _padded(sparse: Sequence[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    # Short rows repeat their last id with its own values, so that writing it twice writes the same.
    width = max(len(ids) for ids, *_ in sparse)
    out = []
    for column, neutral in enumerate((0, 0.0, 1.0, 0.0)):
        dtype = np.int32 if column == 0 else np.float32
        rows = [np.asarray(row[column] if len(row[0]) else [neutral], dtype=dtype) for row in sparse]
        out.append(np.stack([np.pad(r, (0, width - len(r)), mode="edge") for r in rows]))
    return out


def _apply(xp: Any, logits: Any, ids: np.ndarray, bias: Any, theta: Any, less: Any) -> Any:
    if xp is not np:
        ids, bias, theta, less = (mx.array(a) for a in (ids, bias, theta, less))
    value = xp.take_along_axis(logits, ids, axis=-1) + bias
    value = xp.where(value > 0, value / theta, value * theta) - less
    if xp is np:
        logits = np.array(logits)
        np.put_along_axis(logits, ids, value, axis=-1)
        return logits
    return mx.put_along_axis(logits, ids, value, axis=-1)


def _logits(given: Any, vocab: int) -> mx.array:
    """What a processor returned, where that is logits [vocab], or [1, vocab] as the peers' take and give."""
    if not isinstance(given, mx.array) or given.shape not in ((vocab,), (1, vocab)):
        what = f"an array {list(given.shape)}" if isinstance(given, mx.array) else type(given).__name__
        raise ValueError(f"returned {what}: must be logits [{vocab}], an mx.array")
    return given.astype(mx.float32).reshape(vocab)


def _process(
    xp: Any, logits: Any, row: int, request: Request, history: History, errors: dict[int, str]
) -> Any:
    line = mx.array(logits[row])
    try:
        tokens = [*history[0], *history[1]]
        for processor in request.processors:
            line = processor(tokens, line)
        line = _logits(line, logits.shape[-1])
        mx.eval(line)
    except Exception as error:  # a row's own code must not stop its siblings
        errors[row] = "processors: " + fields.one_line(f"{type(error).__name__}: {error}")
        line = mx.full((logits.shape[-1],), mx.nan)
    if xp is np:
        logits = np.array(logits)
        logits[row] = np.asarray(line)
        return logits
    return mx.concatenate([logits[:row], line[None], logits[row + 1 :]], axis=0)
