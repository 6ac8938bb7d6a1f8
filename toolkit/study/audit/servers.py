"""Servers: a target behind OpenAI's `/v1/completions` or chat, asked with `httpx` from one thread a request.

A server makes its batches by timing, so requests of a batch go out together, in order, a moment apart. They
have one deadline, counted from the last one's start; what is late then is abandoned, though the server may go
on with it. How a server wants to be asked for logprobs is found out once.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import re
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from statistics import median
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ...fields import one_line, show
from ...requests import Request
from .answers import Answer, Answers, Fail, Target, Unanswered

# What a completions request has beyond OpenAI's own fields is sent only where it isn't at its default.
_OURS = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_CANT = ("typical_p", "top_n_sigma", "xtc_probability", "penalty_window", "allowed_tokens",
         "priority", "processors")  # fmt: skip
_APART = 0.002  # seconds between the requests of a batch, so that they arrive in order
_REFUSALS = (400, 422)
_BUSY = (429, 503)
_RETRIES, _LONGEST = 3, 30.0  # of a busy server; seconds that it may ask to wait
_MASK = "***"
# How a body may have to be changed: fields to leave out, and whether a length goes by its newer name.
_SHAPES: tuple[frozenset[str], ...] = (
    frozenset(), frozenset({"stream"}), frozenset({"max_tokens"}), frozenset({"stream", "max_tokens"}),
)  # fmt: skip
_CHAT = "/chat/completions"
_MOST = 16 << 20  # bytes of an answer


class ServerTarget(Target):
    """A server.

    Parameters
    ----------
    url : str
        Base URL, with or without its `/v1`; one that ends with `/chat/completions` is asked there. A user and
        a password before the host are for basic auth. A key in TOOLKIT_API_KEY is sent along.
    model : str
    timeout : float
        Seconds for the requests of a batch, from the last one's start to the last byte.
    headers, extra_body, ca
        As for `audit`.
    """

    kind = "server"

    def __init__(self, url: str, model: str | None, timeout: float, *,
                 headers: Mapping[str, str] | None = None, extra_body: Mapping[str, Any] | None = None,
                 ca: str | None = None):  # fmt: skip
        super().__init__()
        try:
            import httpx
        except ImportError:
            raise ValueError(
                'target: a URL needs httpx; install the extra audit: pip install "mlx-seed-toolkit[audit]"'
            ) from None
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            hidden = re.sub(r"^(.*//)?.*@", r"\1", url, flags=re.DOTALL)  # a password is not to be shown
            hidden = re.sub(r"[?#].*", f"?{_MASK}", hidden, flags=re.DOTALL)
            raise ValueError(f"target={show(hidden)}: must be a base URL like http://127.0.0.1:8080")
        if not isinstance(model, str) or not model:
            raise ValueError("model: a server's audit needs the name of the model, as the server calls it")
        # A user and a password go to the server, and nowhere that is shown.
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
        base = plain.geturl().rstrip("/")
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        query = f"?{parts.query}" if parts.query else ""
        self.name = f"{base}{_hidden_values(query)}, model {model}"
        self.chat = base.endswith(_CHAT)
        self.path = f"/v1{_CHAT}" if self.chat else "/v1/completions"
        self.url = base.removesuffix(_CHAT).removesuffix("/completions").removesuffix("/v1") + self.path
        self._ask_at = self.url + query
        self.model, self.timeout = model, timeout
        self._extra = dict(extra_body or {})
        self._shape = _SHAPES[0]
        self._paused_until = 0.0
        self._waited = self._empty = False
        self._errors = httpx.HTTPError, httpx.InvalidURL
        key = os.environ.get("TOOLKIT_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):  # not shown: it is a secret
            raise ValueError("TOOLKIT_API_KEY: must be printable ASCII; set it again")
        sent = {"Authorization": f"Bearer {key}"} if key else {}
        for name, value in (headers or {}).items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                raise ValueError(f"headers: {show(name)}: is no name of a header")
            if not (value.isascii() and value.isprintable()):
                raise ValueError(f"headers: the value of {name}: must be printable ASCII")
            sent = {k: v for k, v in sent.items() if k.lower() != name.lower()} | {name: value}
        basic = base64.b64encode(f"{user}:{password}".encode()).decode() if user or password else ""
        given = [key, user, password, parts.username, parts.password, basic, *sent.values()]
        given += [word for value in sent.values() for word in value.split()]
        given += [part for item in parts.query.split("&") for part in (item.partition("=")[2],)]
        given += [value for _, value in parse_qsl(parts.query)]
        # Shorter ones would mask half of every text; longest first, as one may lie in another.
        self._secrets = sorted({s for s in given if s and len(s) > 3}, key=len, reverse=True)
        try:
            verify = ssl.create_default_context(cafile=ca) if ca else True
        except OSError as error:
            raise ValueError(
                f"ca={show(ca)}: can't be read as certificates: {one_line(str(error))}"
            ) from None
        # A proxy of the environment is for other machines.
        try:
            self._client = httpx.Client(
                timeout=timeout,
                auth=(user, password) if user or password else None,
                trust_env=host not in ("127.0.0.1", "localhost", "::1"),
                headers=sent,
                verify=verify,
                limits=httpx.Limits(max_connections=None),
            )
        except (ImportError, ValueError) as error:  # a proxy that httpx can't use
            words = self._masked(str(error))
            raise ValueError(f"HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: {words}; unset it") from None
        self._forms: tuple[int | None, ...] = (True, None) if self.chat else (1, True, None)
        self._logprobs: tuple[int | None, ...] = self._forms  # those that may still be right
        self._abandoned = False
        self._alone: list[float] = []  # seconds a token; together, of all their tokens
        self._together: list[float] = []

    def _ask(self, requests: Sequence[Request], fail: Fail) -> Answers:
        if len(self._logprobs) > 1:
            self._find_out(requests[0])
        began = time.monotonic()
        answers = self._all(requests, fail)
        took = time.monotonic() - began
        if len(requests) == 1 and requests[0].n == 1:
            self._alone.append(took / requests[0].max_tokens)
        elif len(requests) > 1 and not any(r.arrival for r in requests) and all(r.seeded for r in requests):
            self._together.append(took / sum(r.max_tokens for r in requests))
        return answers

    def _find_out(self, request: Request) -> None:
        """Which form of `logprobs` the server takes, and whether it takes a seed at all."""
        refused: Unanswered | None = None
        for self._shape in _SHAPES:
            for form in self._forms:
                try:
                    self._logprobs = (form,)
                    self._all([request], lambda id, why: None)
                    return
                except Unanswered as error:
                    self._logprobs = self._forms
                    if error.status not in _REFUSALS:
                        raise
                    refused = refused or error
        assert refused is not None
        self._shape = _SHAPES[0]
        plain = request.replace(seed=None)
        self._logprobs = (None,)
        try:
            self._all([plain], lambda id, why: None)
        except Unanswered:
            raise refused from None
        raise Unanswered(f"{refused}; it answers without a seed, so there is no promise to audit")

    def _all(self, requests: Sequence[Request], fail: Fail) -> Answers:
        """One thread a request. Daemons: a server that never answers must not keep the process."""
        done: queue.SimpleQueue[tuple[str, dict[int, Answer] | Unanswered]] = queue.SimpleQueue()
        began = time.monotonic()
        last = began
        for request in sorted(requests, key=lambda r: r.arrival):
            late = self._step() * request.arrival
            time.sleep(max(0.0, began + late - time.monotonic()) if late else _APART * (last != began))
            last = time.monotonic()
            body = self._body(request)
            threading.Thread(target=self._run, args=(request, body, done), daemon=True).start()
        answers: Answers = {}
        reasons: dict[str, Unanswered] = {}
        waiting = {request.id for request in requests}
        while waiting:
            try:
                until = max(last, self._paused_until) + self.timeout
                id, came = done.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                if max(last, self._paused_until) + self.timeout > until:
                    continue  # the server has asked for time meanwhile
                reasons |= {id: self._late() for id in waiting}
                break
            waiting.discard(id)
            if isinstance(came, Unanswered):
                reasons[id] = came
            else:
                answers |= {(id, choice): answer for choice, answer in came.items()}
        if not answers:
            raise next(iter(reasons.values()))
        for id, reason in reasons.items():
            fail(id, reason.why)
        return answers

    def _late(self) -> Unanswered:
        late = Unanswered(f"{self.url}: no answer within {self.timeout:g} s")
        late.late = late.excused = self._abandoned = True
        return late

    def _step(self) -> float:
        """Seconds that one token takes alone, about."""
        return median(self._alone) if self._alone else 0.01

    def _run(self, request: Request, body: dict[str, Any], done: queue.SimpleQueue[Any]) -> None:
        try:
            done.put((request.id, self._read(self._post(body))))
        except Unanswered as error:
            done.put((request.id, error))
        except Exception as error:  # a thread's error must reach who waits for it
            done.put(
                (request.id, Unanswered(f"{self.url}: {type(error).__name__}: {self._masked(str(error))}"))
            )

    def _post(self, body: dict[str, Any]) -> Any:
        """The answer's JSON; a server that is busy is asked again, as late as it wants."""
        for retry in range(_RETRIES + 1):
            try:
                return self._post_once(body)
            except Unanswered as error:
                wait = 0.5 * 2**retry if error.wait is None else error.wait
                if error.status not in _BUSY or retry == _RETRIES or wait > _LONGEST:
                    raise
                self._waited = True
                self._paused_until = max(self._paused_until, time.monotonic() + wait)
                time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _masked(self, text: str) -> str:
        """Somebody else's words on one line, without a secret; masked before they are cut."""
        return one_line(self._mask(text))

    def _mask(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        return text

    def _post_once(self, body: dict[str, Any]) -> Any:
        try:
            with self._client.stream("POST", self._ask_at, json=body) as came:
                data = bytearray()
                for part in came.iter_bytes():
                    data += part
                    if len(data) > _MOST:
                        raise Unanswered(f"{self.url}: the answer is longer than {_MOST >> 20} MiB")
        except self._errors as error:
            if "Timeout" in type(error).__name__:
                raise self._late() from None
            words = self._masked(str(error)) or type(error).__name__
            lost = Unanswered(f"{self.url}: can't be reached or broke off: {words}")
            lost.excused = True
            raise lost from None
        text = data.decode(errors="replace")
        if came.status_code != 200:
            why = (
                _sent_on(came.headers["location"])
                if came.has_redirect_location
                else _message(self._mask(text))
            )
            why = self._mask(why)
            key = "; put a key into TOOLKIT_API_KEY" if came.status_code in (401, 403) else ""
            failed = Unanswered(f"{self.url}: HTTP {came.status_code}: {why}{key}")
            failed.status = came.status_code
            failed.excused = came.status_code == 429 or came.status_code >= 500
            failed.wait = _seconds(came.headers.get("retry-after"))
            raise failed
        try:
            return json.loads(text)
        except ValueError:
            raise Unanswered(f"{self.url}: answers, but not with JSON: {self._masked(text)}") from None

    def _body(self, request: Request) -> dict[str, Any]:
        default = Request("x")
        for name in (*_CANT, "tokens" if self.chat else "messages"):
            if getattr(request, name) != getattr(default, name):
                raise ValueError(f"{name} for request {show(request.id)}: {self.path} has no such field")
        body: dict[str, Any] = {
            "prompt": list(request.tokens) if request.tokens is not None else request.prompt
        }
        if self.chat:
            alone = [{"role": "user", "content": request.prompt}]
            body = {"messages": [dict(m) for m in request.messages] if request.messages else alone}
        body |= {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": False,
        }
        body |= {name: getattr(request, name) for name in _OURS
                 if getattr(request, name) != getattr(default, name)}  # fmt: skip
        if request.seeded:
            body["seed"] = request.seed
        if request.n > 1:
            body["n"] = request.n
        if request.stop:
            body["stop"] = list(request.stop)
        if request.logit_bias:
            body["logit_bias"] = {str(token): max(bias, -100.0) for token, bias in request.logit_bias}
        if self._logprobs[0] is not None:
            body["logprobs"] = self._logprobs[0]
        if "stream" in self._shape:
            del body["stream"]
        if "max_tokens" in self._shape:
            body["max_completion_tokens"] = body.pop("max_tokens")
        return body | self._extra

    def _read(self, came: Any) -> dict[int, Answer]:
        try:
            read = {int(choice.get("index", place)): self._answer(choice)
                    for place, choice in enumerate(came["choices"])}  # fmt: skip
        except (KeyError, TypeError, AttributeError, ValueError):
            read = {}
        if not read:
            said = self._masked(json.dumps(came, ensure_ascii=False))
            raise Unanswered(f"{self.url}: the answer has no completions in it: {said}")
        return read

    def _answer(self, choice: dict[str, Any]) -> Answer:
        text = (choice["message"].get("content") if self.chat else choice["text"]) or ""
        if self.chat and not text:
            text = _unspoken(choice["message"])
        told = choice.get("logprobs") or {}
        if not isinstance(text, str):
            raise TypeError("text: must be text")
        text = self._mask(text)
        if told.get("tokens"):  # OpenAI's own form
            return Answer(tuple(told["tokens"]), text, tuple(told.get("token_logprobs") or ()))
        if told.get("content"):  # the form of chats, which mlx-lm's server uses
            steps = told["content"]
            tokens = tuple(step.get("id", step.get("token")) for step in steps)
            if None not in tokens:
                return Answer(tokens, text, tuple(step.get("logprob") for step in steps))
        if text:
            self.unit = "character"
        else:
            self._empty = True
        return Answer(tuple(text), text)

    def notes(self) -> list[str]:
        told = ["A server makes its batches by timing: what it ran one by one was not put to the test."]
        # One after the other takes as long as all together; a batch takes little longer than one.
        if self._alone and self._together and median(self._together) > 0.75 * median(self._alone):
            told.append("Seeded requests sent together took as long as one after the other: these times "
                        "don't show that it batches, nor that it doesn't.")  # fmt: skip
        if self._waited:
            told.append("It was busy (HTTP 429 or 503) and some requests were sent again, so not every batch "
                        "went out together.")  # fmt: skip
        if self._empty:
            told.append("Some answers were empty: no text, no reasoning, no tool call. Two of those are not "
                        "compared.")  # fmt: skip
        if self._abandoned:
            told.append("Some answers did not come in time. The server may have gone on with those requests, "
                        "so what was asked alone after them may not have been alone.")  # fmt: skip
        if self.unit == "character":
            told.append("It reports no tokens, so characters of the text are compared, and no logprobs.")
        return told

    def close(self) -> None:
        self._client.close()


def _sent_on(location: str) -> str:
    """Where a redirect leads, without a password."""
    to = urlsplit(location)
    query = _hidden_values(f"?{to.query}")[1:] if to.query else ""
    to = to._replace(netloc=to.netloc.rpartition("@")[2], query=query, fragment="")
    return f"it sends to {show(to.geturl())}; ask there"


def _hidden_values(query: str) -> str:
    """A query without its values, which may be keys."""
    if "=" not in query:
        return f"?{_MASK}" if query else ""
    return re.sub(r"=[^&]*", f"={_MASK}", query)


def _seconds(retry_after: str | None) -> float | None:
    """Seconds that a Retry-After asks to wait: a number or a date."""
    if retry_after is None:
        return None
    try:
        if re.fullmatch(r"\s*[0-9]+(\.[0-9]*)?\s*", retry_after):
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _unspoken(message: dict[str, Any]) -> str:
    """What a chat's answer without content consists of: reasoning, or a tool call's arguments."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str) and message[name]:
            return str(message[name])
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return "\n".join(f"{call.get('name', '')}({call.get('arguments', '')})" for call in calls)


def _message(text: str) -> str:
    """A server's own words about an error."""
    try:
        said = json.loads(text)
        error = said.get("error", said.get("detail", said.get("message", text)))
        return one_line(str(error.get("message", error) if isinstance(error, dict) else error))
    except (ValueError, AttributeError):
        return one_line(text)
