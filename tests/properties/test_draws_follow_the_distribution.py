"""Keyed draws follow the exact distribution, over seeds and over positions, in the body and in the tail.

One chance in a million for each test; the seeds were written down before the first run. All draws together
touch 1.2 * 10^9 ids.
"""

import mlx.core as mx
import numpy as np
import pytest
from helpers.random_requests import ask
from helpers.statistics_of_draws import ALPHA, Z, chi_square_z, poisson_p

from toolkit import noise
from toolkit.sampling import Draw, Sampler, distribution

FIRST_SEED, FIRST_POSITION = 1000, 100


def observed(logits, request, count, over, rows=512):
    """How often each id is drawn: over seeds at one position, or over positions of a few seeds."""
    rows = min(rows, count)
    steps = -(-count // rows)
    tiled = mx.array(np.tile(np.asarray(logits, dtype=np.float32), (rows, 1)))
    counts = np.zeros(len(logits), dtype=np.int64)
    if over == "positions":
        sampler = Sampler([Draw(request, 7)] * rows)
        for step in range(steps):
            start = FIRST_POSITION + step * rows
            counts += np.bincount(
                sampler.draw(tiled, range(start, start + rows)).tokens, minlength=len(logits)
            )
        return counts
    # Few samplers, many keys: a sampler's rows are requests, and its keys may come from any seed.
    sampler = Sampler([Draw(request, 0)] * rows)
    zeros = [0] * rows
    for step in range(steps):
        seeds = range(FIRST_SEED + step * rows, FIRST_SEED + (step + 1) * rows)
        keys = noise.row_keys(seeds, zeros, zeros)
        counts += np.bincount(sampler.draw(tiled, zeros, keys=keys).tokens, minlength=len(logits))
    return counts


def judge(counts, p):
    """Body by chi-square, tail by the count of all rare ids together."""
    z = chi_square_z(counts, p)
    rare = (p > 0) & (p * counts.sum() < 12)
    tail = poisson_p(counts[rare].sum(), p[rare].sum() * counts.sum()) if p[rare].sum() > 0 else 1.0
    assert z < Z, f"chi-square {z:.1f} deviations up"
    assert tail > ALPHA, f"tail: {counts[rare].sum()} against {p[rare].sum() * counts.sum():.1f}"


def zipf(vocab, power):
    return -power * np.log(np.arange(1, vocab + 1))


def ties():
    logits = zipf(200, 1.0)
    logits[:2] = 0.0
    return logits


def certain(rest, vocab=500):
    p = np.full(vocab, rest / (vocab - 1))
    p[123] = 1 - rest
    return np.log(p)


RNG = np.random.default_rng(99)
CASES = {
    "flat 50": (np.zeros(50), {}),
    "flat 1,000": (np.zeros(1000), {}),
    "Zipf 1": (zipf(1000, 1.0), {}),
    "Zipf 2": (zipf(1000, 2.0), {}),
    "Zipf shuffled": (RNG.permutation(zipf(2100, 1.2)), {}),
    "two ties": (ties(), {}),
    "two even": (np.array([0.0, 0.0]), {}),
    "nearly certain": (certain(1e-3), {}),
    "almost certain": (certain(1e-5), {}),
    "one survivor": (np.where(np.arange(50) == 7, 0.0, -np.inf), {}),
    "normal, cold": (RNG.normal(size=800), {"temperature": 0.3}),
    "normal, hot": (RNG.normal(size=800) * 4, {"temperature": 3.0}),
    "top-k": (RNG.normal(size=800) * 2, {"top_k": 40}),
    "top-p": (RNG.normal(size=800) * 2, {"top_p": 0.8}),
    "min-p": (RNG.normal(size=800) * 2, {"min_p": 0.05, "temperature": 1.5}),
    "typical-p": (RNG.normal(size=300) * 2, {"typical_p": 0.6}),
    "top-n-sigma": (RNG.normal(size=800) * 2, {"top_n_sigma": 1.5}),
    "XTC": (RNG.normal(size=300) * 2, {"xtc_probability": 0.5, "xtc_threshold": 0.05}),
    "all at once": (
        RNG.normal(size=800) * 2,
        {"top_k": 100, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    ),
    "mask and bias": (RNG.normal(size=300), {"allowed_tokens": range(0, 300, 3), "logit_bias": {3: 2.0}}),
}


# The gate is keyed by the sampler's own seeds, so for XTC only positions vary it here; see the last test.
@pytest.mark.parametrize(
    ("name", "over"), [(n, o) for n in CASES for o in ("seeds", "positions") if (n, o) != ("XTC", "seeds")]
)
def test_draws_follow_the_distribution(name, over):
    logits, parameters = CASES[name]
    request = ask(**parameters)
    p = np.array(distribution(mx.array(logits.astype(np.float32)), request), dtype=np.float64)
    judge(observed(logits, request, min(10_000, 4_000_000 // len(logits)), over), p)


def test_draws_over_150_000_tokens_follow_the_distribution():
    logits = RNG.permutation(zipf(150_000, 1.1))
    p = np.array(distribution(mx.array(logits.astype(np.float32)), ask()), dtype=np.float64)
    for over in ("seeds", "positions"):
        counts = observed(logits, ask(), 640, over, rows=64)
        chunks = np.add.reduceat(counts[np.argsort(-logits)], [0, 1, 3, 10, 100, 1000, 10_000])
        shares = np.add.reduceat(np.sort(p)[::-1], [0, 1, 3, 10, 100, 1000, 10_000])
        judge(chunks, shares)


def test_a_million_flat_draws_in_body_and_tail_and_what_faults_would_show(monkeypatch):
    # Who wins among equals, and how large the winner's noise is: its tail is the noise's own.
    vocab, rows, steps = 1000, 2000, 500
    logits = mx.zeros((rows, vocab))
    sampler = Sampler([Draw(ask(), 0)] * rows)
    zeros = [0] * rows
    counts, loud = np.zeros(vocab, dtype=np.int64), 0
    for step in range(steps):
        keys = noise.row_keys(range(step * rows, (step + 1) * rows), zeros, zeros)
        tokens = np.array(sampler.draw(logits, zeros, keys=keys).tokens)
        counts += np.bincount(tokens, minlength=vocab)
        loud += int((noise.gumbel_at(keys, tokens[:, None]) > 17).sum())
    judge(counts, np.full(vocab, 1 / vocab))
    expected = rows * steps * vocab * -np.expm1(-np.exp(-17.0))
    assert poisson_p(loud, expected) > ALPHA, (loud, expected)
    # Positive controls. 24-bit words never get that loud:
    coarse = noise.gumbel_from_bits(np.array([0xFFFFFF00], dtype=np.uint32))[0]
    assert coarse < 17 and poisson_p(0, expected) < ALPHA
    # and noise shared by the rows of a batch gives each batch one winner.
    shared = np.zeros(vocab, dtype=np.int64)
    for step in range(20):
        keys = np.repeat(noise.row_keys([step], [0], [0]), rows, axis=0)
        shared += np.bincount(np.array(sampler.draw(logits, zeros, keys=keys).tokens), minlength=vocab)
    assert chi_square_z(shared, np.full(vocab, 1 / vocab)) > Z


def test_xtc_opens_each_rows_gate_by_its_own_seed():
    request = ask(xtc_probability=0.5, xtc_threshold=0.1)
    logits = np.log(np.array([0.5, 0.3, 0.1, 0.1], dtype=np.float32))
    p = np.array(distribution(mx.array(logits), request), dtype=np.float64)
    counts = np.zeros(4, dtype=np.int64)
    gates = []
    for block in range(10):
        sampler = Sampler([Draw(request, s) for s in range(block * 2000, block * 2000 + 2000)])
        tiled = mx.array(np.tile(logits, (2000, 1)))
        counts += np.bincount(sampler.draw(tiled, [3] * 2000).tokens, minlength=4)
        gates.append((np.array(sampler.process(tiled, [3] * 2000))[:, 0] > -np.inf).mean())
    judge(counts, p)
    assert all(0.4 < g < 0.6 for g in gates)  # one gate for all rows would give 0 or 1
