"""Drift: what company does to a request's logits, and that the figures told of it hold."""

import sys
import warnings

import mlx.core as mx
import numpy as np
import pytest

import toolkit as tk
from toolkit import backend
from toolkit.study.drift.compositions import Composition, standard
from toolkit.study.drift.flips import ROUNDING, Flips
from toolkit.study.drift.rounded_model import rounded
from toolkit.study.drift.study import COLUMNS
from toolkit.study.seeds.prefilled import prefill

A = tk.Request("The children were playing with a", id="a", seed=7)
OTHERS = ["Yesterday I went to the", tk.Request("My favourite thing is", id="b", top_k=3), "x" * 50]
COMPOSITIONS = {
    "with others": OTHERS,
    "after others": Composition(tuple(OTHERS), last=True),
    "in chunks": Composition(tuple(OTHERS), chunk=5),
    "adopted": Composition(tuple(OTHERS), cached=11),
    "decoded": Composition(tuple(OTHERS), decode=3),
}
mkl = pytest.mark.skipif(
    not (backend.on_cpu() and backend.info().blas == "mkl"),
    reason="shows that logits drift under MKL on a CPU; install the cpu extra",
)


@pytest.fixture(scope="module")
def measured(tiny):
    return tk.drift(tiny, A, COMPOSITIONS, seeds=range(50), progress=False)


@mkl
def test_plain_shapes_drift_and_invariant_ones_do_not_by_a_bit(measured):
    frame = measured.to_frame()
    plain = frame[(frame["forward"] == "packed") & ~frame["invariant"]]
    kept = frame[frame["invariant"]]
    assert len(plain) == len(kept) == len(COMPOSITIONS)
    assert (plain["max_abs"] > 0).all() and (plain["max_abs"] < 1e-4).all()
    for column in ("max_abs", "mean_abs", "max_ulps", "mean_ulps", "flips", "flip_bound"):
        assert (kept[column] == 0).all(), column
    assert (frame[(frame["forward"] == "padded")]["max_abs"] > 0).any()


@mkl
def test_a_row_by_itself_drifts_by_pieces_alone(tiny):
    frame = tk.drift(tiny, A, COMPOSITIONS, forwards=["sequential"], progress=False).to_frame()
    by_name = frame.set_index("composition")["max_abs"]
    assert by_name["with others"] == by_name["after others"] == 0 < by_name["decoded"]


def test_the_table_has_a_row_for_each_run_and_the_documented_columns(measured):
    frame = measured.to_frame()
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == 4 * len(COMPOSITIONS)
    assert list(frame["composition"].unique()) == list(COMPOSITIONS)
    assert (frame["draws"] == 50).all() and (frame["amplify"] == 1).all() and frame["argmax_same"].all()
    assert (frame["mean_abs"] <= frame["max_abs"]).all() and (frame["mean_ulps"] <= frame["max_ulps"]).all()


def test_ulps_are_of_the_largest_logit(measured, tiny):
    frame = measured.to_frame()
    moved = frame[frame["max_abs"] > 0]
    if moved.empty:
        pytest.skip("nothing drifts on this device")
    ulp = (moved["max_abs"] / moved["max_ulps"]).unique()
    logits = np.array(tiny.module(mx.array([tiny.encode(A.prompt)]))[0, -1])
    assert len(ulp) == 1 and ulp[0] == np.spacing(np.abs(logits).max())


def test_differences_count_every_logit_once(measured, tiny):
    counts = measured.differences(bins=7)
    per_run = counts.groupby(["composition", "forward", "invariant"])["count"].sum()
    assert len(per_run) == len(measured.to_frame()) and (per_run == tiny.vocab_size).all()
    zero = counts[counts["high"] == 0].set_index(["composition", "forward", "invariant"])["count"]
    equal = measured.to_frame().set_index(["composition", "forward", "invariant"])["max_abs"] == 0
    assert (zero[equal] == tiny.vocab_size).all()


def test_it_is_read_in_a_sentence_and_drawn_as_a_chart(measured):
    assert repr(measured).startswith('Drift(row "a": ') and "of 1,000 tokens changed" in repr(measured)
    assert "amplified" not in repr(measured)
    assert "<table" in measured._repr_html_()
    assert '"composition"' in measured.chart().to_json()


SAMPLING = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.2, "temperature": 0.7},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"repetition_penalty": 1.3, "logit_bias": {65: 2.0}},
    {"temperature": 0.0},
]


@mkl
@pytest.mark.parametrize("how", SAMPLING, ids=[",".join(h) or "plain" for h in SAMPLING])
def test_amplified_drift_flips_tokens_and_never_more_than_the_bound(tiny, how):
    request = A.replace(**how)
    flips = 0
    for amplify in (1e3, 1e4, 1e5, 1e6):
        made = tk.drift(
            tiny,
            request,
            {"with others": OTHERS},
            forwards=["packed"],
            seeds=range(100),
            amplify=amplify,
            progress=False,
        )
        frame = made.to_frame()
        assert (frame["flips"] <= frame["flip_bound"]).all() and (frame["flip_bound"] <= frame["draws"]).all()
        assert not frame[frame["invariant"]]["flips"].any(), "nothing times anything is nothing"
        assert (frame["draws"] == (1 if request.greedy else 100)).all()
        assert f"(drift amplified {amplify:,g} times)" in repr(made) and "amplified" in made._repr_html_()
        assert "amplified" in made.chart().to_json() and (frame["amplify"] == amplify).all()
        flips += frame["flips"].sum()
    assert flips > 0 or request.greedy


@pytest.mark.parametrize("how", SAMPLING, ids=[",".join(h) or "plain" for h in SAMPLING])
@pytest.mark.parametrize("size", [0.003, 0.03, 0.3, 3.0])
def test_each_token_that_flips_had_a_bound_within_the_difference(how, size):
    rng = np.random.default_rng(1)
    alone = (rng.standard_normal(300) * 3).astype(np.float32)
    after = (alone + rng.uniform(-size, size, 300)).astype(np.float32)
    apart = float(np.abs(after - alone).max())
    flips = Flips(A.replace(**how), [65, 66, 67], range(200))
    (tokens, bound), (others, _) = flips.of(alone), flips.of(after)
    flipped = others != tokens
    assert (bound[flipped] <= apart + ROUNDING * 3).all()
    counted = flips.between((tokens, bound), after, apart)
    assert counted == (
        flipped.sum(),
        len(tokens),
        (bound <= apart + ROUNDING * max(1, A.replace(**how).temperature)).sum(),
    )
    if size == 3.0 and not A.replace(**how).greedy:
        assert flipped.any()


def test_draws_are_those_of_an_engine(tiny):
    flips = Flips(A, tiny.encode(A.prompt), range(30))
    batch = prefill(tiny, [A])
    tokens, bound = flips.of(np.array(batch.logits["a"]))
    for seed in range(30):
        drawn = batch.replay("keyed", "a", {"a": seed})
        assert (drawn.tokens.item(), drawn.max_drift.item()) == (tokens[seed], bound[seed])


def test_a_processor_leaves_no_bound_so_every_token_could_flip(tiny):
    alone = np.arange(300, dtype=np.float32) / 100
    flips = Flips(A.replace(processors=[lambda tokens, logits: logits * 2]), [65], range(10))
    assert flips.between(flips.of(alone), alone + 1, 1.0)[1:] == (10, 10)


def test_compositions_are_named_lists_or_the_usual_ones(tiny):
    names = {c.name for c in standard(OTHERS, 32).values()}
    assert names == {
        "alone, again", "with 1 other", "with 3 others", "after 3 others", "with 3 others, in chunks of 16",
        "with 3 others, 16 tokens cached", "with 3 others, last 3 decoded",
    }  # fmt: skip
    assert list(standard([], 1)) == ["alone, again"]
    made = tk.drift(
        tiny,
        A,
        [OTHERS[:1], OTHERS[1:2], Composition(chunk=3)],
        seeds=[1],
        forwards=["packed"],
        progress=False,
    )
    expected = ["with 1 other", "with 1 other; 2", "in chunks of 3"]
    assert list(made.to_frame()["composition"].unique()) == expected
    assert len(tk.drift(tiny, A, seeds=[1], forwards=["sequential"], progress=False).to_frame()) == 7


@pytest.mark.parametrize(
    "how, cuts",
    [
        (Composition(), [10]),
        (Composition(chunk=4), [4, 8, 10]),
        (Composition(decode=3), [7, 8, 9, 10]),
        (Composition(chunk=5, decode=2), [5, 8, 9, 10]),
        (Composition(chunk=50, decode=50), list(range(1, 11))),
    ],
)
def test_prompts_are_cut_where_a_composition_says(how, cuts):
    assert how.cuts(10) == cuts


@pytest.mark.parametrize(
    "compositions, how, message",
    [
        ({}, {}, "compositions: must not be empty"),
        (["text"], {}, "must be in a list of siblings"),
        ({"c": Composition(cached=32)}, {}, 'cached=32 of composition "c": must leave one of 32 tokens'),
        ([[""]], {}, "has no tokens"),
        ([[]], {"amplify": 0}, "amplify=0: must be a positive number"),
        ([[]], {"amplify": float("inf")}, "amplify=inf"),
        ([[]], {"forwards": ["packt"]}, 'must be one of packed, padded, sequential'),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(tiny, compositions, how, message):
    with pytest.raises(ValueError, match=message):
        tk.drift(tiny, A, compositions, progress=False, **how)
    with pytest.raises(ValueError, match="chunk=-1 of a composition"):
        Composition(chunk=-1)


def test_interrupted_it_keeps_what_it_has(tiny, interrupted):
    interrupted("toolkit.study.drift.study", "_run", 4)
    with pytest.warns(UserWarning, match="interrupted: 2 of 20 runs are there"):
        made = tk.drift(tiny, A, COMPOSITIONS, seeds=range(5), progress=False)
    assert len(made.to_frame()) == 2 and not made.complete
    assert "interrupted" in repr(made) and "other runs are missing" in made._repr_html_()


def test_a_forward_that_a_model_cannot_run_is_left_out_with_a_warning(tiny, monkeypatch):
    module = sys.modules["toolkit.study.drift.study"]
    build = module.build

    def picky(model, name, invariant):
        if name == "padded" or invariant is True:
            raise ValueError(f"no {name} here")
        return build(model, name, invariant)

    monkeypatch.setattr(module, "build", picky)
    with (
        pytest.warns(UserWarning, match="left out: no packed here"),
        pytest.warns(UserWarning, match="no padded"),
    ):
        made = tk.drift(tiny, A, [[]], seeds=[1], progress=False)
    assert list(made.to_frame()["forward"]) == ["packed", "sequential"]
    with pytest.raises(ValueError, match="no padded here"):
        tk.drift(tiny, A, [[]], forwards=["padded"], seeds=[1], progress=False)


def test_a_resumed_request_is_measured_at_its_next_token(tiny):
    resumed = A.replace(generated=[65, 66], max_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = tk.drift(tiny, resumed, [OTHERS], seeds=range(3), progress=False)
    assert len(made.to_frame()) == 4
    assert Flips(resumed, tiny.encode(A.prompt), [1]).position == len(tiny.encode(A.prompt)) + 2


def test_no_row_stays_behind_and_no_generator_moves(tiny):
    before = np.array(mx.random.state[0])
    tk.drift(tiny, A, COMPOSITIONS, seeds=range(3), progress=False)
    assert (np.array(mx.random.state[0]) == before).all()


@pytest.mark.real
@mkl
def test_on_the_real_model_company_moves_logits_and_nothing_flips(smollm2):
    made = tk.drift(smollm2, A, {"with others": OTHERS[:2]}, forwards=["packed", "padded"], progress=False)
    frame = made.to_frame().set_index(["forward", "invariant"])
    assert frame.loc[("packed", True), "max_abs"] == 0 < frame.loc[("packed", False), "max_abs"] < 1e-3
    assert 0 < frame.loc[("padded", False), "max_abs"] < 1e-3
    assert (frame["flips"] == 0).all()


def test_a_rounded_model_keeps_16_bits_and_leaves_the_model_as_it_was(tiny):
    ids = mx.array([tiny.encode(A.prompt)])
    before = np.array(tiny.module(ids))
    for dtype, type_ in (("bfloat16", mx.bfloat16), ("float16", mx.float16)):
        made = rounded(tiny, dtype)
        logits = made.module(ids)
        assert mx.array_equal(logits.astype(type_).astype(mx.float32), logits)
        assert 0 < np.abs(np.array(logits) - before).max() < 0.2
        assert made.name == f"tiny, rounded to {dtype}" and "rounded to" in made.note
        weight = made.module.model.layers[0].mlp.up_proj.weight
        assert weight is tiny.module.model.layers[0].mlp.up_proj.weight
        assert mx.array_equal(mx.array(before), tiny.module(ids))
    assert not mx.array_equal(tiny.module(ids).astype(mx.bfloat16).astype(mx.float32), mx.array(before))
    with pytest.raises(ValueError, match='dtype="int8": must be bfloat16 or float16'):
        rounded(tiny, "int8")


def test_ulps_of_16_bit_logits_are_16_bit_ulps():
    module = sys.modules["toolkit.study.drift.study"]
    assert module._mantissa(np.array([1.0, 3.140625], np.float32)) == 7
    assert module._mantissa(np.array([1.0, 1 + 2.0**-10], np.float32)) == 10
    assert module._mantissa(np.array([1.0, 3.14], np.float32)) == 23
    assert module._mantissa(np.array([1e30, 3.14], np.float32)) == 23


@pytest.mark.real
@mkl
def test_in_16_bits_tokens_flip_unless_shapes_are_invariant(smollm2):
    made = tk.drift(
        rounded(smollm2),
        A,
        {"with others": OTHERS[:2]},
        forwards=["packed"],
        seeds=range(500),
        progress=False,
    )
    plain, kept = made.to_frame().itertuples()
    assert 0 < plain.flips <= plain.flip_bound and 0.01 < plain.max_abs == plain.max_ulps * 0.125
    assert (kept.invariant, kept.max_abs, kept.flips) == (True, 0, 0)
