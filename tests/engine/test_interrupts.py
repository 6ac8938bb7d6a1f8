"""A call happens whole or not at all: interrupts at random lines, threads that overlap, and forks."""

import multiprocessing
import os
import threading

import mlx.core as mx
import pytest
from interrupts import REFUSED, Lines, bits, interrupts, requests
from mlx_lm.models import base, llama

import toolkit as tk
from toolkit.engine.engine import Engine


def test_interrupted_at_any_line_an_engine_goes_on_to_the_same_bits(monkeypatch):
    outcomes, faults = interrupts(40)
    assert not faults
    assert outcomes[REFUSED] == 0
    # Without the way back, the same interrupts do harm.
    monkeypatch.setattr(Engine, "_restore", lambda *_: None)
    assert interrupts(40)[1]


def test_under_a_shared_generator_an_interrupted_engine_is_right_or_refuses():
    outcomes, faults = interrupts(30, policy="reseed")
    assert not faults
    assert outcomes[REFUSED]


def test_an_interrupted_run_returns_what_there_is_and_the_engine_goes_on(tiny):
    made = tk.Engine(tiny)

    def filled():
        for request in requests():
            made.submit(request)
        return made.run

    whole = {(c.id, c.choice): c for c in filled()()}
    run = filled()
    with Lines() as lines:
        run()
    run = filled()
    with Lines(lines.count * 2 // 3), pytest.warns(UserWarning, match="interrupted"):
        part = run()
    assert made.idle
    assert len(part) == len(whole)
    assert any(c.finish_reason == "cancelled" for c in part)
    for c in part:
        both = min(
            len(c.tokens), len(whole[c.id, c.choice].tokens)
        )  # a stop string cuts tokens when it is whole
        assert c.tokens[:both] == whole[c.id, c.choice].tokens[:both]
    assert {(c.id, c.choice): bits(c) for c in filled()()} == {key: bits(c) for key, c in whole.items()}
    assert vars(llama)["scaled_dot_product_attention"] is base.scaled_dot_product_attention


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_an_error_of_mlx_in_a_step_undoes_the_step(tiny, error, monkeypatch):
    made = tk.Engine(tiny)
    for request in requests():
        made.submit(request)
    done = made.step() + made.step()
    real = made.forward.run

    def fails(*args):
        real(*args)
        raise error("Cache thrashing is happening")

    with monkeypatch.context() as patch:
        patch.setattr(made.forward, "run", fails)
        before = made.time, len(made.queue) + len(made.running)
        with pytest.raises(error):
            made.step()
    assert (made.time, len(made.queue) + len(made.running)) == before
    assert not made.forward.store.places
    done += made.run()
    other = tk.Engine(tiny)
    for request in requests():
        other.submit(request)
    assert {(c.id, c.choice): bits(c) for c in done} == {(c.id, c.choice): bits(c) for c in other.run()}


def test_a_second_thread_is_refused_while_a_step_runs_and_welcome_after(tiny):
    inside, go, refused = threading.Event(), threading.Event(), []

    def slow(tokens, logits):
        inside.set()
        go.wait(10)
        return logits

    made = tk.Engine(tiny)
    made.submit(tk.Request("x", id="a", seed=1, max_tokens=1, processors=[slow]))
    results = []
    thread = threading.Thread(target=lambda: results.extend(made.step()))
    thread.start()
    assert inside.wait(10)
    calls = (made.step, made.run, lambda: made.submit(tk.Request("y")), lambda: made.cancel("a"))
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call()
        refused.append(str(raised.value))
    go.set()
    thread.join()
    assert [line.partition(":")[0] for line in refused] == [
        f"Engine.{n}" for n in ("step", "run", "submit", "cancel")
    ]
    assert all("Engine.step of this engine runs now" in line and "\n" not in line for line in refused)
    assert [c.id for c in results] == ["a"]
    made.submit(tk.Request("y", id="b", seed=1, max_tokens=2))
    assert [c.id for c in made.run()] == ["b"]


def test_a_processor_that_calls_its_own_engine_is_refused(tiny):
    made = tk.Engine(tiny)
    seen = []

    def calls_back(tokens, logits):
        with pytest.raises(RuntimeError, match=r"Engine\.run of this engine runs now"):
            made.step()
        seen.append(len(tokens))
        return logits

    made.submit(tk.Request("x", id="a", seed=1, max_tokens=2, processors=[calls_back]))
    assert len(made.run()["a"].tokens) == 2
    assert seen


def _in_child(made, tiny, queue):
    for call in (made.step, lambda: made.submit(tk.Request("x")), lambda: tk.Engine(tiny)):
        try:
            call()
        except RuntimeError as error:
            queue.put(str(error))
    queue.close()
    queue.join_thread()
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_a_fork_an_engine_says_so_in_one_line(tiny):
    made = tk.Engine(tiny)
    made.submit(tk.Request("x", id="a", seed=1, max_tokens=2))
    made.step()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(made, tiny, queue))
    child.start()
    lines = [queue.get(timeout=20) for _ in range(3)]
    child.join(20)
    assert all("the process was forked" in line and "\n" not in line for line in lines)
    assert lines[0].startswith("Engine.step: ")
    assert len(made.run()) == 1
    mx.eval(mx.zeros(1))
