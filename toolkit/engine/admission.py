"""Admission: what only the model can tell of a request, its prompt's tokens, vocabulary and context.

`check` runs before any forward; what it lets through, the engine can run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..fields import Rules, show
from ..requests import Request

if TYPE_CHECKING:
    from ..models.load import Model

__all__ = ["check"]


def check(request: Request, model: Model) -> list[int]:
    """The prompt's token ids, once it is known that the model can run the request.

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
    rules, source, vocab = Rules(request.id), request.source, model.vocab_size
    if not ids:
        raise rules.refuse(source, getattr(request, source), "has no tokens; give at least one")
    named: dict[str, Sequence[int]] = {
        source: ids,
        "generated": request.generated,
        "allowed_tokens": request.allowed_tokens or (),
        "logit_bias": [token for token, _ in request.logit_bias],
    }
    for name, given in named.items():
        if given and max(given) >= vocab:
            place = f"[{given.index(max(given))}]" if name in ("tokens", "generated") else " id"
            rule = f"outside the model's vocabulary; ids run from 0 to {vocab - 1}"
            raise rules.refuse(name + place, max(given), rule)
    start = len(ids) + len(request.generated)
    if request.allowed_tokens == ():
        rule = f"nothing may be drawn at position {start}; None allows every token"
        raise rules.refuse("allowed_tokens", [], rule)
    banned = {token for token, bias in request.logit_bias if bias == -math.inf}
    if banned.issuperset(range(vocab) if request.allowed_tokens is None else request.allowed_tokens):
        what = "every token" if request.allowed_tokens is None else "every one of allowed_tokens"
        rule = f"bans {what}, so nothing may be drawn at position {start}; leave one"
        raise rules.refuse("logit_bias", dict(request.logit_bias), rule)
    if request.logprobs > vocab:
        raise rules.refuse("logprobs", request.logprobs, f"must be at most {vocab}, the model's vocabulary")
    if request.cached >= len(ids):
        rule = f"must be under the prompt's {len(ids)} tokens: the last one runs, to give the first logits"
        raise rules.refuse("cached", request.cached, rule)
    if model.context is not None:
        if start > model.context:
            rule = f"has {start} tokens with those generated; the model's context holds {model.context}"
            raise rules.refuse(source, getattr(request, source), f"{rule}; shorten it")
        # The last token drawn is never run, so it needs no place in the context.
        room = model.context - len(ids) + 1
        if request.max_tokens > room:
            rule = f"must be at most {room}: {len(ids)} prompt tokens, and the context holds {model.context}"
            raise rules.refuse("max_tokens", request.max_tokens, rule)
    return ids


def _prompt_ids(request: Request, model: Model) -> list[int]:
    if request.tokens is not None:
        return list(request.tokens)
    try:
        if request.prompt is not None:
            return [int(token) for token in model.encode(request.prompt)]
        chat: Any = copy.deepcopy(list(request.messages or ()))
        return [int(token) for token in model.chat(chat)]
    except ValueError as error:
        whose = f"request {show(request.id)}: " if request.id else ""
        raise ValueError(whose + " ".join(str(error).split())) from None
