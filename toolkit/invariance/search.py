"""Probe: compares bits of a model's own layers, attention and whole forward, to find shapes that are safe.

`search` tries candidates for each rule, cheapest first; `measure` tries given shapes. Both run the model's
kinds of layers on the same lines among other lines (`cancelling_layers`), its attention geometry on the same
queries in other calls (`attention_checks`), and then the model itself on short prompts: alone, in company,
permuted, chunked, decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import mlx.core as mx
import numpy as np

from .. import backend
from ..forward import cuda_linear
from ..forward.packed import PackedForward
from ..forward.shapes import PLAIN, Shapes, round_up
from ..forward.spans import Span
from ..models.load import Model
from .attention_checks import LONGEST, Check, Trial
from .cancelling_layers import Twin, layers_of

TILES = (1, 8, 16, 32, 64, 128, 256, 512)
BLOCKS = (1, 2, 4, 8, 16)
BUCKETS, GPU_BUCKETS = (64, 128, 256), (256, 512)
MOST_SKIPPED = 2
"""Numbers of keys; a rule that had to pass over more is none."""
LENGTHS = (9, 24, 5)
"""Prompts of the whole-model check: short, and together more tokens than a small tile."""
MORE_LENGTHS = (11, 40)
"""Further ones where some weights are in no linear layer (experts), or where they cost nothing."""

CROWD = 509
"""Lines that those under test are among, again and again."""

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """A model as the probe sees it: what it computes, and on how many lines that is worth trying.

    Attributes
    ----------
    body, head : dict of str to Twin
        Of each distinct layer, and of those that give logits.
    trials : list of Trial
        Two per attention geometry.
    slow : bool
        On a CPU only float32 reaches the BLAS; the scalar loops of other types get few lines.
    lengths : tuple of int
        Of the whole-model check's prompts.
    hasty : bool
        The first difference settles a comparison.
    narrow : bool
        This device may have the kernel of `cuda_linear`, and all weights of the body are in layers that it
        takes.
    """

    model: Model
    body: dict[str, Twin]
    head: dict[str, Twin]
    trials: list[Trial]
    slow: bool
    lengths: tuple[int, ...]
    hasty: bool
    narrow: bool

    @classmethod
    def of(cls, model: Model, hasty: bool = False) -> Subject:
        """Look at a model.

        Raises
        ------
        Unpackable
            It can't run packed.
        """
        body, head, elsewhere = layers_of(model)
        cpu = backend.on_cpu()
        quantized = any(hasattr(layer, "bits") for _, layer in model.module.named_modules())
        slow = cpu and (model.dtype != "float32" or quantized)
        bucket = max(BUCKETS if cpu else GPU_BUCKETS)
        longest = max(12 * bucket, min(LONGEST, round_up(model.context or LONGEST, bucket)))
        trials = [Trial(*layer, longest, cancels=what) for layer in PackedForward(model, PLAIN).attending
                  for what in ("values", "scores")]  # fmt: skip
        lengths = LENGTHS + (MORE_LENGTHS if not cpu or (elsewhere and not slow) else ())
        takes = cuda_linear.available() and cuda_linear.covers(model)
        return cls(model, body, head, trials, slow, lengths, hasty, takes)


def search(model: Model) -> tuple[Shapes, tuple[Check, ...]]:
    """The cheapest shapes with which nothing differs, and the checks; the last tried where nothing passes."""
    subject = Subject.of(model, hasty=True)
    tile, linear = _first(TILES, lambda tile: _linears(subject, tile))
    head, output = _first(TILES, lambda head: _heads(subject, head))
    rules = (Shapes(1, 1, block, bucket, skipped(subject, block, bucket))
             for bucket in (BUCKETS if backend.on_cpu() else GPU_BUCKETS) for block in BLOCKS)  # fmt: skip
    rule, attending = _first(rules, lambda rule: _attention(subject, rule))
    # Other layers are seen only by the whole model: where it fails, a larger tile may pass.
    larger = (1,) if any(c.differing for c in linear) else (1, 2, 4)
    small = _small(subject, tile)
    steps = (cuda_linear.MOST, 0) if small and not any(c.differing for c in small) else (0,)
    sizes = (replace(rule, tile=times * tile, head=head, narrow=most) for most in steps for times in larger)
    chosen, whole = _first(sizes, lambda shapes: _whole(subject, shapes))
    return chosen, (*linear, *output, *(small if chosen.narrow else ()), *attending, *whole)


def measure(model: Model, shapes: Shapes) -> tuple[Check, ...]:
    """What these shapes do: to see what fails without a rule."""
    subject = Subject.of(model)
    small = _narrow(subject, shapes.tile) if shapes.narrow and subject.narrow else ()
    return (*_linears(subject, shapes.tile), *_heads(subject, shapes.head), *small,
            *_attention(subject, shapes), *_whole(subject, shapes))  # fmt: skip


def skipped(subject: Subject, block: int, bucket: int) -> tuple[int, ...]:
    """Multiples of the bucket at which some kernel cuts its sums otherwise than at others."""
    return tuple(
        sorted({keys for trial in subject.trials for keys in trial.narrow.skip(Shapes(1, 1, block, bucket))})
    )


def _first(candidates: Iterable[T], measure: Callable[[T], Iterator[Check]]) -> tuple[T, list[Check]]:
    """The first candidate of which nothing differs, or the last."""
    checks: list[Check] = []
    for candidate in candidates:
        checks = []
        for check in measure(candidate):
            checks.append(check)
            if check.differing:
                break
        else:
            break
    return candidate, checks


def _linears(subject: Subject, tile: int) -> Iterator[Check]:
    most = 33 if subject.slow else 1024 if backend.on_cpu() else 8192
    if not subject.body:
        yield Check("linear: none of a kind that could be tried", f"tile {tile}", 1, 1, math.nan)
    for name, twin in subject.body.items():
        yield _lines(subject, f"linear {name}", twin, f"tile {tile}", tile, most)


def _heads(subject: Subject, head: int) -> Iterator[Check]:
    most = 24 if subject.slow else 128 if backend.on_cpu() else 512
    for name, twin in subject.head.items():
        yield _lines(subject, f"head {name}", twin, f"head {head}", head, most)


def _small(subject: Subject, tile: int) -> list[Check]:
    """Checks of narrow steps; none where they don't run. They save time: no reason to refuse a model."""
    try:
        return list(_narrow(subject, tile)) if subject.narrow else []
    except RuntimeError:  # MLX's own, of a device that the kernel isn't for
        return []


def _narrow(subject: Subject, tile: int) -> Iterator[Check]:
    """The kernel of `narrow` against MLX's own, in steps of every size that it takes."""
    rng = np.random.default_rng(0)
    sizes = range(cuda_linear.TILE, cuda_linear.MOST + 1, cuda_linear.TILE)
    count = sum(sizes)
    for name, twin in subject.body.items():
        x, layer = twin.lines(rng, round_up(count, tile)), twin.make()
        own, ours, at = layer(x)[:count], [], 0
        for size in sizes:
            ours += cuda_linear.linear(x[at : at + size], [layer])
            at += size
        apart = mx.abs(mx.concatenate(ours).astype(mx.float32) - own.astype(mx.float32)).max(1)
        shapes = f"tile {cuda_linear.TILE} against {tile}"
        yield Check.of(f"narrow step, linear {name}", shapes, np.array(apart))


def _lines(subject: Subject, what: str, twin: Twin, rule: str, tile: int, most: int) -> Check:
    """The same three lines among others, at every kind of place, in batches of several sizes."""
    rng = np.random.default_rng(0)
    lines, layer = twin.lines(rng, CROWD + 3), twin.make()

    def run(size: int, places: list[int], others: int, first: int = 0) -> np.ndarray:
        which = (others + np.arange(size)) % CROWD
        which[places] = CROWD + (first + np.arange(len(places))) % 3
        out = twin.run(layer, lines[mx.array(which)][:, None])[:, 0]
        return np.array(out[mx.array(places)].astype(mx.float32))

    alone = np.concatenate([run(tile, [0], 0, first) for first in range(3)])
    if not alone.any(1).all():  # it cancels exactly: nothing would be seen
        lines = twin.lines(rng, CROWD + 3, cancel=False)
        alone = np.concatenate([run(tile, [0], 0, first) for first in range(3)])
    some = (n for n in (3 * tile, 24, 33, 100, 200, 257, most // 2, most) if n <= most)
    apart = []
    for size in sorted({round_up(n, tile) for n in (tile, 2 * tile, *some)}):
        places = sorted({0, 1, 2, 3, size // 2, size - 2, size - 1} & set(range(size)))
        apart.append(np.abs(run(size, places, tile) - alone[np.arange(len(places)) % 3]).max(1))
        if subject.hasty and apart[-1].any():
            break
    return Check.of(what, rule, np.concatenate(apart))


def _attention(subject: Subject, rule: Shapes) -> Iterator[Check]:
    for trial in subject.trials:
        if len(rule.skip) > MOST_SKIPPED:
            apart = np.array([trial.narrow.apart(keys, rule) for keys in rule.skip])
            yield Check.of(
                f"attention {trial}: numbers of keys", f"block {rule.block}, bucket {rule.bucket}", apart
            )
        else:
            yield from trial.checks(rule)


def _whole(subject: Subject, shapes: Shapes) -> Iterator[Check]:
    """The model itself: some prompts' last logits in several ways."""
    model, forward = subject.model, PackedForward(subject.model, shapes)
    rng = np.random.default_rng(0)
    lengths = subject.lengths
    if sum(lengths) <= shapes.tile:  # more than one tile, or the check would be about nothing
        lengths += (min(shapes.tile + 8, model.context or shapes.tile + 8),)
    prompts = [rng.integers(0, model.vocab_size, n).tolist() for n in lengths]
    rule = f"tile {shapes.tile}, head {shapes.head}, block {shapes.block}, bucket {shapes.bucket}"
    rule += f", narrow {shapes.narrow}" if shapes.narrow else ""

    def run(order: list[int], cuts: Callable[[int], list[int]]) -> np.ndarray:
        """Their tokens fed in the given pieces, side by side: `[prompts, vocab]`."""
        names = {i: object() for i in order}
        todo = {i: [*cuts(lengths[i]), lengths[i]] for i in order}
        done: dict[int, int] = dict.fromkeys(order, 0)
        out: dict[int, np.ndarray] = {}
        while any(todo.values()):
            spans, now = [], [i for i in order if todo[i]]
            for i in now:
                stop = todo[i].pop(0)
                spans.append(Span(names[i], done[i], prompts[i][done[i] : stop]))
                done[i] = stop
            out |= dict(zip(now, np.array(forward.run(spans).astype(mx.float32)), strict=True))
        for name in names.values():
            forward.release(name)
        return np.stack([out[i] for i in sorted(order)])

    everyone = list(range(len(prompts)))
    alone = np.concatenate([run([i], lambda n: []) for i in everyone])
    ways: dict[str, Callable[[], np.ndarray]] = {
        "in a batch": lambda: run(everyone, lambda n: []),
        "permuted, in chunks": lambda: run(everyone[::-1], lambda n: [2]),
        "decoded": lambda: run(everyone, lambda n: [n - 2, n - 1]),
        "decoded alone": lambda: np.concatenate([run([i], lambda n: [n - 2, n - 1]) for i in everyone]),
    }
    for what, way in ways.items():
        with np.errstate(invalid="ignore"):  # some models blot ids out with infinities
            apart = np.where(alone == (got := way()), 0, np.abs(got - alone)).max(1)
        yield Check.of(f"model: alone against {what}", rule, apart)
