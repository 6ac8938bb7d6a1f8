"""Servers for audits, real ones on a free port: a batching one over `tk.generate`, and canned answers."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import toolkit as tk

FEW = {"trials": 2, "tokens": 5}
ONCE = {"trials": 1, "tokens": 5}


def broken(found):
    return {check.name for check in found.checks if check.verdict == "broken"}


def causes(found):
    return [cause.name for cause in found.diagnosis]


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
