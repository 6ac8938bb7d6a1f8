"""The audit, on targets that run: engines under each policy, callables with a fault planted in each, servers.

Every check has a target that breaks it, so a verdict of "kept" means something.
"""

import base64
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import toolkit as tk
from toolkit.cli import main, output
from toolkit.study.audit import checks, targets
from toolkit.view import figure

ROOT = Path(__file__).parents[3]
PROMISE = {kind.name for kind in checks.KINDS if kind.promise}
FEW = {"trials": 2, "tokens": 5}
ONCE = {"trials": 1, "tokens": 5}


def broken(found):
    return {check.name for check in found.checks if check.verdict == "broken"}


def causes(found):
    return [cause.name for cause in found.diagnosis]


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


# Servers


class Quiet(ThreadingHTTPServer):
    """A client that has hung up is no news."""

    daemon_threads = True

    def handle_error(self, *_):
        pass


class Batching(Quiet):
    """OpenAI's completions over `tk.generate`: what arrives within 50 ms is a batch."""

    def __init__(self, model, policy, forms="openai"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.policy, self.forms = model, policy, forms
        self.waiting, self.lock, self.sizes = [], threading.Lock(), []
        self.url = f"http://127.0.0.1:{self.server_port}"
        for work in (self.serve_forever, self.batches):
            threading.Thread(target=work, daemon=True).start()

    def batches(self):
        while True:
            time.sleep(0.001)
            if not self.waiting:
                continue
            time.sleep(0.05)
            with self.lock:
                batch, self.waiting = self.waiting, []
            self.sizes.append(len(batch))
            requests = [r.replace(id=f"r{i}") for i, (r, _, _) in enumerate(batch)]
            done = tk.generate(self.model, requests, policy=self.policy)
            for (_, event, into), request in zip(batch, requests, strict=True):
                into += [c for c in done if c.id == request.id]
                event.set()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.answer(body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, body):
        if body["model"] != "tiny":
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist"}}
        fields = {k: body[k] for k in ("prompt", "max_tokens", "temperature", "seed", "n") if k in body}
        if chat := self.path.endswith("/chat/completions"):
            (said,) = body["messages"]
            fields["prompt"] = said["content"]
        event, done = threading.Event(), []
        with self.server.lock:
            self.server.waiting.append((tk.Request(**fields), event, done))
        event.wait()
        choices = [{"index": c.choice, "text": c.text} for c in done]
        if chat:
            steps = [[{"token": self.server.model.token_text(t), "logprob": p}
                      for t, p in zip(c.tokens, c.logprobs, strict=True)] for c in done]  # fmt: skip
            choices = [{"index": c.choice, "message": {"content": c.text}, "logprobs": {"content": told}}
                       for c, told in zip(done, steps, strict=True)]  # fmt: skip
        elif self.server.forms == "openai":
            for choice, c in zip(choices, done, strict=True):
                told = {
                    "tokens": [*map(self.server.model.token_text, c.tokens)],
                    "token_logprobs": list(c.logprobs),
                }
                choice["logprobs"] = told
        return 200, {"choices": choices}

    def log_message(self, *_):
        pass


def serve(**how):
    """A server whose every answer is made by functions of the body."""
    made = type("Canned", (Handler,), {"answer": lambda self, body: how["answer"](body)})
    server = Quiet(("127.0.0.1", 0), made)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def test_last_seed_wins_is_found_over_http(tiny):
    server = Batching(tiny, "global")
    found = tk.audit(server.url, model="tiny", **FEW)
    assert max(server.sizes) == 3  # they were batched
    assert not found.ok and causes(found)[0] == "last seed wins"
    assert {"first_token", "every_token", "sibling_seeds"} <= broken(found)
    assert found.check("repeat").verdict == "kept" and found.unit == "token"


def test_a_chat_is_audited_as_completions_are(tiny):
    for policy, ok in (("reseed", False), ("keyed", True)):
        server = Batching(tiny, policy)
        found = tk.audit(server.url + "/v1/chat/completions", model="tiny", **FEW)
        assert found.ok is ok and found.unit == "token" and max(server.sizes) == 3
        assert found.check("logprobs").compared > 0
        assert causes(found)[:1] == ([] if ok else ["leak after the first token"])
    asked = []

    def answer(body):
        asked.append(body)
        return 200, {"choices": [{"index": 0, "message": {"content": f"abc{body.get('seed')}"}}]}

    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once"}]
    tk.audit(
        serve(answer=answer) + "/chat/completions", model="x", requests=[tk.Request(messages=said)], **ONCE
    )
    assert said in [body["messages"] for body in asked] and not any("prompt" in body for body in asked)
    with pytest.raises(ValueError, match=r"tokens .*/v1/chat/completions has no such field"):
        tk.audit("http://127.0.0.1:1/v1/chat/completions", model="x", requests=[tk.Request(tokens=[1])])
    with pytest.raises(ValueError, match=r"messages .*/v1/completions has no such field"):
        tk.audit("http://127.0.0.1:1", model="x", requests=[tk.Request(messages=said)])


def test_a_server_that_keeps_the_promise_is_told_so_and_what_was_not_tested(tiny):
    server = Batching(tiny, "keyed")
    found = tk.audit(server.url + "/v1/", model="tiny", **ONCE)
    assert found.ok and broken(found) == set() and max(server.sizes) == 3
    assert found.check("logprobs").compared > 0 and found.check("choices").verdict == "kept"
    assert "what it ran one by one was not put to the test" in found.notes[0]
    assert len(found.notes) == 1  # it did batch


def test_the_choices_of_one_request_are_no_batch():
    def answer(body):
        time.sleep(0.2 if "n" in body else 0.02)
        return 200, {"choices": [{"index": 0, "text": "abc"}]}

    target = targets.target_of(serve(answer=answer), "x", 5.0)
    for n in (1, 1, 3):
        target.ask([tk.Request("Once", id="a", seed=1, n=n, max_tokens=4)])
    assert not any("does not batch" in note for note in target.notes())
    one, other = (tk.Request("Once", id=id, seed=1, n=3, max_tokens=4) for id in "ab")
    target.ask([one, other])  # a batch, and it takes long
    assert any("does not batch" in note for note in target.notes())
    target.close()


def test_a_server_that_reports_only_text_is_compared_by_characters(tiny):
    found = tk.audit(Batching(tiny, "reseed", forms="text").url, model="tiny", trials=1, tokens=6)
    assert found.unit == "character" and "characters of the text" in found.notes[-1]
    assert not found.ok and found.check("logprobs").verdict == "not testable"


def test_what_a_server_does_wrong_is_one_line(tiny):
    def slow(body):
        time.sleep(30)

    def no_seed(body):
        if "seed" in body:
            return 400, {"error": {"message": "unknown field seed"}}
        return 200, {"choices": [{"index": 0, "text": "abc"}]}

    for answer, says in [
        (lambda body: (500, {"error": "out of memory"}), r"HTTP 500: out of memory$"),
        (
            lambda body: (401, {"detail": "who are you?"}),
            r"HTTP 401: who are you\?; put a key into TOOLKIT_API_KEY$",
        ),
        (lambda body: (404, {"error": {"message": "no model x"}}), r"HTTP 404: no model x$"),
        (lambda body: (200, b"<html>hello"), "not with JSON: <html>hello"),
        (lambda body: (200, b"x" * (17 << 20)), "the answer is longer than 16 MiB$"),
        (lambda body: (200, {"object": "list"}), "no completions in it"),
        (lambda body: (200, b"[]"), "no completions in it"),
        (lambda body: (200, {"choices": []}), r'no completions in it: {"choices": \[\]}$'),
        (no_seed, "HTTP 400: unknown field seed; it answers without a seed"),
        (slow, "no answer within 0.3 s"),
    ]:
        with pytest.raises(OSError, match=says) as caught:
            tk.audit(serve(answer=answer), model="x", timeout=0.3)
        assert "\n" not in str(caught.value)
    with pytest.raises(OSError, match="does not exist"):
        tk.audit(Batching(tiny, "keyed").url, model="tinny")


def test_a_server_that_answers_a_sibling_with_no_choices_is_told():
    def answer(body):
        some = [{"index": 0, "text": f"abc{body.get('seed')}"}]
        return 200, {"choices": some if body["prompt"] == "Once" else []}

    asked = [tk.Request("Once"), tk.Request("Twice")]
    found = tk.audit(serve(answer=answer), model="x", requests=asked, **ONCE)
    assert found.check("every_token").verdict == "kept"
    assert "answered" in broken(found) and not found.ok
    assert found.check("answered").sentence.endswith('no completions in it: {"choices": []}.')


def test_a_server_that_hangs_half_way_is_given_up(tiny):
    asked = []

    def answer(body):
        asked.append(body["seed"])
        if len(asked) > 4 and "quick" not in body:
            time.sleep(10)
        return 200, {"choices": [{"index": 0, "text": f"abc{body['seed']}"}]}

    found = tk.audit(serve(answer=answer), model="x", timeout=0.3)
    assert found.complete and not found.ok and found.check("repeat").verdict == "kept"
    assert "no answer within 0.3 s" in found.check("answered").sentence
    assert "given up: 3 times in a row" in found.check("choices").reason
    assert len(asked) < 20  # of about a hundred
    assert any("may not have been alone" in note for note in found.notes)
    quick = tk.audit(serve(answer=lambda body: answer(body | {"quick": True})), model="x", **ONCE)
    assert quick.complete and not any("may not have been alone" in note for note in quick.notes)


def test_a_body_that_comes_byte_by_byte_has_a_deadline_too():
    class Dribbles(Handler):
        def do_POST(self):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)

    server = Quiet(("127.0.0.1", 0), Dribbles)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(OSError, match=r"no answer within 0\.5 s"):
        tk.audit(f"http://127.0.0.1:{server.server_port}", model="x", timeout=0.5)
    assert time.monotonic() - began < 3


def test_the_client_is_closed_also_after_an_error(monkeypatch):
    made = []

    class Kept(httpx.Client):
        def __init__(self, **how):
            super().__init__(**how)
            made.append(self)

    def hangs(body):
        time.sleep(5)

    def answer(body):
        return 200, {"choices": [{"index": 0, "text": f"abc{body.get('seed')}"}]}

    monkeypatch.setattr(httpx, "Client", Kept)
    assert tk.audit(serve(answer=answer), model="x", **ONCE).complete
    with pytest.raises(OSError, match="no answer within"):
        tk.audit(serve(answer=hangs), model="x", timeout=0.2)
    assert [client.is_closed for client in made] == [True, True]


def test_a_server_that_sends_elsewhere_is_told_without_a_password():
    class Elsewhere(Handler):
        def do_POST(self):
            self.send_response(307)
            self.send_header("Location", "http://me:s3cret@other:80/v1/completions")
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = Quiet(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(
        OSError, match=r"HTTP 307: it sends to .*http://other:80/v1/completions.*; ask there$"
    ) as said:
        tk.audit(f"http://127.0.0.1:{server.server_port}", model="x")
    assert "s3cret" not in str(said.value)


def test_a_password_in_the_url_reaches_the_server_and_nothing_else():
    class Locked(Handler):
        def answer(self, body):
            if self.headers["Authorization"] != "Basic " + base64.b64encode(b"me:s3cr@t").decode():
                return 401, {"error": "who are you?"}
            return 200, {"choices": [{"index": 0, "text": f"abc{body.get('seed')}"}]}

    server = Quiet(("127.0.0.1", 0), Locked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"127.0.0.1:{server.server_port}"
    found = tk.audit(f"http://me:s3cr%40t@{place}", model="x", **ONCE)
    assert found.check("every_token").verdict == "kept"
    assert found.target == f"http://{place}, model x" and "s3cr" not in json.dumps(found.to_json())
    wrong = [f"http://me:s3cret@{place}", f"https://me:s3cret@{place}", "ftp://me:s3cret@x", "me:s3cret@x:80",
             "http://me:s3cret/@x", "http://me:s3cret@x:port"]  # fmt: skip
    for url in wrong:
        with pytest.raises((OSError, ValueError)) as caught:
            tk.audit(url, model="x", timeout=5)
        assert "s3cr" not in str(caught.value)


def test_what_no_server_can_be_asked_is_refused():
    for url in ("127.0.0.1:8080", "ftp://x", "http://", "nonsense", "http://x:port"):
        with pytest.raises(ValueError, match="must be a base URL like"):
            tk.audit(url, model="x")
    with pytest.raises(ValueError, match="needs the name of the model"):
        tk.audit("http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"typical_p .*/v1/completions has no such field"):
        tk.audit("http://127.0.0.1:1", model="x", requests=[tk.Request("x", typical_p=0.5)])


def test_what_the_environment_can_not_mean_is_one_line_without_the_secret(monkeypatch):
    monkeypatch.setenv("TOOLKIT_API_KEY", "sk-\u00e4-secret")
    with pytest.raises(ValueError, match=r"^TOOLKIT_API_KEY: must be printable ASCII; set it again$"):
        tk.audit("http://127.0.0.1:1", model="x")
    keys = []

    class Keyed(Handler):
        def answer(self, body):
            keys.append(self.headers["Authorization"])
            return 401, {"error": "no"}

    server = Quiet(("127.0.0.1", 0), Keyed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TOOLKIT_API_KEY", "sk-secret\r\n")  # as a file's last line gives it
    with pytest.raises(OSError, match="HTTP 401: no"):
        tk.audit(f"http://127.0.0.1:{server.server_port}", model="x")
    assert set(keys) == {"Bearer sk-secret"}
    monkeypatch.setenv("ALL_PROXY", "bogus://x")
    with pytest.raises(ValueError, match=r"^HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: .*bogus.*; unset it$"):
        tk.audit("http://example.invalid", model="x")


def test_text_that_no_file_takes_and_tokens_without_a_name_are_borne(tiny, tmp_path):
    def answer(body):
        steps = [{"logprob": -1.0}] * 3  # no token's name or id
        text = f"\ud800{body.get('seed')}"
        return 200, {"choices": [{"index": 0, "text": text, "logprobs": {"content": steps}}]}

    found = tk.audit(serve(answer=answer), model="x", trials=1)
    assert found.unit == "character" and found.check("every_token").verdict == "kept"
    found.to_frame().to_csv(tmp_path / "pairs.csv")
    json.dumps(found.to_json(), ensure_ascii=False).encode()
    with pytest.raises(OSError, match="no completions in it"):
        tk.audit(serve(answer=lambda body: (200, {"choices": [{"text": ["a"]}]})), model="x")


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


def test_a_table_that_can_not_be_written_leaves_the_verdict_on_the_screen(cli, tmp_path, monkeypatch):
    def full(path, _):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(output, "write_table", full)
    status, out, err = cli("audit", "--policy", "keyed", "--model", "tiny", "--trials", 1, "--tokens", 2,
                           "--out", tmp_path / "x.csv")  # fmt: skip
    assert (status, err) == (1, f"toolkit: {tmp_path / 'x.csv'}: No space left on device\n")
    assert "The promise to seeded requests is kept." in out


def test_without_httpx_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ValueError, match=r"install the extra audit: pip install .mlx-seed-toolkit\[audit\]"):
        tk.audit("http://127.0.0.1:1", model="x")


@pytest.fixture(scope="module")
def mlx_lm_server(tiny, tmp_path_factory):
    """mlx-lm's own server on the tiny model, and the name that it calls the model by."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(tiny.config))
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(tiny.module.parameters())))
    tiny.tokenizer._tokenizer.save_pretrained(str(directory))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = [sys.executable, "-m", "mlx_lm", "server", "--model", str(directory), "--port", str(port)]
    log = (directory / "log").open("w")
    process = subprocess.Popen(args, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                assert process.poll() is None, (directory / "log").read_text()
                time.sleep(0.1)
        yield url, str(directory)
    finally:
        process.kill()
        process.wait()


def test_mlx_lms_server_serves_seeded_requests_alone_and_leaves_the_generator_seeded(mlx_lm_server):
    url, name = mlx_lm_server
    found = tk.audit(url, model=name, **ONCE)
    assert found.ok and found.unit == "token"
    assert broken(found) == {"unseeded_after_seeded"}
    assert causes(found) == ["unseeded requests follow the last seed"]
    assert "n is not supported" in found.check("choices").sentence
    assert found.check("logprobs").compared > 0


# The command


@pytest.fixture
def cli(capfd):
    def run(*args):
        return main([str(arg) for arg in args]), *capfd.readouterr()

    return run


def test_the_command_exits_0_where_the_promise_is_kept_and_1_where_it_is_broken(cli, tmp_path):
    few = ("--model", "tiny", "--trials", 1, "--tokens", 6)
    status, out, err = cli("audit", "--policy", "keyed", *few)
    assert (status, err) == (0, "")
    assert out.endswith("The promise to seeded requests is kept.\n")
    table, picture = tmp_path / "pairs.csv", tmp_path / "picture.png"
    status, out, err = cli("audit", "--policy", "global", *few, "--out", table, "--chart", picture)
    assert (status, err) == (1, "")
    assert "Likely cause: last seed wins: " in out and max(map(len, out.splitlines())) <= 100
    assert table.read_text().startswith("check,trial,row,compared,first,text,other_text")
    assert picture.stat().st_size > 1000
    assert cli("audit", "--policy", "isolate", *few)[0] == 0
    assert cli("audit", "--policy", "isolate", *few, "--strict")[0] == 1


def test_its_json_is_sorted_and_has_the_documented_fields(cli):
    status, out, _ = cli("audit", "--policy", "reseed", "--model", "tiny", "--trials", 1, "--json")
    said = json.loads(out)
    assert status == 1 and out == json.dumps(said, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    fields = "checks complete diagnosis kind notes ok reading target tokens trials unit"
    assert set(said) == set(fields.split())
    fields = "name promise compares expects compared differing first verdict reason sentence"
    assert all(set(check) == set(fields.split()) for check in said["checks"])


def test_the_command_audits_a_server_with_own_prompts(cli, tiny, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once"}\n{"prompt": "Twice"}\n')
    server = Batching(tiny, "keyed")
    status, out, err = cli("audit", server.url, "--model", "tiny", "--prompts", prompts, "--trials", 1)
    assert (status, err) == (0, "") and server.url in out
    assert max(server.sizes) == 2


def test_bad_input_exits_2_and_an_unreachable_server_1_each_with_one_line(cli, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once", "temperature": 0}\n')
    for args, says, expected in [
        ((), "give either the URL of a server, or --policy", 2),
        (("http://127.0.0.1:1", "--policy", "keyed"), "give either the URL", 2),
        (("http://127.0.0.1:1",), "needs the name of the model", 2),
        (("nonsense", "--model", "x"), "must be a base URL", 2),
        (("--policy", "keyed", "--model", "tiny", "--trials", "0"), "trials=0", 2),
        (
            ("--policy", "keyed", "--model", "tiny", "--prompts", prompts),
            f"{prompts}:1: temperature=0: is greedy",
            2,
        ),
        (("http://127.0.0.1:1", "--model", "x"), "http://127.0.0.1:1/v1/completions: can't be reached", 1),
    ]:
        status, out, err = cli("audit", *args)
        assert (status, out, err.count("\n")) == (expected, "", 1), err
        assert says in err and err.startswith("toolkit: ")


def test_ctrl_c_prints_what_was_found_and_exits_130(tiny):
    answered = threading.Event()

    def answer(body):
        if answered.is_set():
            time.sleep(20)
        if body.get("seed") == 1001:  # of the second question
            answered.set()
        return 200, {"choices": [{"index": 0, "text": f"abc{body.get('seed')}"}]}

    args = [sys.executable, "-m", "toolkit", "audit", serve(answer=answer), "--model", "x"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert answered.wait(30)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in err and "repeat" in out and "(interrupted)" in out
