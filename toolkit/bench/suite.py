"""Side by side with mlx-lm, in one run: medians of turns taken, ratios, and whether the targets are met."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx

from .. import backend
from ..models.load import load
from . import bits, draws, options, report, rows, workloads
from .measure import Check, Clock, Line, Skipped
from .rows import Job

RUN: dict[str, Callable[[Job], Iterator[Line]]] = {
    "prefill": rows.prefill,
    "decode": rows.decode,
    "rules": rows.rules,
    "trace": rows.trace,
    "draw": draws.draw,
    "installed": rows.as_installed,
    "bits": bits.bits,
    "bits-4bit": bits.four_bits,
}


def run(args: argparse.Namespace) -> int:
    """Run what was asked for, printing each line when it is known.

    Returns
    -------
    int
        1 where a promise of equal bits or tokens is broken, or something failed. A target of speed that is
        missed shows in the table, with a profile: times on a busy machine prove nothing.
    """
    out = sys.stderr if args.json else sys.stdout

    def tell(words: str) -> None:
        print(words, file=out, flush=True)

    clock = Clock(170.0 if args.gpu_suite and args.limit == float("inf") else args.limit)
    job = _job(args, clock)
    tell(report.header(f"{job.model.name}, {job.model.dtype}, {job.rounds} rounds after one that warms"))
    wanted = args.only or (options.GPU_SUITE if args.gpu_suite else options.ALWAYS)
    lines: list[Line] = []
    for name in wanted:
        for line in _lines(name, job):
            lines.append(line)
            tell(report.text(line))
        tell(f"    ({name}: done at {clock.spent:.0f} s)")
        gc.collect()
    if args.json:
        print(
            report.document(
                lines, model=job.model.name, quick=args.quick, rounds=job.rounds, seconds=clock.spent
            )
        )
    failed = any(isinstance(line, Skipped) and line.failed for line in lines)
    broken = any(isinstance(line, Check) and line.met is False for line in lines)
    return int(failed or broken)


def _lines(name: str, job: Job) -> Iterator[Line]:
    """A group's lines; what goes wrong in it is one, so that the others run."""
    if job.clock.left < 10:
        yield Skipped(name, "no time left")
        return
    try:
        yield from RUN[name](job)
    except Exception as error:  # whatever a device or a peer comes up with
        yield Skipped(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", failed=True)


def _job(args: argparse.Namespace, clock: Clock) -> Job:
    gpu = not backend.on_cpu()
    if args.trace and not Path(args.trace).is_file():
        raise ValueError(
            f"--trace {args.trace}: no such file; give prompt lengths as toolkit plan reads them"
        )
    if args.model is None and gpu:
        model = workloads.random_qwen3()
    else:
        model = load(args.model or "smollm2", progress=sys.stderr.isatty())
    mx.random.seed(0)  # for the peers' draws
    return Job(
        model=workloads.endless(model),
        gpu=gpu,
        quick=args.quick,
        rounds=args.rounds or (1 if args.quick else 3),
        budget=args.token_budget or (8192 if gpu else 4096),
        checked=args.requests or (4 if args.quick else 16 if args.gpu_suite else 32),
        trace=Path(args.trace) if args.trace else options.TRACE,
        clock=clock,
    )
