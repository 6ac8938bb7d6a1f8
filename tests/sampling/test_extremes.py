"""Values at their limits: a filter leaves one token, a log probability is a number, an error is one line."""

import math

import mlx.core as mx
import numpy as np
import pytest

import toolkit as tk
from toolkit.requests import Request
from toolkit.sampling import ORDER, Draw, Sampler
from toolkit.sampling import draws as rows_module

VOCAB = 300
LOGITS = mx.array(np.random.default_rng(0).normal(size=(1, VOCAB)).astype(np.float32) * 3)
NAMES = ("a\nb", "a\x1b[31m", 'a"b')


@pytest.fixture(params=["numpy", "mlx"])
def library(request, monkeypatch):
    """Both ways to compute a draw: at once in NumPy as on a CPU, and lazily in MLX as on a GPU."""
    if request.param == "mlx":
        monkeypatch.setattr(rows_module, "library", lambda: mx)


def drawn(order=ORDER, logits=LOGITS, **parameters):
    sampler = Sampler([Draw(Request("x", **parameters), 7)], order)
    return sampler.draw(logits, [3])


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
@pytest.mark.parametrize("value", [5e-324, 1e-50, 1e-30])
@pytest.mark.parametrize("temperature", [1e-6, 1.0, 100.0])
def test_a_mass_too_small_for_float32_leaves_one_token(library, name, value, temperature):
    made = drawn(**{name: value}, temperature=temperature, logprobs=20)
    assert not made.bad.item()
    assert made.logprobs.item() == 0
    assert made.top[0].tolist()[0] == [made.tokens.item()] + [-1] * 19
    if name == "top_p":
        assert made.tokens.item() == mx.argmax(LOGITS[0]).item()


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_tokens_far_below_those_that_xtc_dropped_have_log_probabilities(library, temperature):
    xtc = {"xtc_probability": 1, "xtc_threshold": 0.01}
    made = drawn(**xtc, temperature=temperature)
    survivors = np.array(tk.sampling.distribution(LOGITS[0], Request("x", **xtc)))
    assert made.tokens.item() == survivors.argmax() != mx.argmax(LOGITS[0]).item()
    assert made.logprobs.item() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("last", ["typical_p", "top_p"])
def test_filters_after_xtc_and_a_low_temperature_leave_a_token(library, last):
    order = (*(name for name in ORDER if name not in (last, "temperature")), "temperature", last)
    made = drawn(order, xtc_probability=1, xtc_threshold=0.01, temperature=1e-6, **{last: 0.9})
    assert not made.bad.item()
    assert made.logprobs.item() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("order", [None, 3, (*ORDER[:-1], 3), [None] * 7, ORDER[:-1], ORDER * 2])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ValueError, match=r"^order=.*must be a permutation of"):
        drawn(order)


def ask(id="bad", **fields):
    return tk.Request("hello", id=id, seed=1, max_tokens=3, **fields)


def beside_a_sibling(tiny, request):
    """Its error, checked to be one line, and its sibling to be as alone."""
    done = tk.generate(tiny, [request, ask("good")])
    alone = tk.generate(tiny, [ask("good")])[0]
    assert (done["good"].tokens, done["good"].logprobs) == (alone.tokens, alone.logprobs)
    assert done[0].finish_reason == "error"
    assert done[0].error.isprintable()
    return done[0]


@pytest.mark.parametrize("fields", [{}, {"allowed_tokens": [5, 6]}])
def test_a_bias_that_bans_all_that_is_allowed_is_refused_before_anything_runs(tiny, fields):
    ids = fields.get("allowed_tokens", range(tiny.vocab_size))
    engine = tk.Engine(tiny)
    with pytest.raises(ValueError, match=r'^logit_bias=.* for request "bad": bans every .*; leave one$'):
        engine.submit(ask(logit_bias=dict.fromkeys(ids, -math.inf), **fields))
    assert engine.idle
    engine.submit(ask(logit_bias=dict.fromkeys(list(ids)[1:], -math.inf), **fields))
    assert set(engine.run()[0].tokens) == {ids[0]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda logits: None, "returned NoneType: must be logits [258]"),
        (lambda logits: logits.tolist(), "returned list: must be"),
        (lambda logits: np.array(logits), "returned ndarray: must be"),
        (lambda logits: logits[:5], "returned an array [5]: must be"),
        (lambda logits: logits.reshape(2, -1), "returned an array [2, 129]: must be"),
    ],
)
def test_what_a_logits_processor_must_return_is_said(tiny, given, said):
    error = beside_a_sibling(tiny, ask(processors=[lambda tokens, logits: given(logits)])).error
    assert said in error
    assert tk.generate(tiny, [ask(processors=[lambda t, x: x[None]])])[0].tokens == (
        tk.generate(tiny, [ask()])[0].tokens
    )


def test_a_long_message_of_a_logits_processor_becomes_one_short_line(tiny):
    def fail(tokens, logits):
        raise RuntimeError("one\ntwo\x1b[31m" + "x" * 10_000)

    error = beside_a_sibling(tiny, ask(processors=[fail])).error
    assert r"processors: RuntimeError: one two\x1b[31mxxx" in error
    assert len(error) < 400


@pytest.mark.parametrize("name", NAMES)
def test_an_odd_id_is_named_on_one_line(tiny, name):
    engine = tk.Engine(tiny)
    engine.submit(ask(name))
    for act in (
        lambda: engine.submit(ask(name)),
        lambda: engine.cancel(name + "x"),
        lambda: engine.export_row(name, "row", choice=1),
        lambda: tk.Request(id=name),
    ):
        with pytest.raises(ValueError) as raised:
            act()
        assert str(raised.value).isprintable()
    spoil = ask(name, processors=[lambda tokens, logits: logits * math.nan])
    assert "position 5: no token can be drawn" in beside_a_sibling(tiny, spoil).error


@pytest.mark.parametrize("id", [None, 3, ["good"], {}])
def test_what_is_no_id_is_refused(tiny, id):
    engine = tk.Engine(tiny)
    engine.submit(ask("good"))
    for act in (engine.cancel, engine.preempt, lambda id: engine.export_row(id, "row")):
        with pytest.raises(ValueError, match=r"^id=.*no such request"):
            act(id)
    assert engine.run()["good"].finish_reason == "length"


@pytest.mark.parametrize("given", [None, "x", {"prompt": "x"}])
def test_what_is_no_request_is_refused(tiny, given):
    with pytest.raises(ValueError, match=r"^request=.*must be a Request"):
        tk.Engine(tiny).submit(given)


@pytest.mark.parametrize("made", [lambda: iter([ask()]), lambda: None, lambda: 3, lambda: {"a": ask()}])
def test_a_batch_that_can_be_read_only_once_is_refused_and_not_taken_for_an_empty_one(tiny, made):
    with pytest.raises(ValueError, match=r"^batch=.*must be a list of Request"):
        tk.generate(tiny, made())


def test_the_way_out_for_a_model_that_cannot_be_invariant_is_one():
    model = tk.tiny(0, model_type="mamba")
    with pytest.raises(ValueError, match=r"^invariant=True: .* can't run packed: .*; leave invariant out$"):
        tk.Engine(model, invariant=True)
    with pytest.warns(UserWarning, match="can't run packed"):
        engine = tk.Engine(model)
    engine.submit(ask())
    assert engine.run()[0].finish_reason == "length"
