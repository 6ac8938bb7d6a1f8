"""Engine: takes requests, runs them in steps, gives completions. The one object here that changes.

A row's way: `submit` checks its request and queues it; `_enter` moves it from the queue into the batch;
`_pass` takes its cohort through begin_prefill, the forward, and finish_prefill or decode; `_read` reads what
was drawn, and `_finish` lets the row go. Every step of that way is an event in `trace`.
"""

from __future__ import annotations

import secrets
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tqdm.auto import tqdm

from .. import backend
from ..fields import show
from ..forward.packed import PackedForward
from ..forward.prefix_cache import PrefixCache
from ..forward.spans import Span
from ..invariance.build import build
from ..models.load import Model
from ..requests import Request, named
from ..results import Completion, Results
from ..sampling import Drawn
from . import policies, scheduler, transfer
from .admission import check
from .row_state import Live, alternatives
from .scheduler import Work
from .stop_strings import Watch
from .trace import Trace
from .waiting_queue import Waiting


@dataclass(frozen=True)
class _Flight:
    """A draw that has been launched and not read; `phases` say which rows got their first token."""

    rows: Sequence[Live]
    drawn: Drawn
    phases: Sequence[str]


class Engine:
    """Runs requests in batches, a step at a time. To be used from one thread.

    Parameters
    ----------
    model : Model
    policy : {"keyed", "global", "reseed", "isolate"}
    forward : {"packed", "padded", "sequential"}
    planner : {"packed", "by-length", "runs"}, optional
        Default: "packed" for the packed forward, "runs" for the others.
    invariant : {"auto", True, False}
        Whether logits must not depend on a row's company, to the bit. True refuses where that was not
        measured to hold; "auto" warns and goes on.
    max_rows : int
        Rows that are in the batch at one time.
    token_budget : int
        Tokens that one step computes: padded area of a padded cohort, span tokens of a packed one. 0: no cap.
    prefix_cache : int
        Bytes of prefixes to keep for later requests, with the packed forward; 0 keeps none.
    pipeline : bool, optional
        Launch a packed step before the last one's tokens are read; default on a GPU. Results are the same, a
        step later. Without effect under a policy that shares a generator.

    Attributes
    ----------
    trace : Trace
    """

    def __init__(
        self,
        model: Model,
        policy: str = "keyed",
        forward: str = "packed",
        planner: str | None = None,
        invariant: bool | str = "auto",
        max_rows: int = 32,
        token_budget: int = 4096,
        prefix_cache: int = 0,
        pipeline: bool | None = None,
    ):
        scheduler.check(planner, max_rows, token_budget, prefix_cache, pipeline)
        self.model = model
        self.policy = policies.get(policy)
        self.prefixes = PrefixCache(prefix_cache)
        self.forward, self.invariant = build(model, forward, invariant)
        self.planner = scheduler.planner_for(self.forward, planner, prefix_cache)
        self.max_rows, self.token_budget = max_rows, token_budget
        pipeline = not backend.on_cpu() if pipeline is None else pipeline
        self.pipeline = pipeline and self.planner == "packed" and not self.policy.shares
        self.trace = Trace(model.token_text)
        self.time = 0
        self.queue = Waiting()
        self.running: dict[tuple[str, int], Live] = {}
        self._ids: Counter[str] = Counter()  # rows in the engine, by request
        self._flights: deque[_Flight] = deque()
        self._carry: mx.array | None = None  # the newest flight's tokens
        self._done: list[tuple[int, Completion]] = []  # with the request's place in the order of submission
        self._places: list[int] = []  # in that order, of what the last step handed out
        self._submitted = self._cohorts = 0

    # From request to queue

    def submit(self, request: Request) -> str:
        """Queue a request, all its choices.

        Returns
        -------
        str
            Its id: the request's own, or "r0", "r1", ... where it has none.

        Raises
        ------
        ValueError
            One line, before anything runs: what the model can't take, or an id that is in the engine already.
        """
        if not isinstance(request, Request):
            raise ValueError(
                f"request={show(request)}: must be a Request; of a prompt alone, Request(prompt)"
            )
        number = self._submitted
        id = request.id or next(f"r{n}" for n in range(number, sys.maxsize) if f"r{n}" not in self._ids)
        if id in self._ids:
            raise ValueError(f"id={show(id)}: is in the engine already; give each request an id of its own")
        prompt = check(request, self.model)
        seed = request.seed
        if seed is None and not self.policy.shares:
            seed = secrets.randbits(64) - 2**63
        for choice in range(request.n):
            tokens = [*prompt, *request.generated]
            self._add(Live(request, id, choice, number, len(prompt), seed, tokens))
        self._submitted += 1
        return id

    def _add(self, row: Live) -> None:
        row.exclusive = self.policy.exclusive(row.request)
        if row.request.stop:
            row.watch = Watch(self.model.decode, row.request.stop, row.generated)
        self._ids[row.id] += 1
        self.queue.add(row)

    def cancel(self, id: str) -> None:
        """Take a request out; what it generated so far is its result."""
        for row in self._settled(id):
            self._finish(row, "cancelled")

    def preempt(self, id: str) -> None:
        """Put a running request back at the head of the queue; it goes on later as if nothing had been.

        Under a policy that shares a generator its further tokens are others than without.
        """
        for row in reversed([row for row in self._settled(id) if row.key in self.running]):
            self._leave(row, "preempt")
            row.kept, row.begun, row.cached = 0, False, 0
            self.queue.put_back(row)
            self._ids[id] += 1

    def export_row(self, id: str, path: str | Path, choice: int = 0) -> None:
        """Move a row, with its keys and values, out of this engine and into a file; see `transfer`."""
        row = next((row for row in self._settled(id) if row.choice == choice), None)
        if row is None:
            raise ValueError(
                f"choice={show(choice)} for request {show(id)}: is not in the engine; it may have finished"
            )
        transfer.write(path, row, self.model, self.forward, self.policy)
        self._leave(row, "export")

    def import_row(self, path: str | Path) -> str:
        """Queue a row that another engine exported; returns its id. It goes on as it would have there."""
        row = transfer.read(path, self.model, self.forward, self.policy)
        if any(other.key == row.key or other.request != row.request for other in self._rows(row.id)):
            raise ValueError(
                f"id={show(row.id)}: is in the engine already; import {path} when it has finished"
            )
        row.order = self._submitted
        self._submitted += 1
        self._add(row)
        self._event(row, "admit", "import")
        return row.id

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or unread."""
        return not (self.queue or self.running or self._flights or self._done)

    @property
    def _packed(self) -> PackedForward:
        return cast(PackedForward, self.forward)  # no other is asked for what only this one can

    # Steps

    def step(self) -> list[Completion]:
        """Run one step: new rows' prefill, or chunks of it, and a token of every decoding row.

        Returns
        -------
        list of Completion
            Of the rows that finished. They are handed over: the engine forgets them.
        """
        before = len(self._flights)
        for work in self._plan():
            self._run(work)
        waits = self.pipeline and not any(row.looks_back for f in self._flights for row in f.rows)
        self._collect(before if waits else len(self._flights))
        self.time += 1
        done, self._done = self._done, []
        self._places = [place for place, _ in done]
        return [completion for _, completion in done]

    def run(self, progress: bool = False) -> Results:
        """Step until nothing is left.

        Interrupted, it warns, marks the unfinished requests "cancelled" and returns what there is.

        Parameters
        ----------
        progress : bool
            Show a bar of tokens generated.

        Returns
        -------
        Results
            In the order of submission.
        """
        done: list[tuple[int, Completion]] = []
        total = sum(row.request.max_tokens for row in (*self.queue, *self.running.values()))
        with tqdm(total=total, unit="token", desc="generating", disable=not progress, leave=False) as bar:
            try:
                while not self.idle:
                    if not self.running and not any(self.queue.arrived(self.time)):
                        self.time = max(self.time, self.queue.next_arrival or 0)  # nothing to wait for
                    handed = self.step()
                    done += zip(self._places, handed, strict=True)
                    if progress:
                        running = sum(len(row.logprobs) for row in self.running.values())
                        bar.n = sum(len(c.tokens) for _, c in done) + running
                        bar.refresh()
            except KeyboardInterrupt:
                warnings.warn("interrupted: unfinished requests are marked cancelled", stacklevel=2)
                self._collect()
                for id in list(self._ids):
                    self.cancel(id)
                done += self._done
                self._done = []
        return Results(c for _, c in sorted(done, key=lambda pair: (pair[0], pair[1].choice)))

    # Planning

    def _plan(self) -> Sequence[Work]:
        alone = next((row for row in self.running.values() if row.exclusive), None)
        if alone is None and len(self.running) < self.max_rows:
            alone = next((row for row in islice(self.queue.arrived(self.time), 1) if row.exclusive), None)
            if alone is not None and not self._enter(alone):
                return ()
        if alone is not None:  # the others wait, so that nothing draws between its seeding and its last token
            return [Work("sequential", [alone], [alone.remainder])]
        rows, queue = list(self.running.values()), self.queue.arrived(self.time)
        room, budget = self.max_rows - len(rows), self.token_budget
        if self.planner == "packed":
            return scheduler.chunks(rows, queue, self._enter, room, budget)
        return scheduler.whole(
            rows, queue, self._enter, room, budget, self.planner, self.forward, self.max_rows
        )

    def _enter(self, row: Live) -> bool:
        """Move a row from the queue into the batch, adopting what is cached of it; False if it is done."""
        self.queue.remove(row)
        self.running[row.key] = row
        self._event(row, "admit", "admit")
        if row.end:  # resumed after its last token
            self._finish(row, row.end)
            return False
        if row.pairs is not None:  # imported
            self._packed.write(row.key, row.pairs, row.kept)
            row.pairs = None
            return True
        wanted = row.request.cached
        length, pairs = self.prefixes.find(row.tokens, len(row.tokens) - 1)
        if length > wanted:
            self._packed.write(row.key, pairs, length)
            row.kept, row.cached = length, min(length, row.prompt)
        elif wanted:
            prefix = Span(row.key, 0, row.tokens[:wanted], sample=False)
            mx.eval(self.forward.run([prefix]), self.forward.state())
            row.kept = row.cached = wanted
            self._event(row, "admit", "forward", shape=f"prefix of {wanted} tokens")
        return True

    # Running

    def _run(self, work: Work) -> None:
        """Take one cohort through prefill or decode; a sequential one row by row."""
        first = [row for row in work.rows if not (row.begun or row.drawn)]
        for place, row in enumerate(first):
            row.cohort, row.kind, row.place = self._cohorts, work.kind, place
        self._cohorts += bool(first)
        if work.kind == "sequential":
            for row, chunk in zip(work.rows, work.chunks, strict=True):
                self._pass([row], [chunk])
        else:
            self._pass(work.rows, work.chunks)

    def _pass(self, rows: Sequence[Live], chunks: Sequence[int]) -> None:
        """begin_prefill for each row, a forward, then the draws. Under `global` the last seed wins."""
        for row in rows:
            if not row.begun:
                row.begun = True
                if self.policy.begin_prefill(row.draw(whole=True)):
                    self._event(row, "begin_prefill", "seed", seed=row.seed)
        spans = [row.span(chunk) for row, chunk in zip(rows, chunks, strict=True)]
        carried = any(span.source is not None for span in spans)
        logits = self.forward.run(spans, self._carry if carried else None)
        self._event_of_forward(rows, spans)
        for row, span in zip(rows, spans, strict=True):
            row.kept = span.stop
        self._draw([row for row, span in zip(rows, spans, strict=True) if span.sample], logits)

    def _draw(self, rows: Sequence[Live], logits: mx.array) -> None:
        """Draw the rows' next tokens: a first token in finish_prefill, the others together in decode."""
        if not rows:
            mx.async_eval(self.forward.state())
            return
        draws = [row.draw() for row in rows]
        if not self.policy.shares:  # nothing is shared, so nothing has to wait its turn
            self._launch(rows, self.policy.decode(logits, draws))
            return
        later = [i for i, row in enumerate(rows) if row.drawn]
        for i, row in enumerate(rows):
            if not row.drawn:
                drawn, seeded = self.policy.finish_prefill(logits[i : i + 1], draws[i])
                mx.eval(drawn.tokens, mx.random.state)
                if seeded:
                    self._event(row, "finish_prefill", "seed", seed=row.seed)
                self._launch([row], drawn)
                self._collect()
        if later:
            drawn = self.policy.decode(logits[mx.array(later)], [draws[i] for i in later])
            self._launch([rows[i] for i in later], drawn)
            self._collect()

    def _launch(self, rows: Sequence[Live], drawn: Drawn) -> None:
        mx.async_eval(drawn.arrays(), self.forward.state())
        self._carry = drawn.tokens
        self._flights.append(_Flight(rows, drawn, ["decode" if r.drawn else "finish_prefill" for r in rows]))
        for i, row in enumerate(rows):
            row.drawn, row.source = True, i
            row.issued += 1

    # Reading

    def _collect(self, count: int | None = None) -> None:
        """Read the oldest draws that are still on the device, or all of them."""
        for _ in range(len(self._flights) if count is None else count):
            self._read(self._flights.popleft())

    def _read(self, flight: _Flight) -> None:
        drawn, bad = flight.drawn, flight.drawn.bad.tolist()
        columns = (a.tolist() for a in (drawn.tokens, drawn.logprobs, drawn.margins, drawn.max_drift))
        values = zip(*columns, alternatives(flight.rows, drawn), strict=True)
        for i, (row, phase, (token, *rest)) in enumerate(
            zip(flight.rows, flight.phases, values, strict=True)
        ):
            if self.running.get(row.key) is not row:
                continue  # it ended while this draw was on its way
            if bad[i]:
                self._finish(row, "error", error=row.error(drawn.errors.get(i)))
                continue
            self._event(row, phase, "draw", seed=row.seed, position=len(row.tokens), token=token)
            row.take(token, *rest)
            if token in self.model.eos_ids:
                row.tokens.pop()
                self._finish(row, "eos")
            elif row.end:
                self._finish(row, row.end)

    # Leaving

    def _finish(self, row: Live, reason: str, error: str | None = None) -> None:
        self._leave(row, {"cancelled": "cancel", "error": "error"}.get(reason, "finish"))
        how = {"policy": self.policy.name, "forward": self.forward.name, "invariant": self.invariant}
        self._done.append((row.order, row.completion(self.model, reason, error=error, **how)))

    def _leave(self, row: Live, event: str) -> None:
        self._event(row, "leave", "finish" if event == "error" else event)
        row.source = None
        self._ids[row.id] -= 1
        if not self._ids[row.id]:
            del self._ids[row.id]
        if self.running.get(row.key) is not row:
            self.queue.remove(row)
            return
        kept = min(row.kept, len(row.tokens))  # a discarded token may have been run
        if self.prefixes.limit and kept and event != "error":
            self.prefixes.add(row.tokens[:kept], self._packed.read(row.key, kept))
        del self.running[row.key]
        # What it leaves is finite if every token it ran has been looked at.
        unread = any(row in flight.rows for flight in self._flights)
        self.forward.release(row.key, wipe=unread or event != "finish")

    def _rows(self, id: str) -> Iterator[Live]:
        return (row for row in (*self.running.values(), *self.queue) if row.id == id)

    def _settled(self, id: str) -> list[Live]:
        """A request's rows that go on, once every draw has been read."""
        if not isinstance(id, str) or id not in self._ids:
            raise ValueError(f"id={show(id)}: no such request in the engine; it may have finished")
        self._collect()
        return list(self._rows(id))

    # Trace

    def _event(self, row: Live, phase: str, event: str, **what: Any) -> None:
        if self.policy.shares and event in ("seed", "draw"):
            what["state"] = policies.generator_state()
        self.trace.add(self.time, phase, event, row.id, row.choice, row.cohort, row.kind, **what)

    def _event_of_forward(self, rows: Sequence[Live], spans: Sequence[Span]) -> None:
        phase = "decode" if all(row.drawn for row in rows) else "forward"
        shape = f"{len(spans)} spans, {sum(span.count for span in spans)} tokens"
        names = " ".join(row.id for row in rows)
        self.trace.add(self.time, phase, "forward", names, 0, rows[0].cohort, rows[0].kind, shape=shape)


def generate(
    model: Model,
    batch: Sequence[Request],
    *,
    policy: str = "keyed",
    forward: str = "packed",
    planner: str | None = None,
    invariant: bool | str = "auto",
    max_rows: int = 32,
    token_budget: int = 4096,
    prefix_cache: int = 0,
    progress: bool = False,
) -> Results:
    """Run requests together and return their completions.

    Parameters
    ----------
    model : Model
    batch : sequence of Request
    policy, forward, planner, invariant, max_rows, token_budget, prefix_cache
        See `Engine`.
    progress : bool
        Show a bar.

    Returns
    -------
    Results
        One Completion for each request and choice, in order. A request that the model can't take has
        `finish_reason="error"` and one line in `error`; the others run.
    """
    # A generator would be used up by looking at it.
    if not isinstance(batch, Sequence) or not all(isinstance(request, Request) for request in batch):
        raise ValueError(f"batch={show(batch)}: must be a list of Request; a prompt alone is Request(prompt)")
    engine = Engine(model, policy, forward, planner, invariant, max_rows, token_budget, prefix_cache)
    refused: dict[int, list[Completion]] = {}
    batch = named(batch)
    for i, request in enumerate(batch):
        try:
            engine.submit(request)
        except ValueError as error:
            how: dict[str, Any] = {
                "seed": request.seed,
                "policy": policy,
                "forward": forward,
                "error": str(error),
            }
            choices = range(request.n)
            refused[i] = [Completion(id=request.id, choice=c, finish_reason="error", **how) for c in choices]
    done = engine.run(progress=progress)
    by_id: dict[str, list[Completion]] = {}
    for completion in done:
        by_id.setdefault(completion.id, []).append(completion)
    return Results(c for i, r in enumerate(batch) for c in (refused[i] if i in refused else by_id[r.id]))
