"""Draft and verify: whatever the draft, tokens and logprobs are those of plain keyed decoding."""

import random

import mlx.core as mx
import numpy as np
import pytest

from toolkit import Request
from toolkit.sampling import Draw, draw_keyed, verify

VOCAB = 300
KINDS = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 8, "xtc_probability": 0.5},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"typical_p": 0.8, "penalty_window": 4, "repetition_penalty": 1.2},
]
PROMPT = [5, 6, 7]


def after(tokens) -> mx.array:
    """Logits after some tokens: a toy model that looks at the last two."""
    rng = np.random.default_rng([len(tokens), *tokens[-2:]])
    return mx.array(rng.standard_normal(VOCAB, dtype=np.float32) * 2)


def next_draw(request, choice, generated) -> Draw:
    return Draw(request, request.seed, choice, len(PROMPT) + len(generated), PROMPT, generated)


def plain(request, choice, count):
    tokens, logprobs = [], []
    for _ in range(count):
        drawn = draw_keyed(after([*PROMPT, *tokens])[None], [next_draw(request, choice, tokens)])
        tokens = [*tokens, drawn.tokens.item()]
        logprobs.append(drawn.logprobs.item())
    return tokens, logprobs


def speculative(request, choice, count, guess):
    """Tokens, logprobs, and how many of them were guessed."""
    tokens, logprobs, guessed = [], [], 0
    while len(tokens) < count:
        draft = guess(tokens)
        texts = [[*PROMPT, *tokens, *draft[:i]] for i in range(len(draft) + 1)]
        done = verify(mx.stack([after(t) for t in texts]), next_draw(request, choice, tokens), draft)
        assert len(done.tokens) == done.accepted + 1
        assert list(done.tokens[: done.accepted]) == draft[: done.accepted]
        tokens = [*tokens, *done.tokens]
        logprobs += done.drawn.logprobs.tolist()[: len(done.tokens)]
        guessed += done.accepted
    return tokens[:count], logprobs[:count], guessed


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("choice", [0, 2])
def test_whatever_the_draft_the_tokens_are_those_of_plain_decoding(fields, choice):
    request, rng = Request("x", id="a", seed=11, **fields), random.Random(1)
    tokens, logprobs = plain(request, choice, 24)

    def right(so_far):
        return tokens[len(so_far) : len(so_far) + 4]

    def wrong(so_far):
        return [(t + 1) % VOCAB for t in right(so_far)]

    def mixed(so_far):
        return [t if rng.random() < 0.7 else rng.randrange(VOCAB) for t in right(so_far)]

    def none(so_far):
        return []

    counts = {}
    for guess in (right, wrong, mixed, none):
        *got, counts[guess.__name__] = speculative(request, choice, 24, guess)
        assert got == [tokens, logprobs]
    assert counts["right"] > counts["mixed"] > counts["wrong"] == counts["none"] == 0
    assert plain(request.replace(seed=12), choice, 24)[0] != tokens or request.greedy


def test_a_draft_of_the_same_noise_is_accepted_more_often_than_one_of_other_noise():
    request = Request("x", id="a", seed=3)

    def draft(seed):
        def guess(so_far):
            made = list(so_far)
            for _ in range(4):
                blurred = after([*PROMPT, *made]) + 0.3 * after([*made[-1:], 1])
                made.append(
                    draw_keyed(blurred[None], [next_draw(request.replace(seed=seed), 0, made)]).tokens.item()
                )
            return made[len(so_far) :]

        return guess

    same, other = (speculative(request, 0, 60, draft(seed))[2] for seed in (3, 4))
    assert same > 2 * other


def test_what_cannot_be_verified_is_said():
    request, logits = Request("x", id="a", seed=3), mx.zeros((3, VOCAB))
    with pytest.raises(ValueError, match=r"logits of shape \(3, 300\): must be \[2, vocabulary\]"):
        verify(logits, Draw(request, 3, 0, 3), [1])
    broken = mx.concatenate([mx.zeros((1, VOCAB)), mx.full((1, VOCAB), mx.nan)])
    first = draw_keyed(broken[:1], [Draw(request, 3, 0, 3)]).tokens.item()
    with pytest.raises(ValueError, match='request "a", position 4'):
        verify(broken, Draw(request, 3, 0, 3), [first])
    # A bad position after the correction doesn't count.
    assert verify(broken, Draw(request, 3, 0, 3), [first + 1]).tokens == (first,)
