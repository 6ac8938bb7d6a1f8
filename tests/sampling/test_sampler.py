"""The draw: each row its own, whatever the batch; the chain as defined; bad rows alone are bad."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from helpers.naive_chain import draw as naive_draw
from helpers.naive_chain import survivors as naive_survivors
from helpers.random_requests import ask, log, some_request
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit import noise
from toolkit.requests import Request
from toolkit.sampling import ORDER, Draw, Sampler, distribution, draw_keyed, draw_shared, process
from toolkit.sampling import draws as rows_module

ARRAYS = ("tokens", "logprobs", "margins", "max_drift", "bad", "raw_logprobs")


@pytest.fixture(params=["numpy", "mlx"])
def library(request, monkeypatch):
    """Both ways to compute a draw: at once in NumPy as on a CPU, and lazily in MLX as on a GPU."""
    if request.param == "mlx":
        monkeypatch.setattr(rows_module, "library", lambda: mx)
    return request.param


def seeded(requests, position=5):
    return [Draw(r, 100 + i, 0, position) for i, r in enumerate(requests)]


def values(drawn):
    return {name: np.array(getattr(drawn, name)) for name in ARRAYS}


def same_bits(a, b):
    return all(np.array_equal(a[n], b[n], equal_nan=a[n].dtype.kind == "f") for n in ARRAYS)


def probabilities(p, order=ORDER, **parameters):
    return np.array(distribution(log(p), ask(**parameters), order)).round(4).tolist()


# The filters, by hand.


@pytest.mark.parametrize(
    ("p", "parameters", "expected"),
    [
        ([0.5, 0.3, 0.1, 0.1], {"top_p": 0.8}, [0.625, 0.375, 0, 0]),
        ([0.5, 0.3, 0.1, 0.1], {"top_p": 0.81}, [0.5556, 0.3333, 0.1111, 0]),  # a tie goes to the lower id
        ([0.1, 0.1, 0.3, 0.5], {"top_p": 0.5}, [0, 0, 0, 1]),
        ([0.9, 0, 0, 0.1], {"top_p": 0.3}, [1, 0, 0, 0]),
        ([0, 0.5, 0.4, 0.1], {"top_p": 0.6}, [0, 0.5556, 0.4444, 0]),
        ([0.6, 0, 0.1, 0.3], {"top_k": 2}, [0.6667, 0, 0, 0.3333]),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 3}, [0.3333, 0.3333, 0.3333, 0]),  # k is k, also in a tie
        ([0.6, 0, 0.1, 0.3], {"top_k": 4}, [0.6, 0, 0.1, 0.3]),
        ([0.6, 0, 0.1, 0.3], {"top_k": 9}, [0.6, 0, 0.1, 0.3]),
        ([0.9, 0, 0, 0.1], {"min_p": 0.8}, [1, 0, 0, 0]),
        ([0.6, 0.3, 0.06, 0.04], {"min_p": 0.1}, [0.625, 0.3125, 0.0625, 0]),  # reaches the bound exactly
        ([0.4, 0.3, 0.15, 0.15], {"xtc_probability": 1, "xtc_threshold": 0.2}, [0, 0.5, 0.25, 0.25]),
        ([0.4, 0.3, 0.15, 0.15], {"xtc_probability": 1, "xtc_threshold": 0.1}, [0, 0, 0, 1]),
        ([0.4, 0.3, 0.15, 0.15], {"xtc_probability": 1, "xtc_threshold": 0.5}, [0.4, 0.3, 0.15, 0.15]),
        ([0.4, 0.3, 0.2, 0.1], {"xtc_probability": 0.5, "xtc_threshold": 0.25}, [0.2, 0.4, 0.2667, 0.1333]),
        # Surprises 0.36, 1.90, 1.90 (entropy 0.82): the best id is the nearest by far.
        ([0.7, 0.15, 0.15], {"typical_p": 0.5}, [1, 0, 0]),
        # Surprises 0.92 and, ten times, 2.81 (entropy 2.05): here it is the farthest, and goes.
        ([0.4] + [0.06] * 10, {"typical_p": 0.2}, [0] + [0.25] * 4 + [0] * 6),
        ([0.5, 0.25, 0.125, 0.125], {"temperature": 0.5}, [0.7273, 0.1818, 0.0455, 0.0455]),
        ([0.5, 0.3, 0.1, 0.1], {"temperature": 0}, [1, 0, 0, 0]),
        ([0.5, 0.3, 0.1, 0.1], {"top_k": 1, "top_p": 0.8}, [1, 0, 0, 0]),
        ([0.5, 0.3, 0.1, 0.1], {"allowed_tokens": [1, 3]}, [0, 0.75, 0, 0.25]),
        ([0.4, 0.4, 0.2], {"logit_bias": {0: float(np.log(0.5))}}, [0.25, 0.5, 0.25]),
    ],
)  # fmt: skip
def test_a_filter_keeps_what_its_definition_says(library, p, parameters, expected):
    assert probabilities(p, **parameters) == pytest.approx(expected, abs=2e-4)


def test_top_n_sigma_counts_deviations_of_the_logits(library):
    logits = mx.array([4.0, 3.0, 2.0, 1.0, 0.0])  # deviation sqrt(2)
    kept = np.array(distribution(logits, ask(top_n_sigma=1.5))) > 0
    assert kept.tolist() == [True, True, True, False, False]


def test_order_decides_what_a_filter_sees(library):
    # Over all of it, .5 reaches .5; among the best three at temperature 2 it does not.
    p, parameters = [0.5, 0.2, 0.15, 0.15], {"top_p": 0.5, "top_k": 3, "temperature": 2.0}
    assert np.count_nonzero(probabilities(p, **parameters)) == 1
    hot = ("temperature", "top_n_sigma", "typical_p", "top_k", "top_p", "min_p", "xtc")
    assert np.count_nonzero(probabilities(p, hot, **parameters)) == 2
    with pytest.raises(ValueError, match="permutation"):
        distribution(log(p), ask(), ("top_k", "top_p"))


def test_penalties_see_what_they_should(library):
    logits = mx.array([[2.0, -1.0, 1.0, 0.5]])
    history = {"prompt": [0, 1], "generated": [2, 2, 3]}

    def scores(**parameters):
        row = np.array(process(logits, [Draw(ask(**parameters), 1, **history)]))[0]
        return row - row[0] if "repetition_penalty" not in parameters else row

    # Repetition: prompt and generated; positive logits divided, negative multiplied; then less the maximum.
    assert scores(repetition_penalty=2.0) == pytest.approx([0, -3, -0.5, -0.75])
    assert scores(repetition_penalty=2.0, penalty_window=2) == pytest.approx([0, -3, -1.5, -1.75])
    assert scores(presence_penalty=1.0) == pytest.approx([0, -3, -2, -2.5])
    assert scores(frequency_penalty=1.0) == pytest.approx([0, -3, -3, -2.5])
    assert scores(frequency_penalty=1.0, penalty_window=1) == pytest.approx([0, -3, -1, -2.5])


def test_padding_is_never_counted(library):
    logits = mx.array(np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32))
    short = Draw(ask(frequency_penalty=2.0), 1, generated=[3])
    long = Draw(ask(frequency_penalty=2.0), 1, generated=[0, 7] * 200)
    both = np.array(process(logits, [short, long]))
    assert (both[0] == np.array(process(logits[:1], [short]))[0]).all()
    plain = np.array(process(logits[:1], [Draw(ask(), 1)]))[0]
    assert np.flatnonzero(np.abs(both[0] - both[0].max() - (plain - plain.max())) > 1).tolist() == [3]


def test_logits_processors_run_for_their_row_alone(library):
    def only_seven(tokens, logits):
        assert tokens == [1, 2, 3] and logits.shape == (20,)
        return mx.where(mx.arange(20) == 7, logits, -mx.inf)

    def broken(tokens, logits):
        raise RuntimeError("out of cheese")

    requests = [ask(), ask(processors=[only_seven]), ask(processors=[broken])]
    draws = [Draw(r, 5, prompt=[1, 2], generated=[3]) for r in requests]
    logits = mx.array(np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32))
    drawn = draw_keyed(logits, draws)
    assert drawn.tokens.tolist()[:2] == [draw_keyed(logits[:1], draws[:1]).tokens.item(), 7]
    assert drawn.bad.tolist() == [False, False, True]
    assert drawn.errors == {2: "processors: RuntimeError: out of cheese"}
    assert np.isnan(drawn.max_drift[1].item())  # a processor may do anything to an error


def test_top_alternatives_are_those_of_the_chain(library):
    requests = [ask(logprobs=3), ask(logprobs=3, top_k=2), ask()]
    logits = log([[0.1, 0.4, 0.2, 0.3]] * 3)
    ids, logprobs = draw_keyed(logits, seeded(requests)).top
    assert ids.tolist() == [[1, 3, 2], [1, 3, -1], [-1, -1, -1]]
    assert np.exp(np.array(logprobs))[0] == pytest.approx([0.4, 0.3, 0.2], abs=1e-5)
    assert np.exp(np.array(logprobs))[1] == pytest.approx([4 / 7, 3 / 7, 0], abs=1e-5)
    assert draw_keyed(logits, seeded([ask()] * 3)).top is None


def test_my_alternatives_do_not_depend_on_my_siblings(library):
    logits = np.random.default_rng(1).normal(size=(5, 600)).astype(np.float32)
    logits[1, 7], logits[3] = np.nan, np.round(logits[3])  # a bad row; one full of ties
    requests = [ask(logprobs=2), ask(logprobs=9), ask(), ask(logprobs=5, top_p=0.4), ask(logprobs=600)]
    ids, logprobs = draw_keyed(mx.array(logits), seeded(requests)).top
    for row in (0, 3, 4):
        n, own = requests[row].logprobs, mx.array(logits[row : row + 1])
        mine = draw_keyed(own, seeded([requests[row]])).top
        assert ids[row, :n].tolist() == mine[0][0].tolist()
        assert logprobs[row, :n].tolist() == mine[1][0].tolist()
        assert ids[row, n:].tolist() == [-1] * (600 - n)
    ranked = np.argsort(-logits[3], kind="stable")
    assert ids[3, :5].tolist() == ranked[:5].tolist()  # of equal ones the lower id comes first


@pytest.mark.parametrize("how", [{"top_k": 1}, {"top_p": 0.5}, {"typical_p": 0.1}, {"xtc_probability": 1}])
def test_a_greedy_token_is_the_best_of_its_alternatives_whatever_the_filters(library, how):
    greedy = {"temperature": 0, "logprobs": 2, **how}
    drawn = draw_keyed(log([[0.1, 0.4, 0.2, 0.3]] * 2), seeded([ask(**greedy), ask(top_k=2)]))
    assert drawn.top[0].tolist() == [[1, 3], [-1, -1]]
    assert np.exp(np.array(drawn.top[1]))[0] == pytest.approx([0.4, 0.3], abs=1e-5)
    assert drawn.logprobs[0].item() == pytest.approx(drawn.top[1][0, 0].item(), abs=1e-6)


def test_log_probabilities_before_and_after_the_chain(library):
    drawn = draw_keyed(log([[0.1, 0.4, 0.2, 0.3]] * 2), seeded([ask(top_k=2), ask(temperature=0)]))
    token = drawn.tokens.tolist()[0]
    assert drawn.logprobs[0].item() == pytest.approx(np.log({1: 4 / 7, 3: 3 / 7}[token]), abs=1e-5)
    assert drawn.raw_logprobs[0].item() == pytest.approx(np.log({1: 0.4, 3: 0.3}[token]), abs=1e-5)
    assert drawn.logprobs[1].item() == pytest.approx(np.log(0.4), abs=1e-5)


# Any chain against the plain one.


@pytest.mark.parametrize("vocab", [7, 300, 3000])
def test_any_chain_in_any_order_is_the_plain_one(library, vocab):
    rng = np.random.default_rng(vocab)
    for trial in range(6):
        logits = (rng.normal(size=(10, vocab)) * rng.choice([1, 3, 6])).astype(np.float32)
        if trial % 3 == 0:
            logits = np.round(logits)  # ties
        order = list(ORDER) if trial % 2 else rng.permutation(ORDER).tolist()
        draws = seeded([some_request(rng) for _ in range(10)], position=trial)
        parts = [d.seed for d in draws], [0] * 10, [trial] * 10
        gates = noise.uniform(noise.row_keys(*parts, noise.XTC))
        gumbel = np.array(noise.gumbel(noise.row_keys(*parts), vocab))
        sampler = Sampler(draws, order)
        scores = np.array(sampler.process(mx.array(logits), parts[2]))
        drawn = sampler.draw(mx.array(logits), parts[2])
        for row, d in enumerate(draws):
            kept = set(np.flatnonzero(scores[row] > -np.inf).tolist())
            assert kept == set(naive_survivors(logits[row], d.request, order, gates[row])), d.request
            token, margin = naive_draw(logits[row], d.request, order, gumbel[row], gates[row])
            assert drawn.tokens[row].item() == token
            got = drawn.margins[row].item()
            assert got == pytest.approx(margin, abs=1e-4) or (np.isnan(got) and np.isinf(margin))


# Each row its own.


def mixed_rows(rng, count):
    makers = [
        lambda: ask(),
        lambda: ask(temperature=0.0),
        lambda: some_request(rng),
        lambda: some_request(rng, logit_bias={3: 1.5}, repetition_penalty=1.3),
        lambda: ask(allowed_tokens=[1, 4, 6], temperature=2.0),
        lambda: ask(presence_penalty=0.5, frequency_penalty=-0.5, top_k=5),
    ]
    draws = []
    for i in range(count):
        request = makers[rng.integers(len(makers))]()
        tokens = rng.integers(0, 7, 9).tolist()
        draws.append(
            Draw(request, int(rng.integers(-5, 5)), int(i % 3), int(rng.integers(99)), tokens[:4], tokens[4:])
        )
    return draws


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([7, 300, 2500]), st.integers(2, 9), st.booleans())
def test_a_row_is_the_same_to_the_bit_alone_and_in_any_batch(seed, vocab, count, lazy):
    rng = np.random.default_rng(seed)
    draws = mixed_rows(rng, count)
    logits = (rng.normal(size=(count, vocab)) * 3).astype(np.float32)
    if seed % 4 == 0:
        logits[0] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        if lazy:
            patch.setattr(rows_module, "library", lambda: mx)
        whole = values(draw_keyed(mx.array(logits), draws))
        order = rng.permutation(count)
        moved = values(draw_keyed(mx.array(logits[order]), [draws[i] for i in order]))
        assert same_bits({n: v[order] for n, v in whole.items()}, moved)
        row = int(rng.integers(count))
        alone = values(draw_keyed(mx.array(logits[row : row + 1]), draws[row : row + 1]))
        assert same_bits({n: v[row : row + 1] for n, v in whole.items()}, alone)


def test_large_batches_keep_rows_apart(library):
    # Long enough for threads, and for lists of several lengths.
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(24, 20_000)) * np.linspace(0.5, 5, 24)[:, None]).astype(np.float32)
    for parameters in ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01}):
        draws = seeded([ask(**parameters)] * 24)
        whole = values(draw_keyed(mx.array(logits), draws))
        for row in (0, 11, 23):
            alone = values(draw_keyed(mx.array(logits[row : row + 1]), draws[row : row + 1]))
            assert same_bits({n: v[row : row + 1] for n, v in whole.items()}, alone)


def test_a_sibling_with_filters_leaves_an_unfiltered_row_alone(library):
    logits = mx.array(np.random.default_rng(1).normal(size=(3, 5000)).astype(np.float32))
    mine = Draw(ask(), 42, 0, 7)
    alone = values(draw_keyed(logits[:1], [mine]))
    for sibling in (ask(), ask(top_k=2), ask(top_p=0.5), ask(temperature=0), ask(allowed_tokens=[])):
        batch = values(draw_keyed(logits, [mine, Draw(sibling, 1, 0, 7), Draw(sibling, 2, 0, 7)]))
        assert same_bits(alone, {n: v[:1] for n, v in batch.items()})


def test_uniform_rows_with_seeds_1_2_3_draw_as_alone(library):
    logits = mx.zeros((3, 1000))
    draws = [Draw(ask(), seed, 0, 4) for seed in (1, 2, 3)]
    together = draw_keyed(logits, draws).tokens.tolist()
    assert together == [draw_keyed(logits[:1], [d]).tokens.item() for d in draws]
    assert len(set(together)) == 3


def test_rows_with_different_filters_each_keep_their_own(library):
    logits = mx.array(np.random.default_rng(3).normal(size=(1, 200)).astype(np.float32))
    rows = mx.broadcast_to(logits, (4, 200))
    requests = [ask(top_k=1), ask(top_k=50), ask(top_p=0.3), ask(top_p=0.9)]
    kept = (np.array(process(rows, seeded(requests))) > -np.inf).sum(axis=-1).tolist()
    assert kept[:2] == [1, 50] and kept[2] < kept[3]
    assert kept == [len(naive_survivors(np.array(logits)[0], r, ORDER)) for r in requests]


def test_near_ties_swapped_by_a_hair_leave_the_token(library):
    p = np.full(50, 1e-4)
    p[7] = p[31] = 0.4975
    seeds = range(40)
    draws = [Draw(ask(), s) for s in seeds]
    first, second = np.log(p), np.log(p)
    first[7] += 1e-6
    second[31] += 1e-6
    tokens = [
        draw_keyed(mx.array(np.tile(x, (40, 1)).astype(np.float32)), draws).tokens.tolist()
        for x in (first, second)
    ]
    assert tokens[0] == tokens[1] and set(tokens[0]) == {7, 31}


def test_constant_logits_give_other_tokens_at_other_steps(library):
    sampler = Sampler([Draw(ask(), 1)])
    tokens = [sampler.draw(mx.zeros((1, 1000)), [step]).tokens.item() for step in range(8)]
    assert len(set(tokens)) >= 7


def test_choices_of_one_seed_are_streams_of_their_own(library):
    tokens = draw_keyed(mx.zeros((3, 10_000)), [Draw(ask(), -2, c) for c in range(3)]).tokens.tolist()
    assert len(set(tokens)) == 3
    others = [draw_keyed(mx.zeros((1, 10_000)), [Draw(ask(), s)]).tokens.item() for s in (-1, 0)]
    assert not set(tokens[1:]) & set(others)  # choice c is not seed + c


def test_the_same_seed_twice_gives_the_same_token_twice(library):
    tokens = draw_keyed(mx.zeros((2, 10_000)), [Draw(ask(), 9)] * 2).tokens.tolist()
    assert tokens[0] == tokens[1]


def test_worker_threads_draw_what_the_main_thread_draws(library):
    sampler = Sampler([Draw(ask(), 1), Draw(ask(top_p=0.9), 2)])
    logits = np.random.default_rng(0).normal(size=(2, 3000)).astype(np.float32)

    def eight():
        return [sampler.draw(mx.array(logits), [step] * 2).tokens.tolist() for step in range(8)]

    found = []
    threads = [threading.Thread(target=lambda: found.append(eight())) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [eight()] * 2
    assert len({tuple(t) for t in found[0]}) > 4


def test_keys_made_ahead_give_the_same_draw(library):
    sampler = Sampler(seeded([ask(), ask(top_k=9)]))
    logits = mx.array(np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32))
    ahead = sampler.keys([[3, 4, 5], [8, 9, 10]])
    for step in range(3):
        now = sampler.draw(logits, [3 + step, 8 + step])
        assert (
            now.tokens.tolist()
            == sampler.draw(logits, [3 + step, 8 + step], keys=ahead[:, step]).tokens.tolist()
        )


def test_keys_are_those_of_their_positions_however_rows_go_on(library):
    sampler, positions = Sampler(seeded([ask()] * 3)), np.array([3, 8, 5])

    def right(at):
        return np.array_equal(np.array(sampler.keys(at)), noise.row_keys([100, 101, 102], [0] * 3, at))

    assert not np.array_equal(sampler.keys(positions), sampler.keys(positions + 1))
    for move in (0, 1, 1, 1, 0, 1, 1, 63, 1, 1, 62, 1, 70, 1, 1, np.array([1, 1, 2]), 1, 1, -2, 1, 1):
        positions = positions + move
        assert right(positions), move
    sampler = Sampler(seeded([ask()] * 3))
    assert right(positions - 1) and right(positions)
    positions += 10  # a caller that counts in place
    assert right(positions + 2) and right(positions)


def test_an_unseeded_row_is_refused_by_keyed_draws():
    with pytest.raises(ValueError, match="seed=None for row 1"):
        draw_keyed(mx.zeros((2, 9)), [Draw(ask(), 1), Draw(ask(), None)])


# The global generator.


def test_shared_draws_are_mlx_draws(library):
    logits = mx.array(np.random.default_rng(2).normal(size=(3, 500)).astype(np.float32))
    draws = [Draw(r, None) for r in (ask(temperature=0.8), ask(temperature=0), ask(top_k=20))]
    scores = process(logits, draws)
    mx.random.seed(11)
    expected = mx.random.categorical(scores).tolist()
    mx.random.seed(11)
    together = draw_shared(logits, draws, together=True)
    assert [together.tokens.tolist()[i] for i in (0, 2)] == [expected[i] for i in (0, 2)]
    assert together.tokens.tolist()[1] == np.array(logits)[1].argmax()
    mx.random.seed(11)
    expected = [mx.random.categorical(scores[i : i + 1]).item() for i in (0, 2)]
    mx.random.seed(11)
    apart = draw_shared(logits, draws, together=False)
    assert [apart.tokens.tolist()[i] for i in (0, 2)] == expected
    assert np.isnan(np.array(apart.margins)).tolist() == [True, False, True]
    before = np.array(mx.random.state[0])
    draw_keyed(logits, seeded([d.request for d in draws]))
    assert (np.array(mx.random.state[0]) == before).all()


# Edges.


@pytest.mark.parametrize(
    "parameters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.5}, {"temperature": 0}]
)
def test_a_bad_row_is_flagged_and_its_siblings_draw(library, parameters):
    logits = np.random.default_rng(4).normal(size=(5, 300)).astype(np.float32)
    good = draw_keyed(mx.array(logits), seeded([ask(**parameters)] * 5))
    logits[1, 17] = np.nan
    logits[2] = -np.inf
    logits[3, 9] = np.inf
    drawn = draw_keyed(mx.array(logits), seeded([ask(**parameters)] * 5))
    assert drawn.bad.tolist() == [False, True, True, True, False]
    assert [drawn.tokens.tolist()[i] for i in (0, 4)] == [good.tokens.tolist()[i] for i in (0, 4)]
    assert all(0 <= t < 300 for t in drawn.tokens.tolist())
    assert np.isnan(np.array(drawn.logprobs)[1:4]).all()
    empty = draw_keyed(mx.array(logits[:1]), seeded([ask(allowed_tokens=[], **parameters)]))
    assert empty.bad.tolist() == [True]


@pytest.mark.parametrize("parameters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.5}])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_bad_row_is_flagged_whoever_draws_and_shows_no_alternatives(library, parameters, mixed):
    logits = np.random.default_rng(4).normal(size=(5, 300)).astype(np.float32)
    logits[1, 17], logits[2], logits[3, 9] = np.nan, -np.inf, np.inf
    logits = mx.array(logits)
    requests = [ask(logprobs=3, **parameters)] * 4 + [ask(logprobs=3, **({} if mixed else parameters))]
    free = [Draw(r, None) for r in requests]
    ways = (
        draw_shared(logits, free, True),
        draw_shared(logits, free, False),
        draw_keyed(logits, seeded(requests)),
    )
    for drawn in ways:
        assert drawn.bad.tolist() == [False, True, True, True, False]
        assert (np.array(drawn.top[0])[1:4] == -1).all() and (np.array(drawn.top[0])[[0, 4]] >= 0).any()
        assert np.isnan(np.array(drawn.logprobs)).tolist() == drawn.bad.tolist()
    scores = np.array(process(logits, seeded(requests)))
    assert np.isnan(scores[1:4]).all() and not np.isnan(scores[[0, 4]]).any()


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 8}, {"top_k": 2**31 - 1}, {"top_k": 2}, {"top_p": 1.0}, {"top_p": 1e-9}, {"min_p": 1.0},
        {"temperature": 1e-6}, {"temperature": 100.0}, {"logit_bias": dict.fromkeys(range(8), 10_000.0)},
        {"repetition_penalty": 100.0}, {"repetition_penalty": 0.01}, {"presence_penalty": -100.0},
        {"frequency_penalty": 100.0}, {"typical_p": 1e-9}, {"top_n_sigma": 1e-9},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0}, {"allowed_tokens": [5]},
    ],
)  # fmt: skip
def test_extreme_parameters_give_a_defined_result(library, parameters):
    logits = np.array([[3.0, -2.0, 1.0, 0.0, 2.0, 1.0, -9.0, 0.5]], dtype=np.float32)
    d = Draw(ask(**parameters), 3, prompt=[0, 1], generated=[2, 2, 4])
    drawn = draw_keyed(mx.array(logits), [d])
    assert not drawn.bad.item() and np.isfinite(drawn.logprobs.item()) and drawn.logprobs.item() <= 1e-6
    scores = np.array(process(mx.array(logits), [d]))[0]
    assert scores[drawn.tokens.item()] > -np.inf and not np.isnan(scores).any()
    assert np.array(distribution(mx.array(logits[0]), d.request)).sum() == pytest.approx(1, abs=1e-5)
    if parameters.keys() & {"top_p", "min_p", "temperature"} and next(iter(parameters.values())) in (
        1e-9,
        1e-6,
    ):
        assert drawn.tokens.item() == 0


def test_bf16_logits_and_a_tiny_top_p_give_the_argmax(library):
    logits = mx.array([[9.0, 12.0, 12.0, 11.9]]).astype(mx.bfloat16)
    for parameters in ({"top_p": 1e-3}, {"top_k": 1, "top_p": 0.8}, {"temperature": 0}):
        assert draw_keyed(logits, seeded([ask(**parameters)])).tokens.item() == 1


def test_two_rows_one_nearly_certain_with_top_p_half(library):
    p = np.full((2, 100), 0.01 / 99)
    p[0, 3] = p[1, 60] = 0.99
    drawn = draw_keyed(log(p), seeded([ask(top_p=0.5)] * 2))
    assert drawn.tokens.tolist() == [3, 60] and not drawn.bad.any().item()
    assert np.array(drawn.logprobs) == pytest.approx(0, abs=1e-6)
    assert np.isnan(np.array(drawn.margins)).all()  # a single survivor has no runner-up


def test_a_vocabulary_of_one_and_ids_out_of_range(library):
    assert draw_keyed(mx.zeros((1, 1)), seeded([ask()])).tokens.tolist() == [0]
    with pytest.raises(ValueError, match=r"allowed_tokens: 9.*\[0, 5\)"):
        draw_keyed(mx.zeros((1, 5)), seeded([ask(allowed_tokens=[9])]))
    with pytest.raises(ValueError, match="histories=None"):
        Sampler(seeded([ask(repetition_penalty=2.0)])).draw(mx.zeros((1, 5)), [0])


@pytest.mark.parametrize("vocab", [60, 300, 1024, 1025, 3000])
def test_no_empty_array_is_concatenated_which_a_gpu_does_not_bear(vocab, monkeypatch):
    whole, seen = mx.concatenate, []

    def checked(arrays, axis=0, **options):
        seen.extend(a.size for a in arrays)
        return whole(arrays, axis, **options)

    monkeypatch.setattr(rows_module, "library", lambda: mx)
    monkeypatch.setattr(mx, "concatenate", checked)
    some = {"top_p": 0.9}, {"top_k": 5}, {"xtc_probability": 1.0, "top_k": 9}, {"typical_p": 0.5}, {}
    draws = [Draw(Request("x", **parameters), i) for i, parameters in enumerate(some)]
    logits = mx.random.normal((len(draws), vocab), key=mx.random.key(vocab))
    mx.eval(Sampler(draws).draw(logits, [7] * len(draws)).arrays())
    assert seen and min(seen) > 0
