"""Very many seeds at once give the tokens that one seed at a time gives; stages are the chain, cut short."""

import mlx.core as mx
import numpy as np
import pytest

import toolkit as tk
from toolkit.sampling import Draw, distribution, draw_keyed, process
from toolkit.study.seeds.filter_stages import stages
from toolkit.study.seeds.many_seeds import Crowd, tally
from toolkit.study.seeds.prefilled import prefill

SETTINGS = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02, "temperature": 0.7}, {"temperature": 3.0}]


def crowded(logits: mx.array, request: tk.Request, seeds: range, position: int) -> np.ndarray:
    scores = np.array(process(logits[None], [Draw(request, 0, 0, position)])[0])
    return Crowd(seeds, position, np.argsort(-np.array(logits), kind="stable")).tokens(scores)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", ["zipf", "flat", "tiny"])
def test_a_crowd_draws_what_its_seeds_draw_one_by_one(settings, shape):
    vocab = {"zipf": 20_000, "flat": 5_000, "tiny": 50}[shape]
    ranks = np.random.default_rng(3).permutation(vocab) + 1.0
    logits = mx.array(-1.1 * np.log(ranks) if shape != "flat" else ranks / vocab, dtype=mx.float32)
    seeds, request = range(-20, 280), tk.Request("x", **settings)
    draws = [Draw(request.replace(seed=s), s, 0, 9) for s in seeds]
    one_by_one = draw_keyed(mx.broadcast_to(logits[None], (len(seeds), vocab)), draws).tokens
    tokens = crowded(logits, request, seeds, 9)
    assert tokens.tolist() == one_by_one.tolist()
    assert len(set(tokens.tolist())) > 1
    assert tokens.tolist() != crowded(logits, request, seeds, 10).tolist()  # another position, other noise


def test_stages_end_where_the_chain_ends_and_say_who_excluded_a_token():
    model = tk.load("tiny")
    request = tk.Request("abc", id="a", top_k=20, top_p=0.8, min_p=0.03, temperature=0.7)
    batch = prefill(model, [request])
    found = stages(batch, "a")
    assert found.names == ("model", "top-k 20", "top-p 0.8", "min-p 0.03", "temperature 0.7")
    assert np.allclose(found.p.sum(axis=1), 1, atol=1e-5)
    assert np.array_equal(found.p[-1], np.array(distribution(batch.logits["a"], request)))
    left = (found.p > 0).sum(axis=1)
    assert left[1] == 20 and (np.diff(left) <= 0).all()
    removed = found.removed()
    assert (removed == 1).sum() == model.vocab_size - 20 and ((removed == 0) == (found.p[-1] > 0)).all()
    assert stages(batch, "a", tk.Request("abc")).names == ("model",)
    frame = found.to_frame(top=5)
    assert frame.groupby("stage", sort=False)["p"].sum().round(4).eq(1).all()
    assert "20" in repr(found)


def test_a_tally_adds_up_and_follows_the_distribution():
    model = tk.load("tiny")
    batch = prefill(model, [tk.Request("abc", id="a", top_k=20)])
    counted = tally(batch, "a", range(2000), top=5)
    assert counted["drawn"].sum() == 2000 and counted["expected"].sum() == pytest.approx(2000, rel=1e-4)
    assert counted["token"].tolist()[-1] == -1
    chi = ((counted["drawn"] - counted["expected"]) ** 2 / counted["expected"]).sum()
    assert chi < 30  # 5 degrees of freedom
