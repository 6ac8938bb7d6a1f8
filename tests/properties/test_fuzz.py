"""Random schedules on a very small model: a row's output doesn't depend on when, with whom or how it ran.

Each schedule takes a few requests out of a fixed pool and runs them in one long-lived engine: random
arrivals, row caps and budgets, with and without a prefix cache and pipelining, rows cancelled, preempted,
moved through a file, resumed and resubmitted on the way. What comes out must be what the request gives
alone, to the bit.
"""

import itertools
import random
from dataclasses import dataclass

import mlx.core as mx
import pytest

import toolkit as tk
from toolkit import backend
from toolkit.forward.prefix_cache import PrefixCache
from toolkit.results import Completion

SCHEDULES = 2_000
WORDS = ("abcdefgh", "abcdxy", "zyx", "q", "abcdefgh" * 3, "mnop" * 31)  # the last outgrows a bucket

needs_mkl = pytest.mark.skipif(
    backend.info().blas != "mkl", reason="without MKL every shape gives the same bits, and nothing is tested"
)


@pytest.fixture(scope="module")
def model() -> tk.Model:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    return tk.tiny(1, num_attention_heads=2, num_key_value_heads=1, **small)


def even(tokens, logits):
    """A logits processor: even ids only."""
    return mx.where(mx.arange(logits.shape[-1]) % 2 == 0, logits, -mx.inf)


def pool() -> list[tk.Request]:
    """Requests of every kind, all seeded."""
    kinds = [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0},
        {"top_k": 5, "logprobs": 2},
        {"min_p": 0.05, "xtc_probability": 0.5},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "penalty_window": 3},
        {"processors": [even]},
        {"logit_bias": {65: 8.0, 66: 8.0}, "stop": ["AB", "BA"], "max_tokens": 6},
        {"logit_bias": {257: 6.0}},  # the end of sequence
        {"n": 2, "typical_p": 0.9},
        {"cached": 2},
    ]
    made = []
    for i, (fields, words) in enumerate(itertools.product(kinds, WORDS)):
        if fields.get("cached", 0) < len(words):
            made.append(tk.Request(words, id=f"p{i}", seed=i, **{"max_tokens": 1 + i % 5, **fields}))
    return made


def signature(c: Completion) -> tuple[object, ...]:
    return c.tokens, c.text, c.finish_reason, c.logprobs, c.margins, c.max_drift, c.top_logprobs


@dataclass
class Expected:
    """What a request gives alone, by choice, and what it gives without its stop strings."""

    request: tk.Request
    choices: list[Completion]
    unstopped: list[Completion]


@dataclass
class Sent:
    """A request on its way: what it must come to, `skip` tokens of that having been there before."""

    expected: Expected
    skip: int = 0
    cancelled: bool = False


def references(engine: tk.Engine) -> list[Expected]:
    def alone(request: tk.Request) -> list[Completion]:
        engine.submit(request)
        return list(engine.run())

    return [Expected(request, alone(request), alone(request.replace(stop=()))) for request in pool()]


def variant(rng: random.Random, expected: Expected, id: str, arrival: int) -> tuple[tk.Request, int]:
    """The request as it is, resumed after some of its tokens, or sent again with them in its prompt."""
    request, tokens = expected.request, expected.choices[0].tokens
    request = request.replace(id=id, arrival=arrival, priority=rng.choice(["high", "normal", "low"]))
    skip = rng.randint(0, max(0, len(tokens) - 1))
    if not skip or request.n > 1 or request.stop or rng.random() < 0.5:
        return request, 0
    if rng.random() < 0.5 or request.presence_penalty:
        return request.replace(generated=tokens[:skip]), skip
    ids = [*request.prompt.encode(), *tokens[:skip]]
    return request.replace(tokens=ids, max_tokens=request.max_tokens - skip), skip


def play(rng: random.Random, engine: tk.Engine, known: list[Expected], path) -> list[str]:
    """One schedule; what went wrong, if anything."""
    engine.max_rows = rng.choice([1, 2, 3, 8])
    engine.token_budget = rng.choice([5, 20, 60, 0])
    engine.pipeline = rng.random() < 0.5
    engine.prefixes = PrefixCache(rng.choice([0, 0, 20_000]))
    waiting, sent, moved = [], {}, set()
    for i in range(rng.choice([2, 2, 3, 4])):
        expected = rng.choice(known)
        request, skip = variant(rng, expected, f"s{i}", engine.time + rng.choice([0, 0, 1, 4]))
        sent[f"s{i}"] = Sent(expected, skip)
        waiting.append(request)
    done: list[Completion] = []
    while waiting or not engine.idle:
        while waiting and rng.random() < 0.8:
            engine.submit(waiting.pop())
        live = sorted({row.id for row in (*engine.queue, *engine.running.values())})
        if live and rng.random() < 0.25:
            id, action = rng.choice(live), rng.random()
            try:
                if action < 0.25:
                    engine.cancel(id)
                    sent[id].cancelled = True
                elif action < 0.9:
                    engine.preempt(id)
                elif not sent[id].expected.request.processors and id not in moved:
                    moved.add(id)
                    for choice in range(sent[id].expected.request.n):
                        engine.export_row(id, path / f"{choice}", choice)
                        engine.import_row(path / f"{choice}")
            except ValueError as error:
                if "it may have finished" not in str(error):
                    raise
        done += engine.step()
    wrong = []
    if len(done) != sum(s.expected.request.n for s in sent.values()):
        wrong.append(f"{len(done)} completions of {sent}")
    for c in done:
        one, cancelled = sent[c.id], c.finish_reason == "cancelled"
        # Cancelled, a row may have the first half of a stop string.
        whole = (one.expected.unstopped if cancelled else one.expected.choices)[c.choice]
        count = len(c.tokens) if cancelled else len(whole.tokens) - one.skip
        got = (c.tokens, c.logprobs, c.margins, c.max_drift, c.top_logprobs)
        due = (whole.tokens, whole.logprobs, whole.margins, whole.max_drift, whole.top_logprobs)
        if got != tuple(part[one.skip :][:count] for part in due):
            wrong.append(f"{whole.id} as {one}: {got}, not {due}")
        elif (cancelled and not one.cancelled) or (not cancelled and c.finish_reason != whole.finish_reason):
            wrong.append(f"{whole.id} ended by {c.finish_reason}, not {whole.finish_reason}")
    return wrong


@needs_mkl
def test_no_schedule_changes_a_row(model, tmp_path) -> None:
    engine = tk.Engine(model, invariant=True)
    known = references(engine)
    for number in range(SCHEDULES):
        wrong = play(random.Random(number), engine, known, tmp_path)
        assert not wrong, f"schedule {number}: " + "; ".join(wrong)
    assert not engine.forward.store.places
    assert not engine.forward.store.slabs
    assert engine.idle
    assert len(engine.trace) <= 100_000


@needs_mkl
def test_without_rules_for_shapes_schedules_do_change_logprobs(model, tmp_path) -> None:
    engine = tk.Engine(model, invariant=False)
    known = references(engine)
    assert any(play(random.Random(number), engine, known, tmp_path) for number in range(100))
