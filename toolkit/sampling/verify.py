"""Verify: draft tokens checked against a row's own draws, as in speculative decoding.

The draw at a position is the same noise whoever guessed the token, so a draft is accepted exactly as far
as it is what plain decoding draws: the output is plain decoding's, token for token, not just its
distribution. A drafting model that draws with the row's own seed and positions meets the same noise,
which raises the number of tokens accepted; nothing else depends on how the draft came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..fields import show
from .draws import Draw, Drawn
from .sampler import sampler_for


@dataclass(frozen=True, eq=False)
class Verified:
    """What a draft comes to.

    Attributes
    ----------
    accepted : int
        How many draft tokens stand.
    tokens : tuple of int, accepted + 1
        Those, then the token that is drawn after them: the correction, or one more where all stand.
    drawn : Drawn
        The draws, one per position; those after `accepted` belong to discarded tokens.
    """

    accepted: int
    tokens: tuple[int, ...]
    drawn: Drawn


def verify(logits: mx.array, draw: Draw, draft: Sequence[int]) -> Verified:
    """Check one row's draft tokens.

    Parameters
    ----------
    logits : float, [len(draft) + 1, V]
        The row's own model after its tokens so far, then after each draft token: one forward gives them all.
    draw : Draw
        The row's next draw, at the position of the first draft token; with its history where penalties or
        processors need it.
    draft : sequence of int
        May be empty: then this is a plain draw.

    Returns
    -------
    Verified

    Raises
    ------
    ValueError
        The number of logits is another, or a position that counts has logits that no token can be drawn from.

    References
    ----------
    Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023.
    """
    if logits.ndim != 2 or logits.shape[0] != len(draft) + 1:
        raise ValueError(
            f"logits of shape {logits.shape}: must be [{len(draft) + 1}, vocabulary], one per position"
        )
    draws = [
        replace(draw, position=draw.position + i, generated=(*draw.generated, *draft[:i]))
        for i in range(len(draft) + 1)
    ]
    drawn = sampler_for(draws).draw(
        logits, [d.position for d in draws], [(d.prompt, d.generated) for d in draws]
    )
    tokens, bad = drawn.tokens.tolist(), drawn.bad.tolist()
    accepted = 0
    while accepted < len(draft) and not bad[accepted] and tokens[accepted] == draft[accepted]:
        accepted += 1
    if bad[accepted]:
        why = drawn.errors.get(
            accepted, "no token can be drawn: its logits are NaN or +inf, or everything is excluded"
        )
        raise ValueError(f"request {show(draw.request.id)}, position {draw.position + accepted}: {why}")
    return Verified(accepted, tuple(tokens[: accepted + 1]), drawn)
