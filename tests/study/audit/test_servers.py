"""Audits over HTTP: verdicts about servers, what servers do wrong, secrets, and what they are asked."""

import base64
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import httpx
import mlx.core as mx
import pytest
from helpers.audit_servers import FEW, ONCE, Batching, Handler, Quiet, broken, causes, serve
from mlx.utils import tree_flatten

import toolkit as tk
from toolkit.study.audit import targets


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
    assert not any("show that it batches" in note for note in target.notes())
    one, other = (tk.Request("Once", id=id, seed=1, n=3, max_tokens=4) for id in "ab")
    target.ask([one, other])  # a batch, and it takes long
    assert any("show that it batches" in note for note in target.notes())
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


# Servers as they are


def text(body, words="abc"):
    return 200, {"choices": [{"index": 0, "text": f"{words}{body.get('seed')}"}]}


class Recorded(Handler):
    """Answers by the server's function of the request, which may set headers of its answer."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer, *headers = self.server.function(self, body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def recorded(function):
    server = Quiet(("127.0.0.1", 0), Recorded)
    server.function = function
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def test_a_busy_server_is_asked_again_after_the_time_that_it_names():
    busy = itertools.cycle([True, False, False])
    asked = []

    def function(handler, body):
        asked.append(time.monotonic())
        if next(busy):
            return 429, {"error": "slow down"}, ("Retry-After", "0.05")
        return text(body)

    found = tk.audit(recorded(function), model="x", **ONCE)
    assert found.check("every_token").verdict == "kept"
    assert any("HTTP 429 or 503" in note for note in found.notes)


@pytest.mark.parametrize("status", [429, 500])
def test_a_server_that_fails_under_load_is_not_testable_and_never_breaks_the_promise(status):
    calls = itertools.count()

    def function(handler, body):
        if next(calls) > 6:
            return status, {"error": "overloaded"}, ("Retry-After", "0")
        return text(body)

    found = tk.audit(recorded(function), model="x", **ONCE)
    assert not found.ok
    assert broken(found) & {check.name for check in found.checks if check.promise} == set()
    # A server that refuses a part of the requests for what they are is another matter.
    refuses = recorded(lambda handler, body: (400, {"error": "no"}) if "seed" not in body else text(body))
    assert "answered" in broken(tk.audit(refuses, model="x", **ONCE))


def test_answers_without_content_are_compared_by_their_reasoning_or_their_tool_calls():
    def reasoning(handler, body):
        return 200, {"choices": [{"message": {"content": None, "reasoning_content": f"r{body.get('seed')}"}}]}

    def call(handler, body):
        call = {"function": {"name": "f", "arguments": f"{{{body.get('seed')}}}"}}
        return 200, {"choices": [{"message": {"content": "", "tool_calls": [call]}}]}

    def empty(handler, body):
        return 200, {"choices": [{"message": {"content": ""}}]}

    for function in (reasoning, call):
        found = tk.audit(recorded(function) + "/v1/chat/completions", model="x", **ONCE)
        assert found.check("own_seed").verdict == "kept"
    found = tk.audit(recorded(empty) + "/v1/chat/completions", model="x", **ONCE)
    assert not found.ok and found.check("own_seed").verdict == "not testable"
    assert any("empty" in note for note in found.notes)


def test_a_server_gets_the_fields_that_it_takes_and_those_that_it_is_given():
    seen = []

    def function(handler, body):
        if "max_tokens" in body:
            return 400, {"error": "Unsupported parameter: max_tokens; use max_completion_tokens"}
        if "stream" in body:
            return 400, {"error": "Unsupported parameter: stream"}
        seen.append((handler.path, handler.headers["X-Team"], body))
        return text(body)

    url = recorded(function) + "/v1?api-version=2024-10"
    headers = {"X-Team": "blue team"}
    found = tk.audit(url, model="x", headers=headers, extra_body={"cache_prompt": False}, **ONCE)
    assert found.check("every_token").verdict == "kept"
    assert {path for path, _, _ in seen} == {"/v1/completions?api-version=2024-10"}
    assert {team for _, team, _ in seen} == {"blue team"}
    assert all(body["cache_prompt"] is False and body["max_completion_tokens"] for _, _, body in seen)
    with pytest.raises(ValueError, match="headers: is for a server"):
        tk.audit(lambda requests: [], headers=headers)


def test_a_secret_is_masked_wherever_a_server_repeats_it(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hush-hush")
    secrets = ("sk-hush-hush", "tok3n-value", "qu3ry-key")

    def echoes(handler, body):
        return 400, {
            "error": f"bad: {handler.headers['Authorization']} {handler.headers['X-Key']} {handler.path}"
        }

    def says(handler, body):
        return 200, {"choices": [{"index": 0, "text": f"{handler.headers['X-Key']} {body.get('seed')}"}]}

    how = {"model": "x", "headers": {"X-Key": "tok3n-value"}, **ONCE}
    with pytest.raises(OSError, match=r"\*\*\*") as caught:
        tk.audit(recorded(echoes) + "/v1?code=qu3ry-key", **how)
    found = tk.audit(recorded(says) + "/v1?code=qu3ry-key", **how)
    texts = str(caught.value) + json.dumps(found.to_json()) + found.to_frame().to_csv() + repr(found)
    assert not any(secret in texts for secret in secrets)
    assert "code=***" in found.target


def test_certificates_that_cannot_be_read_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^ca=.*: can't be read as certificates: "):
        tk.audit("https://127.0.0.1:1", model="x", ca=str(tmp_path / "nowhere.pem"))
