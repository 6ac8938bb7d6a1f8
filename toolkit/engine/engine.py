"""Engine: takes requests, runs them in steps, gives completions. The one object here that changes.

A row's way: `submit` checks its request and queues it; `_enter` moves it from the queue into the batch;
`_pass` takes its cohort through begin_prefill, the forward, and finish_prefill or decode; `_read` reads what
was drawn, and `_finish` lets the row go. Every step of that way is an event in `trace`.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import mlx.core as mx
from tqdm.auto import tqdm

from .. import backend
from ..fields import show
from ..forward.packed import PackedForward
from ..forward.patch import detach
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

T = TypeVar("T")
_FORKED = 'the process was forked, where MLX hangs; load the model in the child, or start it by "spawn"'
_NEW = "make a new engine"


@dataclass(frozen=True)
class _Flight:
    """A draw that has been launched and not read; `phases` say which rows got their first token."""

    rows: Sequence[Live]
    drawn: Drawn
    phases: Sequence[str]


@dataclass(frozen=True)
class _Saved:
    """What a call that is undone goes back to."""

    running: list[Live]
    rows: dict[Live, Any]
    queue: Any
    done: list[tuple[int, Completion]]
    time: int
    cohorts: int
    submitted: int
    events: int


class Engine:
    """Runs requests in batches, a step at a time. One thread at a time may call it.

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
        if model.pid != os.getpid():
            raise RuntimeError(f"Engine: {_FORKED}")
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
        self._submitted = self._cohorts = 0
        self._pid = os.getpid()
        self._inside: dict[str, tuple[str, int, FrameType]] = {}  # the call that runs: name, thread, frame
        self._undo: Callable[[], None] | None = None  # of the call that runs, or that ended half done
        self._rows_saved: dict[Live, Any] = {}
        self._broken = ""

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
        self._begin("submit")
        number = self._submitted
        id = request.id or next(f"r{n}" for n in range(number, sys.maxsize) if f"r{n}" not in self._ids)
        if id in self._ids:
            raise ValueError(f"id={show(id)}: is in the engine already; give each request an id of its own")
        prompt = check(request, self.model)
        seed = request.seed
        if seed is None and not self.policy.shares:
            seed = secrets.randbits(64) - 2**63
        whole = [*prompt, *request.generated]
        rows = [
            self._prepared(Live(request, id, choice, number, len(prompt), seed, [*whole]))
            for choice in range(request.n)
        ]
        undo = partial(self._unqueue, rows, number, self.trace.count)
        return self._transact(self._add, rows, undo=undo)

    def _prepared(self, row: Live) -> Live:
        row.exclusive = self.policy.exclusive(row.request)
        self._watch(row)
        return row

    def _watch(self, row: Live) -> None:
        if row.request.stop:
            row.watch = Watch(self.model.decode, row.request.stop, row.generated)

    def _add(self, rows: list[Live]) -> str:
        for row in rows:
            self._ids[row.id] += 1
            self.queue.add(row)
        self._submitted += 1
        return rows[0].id

    def cancel(self, id: str) -> None:
        """Take a request out; what it generated so far is its result."""
        self._begin("cancel")
        self._known(id)
        return self._transact(self._cancel, id)

    def _cancel(self, id: str) -> None:
        for row in self._settled(id):
            self._finish(row, "cancelled")

    def preempt(self, id: str) -> None:
        """Put a running request back at the head of the queue; it goes on later as if nothing had been.

        Under a policy that shares a generator its further tokens are others than without.
        """
        self._begin("preempt")
        self._known(id)
        return self._transact(self._preempt, id)

    def _preempt(self, id: str) -> None:
        for row in reversed([row for row in self._settled(id) if row.key in self.running]):
            self._leave(row, "preempt")
            row.kept, row.begun, row.cached = 0, False, 0
            self.queue.put_back(row)
            self._ids[id] += 1

    def export_row(self, id: str, path: str | Path, choice: int = 0) -> None:
        """Move a row, with its keys and values, out of this engine and into a file; see `transfer`."""
        self._begin("export_row")
        self._known(id)
        row = next((row for row in self._transact(self._settled, id) if row.choice == choice), None)
        if row is None:
            raise ValueError(
                f"choice={show(choice)} for request {show(id)}: is not in the engine; it may have finished"
            )
        transfer.write(path, row, self.model, self.forward, self.policy)
        self._transact(self._leave, row, "export")
        self._inside.clear()

    def import_row(self, path: str | Path) -> str:
        """Queue a row that another engine exported; returns its id. It goes on as it would have there."""
        self._begin("import_row")
        row = transfer.read(path, self.model, self.forward, self.policy)
        if any(other.key == row.key or other.request != row.request for other in self._rows(row.id)):
            raise ValueError(
                f"id={show(row.id)}: is in the engine already; import {path} when it has finished"
            )
        row.order = self._submitted
        undo = partial(self._unqueue, [row], self._submitted, self.trace.count)
        return self._transact(self._import, self._prepared(row), undo=undo)

    def _import(self, row: Live) -> str:
        self._event(row, "admit", "import")
        return self._add([row])

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or unread."""
        return not (self.queue or self.running or self._flights or self._done)

    @property
    def _packed(self) -> PackedForward:
        return cast(PackedForward, self.forward)  # no other is asked for what only this one can

    # Whole or not at all

    def _begin(self, name: str) -> None:
        """Called first by every public method: one line where it can't run; what a call left torn is mended.

        Nothing is released at a call's end, which an interrupt could prevent: a call that is over is told by
        its frame, which is on no stack. A logits processor may submit to its own engine, in the same thread.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(f"Engine.{name}: {_FORKED}")
        mine = (name, threading.get_ident(), sys._getframe(1))
        other = self._inside.setdefault("call", mine)
        if other[2] is not mine[2]:
            if _runs(*other[1:]):
                if name == "submit" and other[1] == mine[1]:
                    return
                raise RuntimeError(
                    f"Engine.{name}: Engine.{other[0]} of this engine runs now; call one after the other, or "
                    "make an engine for each thread"
                )
            self._inside["call"] = mine
        if self._undo is not None:
            self._roll_back()
        if self._broken:
            self._inside.clear()
            raise RuntimeError(f"Engine.{name}: {self._broken}")

    def _transact(self, work: Callable[..., T], *args: Any, undo: Callable[[], None] | None = None) -> T:
        """Do it whole or not at all. Should a second interrupt cut the undoing short, `_begin` does it."""
        outer = self._undo  # of the step whose logits processor submits
        undo = undo or partial(self._restore, self._save())
        try:
            self._undo = undo
            result = work(*args)
            self._undo = outer
            if outer is None:
                self._rows_saved = {}
                if self._inside["call"][0] not in ("run", "export_row"):  # those go on
                    self._inside.clear()
            return result
        except BaseException:
            self._undo = undo
            self._roll_back()
            self._undo = outer
            raise

    def _roll_back(self) -> None:
        assert self._undo is not None
        detach()
        self._undo()
        self._undo = None

    def _save(self) -> _Saved:
        running = list(self.running.values())
        self._rows_saved = {row: row.save() for row in running}  # `_enter` adds those that it takes
        return _Saved(
            running, self._rows_saved, self.queue.save(), list(self._done),
            self.time, self._cohorts, self._submitted, self.trace.count,
        )  # fmt: skip

    def _restore(self, saved: _Saved) -> None:
        """Go back to where a call began, with running rows preempted: they are computed again.

        Where a generator is shared its state can't be had back: the engine is broken.
        """
        self.trace.forget(saved.events)
        self.queue.restore(saved.queue)
        for row, state in saved.rows.items():
            row.restore(state)
            self._watch(row)
        self._flights.clear()
        self._carry, self.running = None, {}
        self.time, self._cohorts, self._submitted = saved.time, saved.cohorts, saved.submitted
        self._done = list(saved.done)
        for row in reversed(saved.running):
            self.queue.put_back(row)
            self._event(row, "leave", "preempt")
        self._ids = Counter(row.id for row in self.queue)
        self.prefixes.mend()
        if reset := getattr(self.policy, "reset", None):
            reset()
        if reset := getattr(self.forward, "reset", None):
            reset()
        else:
            self._broken = f"an exception ended a call, and this forward has no reset(); {_NEW}"
        if self.policy.shares:
            moved = f'the generator of policy="{self.policy.name}" has moved on'
            self._broken = f"an exception ended a call, and {moved}; {_NEW}"

    def _unqueue(self, rows: list[Live], submitted: int, events: int) -> None:
        self.trace.forget(events)
        self.queue.discard(rows)
        self._ids = Counter(row.id for row in (*self.running.values(), *self.queue))
        self._submitted = submitted

    # Steps

    def step(self) -> list[Completion]:
        """Run one step: new rows' prefill, or chunks of it, and a token of every decoding row.

        It happens or it doesn't: an exception or interrupt leaves the engine as it was before, with running
        rows to be computed again from their tokens. Under a policy that shares a generator that can't be, and
        every later call raises RuntimeError.

        Returns
        -------
        list of Completion
            Of the rows that finished. They are handed over: the engine forgets them.

        Raises
        ------
        RuntimeError
            One line: a call of this engine runs in another thread, the process was forked, or an earlier
            exception can't be undone.
        """
        self._begin("step")
        return self._transact(self._step)

    def _step(self) -> list[Completion]:
        self._advance()
        done, self._done = self._done, []
        return [completion for _, completion in done]

    def _advance(self) -> None:
        before = len(self._flights)
        for work in self._plan():
            self._run(work)
        waits = self.pipeline and not any(row.looks_back for f in self._flights for row in f.rows)
        self._collect(before if waits else len(self._flights))
        self.time += 1

    def _advance_to_work(self) -> None:
        if not self.running and not any(self.queue.arrived(self.time)):
            self.time = max(self.time, self.queue.next_arrival or 0)  # nothing to wait for
        self._advance()

    def run(self, progress: bool = False) -> Results:
        """Step until nothing is left.

        Interrupted, it warns, marks the unfinished requests "cancelled" and returns what there is. What has
        finished before another exception comes with the next call.

        Parameters
        ----------
        progress : bool
            Show a bar of tokens generated.

        Returns
        -------
        Results
            In the order of submission.
        """
        interrupted, results = False, None
        while True:
            try:
                if results is None:
                    if interrupted:
                        self._cancel_all()
                    else:
                        self._begin("run")
                        self._until_idle(progress)
                    done = sorted(self._done, key=lambda pair: (pair[0], pair[1].choice))
                    results = Results(completion for _, completion in done)
                if interrupted and any(c.finish_reason == "cancelled" for c in results):
                    warnings.warn("interrupted: unfinished requests are marked cancelled", stacklevel=2)
                self._done = []
                self._inside.clear()
                return results
            except KeyboardInterrupt:
                interrupted = True

    def _until_idle(self, progress: bool) -> None:
        total = sum(row.request.max_tokens for row in (*self.queue, *self.running.values()))
        bar = tqdm(total=total, unit="token", desc="generating", leave=False) if progress else None
        try:
            while self.queue or self.running or self._flights:
                self._transact(self._advance_to_work)
                if bar is not None:
                    running = sum(len(row.logprobs) for row in self.running.values())
                    bar.n = sum(len(c.tokens) for _, c in self._done) + running
                    bar.refresh()
        finally:
            if bar is not None:
                bar.close()

    def _cancel_all(self) -> None:
        if self._undo is not None:
            self._roll_back()
        for id in list(self._ids):
            self._transact(self._cancel, id)
        if hasattr(self.forward, "reset"):
            self._broken = ""  # nothing is left that a shared generator's state could matter to

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
        self._rows_saved.setdefault(row, row.save())
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

    def _known(self, id: str) -> None:
        if not isinstance(id, str) or id not in self._ids:
            raise ValueError(f"id={show(id)}: no such request in the engine; it may have finished")

    def _rows(self, id: str) -> Iterator[Live]:
        return (row for row in (*self.running.values(), *self.queue) if row.id == id)

    def _settled(self, id: str) -> list[Live]:
        """A request's rows that go on, once every draw has been read."""
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


def _runs(thread: int, call: FrameType) -> bool:
    """Whether a call's frame is on its thread's stack."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


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
