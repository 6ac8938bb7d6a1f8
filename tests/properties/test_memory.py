"""Memory: ten thousand requests leave nothing, and a batch takes what its weights, keys and step need."""

import gc

import mlx.core as mx
from mlx.utils import tree_flatten

import toolkit as tk
from toolkit.engine.row_state import Live
from toolkit.engine.trace import LIMIT, Trace
from toolkit.forward.packed import PackedForward
from toolkit.forward.spans import Span


def test_ten_thousand_requests_leave_nothing_behind(tiny):
    engine = tk.Engine(tiny, prefix_cache=100_000, max_rows=64)
    engine.trace = Trace(limit=500)

    def work(first, count):
        for i in range(first, first + count):
            prompt = f"{i % 7} children"
            engine.submit(tk.Request(prompt, id=f"{i}", seed=i, max_tokens=1 + i % 2, top_k=3 * (i % 2)))
        engine.step()
        engine.cancel(f"{first + count - 1}")
        assert len(engine.run()) >= count - 64
        assert engine.idle
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory(), len(gc.get_objects())

    memory, objects = work(0, 2_000)
    for first in range(2_000, 10_000, 2_000):
        more_memory, more_objects = work(first, 2_000)
        assert more_memory <= memory + engine.prefixes.limit
        assert more_objects <= objects * 1.02
    assert engine.prefixes.nbytes <= engine.prefixes.limit
    assert not engine.forward.store.places
    assert len(engine.trace) == 500
    assert not any(isinstance(o, Live) for o in gc.get_objects())
    assert tk.Engine(tiny).trace._events.maxlen == LIMIT
    # The measure sees one that is kept.
    engine.submit(tk.Request("x"))
    assert any(isinstance(o, Live) for o in gc.get_objects())


def took(forward: PackedForward, count: int) -> int:
    """Bytes that one step of `tokens` tokens needs beside weights, keys and values."""
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    logits = forward.run([Span("measured", 0, [i % 256 for i in range(count)])])
    mx.eval(logits, forward.state())
    peak, kept = mx.get_peak_memory(), forward.store.nbytes
    forward.release("measured")
    return peak - before - kept


def test_peak_memory_stays_near_weights_live_keys_and_one_step():
    model = tk.tiny(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, head_dim=32,
    )  # fmt: skip
    mx.clear_cache()
    gc.collect()
    before = mx.get_active_memory()
    weights = sum(array.nbytes for _, array in tree_flatten(model.module.parameters()))
    budget, rows = 512, 16
    engine = tk.Engine(model, max_rows=rows, token_budget=budget)
    store = engine.forward.store
    token = sum(layer.nbytes for layer in store.geometry)
    step = took(engine.forward, budget)
    for i in range(rows):
        ids = [(13 * i + k) % 256 for k in range(370)]
        engine.submit(tk.Request(tokens=ids, id=f"{i}", seed=i, max_tokens=14))
    most = 0.0
    while not engine.idle:
        mx.reset_peak_memory()
        engine.step()
        live = token * sum(place.length for place in store.places.values())
        if len(engine.running) >= 3:
            most = max(most, (mx.get_peak_memory() - before + weights) / (weights + live + step))
    assert 0.5 < most <= 1.3
    assert live == 0
    gc.collect()
    assert mx.get_active_memory() <= before + (1 << 20)
