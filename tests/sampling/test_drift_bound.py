"""`max_drift`: no logit error within it changes a token; where the margin limits, a little more does."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.attacks import errors
from helpers.random_requests import ask, log, some_request

from toolkit import noise
from toolkit.sampling import ORDER, Draw, Sampler
from toolkit.sampling import draws as rows_module

SEED = 20_240_607  # of everything random here; fixed before the first run


def draw_many(request, seed, logits, order=ORDER, position=5, **history):
    """Draws of one stream from several rows of logits."""
    draws = [Draw(request, seed)] * len(logits)
    histories = [(history.get("prompt", ()), history.get("generated", ()))] * len(logits)
    return Sampler(draws, order).draw(mx.array(logits), [position] * len(logits), histories)


def attack(rng, request, seed, logits, count, order=ORDER, factor=0.999, **history):
    """The bound, the margin's part of it, and how many of `count` errors of factor * bound flip the token."""
    drawn = draw_many(request, seed, logits[None], order, **history)
    token, bound = drawn.tokens.item(), drawn.max_drift.item()
    gumbel = np.array(noise.gumbel(noise.row_keys([seed], [0], [5]), len(logits)))[0]
    scores = logits if request.greedy else logits / request.temperature + gumbel
    heat = 1.0 if request.greedy else request.temperature
    made = errors(rng, logits, scores, token, bound * factor, count)
    flips = np.array(draw_many(request, seed, logits + made, order, **history).tokens) != token
    return bound, drawn.margins.item() * heat / 2, int(flips.sum())


@pytest.mark.parametrize("lazy", [False, True])
def test_no_error_within_the_bound_flips_a_token(lazy, monkeypatch):
    # 10^5 errors in all: random ones, corners, and corners chosen to hurt.
    if lazy:
        monkeypatch.setattr(rows_module, "library", lambda: mx)
    rng = np.random.default_rng(SEED + lazy)
    cases, each = (60, 300) if lazy else (230, 400)
    tried, by_margin, slack = 0, [0, 0], []
    for case in range(cases):
        vocab = int(rng.choice([5, 40, 300, 900]))
        logits = (rng.normal(size=vocab) * rng.choice([1, 3, 6])).astype(np.float32)
        order = list(ORDER) if case % 2 else rng.permutation(ORDER).tolist()
        request = some_request(rng) if case % 5 else ask(temperature=float(rng.choice([0.0, 0.5, 2.0])))
        bound, limit, flips = attack(rng, request, case, logits, each, order)
        assert flips == 0, (request, order, bound)
        tried += each
        if bound > 0.999 * limit - 1e-4 and bound > 1e-3:
            # The runner-up is what limits: half as much again must flip.
            by_margin[0] += 1
            by_margin[1] += attack(rng, request, case, logits, each, order, factor=1.5)[2] > 0
        elif bound > 0:
            flipping = (f for f in (1.2, 2, 5, 100) if attack(rng, request, case, logits, 60, order, f)[2])
            slack.append(next(flipping, np.inf))
    print(f"{tried} errors; {by_margin[0]} bounds by margin; slack of {len(slack)} others: {sorted(slack)}")
    assert by_margin[0] == by_margin[1] > cases / 5
    assert np.median(slack) <= 2


def test_an_excluded_id_with_large_noise_sets_the_bound_not_the_margin():
    # Mass before the third id is .801, just past .8: at an error near .005 it is let in, and wins.
    p = [0.5, 0.301, 0.1, 0.099]
    request = ask(top_p=0.8)
    for seed in range(5000):
        g = np.array(noise.gumbel(noise.row_keys([seed], [0], [5]), 4))[0]
        s = np.log(p) + g
        if s[2] > max(s[0], s[1]) + 1 and abs(s[0] - s[1]) > 2:
            break
    logits = np.array(log(p))
    drawn = draw_many(request, seed, logits[None])
    bound, by_margin = drawn.max_drift.item(), drawn.margins.item() / 2
    assert 0.002 < bound < 0.0035 and by_margin > 1
    token = drawn.tokens.item()
    corner = np.array([-1, -1, 1, 1], dtype=np.float32)
    assert draw_many(request, seed, (logits + corner * bound * 0.99)[None]).tokens.item() == token
    assert draw_many(request, seed, (logits + corner * 0.005)[None]).tokens.item() == 2


def test_unfiltered_and_greedy_rows_stand_half_the_gap():
    rng = np.random.default_rng(SEED)
    for request in (ask(), ask(temperature=0.5), ask(temperature=0)):
        for seed in range(10):
            logits = rng.normal(size=300).astype(np.float32)
            bound, limit, flips = attack(rng, request, seed, logits, 400)
            assert bound == pytest.approx(limit, abs=1e-5) and flips == 0
            assert attack(rng, request, seed, logits, 400, factor=1.05)[2] > 0


def test_a_repetition_penalty_divides_the_bound():
    rng = np.random.default_rng(SEED)
    history = {"prompt": list(range(20)), "generated": [3, 4]}
    for theta in (1.5, 0.5):
        request = ask(repetition_penalty=theta, top_k=15)
        for seed in range(12):
            logits = (rng.normal(size=40) * 2).astype(np.float32)
            bound, limit, flips = attack(rng, request, seed, logits, 500, **history)
            assert flips == 0 and bound <= limit / max(theta, 1 / theta) + 1e-5
            bare = draw_many(ask(top_k=15), seed, logits[None]).max_drift.item()
            assert draw_many(request, seed, logits[None]).max_drift.item() == bare  # no history: no stretch


def test_a_batch_has_the_bounds_of_its_rows():
    rng = np.random.default_rng(SEED)
    logits = rng.normal(size=(6, 400)).astype(np.float32)
    requests = [ask(), ask(top_k=40), ask(top_p=0.9), ask(min_p=0.1), ask(typical_p=0.7), ask(temperature=0)]
    draws = [Draw(r, i) for i, r in enumerate(requests)]
    drawn = np.array(Sampler(draws).draw(mx.array(logits), [5] * 6).max_drift)
    assert (drawn > 0).all()
    alone = [draw_many(r, i, logits[i : i + 1]).max_drift.item() for i, r in enumerate(requests)]
    assert drawn.tolist() == alone
