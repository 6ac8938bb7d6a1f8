"""Our chain in mlx-lm's order against mlx-lm's own sampler: the same survivors."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from helpers.random_requests import ask, log
from mlx_lm import sample_utils

from toolkit.sampling import Draw, Sampler

# top-p, min-p, XTC, top-k, and temperature last; the filters mlx-lm lacks are off.
ORDER = ("top_n_sigma", "typical_p", "top_p", "min_p", "xtc", "top_k", "temperature")
OURS = {"top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.02}, "top_k": {"top_k": 12},
        "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.03}}  # fmt: skip
COMBINATIONS = [c for n in range(1, 5) for c in itertools.combinations(OURS, n)]


def peer_survivors(monkeypatch, logprobs, parameters):
    """What reaches mlx-lm's categorical draw: bool [rows, V]."""
    seen = []

    def capture(scores, temp):
        seen.append(scores)
        return mx.argmax(scores, axis=-1)

    with monkeypatch.context() as patch:
        patch.setattr(sample_utils, "categorical_sampling", capture)
        sample_utils.make_sampler(temp=1.0, **parameters)(logprobs)
    return np.array(seen[0]) > -np.inf


def our_survivors(logits, parameters):
    rows = len(logits)
    sampler = Sampler([Draw(ask(**parameters), 1)] * rows, ORDER)
    return np.array(sampler.process(mx.array(logits), [0] * rows)) > -np.inf


def near_the_boundary(logits, top_p, reach=1e-5):
    """Ids with a prefix mass so near top_p that float32 sums may differ about them: bool [rows, V]."""
    z = logits.astype(np.float64)
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    order = np.argsort(-z, axis=-1, kind="stable")
    before = np.cumsum(np.take_along_axis(p, order, axis=-1), axis=-1) - np.take_along_axis(p, order, axis=-1)
    near = np.zeros(z.shape, dtype=bool)
    np.put_along_axis(near, order, np.abs(before - top_p) < reach, axis=-1)
    return near


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_the_same_ids_survive_as_in_mlx_lm(names, monkeypatch):
    parameters = {k: v for n in names for k, v in OURS[n].items()}
    rng = np.random.default_rng(len(COMBINATIONS))
    excused = 0
    for rows, vocab in ((990, 1000), (10, 49_152)):
        logits = (rng.normal(size=(rows, vocab)) * rng.uniform(1, 4, (rows, 1))).astype(np.float32)
        logprobs = mx.array(logits) - mx.logsumexp(mx.array(logits), axis=-1, keepdims=True)
        theirs, ours = peer_survivors(monkeypatch, logprobs, parameters), our_survivors(logits, parameters)
        differ = theirs != ours
        if differ.any() and "top_p" in names:
            near = near_the_boundary(logits, parameters["top_p"])
            # One id more or less under top-p moves what the later filters see.
            differ[near.any(axis=-1)] = False
            excused += int((theirs != ours).any(axis=-1).sum())
        assert not differ.any(), np.argwhere(differ)[:5]
        assert (~ours).any() and ours.any(axis=-1).all()
    print(f"{excused} of 1,000 rows excused")
    assert excused <= 3


@pytest.mark.parametrize(
    ("p", "peer", "ours", "why"),
    [
        # A tie at the boundary: mlx-lm keeps every id as likely as the last one, we keep to the definition.
        ([0.4, 0.3, 0.3], {"top_p": 0.5}, {"top_p": 0.5}, ([1, 1, 1], [1, 1, 0])),
        # XTC's threshold: "at or above" here, as by its author; above it in mlx-lm.
        ([0.5, 0.25, 0.25], {"xtc_probability": 1.0, "xtc_threshold": 0.25},
         {"xtc_probability": 1.0, "xtc_threshold": 0.25}, ([1, 1, 1], [0, 0, 1])),
    ],
)  # fmt: skip
def test_known_differences_of_definition(p, peer, ours, why, monkeypatch):
    theirs = peer_survivors(monkeypatch, log([p]), peer)[0].astype(int).tolist()
    assert (theirs, our_survivors(np.array(log([p])), ours)[0].astype(int).tolist()) == why


def test_penalties_are_mlx_lms_where_the_history_is_the_same():
    logits = np.random.default_rng(0).normal(size=(1, 30)).astype(np.float32)
    history = [3, 5, 5, 9, 3, 3]
    for ours, peer in (
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"presence_penalty": 0.7}, {"presence_penalty": 0.7}),
        ({"frequency_penalty": 0.7}, {"frequency_penalty": 0.7}),
        ({"logit_bias": {4: 2.0, 5: -1.0}}, {"logit_bias": {4: 2.0, 5: -1.0}}),
    ):
        line = mx.array(logits)
        for processor in sample_utils.make_logits_processors(**peer):
            line = processor(mx.array(history), line)
        sampler = Sampler([Draw(ask(**ours), 1)])
        scores = np.array(sampler.process(mx.array(logits), [0], [((), history)]))
        line = np.array(line)
        assert scores == pytest.approx(line - line.max(), abs=1e-6), ours
