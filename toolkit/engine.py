"""Engine: takes requests, runs them in steps, gives completions. The one object here that changes.

A row's way: `submit` checks its request and queues it; `_admit` takes it from the queue into a cohort; `_run`
takes the cohort through begin_prefill, the forward, and finish_prefill or decode; `_collect` reads what was
drawn, and `_finish` lets the row go. Every step of that way is an event in `trace`.
"""

from __future__ import annotations

import secrets
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import mlx.core as mx
from tqdm.auto import tqdm

from . import backend, cohorts, policies, requests
from .forward import Span, build
from .forward.prefix import PrefixCache
from .live import Live
from .models import Model
from .requests import PRIORITIES, Request
from .results import Completion, Results
from .sampling import Drawn
from .trace import Trace

PLANNERS = cohorts.STRATEGIES


@dataclass(frozen=True)
class _Work:
    """A cohort to run: `chunks[i]` tokens of `rows[i]`."""

    kind: str
    rows: tuple[Live, ...]
    chunks: tuple[int, ...]


class Engine:
    """Runs requests in batches, a step at a time.

    Parameters
    ----------
    model : Model
    policy : {"keyed", "global", "reseed", "isolate"}
    forward : {"packed", "padded", "sequential"}
    planner : {"packed", "by-length", "runs"}, optional
        Default: "packed" for the packed forward, "runs" for the others.
    invariant : {"auto", True, False}
        Whether logits must not depend on a row's company, to the bit. True refuses where that was not measured
        to hold; "auto" warns and goes on.
    max_rows : int
        Rows that are in the batch at one time.
    token_budget : int
        Tokens that one step computes: padded area of a padded cohort, span tokens of a packed one. 0 is no cap.
    prefix_cache : int
        Bytes of prompt prefixes to keep for later requests; 0 keeps none.
    pipeline : bool, optional
        Launch a decode step before the last one's tokens are read; default on a GPU.

    Attributes
    ----------
    trace : Trace
    """

    def __init__(self, model: Model, policy: str = "keyed", forward: str = "packed", planner: str | None = None,
                 invariant: bool | str = "auto", max_rows: int = 32, token_budget: int = 4096,
                 prefix_cache: int = 0, pipeline: bool | None = None):
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: must be at least 1; the rows in the batch at one time")
        if token_budget < 0:
            raise ValueError(f"token_budget={token_budget}: must be at least 0; 0 is no cap")
        if planner is not None and planner not in PLANNERS:
            raise ValueError(f"planner={planner!r}: must be one of {', '.join(PLANNERS)}")
        self.model = model
        self.policy = policies.get(policy)
        self.forward, self.invariant = build(model, forward, invariant)
        self.planner = planner or ("packed" if self.forward.name == "packed" else "runs")
        if self.planner == "packed" and self.forward.name != "packed":
            raise ValueError(f'planner="packed" with forward="{self.forward.name}": needs forward="packed"; '
                             'use planner="runs" or "by-length"')
        self.max_rows, self.token_budget = max_rows, token_budget
        self.prefixes = PrefixCache(prefix_cache)
        self.pipeline = not backend.on_cpu() if pipeline is None else pipeline
        self.trace = Trace()
        self.time = 0
        self.queue: list[Live] = []
        self.running: dict[tuple[str, int], Live] = {}
        self._done: list[tuple[int, Completion]] = []  # with the request's place in the order of submission
        self._flight: list[tuple[list[Live], Drawn, list[str]]] = []
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
        id = request.id or f"r{self._submitted}"
        if any(row.id == id for row in (*self.queue, *self.running.values())):
            raise ValueError(f'id="{id}": is in the engine already; give each request an id of its own')
        prompt = requests.check(request, self.model)
        seed = request.seed
        if seed is None and not self.policy.shares:
            seed = secrets.randbits(64) - 2**63
        for choice in range(request.n):
            row = Live(request, id, choice, self._submitted, len(prompt), seed, [*prompt, *request.generated],
                       exclusive=self.policy.exclusive(request))
            self.queue.append(row)
        self._submitted += 1
        return id

    def cancel(self, id: str) -> None:
        """Take a request out; what it generated so far is its result."""
        self._collect()
        for row in self._rows(id):
            self._finish(row, "cancelled")

    def preempt(self, id: str) -> None:
        """Put a running request back at the head of the queue; it goes on later as if nothing had happened."""
        self._collect()
        for row in reversed([r for r in self._rows(id) if r.key in self.running]):
            self._leave(row, "preempt")
            row.kept, row.begun, row.cached = 0, False, 0
            self.queue.insert(0, row)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or unread."""
        return not (self.queue or self.running or self._flight or self._done)

    # Steps

    def step(self) -> list[Completion]:
        """Run one step: new rows' prefill, or chunks of it, and a token of every decoding row.

        Returns
        -------
        list of Completion
            Of the rows that finished. They are handed over: the engine forgets them.
        """
        return [completion for _, completion in self._step()]

    def _step(self) -> list[tuple[int, Completion]]:
        before, self._flight = self._flight, []
        for work in self._plan():
            self._run(work)
        for landed in before:
            self._read(*landed)
        if not self.pipeline or self._needs_reading():
            self._collect()
        self.time += 1
        done, self._done = self._done, []
        return done

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
        rows = (*self.queue, *self.running.values())
        bar = tqdm(total=sum(row.request.max_tokens for row in rows), unit="token", desc="generating",
                   disable=not progress, leave=False)
        with bar:
            try:
                while not self.idle:
                    done += self._step()
                    bar.n = sum(len(c.tokens) for _, c in done) + sum(len(r.generated) for r in self.running.values())
                    bar.refresh()
            except KeyboardInterrupt:
                warnings.warn("interrupted: unfinished requests are marked cancelled", stacklevel=2)
                for id in {row.id for row in (*self.queue, *self.running.values())}:
                    self.cancel(id)
                done += self._done
                self._done = []
        return Results(c for _, c in sorted(done, key=lambda pair: (pair[0], pair[1].choice)))

    # Planning

    def _plan(self) -> list[_Work]:
        alone = next((row for row in self.running.values() if row.exclusive), None)
        if alone is None and len(self.running) < self.max_rows:
            alone = next((row for row in self._arrived()[:1] if row.exclusive), None)
            if alone is not None:
                self._enter(alone)
        if alone is not None:  # the others wait, so that nothing draws between its seeding and its last token
            return [] if alone.full else [_Work("sequential", (alone,), (alone.remainder,))]
        return self._admit_chunks() if self.planner == "packed" else self._admit_cohorts()

    def _arrived(self) -> list[Live]:
        """The queue in the order in which it is served: by priority, first come first served within one."""
        here = [row for row in self.queue if row.request.arrival <= self.time]
        return sorted(here, key=lambda row: PRIORITIES.index(row.priority))

    def _admit_chunks(self) -> list[_Work]:
        """One packed cohort: a token of each decoding row, then prefill in chunks, as far as the budget goes."""
        decoding = [row for row in self.running.values() if row.decoding and not row.full]
        chunks = {row: 1 for row in decoding}
        left = (self.token_budget or sys.maxsize) - len(decoding)
        waiting = [row for row in self.running.values() if not row.drawn]
        for row in [*waiting, *self._arrived()]:
            new = row.key not in self.running
            if left <= 0 or row.exclusive or (new and len(self.running) >= self.max_rows):
                break
            if new:
                self._enter(row)
            if row.full:  # resumed with all it may generate
                continue
            chunks[row] = min(row.remainder, left)
            left -= chunks[row]
        return [_Work("packed", tuple(chunks), tuple(chunks.values()))] if chunks else []

    def _admit_cohorts(self) -> list[_Work]:
        """Cohorts of whole prompts out of the next window, then a token of each decoding row."""
        decoding = tuple(row for row in self.running.values() if row.decoding and not row.full)
        room = self.max_rows - len(self.running)
        window, _ = cohorts.drain_window(self._arrived(), room, self.token_budget) if room > 0 else ([], [])
        window = list(takewhile(lambda row: not row.exclusive, window))
        for row in window:
            self._enter(row)
        by_id = {f"{row.id}/{row.choice}": row for row in window if not row.full}
        can_batch, can_pad = self.forward.can_batch, self.forward.can_pad
        planned = cohorts.plan_cohorts(
            [row.plan(row.cached) for row in by_id.values()], self.planner, can_batch=can_batch, can_pad=can_pad,
            max_rows=self.max_rows, token_budget=self.token_budget)
        works = []
        for cohort in planned:
            rows = tuple(by_id[r.id] for r in cohort.rows)
            works.append(_Work(cohort.kind, rows, tuple(row.remainder for row in rows)))
        if decoding:
            works.append(_Work("decode", decoding, (1,) * len(decoding)))
        return works

    def _enter(self, row: Live) -> None:
        """Move a row from the queue into the batch, adopting what is cached of its prefix."""
        self.queue.remove(row)
        self.running[row.key] = row
        self._event(row, "admit", "admit")
        if row.full:
            self._finish(row, "length")
            return
        wanted = row.request.cached
        if self.prefixes.limit and self.forward.name == "packed":
            length, pairs = self.prefixes.find(row.tokens, len(row.tokens) - 1)
            if length > wanted:
                self.forward.write(row.key, pairs, length)
                row.kept = row.cached = length
                return
        if wanted:
            mx.eval(self.forward.run([Span(row.key, 0, row.tokens[:wanted], sample=False)]), self.forward.state())
            row.kept = row.cached = wanted
            self._event(row, "admit", "forward", shape=f"prefix of {wanted} tokens")

    # Running

    def _run(self, work: _Work) -> None:
        """Take one cohort through prefill or decode; a sequential one row by row."""
        if work.kind != "decode" and any(not row.begun for row in work.rows):
            for place, row in enumerate(row for row in work.rows if not row.begun):
                row.cohort, row.kind, row.place = self._cohorts, work.kind, place
            self._cohorts += 1
        if work.kind == "sequential":
            for row, chunk in zip(work.rows, work.chunks, strict=True):
                self._pass([row], [chunk])
        else:
            self._pass(work.rows, work.chunks)

    def _pass(self, rows: Sequence[Live], chunks: Sequence[int]) -> None:
        """begin_prefill for every row, one forward, finish_prefill or decode: the order that the bug lives in."""
        for row in rows:
            if not row.begun:
                row.begun = True
                if self.policy.begin_prefill(row.draw()):
                    self._event(row, "begin_prefill", "seed", seed=row.seed)
        spans = [self._span(row, chunk) for row, chunk in zip(rows, chunks, strict=True)]
        carry = self._carry
        logits = self.forward.run(spans, carry if any(s.source is not None for s in spans) else None)
        self._trace_forward(rows, spans)
        for row, span in zip(rows, spans, strict=True):
            row.kept = span.stop
        self._draw([row for row, span in zip(rows, spans, strict=True) if span.sample], logits)

    _carry: mx.array | None = None

    def _span(self, row: Live, chunk: int) -> Span:
        last = row.kept + chunk == row.issued
        if row.source is not None:
            return Span(row.key, row.kept, (), source=row.source)
        return Span(row.key, row.kept, row.tokens[row.kept : row.kept + chunk], sample=last)

    def _draw(self, rows: list[Live], logits: mx.array) -> None:
        """Draw the rows' next tokens: a first token in finish_prefill, the others together in decode."""
        if not rows:
            mx.async_eval(self.forward.state())
            return
        decoding = [row for row in rows if row.drawn]
        draws = [row.draw() for row in rows]
        if not self.policy.shares:  # nothing is shared, so nothing has to wait its turn
            self._launch(rows, self.policy.decode(logits, draws))
            return
        for i, row in enumerate(rows):
            if not row.drawn:
                drawn, seeded = self.policy.finish_prefill(logits[i : i + 1], draws[i])
                mx.eval(drawn.tokens, mx.random.state)
                if seeded:
                    self._event(row, "finish_prefill", "seed", seed=row.seed)
                self._launch([row], drawn)
                self._collect()
        later = [i for i, row in enumerate(rows) if row in decoding]
        if later:
            index = mx.array(later)
            self._launch([rows[i] for i in later], self.policy.decode(logits[index], [draws[i] for i in later]))
            self._collect()

    def _launch(self, rows: list[Live], drawn: Drawn) -> None:
        mx.async_eval(drawn.tokens, drawn.logprobs, drawn.margins, drawn.max_drift, drawn.bad, self.forward.state())
        self._carry = drawn.tokens
        phases = ["decode" if row.drawn else "finish_prefill" for row in rows]
        for i, row in enumerate(rows):
            row.drawn, row.source = True, i
            row.issued += 1
        self._flight.append((rows, drawn, phases))

    # Reading

    def _collect(self) -> None:
        """Read every draw that is still on the device."""
        flight, self._flight = self._flight, []
        for landed in flight:
            self._read(*landed)

    def _read(self, rows: list[Live], drawn: Drawn, phases: list[str]) -> None:
        tokens, bad = drawn.tokens.tolist(), drawn.bad.tolist()
        columns = [drawn.logprobs.tolist(), drawn.margins.tolist(), drawn.max_drift.tolist()]
        tops = _alternatives(rows, drawn)
        newest = {id(row) for later, _, _ in self._flight for row in later}
        for i, row in enumerate(rows):
            if row.key not in self.running or self.running[row.key] is not row:
                continue  # it ended while this draw was on its way
            if id(row) not in newest:
                row.source = None
            if bad[i]:
                self._finish(row, "error", error=f'request "{row.id}", position {len(row.tokens)}: no token can be '
                             "drawn: its logits are NaN, or everything is excluded")
                continue
            row.tokens.append(tokens[i])
            for values, column in zip((row.logprobs, row.margins, row.max_drift), columns, strict=True):
                values.append(column[i])
            row.top.append(tops[i])
            self._event(row, phases[i], "draw", seed=row.seed, position=len(row.tokens) - 1, token=tokens[i],
                        text=self.model.token_text(tokens[i]))
            self._check_end(row)

    def _check_end(self, row: Live) -> None:
        token = row.tokens[-1]
        if token in self.model.eos_ids:
            row.tokens.pop()
            self._finish(row, "eos")
        elif (stop := self._stop(row)) is not None:
            self._finish(row, "stop", stop=stop)
        elif len(row.tokens) - row.prompt >= row.request.max_tokens:
            self._finish(row, "length")

    def _stop(self, row: Live) -> int | None:
        """Where in the row's text the first stop string begins."""
        if not row.request.stop:
            return None
        text = self.model.decode(row.generated)
        found = [at for s in row.request.stop if (at := text.find(s)) >= 0]
        return min(found, default=None)

    def _needs_reading(self) -> bool:
        """Whether a row in flight must know its last token before the next step."""
        return any(_looks_back(row.request) or row.full for rows, _, _ in self._flight for row in rows)

    # Leaving

    def _finish(self, row: Live, reason: str, *, stop: int | None = None, error: str | None = None) -> None:
        if self.prefixes.limit and row.key in self.running and self.forward.name == "packed" and reason != "error":
            kept = min(row.kept, len(row.tokens))
            if kept:
                self.prefixes.add(row.tokens[:kept], self.forward.read(row.key, kept))
        self._leave(row, "cancel" if reason == "cancelled" else "finish")
        completion = row.completion(
            self.model, reason, stop=stop, error=error, policy=self.policy.name, forward=self.forward.name,
            invariant=self.invariant)
        self._done.append((row.order, completion))

    def _leave(self, row: Live, event: str) -> None:
        self._event(row, "leave", event)
        row.source = None
        if row.key in self.running:
            del self.running[row.key]
            self.forward.release(row.key)
        else:
            self.queue.remove(row)

    def _rows(self, id: str) -> list[Live]:
        rows = [row for row in (*self.running.values(), *self.queue) if row.id == id]
        if not rows:
            raise ValueError(f'id="{id}": no such request in the engine; it may have finished')
        return rows

    # Trace

    def _event(self, row: Live, phase: str, event: str, **values: object) -> None:
        state = policies.generator_state() if self.policy.shares and event in ("seed", "draw") else ""
        self.trace.add(step=self.time, phase=phase, event=event, row=row.id, choice=row.choice, cohort=row.cohort,
                       cohort_kind=row.kind, state=state, **values)

    def _trace_forward(self, rows: Sequence[Live], spans: Sequence[Span]) -> None:
        names = " ".join(row.id for row in rows)
        phase = "decode" if all(row.drawn for row in rows) else "forward"
        self.trace.add(step=self.time, phase=phase, event="forward", row=names, cohort=rows[0].cohort,
                       cohort_kind=rows[0].kind, shape=f"{len(spans)} spans, {sum(s.count for s in spans)} tokens")


def generate(model: Model, batch: Sequence[Request], *, policy: str = "keyed", forward: str = "packed",
             planner: str | None = None, invariant: bool | str = "auto", max_rows: int = 32, token_budget: int = 4096,
             prefix_cache: int = 0, progress: bool = False) -> Results:
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
    engine = Engine(model, policy, forward, planner, invariant, max_rows, token_budget, prefix_cache)
    refused: dict[int, Completion] = {}
    ids = []
    for i, request in enumerate(batch):
        if not request.id:
            request = request.replace(id=f"r{i}")
        ids.append(request.id)
        try:
            engine.submit(request)
        except ValueError as error:
            refused[i] = Completion(id=request.id, finish_reason="error", error=str(error), seed=request.seed,
                                    policy=policy, forward=forward)
    done = engine.run(progress=progress)
    by_id: dict[str, list[Completion]] = {}
    for completion in done:
        by_id.setdefault(completion.id, []).append(completion)
    return Results(c for i, id in enumerate(ids) for c in ([refused[i]] if i in refused else by_id[id]))


def _looks_back(request: Request) -> bool:
    """Whether drawing the next token needs the last one on the host."""
    return bool(request.processors or request.repetition_penalty != 1 or request.presence_penalty
                or request.frequency_penalty or request.stop)


def _alternatives(rows: Sequence[Live], drawn: Drawn) -> list[tuple[tuple[int, float], ...]]:
    """Each row's most likely tokens, as many as its request asked for."""
    if drawn.top is None:
        return [()] * len(rows)
    ids, logprobs = (a.tolist() for a in drawn.top)
    return [tuple(zip(i, p, strict=True))[: row.request.logprobs] for row, i, p in zip(rows, ids, logprobs, strict=True)]
