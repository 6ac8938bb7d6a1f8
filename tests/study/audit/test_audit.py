"""The audit, on targets that run: engines under each policy, callables with a fault planted in each, servers.

Every check has a target that breaks it, so a verdict of "kept" means something.
"""

import itertools
import json
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.audit_servers import FEW, ONCE, broken, causes, serve

import toolkit as tk
from toolkit.study.audit import checks
from toolkit.view import figure

ROOT = Path(__file__).parents[3]
PROMISE = {kind.name for kind in checks.KINDS if kind.promise}


def engine(tiny, policy="keyed", **how):
    return tk.Engine(tiny, policy, **how)


# Engines


@pytest.mark.parametrize("forward", ["packed", "padded"])
def test_under_global_the_last_seed_wins(tiny, forward):
    found = tk.audit(engine(tiny, "global", forward=forward), **FEW)
    assert not found.ok
    assert causes(found) == ["last seed wins", "unseeded requests follow the last seed"]
    end = "is broken: last seed wins; beside it, unseeded requests follow the last seed)"
    assert repr(found) == f"Audit(engine of tiny, global, {forward}: the promise to seeded requests {end}"
    assert {"first_token", "every_token", "order", "sibling_seeds", "own_seed", "greedy_sibling"} <= broken(
        found
    )
    assert found.check("first_token").first == 0
    assert found.check("own_seed").differing == 0  # it does nothing
    assert found.check("greedy").verdict == "kept"  # no seed reaches it, and its logits stay


def test_under_reseed_it_leaks_after_the_first_token(tiny):
    found = tk.audit(engine(tiny, "reseed"), **FEW)
    assert not found.ok
    assert causes(found)[0] == "leak after the first token"
    assert {"first_token", "own_seed"} & broken(found) == set()
    assert {"every_token", "order", "sibling_seeds", "unseeded_siblings", "midway"} <= broken(found)
    assert found.check("sibling_seeds").first == 1


@pytest.mark.parametrize("forward", ["packed", "padded", "sequential"])
def test_keyed_keeps_the_promise_in_every_check(tiny, forward):
    found = tk.audit(engine(tiny, forward=forward), **ONCE)
    assert found.ok and broken(found) & PROMISE == set()
    assert {check.verdict for check in found.checks if check.name != "logprobs"} == {"kept"}
    assert repr(found).startswith(
        f"Audit(engine of tiny, keyed, {forward}: the promise to seeded requests is kept"
    )
    if forward == "packed":
        assert found.diagnosis == () and found.check("logprobs").compared > 0


def test_isolate_keeps_the_promise_but_leaves_the_generator_seeded_for_unseeded_requests(tiny):
    found = tk.audit(engine(tiny, "isolate"), **ONCE)
    assert found.ok
    assert broken(found) == {"unseeded_after_seeded"}
    assert causes(found) == ["unseeded requests follow the last seed"]
    assert "beside it, unseeded requests follow the last seed" in repr(found)


def test_drift_shows_in_logprobs_before_it_shows_in_tokens(tiny):
    found = tk.audit(engine(tiny, invariant=False), **FEW)
    assert found.ok  # no token flipped
    assert broken(found) == {"logprobs"} and causes(found) == ["drift of logits"]
    assert tk.audit(engine(tiny, invariant=True), **FEW).check("logprobs").verdict == "kept"


def test_an_engine_can_be_audited_again_but_not_while_it_has_requests(tiny):
    same = engine(tiny, prefix_cache=1 << 20)
    assert tk.audit(same, **ONCE).ok and tk.audit(same, **ONCE).ok
    same.submit(tk.Request("x"))
    with pytest.raises(ValueError, match="the engine has requests in it"):
        tk.audit(same)


def test_an_engine_that_never_had_two_rows_says_so(tiny):
    found = tk.audit(engine(tiny, "reseed", max_rows=1), trials=1, tokens=4)
    assert found.notes == ("max_rows=1: the engine never had two rows in a batch.",)


# Callables


def keyed(tiny, requests, **how):
    return list(tk.generate(tiny, requests, **how))


def ignores_seeds(tiny, requests):
    return keyed(tiny, [r.replace(seed=None) for r in requests])


def one_seed_for_all_seeded(tiny, requests):
    return keyed(tiny, [r.replace(seed=5) if r.seeded else r for r in requests])


def constant(tiny, requests):
    return keyed(tiny, [r.replace(temperature=0) for r in requests])


def swaps_seeds(tiny, requests):
    seeds = [r.seed for r in requests]
    turned = [r.replace(seed=s) for r, s in zip(requests, seeds[1:] + seeds[:1], strict=True)]
    return keyed(tiny, turned)


def noise_by_shape(tiny, requests):
    """As a draw over the whole batch: own seed, but another part of the noise for each number of rows."""
    size = 1_000_003 * (len(requests) - 1)
    return keyed(tiny, [r.replace(seed=r.seed + size * (not r.greedy)) if r.seeded else r for r in requests])


def one_greedy_flip(tiny, requests):
    """The same, and a greedy answer that ends in another token when in company."""
    flips = [lambda tokens, logits: -logits if len(tokens) > len(flipped[0].prompt) + 3 else logits]
    flipped = [r for r in requests if r.greedy]
    if len(requests) > 1 and flipped and flipped[0].id == "r1":
        requests = [r.replace(processors=flips) if r.greedy else r for r in requests]
    return noise_by_shape(tiny, requests)


def logits_by_shape(tiny, requests):
    """Logits that have little to do with the number of rows before."""
    moved = mx.random.normal((tiny.vocab_size,), key=mx.random.key(3)) * 9 * (len(requests) - 1)
    mx.eval(moved)
    return keyed(tiny, [r.replace(processors=[lambda tokens, logits: logits + moved]) for r in requests])


_TIMES = itertools.count()  # the same ones in every run: with others greedy answers may move too


def later_tokens_are_random(tiny, requests):
    """The first token is the seed's; for the later ones logits move, another way each time."""
    moved = mx.random.normal((tiny.vocab_size,), key=mx.random.key(next(_TIMES)))
    mx.eval(moved)

    def move(start):
        return lambda tokens, logits: logits + moved * 9 if len(tokens) > start else logits

    return keyed(tiny, [r.replace(processors=[move(len(tiny.encode(r.prompt)))]) for r in requests])


def drifts(tiny, requests):
    """Logits that move with the number of rows, far enough to flip a token now and then."""
    moved = mx.random.normal((tiny.vocab_size,), key=mx.random.key(3)) * 0.15 * (len(requests) - 1)
    mx.eval(moved)
    return keyed(tiny, [r.replace(processors=[lambda tokens, logits: logits + moved]) for r in requests])


def greedy_drifts(tiny, requests):
    moved = mx.random.normal((tiny.vocab_size,), key=mx.random.key(3)) * (len(requests) - 1)
    mx.eval(moved)
    add = [lambda tokens, logits: logits + moved]
    return keyed(tiny, [r.replace(processors=add) if r.greedy else r for r in requests])


def same_choices(tiny, requests):
    done = keyed(tiny, requests)
    first = {c.id: c for c in done if c.choice == 0}
    return [c if c.choice == 0 else _as(c, first[c.id]) for c in done]


def _as(completion, other):
    return tk.Completion(id=completion.id, choice=completion.choice, tokens=other.tokens, text=other.text)


def fixed_when_unseeded(tiny, requests):
    return keyed(tiny, [r if r.seeded else r.replace(seed=0) for r in requests])


def heeds_arrivals(tiny, requests):
    late = max(r.arrival for r in requests)
    return keyed(tiny, [r.replace(seed=r.seed + late) if late and r.seeded else r for r in requests])


def refuses_arrivals(tiny, requests):
    if any(r.arrival for r in requests):
        raise ValueError("arrival: not supported")
    return keyed(tiny, requests)


def mixes_seeds(tiny, requests):
    total = sum(r.seed or 0 for r in requests)
    return keyed(tiny, [r.replace(seed=r.seed + 7919 * total) if r.seeded else r for r in requests])


def unseeded_leak(tiny, requests):
    shift = 0 if all(r.seeded for r in requests) else 7919 * (1 + next(_TIMES))
    return keyed(tiny, [r.replace(seed=r.seed + shift) if r.seeded else r for r in requests])


FAULTS = [
    (ignores_seeds, {"repeat"}, ["seeds ignored"]),
    (one_seed_for_all_seeded, {"other_seed"}, ["seeds ignored"]),
    (constant, {"other_seed"}, ["constant output"]),
    (swaps_seeds, {"first_token", "order", "sibling_seeds", "own_seed"}, ["seeds go to the wrong rows"]),
    (noise_by_shape, {"first_token", "every_token", "midway"}, ["noise depends on shape"]),
    (one_greedy_flip, {"first_token", "greedy"}, ["noise depends on shape"]),
    (logits_by_shape, {"first_token", "greedy"}, ["drift of logits"]),
    (later_tokens_are_random, {"repeat"}, ["leak after the first token, or arithmetic that doesn't repeat"]),
    (drifts, {"every_token", "logprobs"}, ["drift of logits"]),
    (greedy_drifts, {"greedy"}, ["drift of logits"]),
    (same_choices, {"choices"}, []),
    (fixed_when_unseeded, {"unseeded_together", "unseeded_after_seeded"}, ["a missing seed is a fixed one"]),
    (heeds_arrivals, {"midway"}, ["late arrivals change the noise"]),
    (mixes_seeds, {"first_token", "sibling_seeds"}, ["leak of siblings' seeds"]),
    (unseeded_leak, {"unseeded_siblings"}, ["leak from unseeded or greedy siblings"]),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "finds", "cause"), FAULTS, ids=lambda v: getattr(v, "__name__", None))
def test_a_planted_fault_is_found_and_named(tiny, fault, finds, cause):
    how = {"trials": 4, "tokens": 8} if fault is drifts else FEW  # a flip is rare
    found = tk.audit(lambda requests: fault(tiny, requests), **how)
    assert finds <= broken(found)
    assert found.ok == (not finds & PROMISE)
    assert causes(found) == cause


def test_one_token_that_a_siblings_seed_gives_too_is_no_overwritten_seed(tiny):
    how = {"requests": [tk.Request(prompt, top_k=3) for prompt in ("Once", "Twice", "Thrice")], "trials": 2}
    found = tk.audit(lambda requests: noise_by_shape(tiny, requests), tokens=6, **how)
    frame = found.to_frame()
    whose = frame[frame["check"] == "whose_seed"]["first"]
    assert (whose.fillna(99) > 0).any()  # three likely tokens: a sibling's seed gives the same one
    assert found.check("sibling_seeds").verdict == "kept"
    assert causes(found) == ["noise depends on shape"]
    assert causes(tk.audit(engine(tiny, "global"), tokens=6, **how))[0] == "last seed wins"


def test_one_trial_of_many_is_not_enough_for_a_siblings_seed(tiny):
    def swaps_in(trials):
        def target(requests):
            if any((r.seed or 0) // 1000 - 1 in trials for r in requests):
                return swaps_seeds(tiny, requests)
            return keyed(tiny, requests, policy="reseed")

        return target

    how = {"trials": 4, "tokens": 4}
    assert causes(tk.audit(swaps_in({0}), **how))[0] == "leak of siblings' seeds"
    assert causes(tk.audit(swaps_in({0, 1}), **how))[0] == "seeds go to the wrong rows"


def test_what_siblings_seeds_do_is_not_claimed_where_it_was_not_testable(tiny):
    def refuses_other_seeds(requests):
        if any(100 <= (r.seed or 0) % 1000 < 300 for r in requests):
            raise ValueError("seed: not this one")
        return noise_by_shape(tiny, requests)

    found = tk.audit(refuses_other_seeds, **ONCE)
    assert found.check("sibling_seeds").verdict == "not testable"
    assert "whether siblings' seeds change anything was not testable" in found.diagnosis[0].why
    every = tk.audit(lambda requests: noise_by_shape(tiny, requests), **ONCE)
    assert every.diagnosis[0].why.startswith("siblings' seeds change nothing")


def test_equal_answers_prove_nothing_where_no_seed_changes_one(tiny):
    found = tk.audit(lambda requests: constant(tiny, requests), **ONCE)
    assert found.check("every_token").verdict == "not testable"
    assert "no seed changes the answer" in found.check("every_token").sentence
    assert found.check("choices").verdict == "not testable"  # equal, as all else is
    assert found.check("greedy").verdict == "kept"  # which needs no seed


def test_prompts_that_are_too_certain_are_told_from_constant_output(tiny):
    certain = [tk.Request(prompt, top_k=2, temperature=0.05) for prompt in ("ab", "cd")]
    found = tk.audit(engine(tiny), requests=certain, trials=2, tokens=4)
    assert not found.ok and broken(found) == set() and causes(found) == []
    assert "ask with less certain prompts" in found.check("other_seed").sentence
    assert "the promise to seeded requests is not tested" in repr(found)


def test_what_one_request_alone_does_not_repeat_is_not_asked_of_a_batch(tiny):
    found = tk.audit(lambda requests: ignores_seeds(tiny, requests), **ONCE)
    assert found.check("every_token").verdict == "not testable"
    assert "does not even repeat alone" in found.check("every_token").reason


def test_a_lost_request_and_a_wrong_order_are_told(tiny):
    def loses(requests):
        return keyed(tiny, requests)[: max(1, len(requests) - 1)]

    def turned(requests):
        return keyed(tiny, requests)[::-1]

    found = tk.audit(loses, **ONCE)
    assert not found.ok and "answered" in broken(found)
    assert 'request "r2" of 3 got no answer' in found.check("answered").sentence
    found = tk.audit(turned, **ONCE)
    assert broken(found) == {"answered"} and not found.ok  # by id every answer is right
    assert "order r2, r1, r0" in found.check("answered").sentence


def test_answers_without_ids_are_taken_by_place(tiny):
    def nameless(requests):
        done = keyed(tiny, requests)
        return [tk.Completion(id="", choice=c.choice, tokens=c.tokens, text=c.text) for c in done]

    found = tk.audit(nameless, **ONCE)
    assert found.ok and found.check("logprobs").verdict == "not testable"
    assert not tk.audit(lambda requests: nameless(requests)[::-1], **ONCE).ok


def test_by_place_too_a_request_without_an_answer_is_told(tiny):
    def first_only(requests):
        done = keyed(tiny, requests)[:1]
        return [tk.Completion(id="mine", tokens=c.tokens, text=c.text) for c in done]

    found = tk.audit(first_only, **ONCE)
    assert found.check("every_token").verdict == "kept"
    assert broken(found) & PROMISE == {"answered"} and not found.ok
    check = found.check("answered")
    assert check.sentence.endswith('request "r1" of 3 got no answer.')
    assert 0 < check.differing < check.compared


def test_a_target_that_raises_is_one_line(tiny):
    def raises(requests):
        raise RuntimeError("out\nof paper")

    def raises_in_company(requests):
        return raises(requests) if len(requests) > 1 else keyed(tiny, requests)

    with pytest.raises(OSError, match=r"target=raises: raised RuntimeError: out of paper$"):
        tk.audit(raises)
    found = tk.audit(raises_in_company, **ONCE)
    assert not found.ok and broken(found) == {"answered"}
    assert "out of paper" in found.check("every_token").reason


def test_control_characters_of_a_target_never_reach_the_terminal(tiny):
    odd = "\x1b]0;title\x07\x9b31mred\u202e"

    def raises(requests):
        raise RuntimeError(odd)

    def errors(requests):
        done = keyed(tiny, requests)
        return [*done[:1], *(tk.Completion(id=c.id, finish_reason="error", error=odd) for c in done[1:])]

    said = [tk.audit(errors, **ONCE).check("answered").sentence]
    for target, how in [
        (raises, {}),
        (serve(answer=lambda body: (500, {"error": odd})), {"model": "x"}),
        (serve(answer=lambda body: (500, odd.encode())), {"model": "x"}),
        (serve(answer=lambda body: (200, odd.encode())), {"model": "x"}),
        (serve(answer=lambda body: (200, {"object": odd})), {"model": "x"}),
    ]:
        with pytest.raises(OSError, match="title") as caught:
            tk.audit(target, **how)
        said.append(str(caught.value))
    for words in said:
        assert words.isprintable() and "red" in words, ascii(words)


def test_what_a_target_may_refuse_is_not_held_against_it(tiny):
    found = tk.audit(lambda requests: refuses_arrivals(tiny, requests), **ONCE)
    assert found.ok and found.check("midway").verdict == "not testable"
    assert "arrival: not supported" in found.check("midway").sentence
    alone = tk.audit(lambda requests: keyed(tiny, [r.replace(n=1) for r in requests]), **ONCE)
    assert alone.ok and "1 of 3 choices came back" in alone.check("choices").reason


# The result


def test_the_result_is_a_table_a_picture_and_json(tiny):
    found = tk.audit(engine(tiny, "reseed"), **ONCE)
    frame = found.to_frame()
    assert list(frame.columns) == ["check", "trial", "row", "compared", "first", "text", "other_text"]
    for check in found.checks[1:]:
        mine = frame[frame["check"] == check.name]
        assert (len(mine), mine["first"].notna().sum()) == (check.compared, check.differing)
    assert list(found.summary()["name"]) == [kind.name for kind in checks.KINDS]
    said = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert said["ok"] is False and said["diagnosis"][0]["name"] == "leak after the first token"
    assert "every token: broken" in figure.svg(found.chart())
    assert "leak after the first token" in found._repr_html_() and "<table>" in found._repr_html_()
    with pytest.raises(ValueError, match="must be one of answered, repeat"):
        found.check("nothing")


def test_own_prompts_and_parameters_are_asked_with(tiny):
    asked = []

    def listens(requests):
        asked.extend(requests)
        return keyed(tiny, requests)

    assert tk.audit(listens, requests=[tk.Request("Once", top_k=50, seed=3)], trials=1, tokens=5).ok
    assert {r.prompt for r in asked if r.top_k == 50} == {"Once"}
    assert len({r.prompt for r in asked}) == 4  # one request gets company
    assert {r.max_tokens for r in asked} == {5}


@pytest.mark.parametrize("prompts", [3, 950])
def test_no_two_requests_share_a_seed_however_many_there_are(prompts):
    calls = []

    def hashes(requests):
        calls.append([r.seed for r in requests if r.seeded])
        return [tk.Completion(id=r.id, tokens=[hash((r.seed, i)) % 999 for i in range(2)]) for r in requests]

    asked = [tk.Request(f"prompt {i}") for i in range(prompts)]
    assert tk.audit(hashes, requests=asked, trials=1, tokens=2).check("own_seed").verdict == "kept"
    per_trial = len(calls)
    calls.clear()
    tk.audit(hashes, requests=asked, trials=2, tokens=2)
    assert len(calls) == 2 * per_trial
    one, two = ({s for c in part for s in c} for part in (calls[:per_trial], calls[per_trial:]))
    assert len(one) >= 2 * prompts and not one & two
    assert all(len(set(call)) == len(call) for call in calls)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"requests": [tk.Request("x", temperature=0)]}, r"requests\[0\]: temperature=0: is greedy"),
        ({"requests": ["x"]}, r"requests\[0\]: must be a Request"),
        ({"requests": [tk.Request("x", generated=[1])]}, r"requests\[0\]: generated: must be left out"),
        ({"requests": [tk.Request("")]}, "has no tokens"),
        ({"trials": 0}, "trials=0: must be in"),
        ({"tokens": 1}, "tokens=1: must be in"),
        ({"timeout": 0}, "timeout=0: must be in"),
        ({"model": "x"}, "names a server's model"),
    ],
)
def test_a_bad_argument_is_refused_by_name(tiny, how, says):
    with pytest.raises(ValueError, match=says):
        tk.audit(engine(tiny), **how)
    with pytest.raises(ValueError, match="must be an Engine, a callable or a base URL"):
        tk.audit(3)


def test_interrupted_it_keeps_what_it_found(tiny):
    calls = []

    def interrupted(requests):
        calls.append(1)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return keyed(tiny, requests)

    found = tk.audit(interrupted, **ONCE)
    assert not found.complete and not found.ok and "(interrupted)" in repr(found)
    assert found.check("every_token").verdict == "kept"
    assert found.check("choices").reason == "it was not reached"


def test_a_function_that_spoils_its_requests_spoils_nobody_elses(tiny):
    def spoils(requests):
        done = list(tk.generate(tiny, requests))
        for request in requests:
            object.__setattr__(request, "id", "zz")
            object.__setattr__(request, "seed", 1)
        return done

    assert tk.audit(spoils, trials=1, tokens=3).ok


def test_what_is_no_list_of_requests_is_one_line(tiny):
    for given in (tk.Request("x"), "x", 5):
        with pytest.raises(ValueError, match=r"^requests=.*: must be a list of Request$"):
            tk.audit(tk.Engine(tiny), requests=given)
