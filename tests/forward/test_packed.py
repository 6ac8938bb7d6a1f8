"""The packed forward on the tiny llama: a row's logits are the same bits however its tokens come in."""

import gc
import threading
import weakref
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import activations, base, llama

import toolkit as tk
from toolkit import backend
from toolkit.forward import cpu_exp, layer_cache, packed, reference_check
from toolkit.forward.kv_cache import Geometry, KVStore
from toolkit.forward.packed import PackedForward
from toolkit.forward.patch import ATTENTION, GATE, attached, functions_of
from toolkit.forward.shapes import PLAIN, Shapes
from toolkit.forward.spans import Span

SHAPES = Shapes(8, 8, 4, 128)
LENGTHS = (12, 3, 40, 7, 131, 5)
STEPS = 3
LLAMA = [(llama.__name__, ATTENTION)]

needs_mkl = pytest.mark.skipif(backend.info().blas != "mkl", reason="these shapes were measured with MKL")


def prompts(seed: int = 0) -> dict[int, list[int]]:
    rng = np.random.default_rng(seed)
    return {n: [int(t) for t in rng.integers(0, 256, n + STEPS)] for n in LENGTHS}


def step(forward: PackedForward, spans: Sequence[Span]) -> dict[object, np.ndarray]:
    logits = forward.run(spans)
    mx.eval(logits, forward.state())
    return {s.row: np.array(logits[i]) for i, s in enumerate(s for s in spans if s.sample)}


def whole(forward: PackedForward, rows: dict[int, list[int]]) -> dict[int, np.ndarray]:
    """Prefill and decode, all rows together: logits [1 + STEPS, vocab] a row."""
    outs = [step(forward, [Span(n, 0, tokens[:n]) for n, tokens in rows.items()])]
    for i in range(STEPS):
        outs.append(step(forward, [Span(n, n + i, [tokens[n + i]]) for n, tokens in rows.items()]))
    for n in rows:
        forward.release(n)
    return {n: np.stack([out[n] for out in outs]) for n in rows}


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


@pytest.fixture(scope="module")
def forward(tiny: tk.Model) -> PackedForward:
    return PackedForward(tiny, SHAPES)


@pytest.fixture(scope="module")
def expected(forward: PackedForward) -> dict[int, np.ndarray]:
    """What each row gets alone."""
    return {n: whole(forward, {n: tokens})[n] for n, tokens in prompts().items()}


@needs_mkl
def test_a_row_gets_the_same_bits_alone_in_a_batch_and_in_another_order(forward, expected) -> None:
    rows = prompts()
    orders = [list(rows), list(rows)[::-1], [131, 12, 5, 40, 3, 7]]
    for order in orders:
        got = whole(forward, {n: rows[n] for n in order})
        assert all(same(got[n], expected[n]) for n in rows)


@needs_mkl
def test_without_rules_for_shapes_the_same_comparison_fails(tiny: tk.Model) -> None:
    forward, rows = PackedForward(tiny, PLAIN), prompts()
    alone = {n: whole(forward, {n: tokens})[n] for n, tokens in rows.items()}
    together = whole(forward, rows)
    assert not all(same(alone[n], together[n]) for n in rows)
    assert all(np.allclose(alone[n], together[n], atol=1e-4) for n in rows)


def test_logits_are_the_models_own_within_rounding(tiny: tk.Model, expected) -> None:
    for n, tokens in prompts().items():
        own = np.array(tiny.module(mx.array([tokens]))[0, n - 1 :])
        np.testing.assert_allclose(expected[n], own, atol=1e-4)


@needs_mkl
@pytest.mark.parametrize("chunk", [1, 5, 64, 128])
def test_a_prompt_in_chunks_ends_in_the_same_bits(forward, expected, chunk: int) -> None:
    for n, tokens in prompts().items():
        for start in range(0, n, chunk):
            stop = min(n, start + chunk)
            got = step(forward, [Span("row", start, tokens[start:stop], sample=stop == n)])
        forward.release("row")
        assert same(got["row"], expected[n][0])


@needs_mkl
def test_a_decode_step_equals_the_same_token_at_the_end_of_a_prompt(forward, expected) -> None:
    rows = prompts()
    for i in range(STEPS):
        got = step(forward, [Span(n, 0, tokens[: n + i + 1]) for n, tokens in rows.items()])
        for n in rows:
            forward.release(n)
        assert all(same(got[n], expected[n][i + 1]) for n in rows)


@needs_mkl
def test_prefill_chunks_and_decode_share_a_step(forward, expected) -> None:
    rows = prompts()
    step(forward, [Span(12, 0, rows[12][:12]), Span(131, 0, rows[131][:100], sample=False)])
    spans = [Span(131, 100, rows[131][100:131]), Span(12, 12, rows[12][12:13]), Span(7, 0, rows[7][:7])]
    got = step(forward, spans)
    for n in (12, 131, 7):
        forward.release(n)
    assert same(got[131], expected[131][0])
    assert same(got[12], expected[12][1])
    assert same(got[7], expected[7][0])


@needs_mkl
def test_an_adopted_prefix_continues_in_the_same_bits(forward, expected) -> None:
    tokens = prompts()[131]
    step(forward, [Span("first", 0, tokens[:131])])
    pairs = forward.read("first", 90)
    mx.eval(pairs)
    forward.release("first")
    forward.write("second", pairs, 90)
    assert forward.length("second") == 90
    got = step(forward, [Span("other", 0, tokens[:9]), Span("second", 90, tokens[90:131])])
    forward.release("second")
    forward.release("other")
    assert same(got["second"], expected[131][0])


@needs_mkl
def test_tokens_still_on_the_device_are_taken_from_carry(forward, expected) -> None:
    rows = prompts()
    step(forward, [Span(12, 0, rows[12][:12]), Span(7, 0, rows[7][:7])])
    carry = mx.array([rows[7][7], rows[12][12]], mx.int32)
    logits = np.array(forward.run([Span(12, 12, (), source=1), Span(7, 7, (), source=0)], carry))
    forward.release(12)
    forward.release(7)
    assert same(logits[0], expected[12][1])
    assert same(logits[1], expected[7][1])


@needs_mkl
def test_a_compiled_step_gives_the_same_bits_as_itself_alone(tiny: tk.Model) -> None:
    forward, rows = PackedForward(tiny, SHAPES, compile=True), prompts()
    alone = {n: whole(forward, {n: tokens})[n] for n, tokens in rows.items()}
    together = whole(forward, rows)
    assert all(same(alone[n], together[n]) for n in rows)


@pytest.mark.parametrize("length", [20, 120])  # written into a slab, and all of a slab made at once
def test_a_sibling_that_is_not_a_number_does_not_reach_me(length: int) -> None:
    model = tk.tiny(3)
    embedding = model.module.model.embed_tokens
    forward, mine = PackedForward(model, SHAPES), [5, 6, 7, 8] * (length // 4)
    alone = step(forward, [Span("mine", 0, mine)])["mine"]
    forward.release("mine")
    weight = np.array(embedding.weight)
    weight[99] = np.nan
    embedding.weight = mx.array(weight)
    got = step(forward, [Span("ill", 0, [99] * length), Span("mine", 0, mine)])
    assert np.isnan(got["ill"]).all()
    assert same(got["mine"], alone)
    forward.release("ill")
    assert same(step(forward, [Span("next", 0, mine)])["next"], alone)  # in the slot that it left


def test_a_prompt_that_is_not_a_number_and_moves_between_chunks_leaves_nothing_behind() -> None:
    model = tk.tiny(3)
    embedding = model.module.model.embed_tokens
    forward, other, mine = PackedForward(model, SHAPES), [9] * 20, [5, 6, 7, 8]
    alone = step(forward, [Span("mine", 0, mine)])["mine"]
    forward.release("mine")
    weight = np.array(embedding.weight)
    weight[99] = np.nan
    embedding.weight = mx.array(weight)
    step(forward, [Span("other", 0, other), Span("ill", 0, [99] * 100, sample=False)])
    left = forward.store.places["ill"]
    step(forward, [Span("ill", 100, [99] * 100, sample=False)])  # outgrows its slab, its logits unseen
    got = step(forward, [Span("mine", 0, mine)])["mine"]
    mine_now = forward.store.places["mine"]
    assert (mine_now.slab, mine_now.slot) == (left.slab, left.slot)
    assert same(got, alone)


# Threads, and what is left behind


def test_two_models_run_in_two_threads_and_mlx_lm_in_a_third() -> None:
    models = [tk.tiny(seed) for seed in (1, 2, 3)]
    rows = prompts()
    want: list[object] = [whole(PackedForward(m, SHAPES), rows) for m in models[:2]]
    prompt = mx.array(rows[12])
    want.append([t for (t, _), _ in zip(generate_step(prompt, models[2].module), range(8), strict=False)])
    got: list[object] = [None, None, None]

    def run_packed(i: int) -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            forward = PackedForward(models[i], SHAPES)
            got[i] = [whole(forward, rows) for _ in range(3)][-1]

    def run_mlx_lm() -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            for _ in range(3):
                steps = generate_step(mx.array(rows[12]), models[2].module)
                got[2] = [t for (t, _), _ in zip(steps, range(8), strict=False)]

    threads = [threading.Thread(target=run_packed, args=(i,)) for i in (0, 1)]
    threads.append(threading.Thread(target=run_mlx_lm))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 1):
        assert all(same(got[i][n], want[i][n]) for n in rows)
    assert got[2] == want[2]
    assert vars(llama)[ATTENTION] is base.scaled_dot_product_attention


def test_within_a_step_other_threads_keep_their_own_attention(tiny: tk.Model) -> None:
    prompt = mx.array([[1, 2, 3, 4]])
    own, seen = np.array(tiny.module(prompt)), []
    with attached(LLAMA):
        assert vars(llama)[ATTENTION] is not base.scaled_dot_product_attention
        with pytest.raises(TypeError, match="no cache keeps"):
            tiny.module(prompt)  # in this thread, a forward without the step's caches is a mistake
        thread = threading.Thread(target=lambda: seen.append(np.array(tiny.module(prompt))))
        thread.start()
        thread.join()
    assert np.array_equal(seen[0], own)
    assert np.array_equal(np.array(tiny.module(prompt)), own)


def test_within_a_step_the_gate_is_another_in_this_thread_only(tiny: tk.Model) -> None:
    names = functions_of(tiny.module, cpu=True)
    assert set(names) - set(functions_of(tiny.module, cpu=False)) == {(llama.__name__, GATE)}
    gate, x = (mx.array(a) for a in np.random.default_rng(0).normal(size=(2, 8, 64)).astype(np.float32))
    theirs, ours, seen = np.array(activations.swiglu(gate, x)), np.array(cpu_exp.swiglu(gate, x)), []
    assert not same(theirs, ours)
    with attached(names):
        with attached(names):
            assert same(np.array(llama.swiglu(gate, x)), ours)
        assert same(np.array(llama.swiglu(gate, x)), ours)
        thread = threading.Thread(target=lambda: seen.append(np.array(llama.swiglu(gate, x))))
        thread.start()
        thread.join()
    assert same(seen[0], theirs)
    assert llama.swiglu is activations.swiglu


def test_a_model_met_during_anothers_step_gets_the_same_functions(tiny: tk.Model, monkeypatch) -> None:
    names = functions_of(tiny.module, cpu=True)
    with attached(names):
        assert functions_of(tiny.module, cpu=True) == names
    monkeypatch.setattr(llama, GATE, lambda gate, x: gate * x)  # a gate of its own is left alone
    assert functions_of(tiny.module, cpu=True) == LLAMA


def test_an_error_within_a_step_leaves_nothing_behind(tiny: tk.Model, forward, expected, monkeypatch) -> None:
    tokens = prompts()[12]
    step(forward, [Span("row", 0, tokens[:6], sample=False)])
    with monkeypatch.context() as patch:
        patch.setattr(layer_cache.attention, "attend", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward.run([Span("row", 6, tokens[6:12])])
    assert vars(llama)[ATTENTION] is base.scaled_dot_product_attention
    assert forward.length("row") == 6
    got = step(forward, [Span("row", 6, tokens[6:12])])
    forward.release("row")
    assert same(got["row"], expected[12][0])


def test_what_another_library_put_in_place_comes_back(monkeypatch) -> None:
    def theirs(*args, **kwargs):
        return base.scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(llama, ATTENTION, theirs)
    with attached(LLAMA), attached(LLAMA):
        pass
    assert vars(llama)[ATTENTION] is theirs


def test_the_callers_model_is_not_touched(tiny: tk.Model) -> None:
    before = dict(tiny.module), type(tiny.module.model)
    PackedForward(tiny, SHAPES)
    assert (dict(tiny.module), type(tiny.module.model)) == before


# Where keys and values live


def content(seed: int, length: int) -> list[tuple[mx.array, mx.array]]:
    rng = np.random.default_rng(seed)
    shapes = [(2, length, 4), (2, length, 4)], [(1, length, 6), (1, length, 3)]
    return [tuple(mx.array(rng.standard_normal(s).astype(np.float32)) for s in pair) for pair in shapes]


def store(split: bool = True) -> KVStore:
    geometry = [Geometry(2, 4, 2, 4, mx.float32), Geometry(1, 6, 1, 3, mx.float32)]
    return KVStore(geometry, bucket=8, least=8, split=split)


def holds(kv: KVStore, row: str, pairs: list[tuple[mx.array, mx.array]]) -> bool:
    got = kv.read(row)
    return all(
        mx.array_equal(a, b)
        for mine, its in zip(pairs, got, strict=True)
        for a, b in zip(mine, its, strict=True)
    )


@pytest.mark.parametrize("split", [True, False])
def test_rows_keep_their_content_while_others_come_go_and_move(split: bool) -> None:
    kv, kept = store(split), {}
    for i in range(11):  # grows the slab of 8 several times
        kept[f"r{i}"] = content(i, 5)
        kv.write(f"r{i}", kept[f"r{i}"], 5)
    assert set(kv.slabs) == {8}
    assert all(holds(kv, row, pairs) for row, pairs in kept.items())
    for row in ("r3", "r7"):
        kv.release(row)
        del kept[row]
    kv.reserve({"r5": 20, "r6": 9})  # they move to larger slabs, with what they have
    assert kv.places["r5"].slab.capacity == 24
    assert kv.places["r6"].slab.capacity == 16
    assert all(holds(kv, row, pairs) for row, pairs in kept.items())
    slots = len(kv.slabs[8].rows)
    kept["new"] = content(99, 8)
    kv.write("new", kept["new"], 8)  # into a slot that was left
    assert len(kv.slabs[8].rows) == slots
    assert all(holds(kv, row, pairs) for row, pairs in kept.items())


def test_the_last_row_out_of_a_slab_frees_its_memory() -> None:
    kv = store()
    kv.write("a", content(0, 30), 30)
    kv.write("b", content(1, 2), 2)
    assert kv.nbytes > 0
    for row in ("a", "b", "never there"):
        kv.release(row)
    assert (kv.nbytes, kv.slabs, kv.places) == (0, {}, {})


@needs_mkl
def test_a_row_that_outgrows_its_slab_goes_on_in_the_same_bits(tiny: tk.Model) -> None:
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 256, 132)]
    forward = PackedForward(tiny, SHAPES)
    step(forward, [Span("row", 0, tokens[:127]), Span("beside", 0, tokens[:4])])
    assert forward.store.places["row"].slab.capacity == 128
    for n in range(127, 131):
        got = step(forward, [Span("row", n, [tokens[n]]), Span("beside", n - 123, [tokens[n]])])
    assert forward.store.places["row"].slab.capacity > 128
    forward.release("row")
    assert same(step(forward, [Span("whole", 0, tokens[:131])])["whole"], got["row"])


def test_where_the_device_cannot_run_a_step_rows_run_alone_and_it_is_said(monkeypatch) -> None:
    model = tk.tiny(5)
    request = tk.Request(tokens=[3, 1, 4, 1, 5], seed=9, max_tokens=4)
    (expected,) = tk.generate(model, [request], forward="sequential")

    def refuse(*_):  # as MLX says it of a kernel with more threads than the device takes
        raise RuntimeError("cudaGraphAddKernelNode(&node, graph_, NULL, 0, &params) failed: invalid argument")

    monkeypatch.setattr(packed, "agrees", refuse)
    with pytest.warns(UserWarning, match="can't run packed: a step of it fails here .*one at a time"):
        (got,) = tk.generate(model, [request], invariant=False)
    assert got.tokens == expected.tokens and got.forward == "sequential"


def test_what_a_gpu_runs_once_leaves_no_row_behind(tiny: tk.Model, forward) -> None:
    reference_check._run(forward, np.arange(reference_check.MANY) % 200)
    assert not forward.store.places


@pytest.mark.parametrize("compile", [False, True])
def test_a_forward_is_freed_when_it_is_let_go(tiny: tk.Model, compile: bool) -> None:
    forward = PackedForward(tiny, SHAPES, compile=compile)
    for spans in ([Span("a", 0, [1, 2, 3])], [Span("a", 3, [4])]):
        step(forward, spans)
    let_go = weakref.ref(forward)
    gc.disable()
    try:
        del forward
        assert let_go() is None
    finally:
        gc.enable()


def test_few_steps_are_kept_compiled_and_the_others_compiled_again(tiny: tk.Model, monkeypatch) -> None:
    monkeypatch.setattr(packed, "COMPILED", 1)
    forward = PackedForward(tiny, SHAPES, compile=True)
    outs = []
    for rows in ("a", "ab", "a"):
        for row in rows:
            forward.release(row)
        step(forward, [Span(row, 0, [1, 2, 3]) for row in rows])
        outs.append(step(forward, [Span(row, 3, [4]) for row in rows])["a"])
        assert len(forward._compiled) == 1
    assert same(outs[0], outs[1]) and same(outs[0], outs[2])
