"""Rows: how fast the engine is. Each function makes the lines of one group, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from ..cohorts.read import read_rows
from ..engine.engine import Engine
from ..models.fetch import manifest
from ..models.load import Model, tiny
from ..requests import Request
from . import installed, ours, peers, workloads
from .measure import Clock, Figure, Line, Skipped, medians


@dataclass(frozen=True)
class Job:
    """What is asked for, and the model that it is asked of.

    Attributes
    ----------
    model : Model
        Without end-of-sequence tokens.
    gpu, quick : bool
    rounds : int
    budget : int
        Tokens a step of the prefill.
    checked : int
        Requests of the invariance matrix.
    trace : Path or None
    clock : Clock
    """

    model: Model
    gpu: bool
    quick: bool
    rounds: int
    budget: int
    checked: int
    trace: Path | None
    clock: Clock

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Prompts whose first tokens are timed."""
        counts = workloads.lengths(*(workloads.MIXED if self.gpu else workloads.SHORT))
        return workloads.prompts(counts[:4] if self.quick else counts, self.model.vocab_size)

    @cached_property
    def engines(self) -> dict[bool, Engine]:
        """The engine that is batch-invariant (where that holds here), and one without shape rules."""
        how = {"max_rows": 64, "token_budget": self.budget}
        return {True: Engine(self.model, **how), False: Engine(self.model, invariant=False, **how)}  # type: ignore[arg-type]

    @property
    def note(self) -> str:
        """A word of warning where there is no invariance to pay for."""
        return "" if self.engines[True].invariant else "NOT batch-invariant on this device"

    def batch(self, rows: int, tokens: int) -> list[Request]:
        """Requests that decode together, of 16 to 120 prompt tokens."""
        counts = workloads.lengths(2, 16, 121, rows)
        return ours.requests(workloads.prompts(counts, self.model.vocab_size), 4 if self.quick else tokens)


def prefill(job: Job) -> Iterator[Line]:
    """All first tokens: against mlx-lm's generator, and on a GPU against the bare layers."""
    total = sum(map(len, job.prompts))
    batch = ours.requests(job.prompts, 1)
    sides: dict[str, Callable[[], float]] = {"ours": lambda: ours.whole(job.engines[True], batch)}
    for size in (8, 32) if job.gpu else (8,):
        name = f"BatchGenerator, prefill_batch_size {size}"
        sides[name] = partial(peers.first_tokens, job.model, job.prompts, size)
    rows, length = (2, 16) if job.quick else (32, 512)
    bare = f"backbone on [{rows}, {length}]"
    if job.gpu:
        sides[bare] = lambda: peers.backbone(job.model, rows, length)
    taken = medians(sides, job.rounds)
    fastest = min((s for s in sides if s.startswith("Batch")), key=lambda s: taken[s])
    work = f"{len(batch)} prompts, {total:,} tokens, to all first tokens"
    found = [Figure("prefill", work, taken["ours"], taken[fastest], fastest, total, "tokens/s",
                    8.0 if job.gpu else 1.8, note=job.note)]  # fmt: skip
    if job.gpu:
        rate = rows * length / taken[bare]
        found.append(
            Figure("prefill", work, taken["ours"], total / rate, bare, total, "tokens/s", 0.8, note=job.note)
        )
    yield from _explained(found, job.engines[True], batch)


def decode(job: Job) -> Iterator[Line]:
    """Many rows decoding, keyed and invariant."""
    rows, tokens = (32, 128) if job.gpu else (16, 64)
    batch = job.batch(rows, tokens)
    prompts, tokens = [list(r.tokens or ()) for r in batch], batch[0].max_tokens
    sides = {
        "ours": lambda: ours.decode(job.engines[True], batch),
        "peer": lambda: peers.decode(job.model, prompts, tokens),
    }
    taken = medians(sides, job.rounds)
    work, goal = f"{rows} rows of 16-120 tokens decoding {tokens}, keyed", 2.0 if job.gpu else 0.9
    found = Figure("decode", work, taken["ours"], taken["peer"], "BatchGenerator, greedy", tokens - 1,
                   "ms/step", goal, note=job.note)  # fmt: skip
    yield from _explained([found], job.engines[True], batch)


def rules(job: Job) -> Iterator[Line]:
    """What batch invariance costs: shape rules on against off."""
    if not job.engines[True].invariant:
        yield Skipped(
            "rules", f"{job.model.name} is not batch-invariant on this device, so there is no price"
        )
        return
    batch = ours.requests(job.prompts, 1)
    total = sum(map(len, job.prompts))
    taken = _on_and_off(job, ours.whole, batch)
    work = f"{len(batch)} prompts, {total:,} tokens, to all first tokens"
    found = Figure("rules", work, taken[True], taken[False], "rules off", total, "tokens/s", 0.97)
    yield from _explained([found], job.engines[True], batch)
    goals: Mapping[int, float | None] = {8: 0.97, 32: 0.97, 1: None} if job.gpu else {8: 0.9, 16: 0.9, 1: 0.6}
    for rows, goal in goals.items():
        if job.clock.left < 15:
            yield Skipped("rules", f"no time left for decode of {rows}")
            continue
        batch = job.batch(rows, 64 if job.gpu else 48)
        tokens = batch[0].max_tokens
        taken = _on_and_off(job, ours.decode, batch)
        work = f"{rows} row{'s' * (rows > 1)} decoding {tokens} tokens"
        found = Figure("rules", work, taken[True], taken[False], "rules off", tokens - 1, "ms/step", goal)
        yield from _explained([found], job.engines[True], batch)


def _on_and_off(
    job: Job, work: Callable[[Engine, Sequence[Request]], float], batch: Sequence[Request]
) -> dict[bool, float]:
    return medians({on: partial(work, job.engines[on], batch) for on in (True, False)}, job.rounds)


def trace(job: Job) -> Iterator[Line]:
    """Requests of a public trace on the tiny model, against padded cohorts of 8, first come first served."""
    if job.trace is None or not job.trace.exists():
        yield Skipped("trace", "no trace of prompt lengths here; name one with --trace FILE")
        return
    rows = read_rows(str(job.trace))[: 40 if job.quick else 1000]
    model = workloads.endless(tiny())
    prompts = workloads.prompts([max(1, row.length // 8) for row in rows], model.vocab_size)
    batch, total = ours.requests(prompts, 1), sum(map(len, prompts))
    packed = Engine(model)
    padded = Engine(model, forward="padded", planner="runs", max_rows=8, token_budget=0)
    sides = {name: partial(ours.whole, e, batch) for name, e in (("packed", packed), ("padded", padded))}
    taken = medians(sides, min(job.rounds, 2))
    work = f"{len(batch):,} requests of the trace, lengths / 8 ({total:,} tokens), tiny model"
    found = Figure("trace", work, taken["packed"], taken["padded"], "FIFO padded cohorts of 8", total,
                   "tokens/s", 2.0)  # fmt: skip
    yield from _explained([found], packed, batch)


def as_installed(job: Job) -> Iterator[Line]:
    """All first tokens against mlx-lm as it comes from the package index, in a process of its own."""
    if job.gpu:
        yield Skipped("installed", "on a GPU, mlx-lm as installed is what all other lines compare with")
        return
    known = manifest().get(job.model.name)
    if known is None or not known.path.exists():
        yield Skipped("installed", f"needs a fetched model, such as smollm2; {job.model.name} is none")
        return
    some = installed.subset(job.prompts)
    few, total = sum(map(len, some)), sum(map(len, job.prompts))
    batch = ours.requests(job.prompts, 1)
    taken = medians({"ours": lambda: ours.whole(job.engines[True], batch)}, job.rounds)["ours"]
    peer = installed.first_tokens(known.path, some)
    work = f"{len(batch)} prompts, {total:,} tokens, to all first tokens"
    note = f"the peer ran {len(some)} of them once ({few} tokens, {peer:.0f} s); compared by rate"
    yield Figure("installed", work, taken, peer * total / few, "BatchGenerator, no BLAS bound", total,
                 "tokens/s", 25.0, note=note)  # fmt: skip


def _explained(found: Sequence[Figure], engine: Engine, batch: Sequence[Request]) -> Iterator[Figure]:
    """Figures, with a profile of our side where a target was missed."""
    where = None
    for figure in found:
        if figure.met is False:
            where = where or ours.profile(engine, batch, decoding=batch[0].max_tokens > 1)
            figure = Figure(**{**figure.__dict__, "where": where})
        yield figure
