"""The engine on the tiny model, and on given logits: a row's tokens are those that it gets alone."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from helpers.canned import engine, generate

import toolkit as tk

POLICIES = ("global", "reseed", "isolate", "keyed")
VOCAB = 258


def flat(id, choice, position):
    """Every token as likely as the next."""
    return mx.zeros(VOCAB)


def request(id, seed=None, **fields):
    fields.setdefault("prompt", "x" if "tokens" not in fields else None)
    return tk.Request(id=id, seed=seed, **{"max_tokens": 8, **fields})


def tokens(results):
    return {(c.id, c.choice): c.tokens for c in results}


def same_as_alone(model, batch, **how):
    """Whether each row of the batch has the tokens and logprobs that it has by itself."""
    together = tk.generate(model, batch, **how)
    for row in batch:
        alone = tk.generate(model, [row], **how)
        for choice in range(row.n):
            one, other = together[row.id, choice], alone[row.id, choice]
            if (one.tokens, one.logprobs) != (other.tokens, other.logprobs):
                return False
    return True


# Rows and their streams


def test_three_rows_of_flat_logits_draw_as_alone_and_the_last_seed_wins_in_none(tiny):
    batch = [request(f"r{seed}", seed) for seed in (1, 2, 3)]
    together = tokens(generate(tiny, "keyed", flat, batch))
    assert len(set(together.values())) == 3
    for row in batch:
        assert tokens(generate(tiny, "keyed", flat, [row]))[row.id, 0] == together[row.id, 0]
    # The same three under `global`: the first tokens are those of a batch that seeded 3 only.
    only = generate(tiny, "global", flat, [request("r1"), request("r2"), request("r3", 3)])
    leaked = generate(tiny, "global", flat, batch)
    assert [c.tokens[0] for c in leaked] == [c.tokens[0] for c in only]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seeded_row_repeats_beside_an_unseeded_one_that_does_not(tiny, policy):
    batch = [request("free"), request("seeded", 42)]
    runs = [tk.generate(tiny, batch, policy=policy) for _ in range(4)]
    assert len({run["seeded"].tokens for run in runs}) == 1
    # As in the peers, a shared generator that a sibling seeded is the unseeded row's too.
    assert (len({run["free"].tokens for run in runs}) == 4) == (policy == "keyed")


def test_a_siblings_filter_does_not_reach_my_row(tiny):
    mine = request("mine", 5)
    alone = generate(tiny, "keyed", flat, [mine])["mine"].tokens
    for k in (1, 2, 50):
        done = generate(tiny, "keyed", flat, [mine, request("other", 6, top_k=k)])
        assert done["mine"].tokens == alone
        assert len(set(done["other"].tokens)) <= k


def test_rows_of_one_batch_each_have_their_own_filters(tiny):
    fields = [
        {"top_k": 1},
        {"top_k": 50},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"min_p": 0.5},
        {"temperature": 0},
        {},
    ]
    batch = [request(f"r{i}", i, **given) for i, given in enumerate(fields)]
    assert same_as_alone(tiny, batch)
    done = tk.generate(tiny, batch)
    assert done["r0"].tokens == done["r5"].tokens  # greedy both
    assert len({c.tokens for c in done}) >= 5


def test_near_ties_swapped_keep_the_token(tiny):
    """Noise belongs to an id: exchanging which of two near-tied tokens leads doesn't exchange the draw."""

    def tied(first, second):
        ids = mx.arange(VOCAB)
        return lambda *_: mx.where(ids == 65, first, mx.where(ids == 66, second, -20.0))

    batch = [request(f"r{seed}", seed, max_tokens=4) for seed in range(8)]
    one = tokens(generate(tiny, "keyed", tied(1.0, 1.000001), batch))
    assert one == tokens(generate(tiny, "keyed", tied(1.000001, 1.0), batch))
    assert {t for row in one.values() for t in row} == {65, 66}
    assert one != tokens(generate(tiny, "keyed", tied(3.0, 0.0), batch))


def test_threads_draw_what_the_main_thread_draws(tiny):
    seeds = range(8)
    expected = [tk.generate(tiny, [request("x", seed)])[0].tokens for seed in seeds]
    assert len(set(expected)) == 8
    made = {}

    def work(name, order):
        made[name] = {seed: tk.generate(tiny, [request("x", seed)])[0].tokens for seed in order}

    workers = [threading.Thread(target=work, args=(name, order)) for name, order in
               (("up", seeds), ("down", list(reversed(seeds))))]  # fmt: skip
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for drawn in (made["up"], made["down"]):
        assert [drawn[seed] for seed in seeds] == expected


def test_a_missing_seed_is_fresh_recorded_and_can_be_replayed(tiny):
    batch = [request(f"r{i}") for i in range(3)]
    done = tk.generate(tiny, batch)
    assert len({c.seed for c in done}) == len({c.tokens for c in done}) == 3
    assert 0 not in {c.seed for c in done}
    for c in done:
        assert tk.generate(tiny, [request(c.id, c.seed)])[0].tokens == c.tokens


def test_an_unseeded_row_never_seeds_the_shared_generator(tiny):
    for policy in ("global", "reseed", "isolate"):
        done = tk.generate(tiny, [request("free")], policy=policy)
        assert done["free"].seed is None


def test_constant_logits_give_other_tokens_from_step_to_step(tiny):
    (done,) = generate(tiny, "keyed", flat, [request("x", 7)])
    assert len(set(done.tokens)) > 4
    assert len(done.tokens) == 8


@pytest.mark.parametrize("seed", [-2, 0, 2**63 - 1])
def test_choices_are_streams_of_their_own_and_the_first_is_what_one_gives(tiny, seed):
    done = tk.generate(tiny, [request("x", seed, n=3)])
    assert [c.choice for c in done] == [0, 1, 2]
    assert len({c.tokens for c in done}) == 3
    assert tk.generate(tiny, [request("x", seed)])[0].tokens == done["x", 0].tokens
    # and never the stream of the next seed
    neighbours = {tk.generate(tiny, [request("x", seed - k)])[0].tokens for k in (1, 2)}
    assert not neighbours & {c.tokens for c in done}


def test_the_same_request_twice_gives_the_same_tokens_twice(tiny):
    one, other, third = tk.generate(tiny, [request("a", 9), request("b", 9), request("c", 10)])
    assert one.tokens == other.tokens != third.tokens


# Company, in space and in time


@pytest.mark.parametrize("lengths", [(12, 3), (1, 4096), (1, 1, 1, 1), (1, 7, 8, 9, 64, 129)], ids=str)
def test_rows_of_any_lengths_get_what_they_get_alone(tiny, lengths):
    batch = [
        request(f"r{i}", i, tokens=[(i * 31 + k) % 256 for k in range(n)]) for i, n in enumerate(lengths)
    ]
    assert same_as_alone(tiny, batch, token_budget=0)
    if max(lengths) < 1000:  # which takes seconds
        assert same_as_alone(tiny, batch[::-1], token_budget=0)


@pytest.mark.parametrize("budget", [1, 5, 64, 4096])
def test_chunks_do_not_change_a_row(tiny, budget):
    batch = [
        request(f"r{i}", i, tokens=list(range(1, n + 1)), max_tokens=4) for i, n in enumerate((40, 3, 17))
    ]
    whole = tk.generate(tiny, batch, token_budget=0)
    cut = tk.generate(tiny, batch, token_budget=budget)
    assert [(c.tokens, c.logprobs) for c in cut] == [(c.tokens, c.logprobs) for c in whole]


def test_a_row_that_takes_anothers_place_draws_with_its_own_seed(tiny):
    batch = [request("short", 1, max_tokens=2), request("long", 2), request("late", 3)]
    assert same_as_alone(tiny, batch, max_rows=2)
    made = tk.Engine(tiny, max_rows=2)
    for row in batch:
        made.submit(row)
    made.run()
    admitted = {e.row: e.step for e in made.trace if e.event == "admit"}
    assert admitted["late"] > admitted["long"] == admitted["short"]


def test_a_stopped_row_goes_on_as_if_it_had_not_stopped(tiny):
    whole = tk.generate(tiny, [request("x", 4)])[0]
    assert whole.finish_reason == "length"
    other = request("other", 5)
    first = tk.generate(tiny, [request("x", 4, max_tokens=3), other])["x"]
    rest = tk.generate(tiny, [other, request("x", 4, generated=first.tokens)])["x"]
    assert first.tokens + rest.tokens == whole.tokens
    assert first.logprobs + rest.logprobs == whole.logprobs
    assert first.text + rest.text == whole.text
    assert rest.resumed == 3


def test_preempted_rows_go_on_and_cancelled_ones_keep_what_they_have(tiny):
    batch = [request("a", 1), request("b", 2), request("c", 3)]
    expected = tk.generate(tiny, batch)
    made = tk.Engine(tiny)
    for row in batch:
        made.submit(row)
    for _ in range(3):
        assert made.step() == []
    made.preempt("a")
    made.cancel("b")
    done = made.run()
    assert done["a"].tokens == expected["a"].tokens
    assert done["c"].tokens == expected["c"].tokens
    assert done["b"].finish_reason == "cancelled"
    assert 0 < len(done["b"].tokens) < 8
    assert done["b"].tokens == expected["b"].tokens[: len(done["b"].tokens)]
    with pytest.raises(ValueError, match="b"):
        made.cancel("b")


def test_a_prefix_cache_changes_no_token(tiny):
    a = request("a", 1, prompt="The children were playing with a")
    b = a.replace(id="b", prompt="The children were sleeping")
    again = [a, b, a.replace(id="a2"), a.replace(id="a3")]
    made = tk.Engine(tiny, prefix_cache=1 << 20, max_rows=1)
    for row in again:
        made.submit(row)
    done = made.run()
    alone = tk.generate(tiny, [a])[0]
    for name in ("a", "a2", "a3"):
        assert (done[name].tokens, done[name].logprobs) == (alone.tokens, alone.logprobs)
    assert done["a"].cached == 0 < done["a2"].cached < len(tiny.encode(a.prompt))


def test_high_priority_goes_first_and_arrivals_wait_for_their_step(tiny):
    made = tk.Engine(tiny, max_rows=1)
    for row in (request("low", 1, priority="low"), request("late", 2, arrival=3, priority="high"),
                request("high", 3, priority="high"), request("normal", 4)):  # fmt: skip
        made.submit(row)
    done = made.run()
    admitted = [e.row for e in made.trace if e.event == "admit"]
    assert admitted == ["high", "late", "normal", "low"]
    assert [c.id for c in done] == ["low", "late", "high", "normal"]


# Ends


def test_output_ends_before_a_stop_string_and_before_the_end_of_sequence(tiny):
    script = [104, 101, 108, 108, 111, min(tiny.eos_ids)]  # "hello", then the end

    def told(id, choice, position):
        return mx.where(mx.arange(VOCAB) == script[min(position - 1, 5)], 0.0, -100.0)

    batch = [request("eos", 1), request("stop", 2, stop=["lo"]), request("length", 3, max_tokens=3)]
    done = generate(tiny, "keyed", told, batch)
    assert [(c.id, c.finish_reason, c.text) for c in done] == [
        ("eos", "eos", "hello"), ("stop", "stop", "hel"), ("length", "length", "hel")]  # fmt: skip
    assert [len(c.tokens) == len(c.logprobs) == len(c.margins) for c in done] == [True] * 3


def test_logits_that_allow_no_draw_end_their_own_row_only(tiny):
    def broken(id, choice, position):
        if id == "nan" and position == 3:
            return mx.full(VOCAB, float("nan"))
        return mx.full(VOCAB, -mx.inf) if id == "none" else mx.zeros(VOCAB)

    batch = [request("nan", 1), request("good", 2), request("none", 3)]
    done = generate(tiny, "keyed", broken, batch)
    assert [c.finish_reason for c in done] == ["error", "length", "error"]
    assert 'request "nan", position 3' in done["nan"].error
    assert 'request "none", position 1' in done["none"].error
    assert len(done["nan"].tokens) == 2
    assert done["good"].tokens == generate(tiny, "keyed", broken, [batch[1]])[0].tokens


def test_what_is_refused_is_refused_before_anything_runs(tiny):
    made = tk.Engine(tiny)
    made.submit(request("a", 1))
    for bad, says in [
        (request("a", 2), "in the engine already"),
        (request("b", 2, tokens=[], prompt=None), "no tokens"),
        (request("b", 2, tokens=[VOCAB], prompt=None), "vocabulary"),
        (request("b", 2, prompt="x" * 9000), "context"),
        (request("b", 2, allowed_tokens=[]), "nothing may be drawn"),
    ]:
        with pytest.raises(ValueError, match=says):
            made.submit(bad)
    assert not any(e.event == "forward" for e in made.trace)
    assert [c.id for c in made.run()] == ["a"]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"policy": "fair"}, "policy='fair'"),
        ({"forward": "fast"}, "forward='fast'"),
        ({"planner": "best"}, "planner='best'"),
        ({"invariant": "maybe"}, "invariant='maybe'"),
        ({"invariant": 1}, "invariant=1"),  # equal to True, and not taken for it nor for "auto"
        ({"invariant": np.True_}, "invariant="),
        ({"max_rows": 0}, "max_rows=0"),
        ({"token_budget": -1}, "token_budget=-1"),
        ({"forward": "padded", "planner": "packed"}, "packed"),
        ({"forward": "padded", "invariant": True}, "invariant=True"),
    ],
)
def test_an_engine_says_which_setting_is_wrong(tiny, how, says):
    with pytest.raises(ValueError, match=says) as raised:
        tk.Engine(tiny, **how)
    assert "\n" not in str(raised.value)


# The order of events


def story(trace):
    return [(e.phase, e.event, e.row) for e in trace if e.event in ("seed", "forward", "draw")]


def test_a_cohort_begins_every_row_then_runs_then_finishes_every_row(tiny):
    made = tk.Engine(tiny, "global", "padded")
    for row in (request("a", 1, max_tokens=2), request("b", 2, max_tokens=2)):
        made.submit(row)
    made.run()
    assert story(made.trace) == [
        ("begin_prefill", "seed", "a"), ("begin_prefill", "seed", "b"),
        ("forward", "forward", "a b"),
        ("finish_prefill", "draw", "a"), ("finish_prefill", "draw", "b"),
        ("decode", "forward", "a b"),
        ("decode", "draw", "a"), ("decode", "draw", "b"),
    ]  # fmt: skip
    states = [e.state for e in made.trace if e.event in ("seed", "draw")]
    assert states[0] != states[1]  # b's seed replaced a's


def test_reseed_seeds_again_before_each_first_draw_and_keyed_never(tiny):
    seeded = {}
    for policy in POLICIES:
        made = engine(tiny, policy, flat)
        for row in (request("a", 1, max_tokens=1), request("b", 2, max_tokens=1)):
            made.submit(row)
        made.run()
        seeded[policy] = [(phase, row) for phase, event, row in story(made.trace) if event != "forward"]
    begin, finish = "begin_prefill", "finish_prefill"
    assert seeded["global"] == [(begin, "a"), (begin, "b"), (finish, "a"), (finish, "b")]
    assert seeded["reseed"] == [(begin, "a"), (begin, "b"), *2 * [(finish, "a")], *2 * [(finish, "b")]]
    assert seeded["isolate"] == [(begin, "a"), (finish, "a"), (begin, "b"), (finish, "b")]
    assert seeded["keyed"] == [(finish, "a"), (finish, "b")]


def test_isolate_lets_nothing_else_draw_until_the_row_has_its_last_token(tiny):
    made = engine(tiny, "isolate", flat)
    for row in (request("a", 1, max_tokens=3), request("free"), request("b", 2, max_tokens=3)):
        made.submit(row)
    made.run()
    drawn = [row for _, event, row in story(made.trace) if event == "draw"]
    assert drawn[:3] == ["a"] * 3
    where = drawn.index("b")
    assert drawn[where : where + 3] == ["b"] * 3


def test_the_trace_is_a_table_with_a_short_repr(tiny):
    made = tk.Engine(tiny, "global")
    made.submit(request("a", 2**63 - 1, max_tokens=2))
    made.run()
    frame = made.trace.to_frame()
    assert repr(made.trace) == f"Trace({len(frame)} events)"
    assert list(frame["index"]) == list(range(len(frame)))
    assert frame.loc[frame["event"] == "seed", "seed"].tolist() == [2**63 - 1]  # all of its bits
    assert frame["state"].str.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{8}|").all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_rows", 2.5), ("max_rows", True), ("max_rows", 0), ("max_rows", "3"), ("token_budget", 8.5),
     ("token_budget", -1), ("prefix_cache", 1.5), ("pipeline", "no"), ("policy", ["keyed"]),
     ("planner", "x")],
)  # fmt: skip
def test_a_setting_that_no_engine_can_have_is_refused_by_name(tiny, name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        tk.Engine(tiny, **{name: value})


@pytest.mark.parametrize("batch", [tk.Request("x"), ["x"], "x"])
def test_what_is_no_list_of_requests_is_refused_before_anything_runs(tiny, batch):
    with pytest.raises(ValueError, match=r"^batch="):
        tk.generate(tiny, batch)


def test_a_results_table_has_the_text_of_each_token(tiny):
    requests = [
        tk.Request("Hello", id="a", seed=1, max_tokens=6),
        tk.Request("Bye", id="b", generated=[72, 105]),
    ]
    frame = tk.generate(tiny, requests).to_frame()
    assert frame["text"].tolist() == [tiny.token_text(token) for token in frame["token"]]
    assert frame["text"].str.len().min() > 0 and frame["text"].nunique() > 1
