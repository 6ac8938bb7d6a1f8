"""Small inputs that broke other engines, through the packed one: a row gets the tokens that it gets alone."""

import mlx.core as mx
import pytest

import toolkit as tk


def request(id, seed, prompt="The children were playing with a", **fields):
    return tk.Request(None if "tokens" in fields else prompt, id=id, seed=seed, **{"max_tokens": 8, **fields})


def line(completion):
    return completion.tokens, completion.logprobs


def alone(model, one, **how):
    return line(tk.generate(model, [one], **how)[0])


def engine(model, batch, **how):
    made = tk.Engine(model, **how)
    for one in batch:
        made.submit(one)
    return made


# A row that leaves, and one that takes its place


@pytest.mark.parametrize(
    "fields", [{}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.5, "top_p": 0.9}]
)
def test_a_row_freed_after_three_tokens_goes_on_from_its_prompt_and_them(tiny, fields):
    one, other = request("a", 4, **fields), request("b", 5, "Yesterday")
    tokens, logprobs = alone(tiny, one)
    made = engine(tiny, [one, other])
    for _ in range(3):
        made.step()
    made.cancel("a")
    made.submit(one.replace(id="again", generated=tokens[:3]))
    if not fields.get("frequency_penalty"):  # which would not count tokens that came as prompt
        ids = [*tiny.encode(one.prompt), *tokens[:3]]
        made.submit(one.replace(id="sent", tokens=ids, max_tokens=5))
    done = made.run()
    assert line(done["a"]) == (tokens[:3], logprobs[:3])
    for id in {"again", "sent"} & {c.id for c in done}:
        assert line(done[id]) == (tokens[3:], logprobs[3:])
    assert line(done["b"]) == alone(tiny, other)


def test_a_row_in_the_slot_of_one_that_finished_has_its_own_seed_and_history(tiny):
    first = request("first", 1, max_tokens=2, repetition_penalty=2.0)
    late, other = request("late", 2, repetition_penalty=1.1), request("other", 3)
    done = engine(tiny, [first, other, late], max_rows=2).run()
    for one in (first, late, other):
        assert line(done[one.id]) == alone(tiny, one)
    assert done["late"].tokens != done["other"].tokens


def test_an_id_can_be_used_again_while_its_old_rows_last_draw_is_on_its_way(tiny):
    for pipeline in (False, True):
        made = engine(tiny, [request("x", 1), request("y", 2)], pipeline=pipeline)
        for _ in range(3):
            made.step()
        made.cancel("x")
        made.submit(request("x", 9))
        done = [c for c in made.run() if c.id == "x"]
        assert [c.finish_reason for c in done] == ["cancelled", "length"]
        assert line(done[1]) == alone(tiny, request("x", 9))


# Lengths


@pytest.mark.parametrize(
    "lengths", [(12, 3), (1, 1024), (1, 1, 1, 1, 1), (127, 128, 129), (250, 256, 257)], ids=str
)
@pytest.mark.parametrize("budget", [100, 0])
def test_rows_of_any_lengths_get_what_they_get_alone(tiny, lengths, budget):
    batch = [
        request(f"r{i}", i, tokens=[(31 * i + k) % 256 for k in range(n)]) for i, n in enumerate(lengths)
    ]
    done = tk.generate(tiny, batch, token_budget=budget)
    assert [line(c) for c in done] == [alone(tiny, one) for one in batch]


def test_a_penalty_on_a_short_row_counts_its_own_tokens_only(tiny):
    """Beside a row two hundred times as long, at a temperature and greedily: no padding is counted."""
    long = request("long", 2, tokens=[0] * 400)
    for fields in ({"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"repetition_penalty": 3.0}):
        for temperature in (0, 1):
            short = request("short", 1, "ab", temperature=temperature, max_tokens=12, **fields)
            done = tk.generate(tiny, [short, long])
            assert line(done["short"]) == alone(tiny, short)
            assert done["short"].tokens != alone(tiny, request("short", 1, "ab", temperature=temperature))[0]


# Prefixes


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_b_a_a_with_a_prefix_cache_gives_all_three_a_the_same(tiny, pipeline):
    a, b = request("a", 1), request("b", 2, "The children were asleep")
    made = tk.Engine(tiny, prefix_cache=1 << 20, pipeline=pipeline)
    got = {}
    for one in (a, b, a.replace(id="a2"), a.replace(id="a3")):
        made.submit(one)
        (got[one.id],) = made.run()
    assert line(got["a"]) == line(got["a2"]) == line(got["a3"]) == alone(tiny, a)
    assert line(got["b"]) == alone(tiny, b)
    prompt = len(tiny.encode(a.prompt))
    # A whole prompt that is there leaves one token to run.
    assert [got[id].cached for id in got] == [0, 18, prompt - 1, prompt - 1]
    beside = engine(
        tiny, [a, b, a.replace(id="a2"), a.replace(id="a3")], prefix_cache=1 << 20, max_rows=2
    ).run()
    assert line(beside["a"]) == line(beside["a2"]) == line(beside["a3"]) == line(got["a"])


def test_a_prefix_cache_keeps_to_its_bytes_and_lets_the_oldest_go(tiny):
    one = tk.Engine(tiny, prefix_cache=1 << 20)
    one.submit(request("a", 1, max_tokens=1))
    one.run()
    size = one.prefixes.nbytes
    made = tk.Engine(tiny, prefix_cache=int(size * 2.5))
    for i in range(6):
        made.submit(request(f"r{i}", i, f"{i}he children were playing with a", max_tokens=1))
        made.run()
        assert made.prefixes.nbytes <= size * 2.5
    assert len(made.prefixes) == 2
    for i, expected in ((0, 0), (5, 31)):
        made.submit(request("again", i, f"{i}he children were playing with a", max_tokens=1))
        assert made.run()[0].cached == expected


# What can't be run


def spoil(at):
    def processor(tokens, logits):
        return mx.full(logits.shape, mx.nan) if len(tokens) == at else logits

    return processor


def fail(tokens, logits):
    raise KeyError("no such state")


def nothing(tokens, logits):
    return mx.full(logits.shape, -mx.inf)


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_row_that_cannot_draw_says_where_and_its_siblings_finish(tiny, pipeline):
    batch = [
        request("good", 1),
        request("nan", 2, "abc", processors=[spoil(5)]),
        request("none", 3, "abc", processors=[nothing], temperature=0),
        request("raises", 4, "abc", processors=[fail]),
        request("two", 5, "abc", n=2, processors=[spoil(4)]),
        request("other", 6, top_k=3),
    ]
    done = engine(tiny, batch, pipeline=pipeline).run()
    assert [c.finish_reason for c in done] == [
        "length",
        "error",
        "error",
        "error",
        "error",
        "error",
        "length",
    ]
    assert done["nan"].error.startswith('request "nan", position 5: no token can be drawn')
    assert len(done["nan"].tokens) == 2
    assert done["none"].error.startswith('request "none", position 3: no token')
    assert done["raises"].error == "request \"raises\", position 3: processors: KeyError: 'no such state'"
    assert done["two", 1].error.startswith('request "two" choice 1, position 4: ')
    assert all("\n" not in c.error for c in done if c.error)
    for one in (batch[0], batch[-1]):
        assert line(done[one.id]) == alone(tiny, one)


def test_logits_that_are_not_numbers_end_their_row_and_leave_nothing_to_the_next():
    model = tk.tiny(3)
    embedding, mine = model.module.model.embed_tokens, request("mine", 1, "Yesterday I went")  # no 99
    expected = alone(model, mine)
    weight = mx.array(embedding.weight)
    weight[99] = mx.nan
    embedding.weight = weight
    made = engine(model, [request("ill", 2, tokens=[99] * 20), mine], invariant=False)
    done = made.run()
    assert done["ill"].error.startswith('request "ill", position 20')
    assert done["mine"].tokens == expected[0]
    made.submit(mine.replace(id="next"))
    assert made.run()[0].tokens == expected[0]


def test_what_cannot_run_is_refused_with_one_line_and_its_siblings_finish(tiny):
    good = request("good", 1)
    batch = [
        good,
        request("empty", 2, tokens=[]),
        request("outside", 3, tokens=[5, 258]),
        request("long", 4, tokens=[1] * 8193),
        request("barred", 5, allowed_tokens=[], n=2),
        request("good", 6),
    ]
    done = tk.generate(tiny, batch)
    assert [c.finish_reason for c in done] == ["length", *["error"] * 6]
    whys = ("no tokens", "258 for request", "context", "position 32", "position 32", "in the engine already")
    for c, why in zip(done[1:], whys, strict=True):
        assert why in c.error
        assert "\n" not in c.error
    assert [(c.id, c.choice) for c in done if c.id == "barred"] == [("barred", 0), ("barred", 1)]
    assert line(done[0]) == alone(tiny, good)


def test_a_setting_that_another_forward_cannot_honour_is_refused(tiny):
    with pytest.raises(ValueError, match='prefix_cache=100 with forward="padded": needs forward="packed"'):
        tk.Engine(tiny, forward="padded", prefix_cache=100)


# Pipelining


@pytest.mark.parametrize("budget", [7, 0])
def test_a_pipelined_engine_gives_the_same_whatever_ends_a_row(tiny, budget):
    batch = [
        request("length", 1),
        request("eos", 2, logit_bias={257: 5.0}, max_tokens=40),
        request("stop", 3, logit_bias={65: 9.0, 66: 9.0}, stop=["AB"], max_tokens=40),
        request("one", 4, max_tokens=1),
        request("penalised", 5, repetition_penalty=1.5),
        request("greedy", 6, temperature=0, logprobs=2),
        request("resumed", 7, generated=[5, 6], max_tokens=6),
        request("all there", 8, generated=[5, 6], max_tokens=2),
        request("many", 9, n=2, cached=3),
    ]
    plain, piped = (
        engine(tiny, batch, pipeline=pipeline, token_budget=budget, max_rows=4).run()
        for pipeline in (False, True)
    )
    fields = (
        "id",
        "choice",
        "tokens",
        "text",
        "finish_reason",
        "logprobs",
        "margins",
        "max_drift",
        "top_logprobs",
    )
    for one, other in zip(plain, piped, strict=True):
        assert [getattr(one, f) for f in fields] == [getattr(other, f) for f in fields]
    assert {plain[id].finish_reason for id in ("eos", "stop", "length")} == {"eos", "stop", "length"}
    assert plain["all there"].tokens == ()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_cancelled_after_so_many_steps_a_row_has_as_many_tokens_pipelined_or_not(tiny, steps):
    for pipeline in (False, True):
        made = engine(tiny, [request("a", 1), request("b", 2)], pipeline=pipeline)
        for _ in range(steps):
            made.step()
        made.cancel("a")
        made.preempt("b")
        done = made.run()
        assert line(done["a"])[0] == alone(tiny, request("a", 1))[0][:steps]
        assert line(done["b"]) == alone(tiny, request("b", 2))


def test_a_long_preempted_row_comes_back_in_chunks(tiny):
    one = request("a", 1, tokens=list(range(200)))
    made = engine(tiny, [one, request("b", 2)], token_budget=32)
    for _ in range(9):
        made.step()
    made.preempt("a")
    assert line(made.run()["a"]) == alone(tiny, one)


@pytest.mark.parametrize("policy", ["isolate", "keyed"])
@pytest.mark.parametrize("fields", [{}, {"xtc_probability": 0.5, "xtc_threshold": 0.01}], ids=str)
def test_a_preempted_and_a_resumed_row_go_on_in_their_stream_under_every_policy_that_has_one(
    tiny, policy, fields
):
    one = request("a", 11, **fields)
    (whole,) = tk.generate(tiny, [one], policy=policy)
    made = engine(tiny, [one, request("b", 2)], policy=policy)
    for _ in range(3):
        made.step()
    made.preempt("a")
    assert made.run()["a"].tokens == whole.tokens
    done = tk.generate(tiny, [request("b", 2), one.replace(generated=whole.tokens[:3])], policy=policy)
    assert done["a"].tokens == whole.tokens[3:]


# Order


def test_requests_may_be_submitted_while_others_run_and_names_stay_apart(tiny):
    made = engine(tiny, [request("r1", 1)])
    made.step()
    assert made.submit(request("", 2)) == "r2"  # r1 is taken
    assert made.submit(request("", 3)) == "r3"
    assert {c.id for c in made.run()} == {"r1", "r2", "r3"}
    done = tk.generate(tiny, [request("r1", 1), request("", 2), request("", 3)])
    assert len({c.id for c in done}) == 3
    assert "error" not in {c.finish_reason for c in done}


def test_a_processor_may_submit_and_the_new_request_runs(tiny):
    made = tk.Engine(tiny)

    def and_another(tokens, logits):
        if len(tokens) == 32:
            made.submit(request("second", 2))
        return logits

    made.submit(request("first", 1, processors=[and_another]))
    done = made.run()
    assert [c.id for c in done] == ["first", "second"]
    assert line(done["second"]) == alone(tiny, request("second", 2))


def test_a_far_arrival_costs_no_steps_in_a_run(tiny):
    done = engine(tiny, [request("late", 1, arrival=10**9), request("now", 2)]).run()
    assert line(done["late"]) == alone(tiny, request("late", 1))


def test_a_high_priority_prompt_overtakes_a_long_one_in_the_batch(tiny):
    made = engine(tiny, [request("long", 1, tokens=[1] * 300)], token_budget=50)
    made.step()
    made.submit(request("urgent", 2, priority="high", max_tokens=1))
    assert [c.id for c in made.step()] == ["urgent"]
    assert line(made.run()["long"]) == alone(tiny, request("long", 1, tokens=[1] * 300))
