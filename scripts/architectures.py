"""What the packed forward makes of each model type. Run as a script, it writes docs/architectures.md."""

from __future__ import annotations

import toolkit  # isort: skip # it binds the BLAS, which must come before mlx

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import tiny_architectures
from mlx_lm.models import cache as mlx_cache
from mlx_lm.utils import MODEL_REMAPPING

from toolkit.forward.packed import PackedForward, Unpackable
from toolkit.forward.shapes import Shapes
from toolkit.forward.spans import Span
from toolkit.models.load import Model

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
SHAPES = Shapes(8, 8, 4, 128)
LENGTHS = (12, 3, 7, 5)
STEPS = 2
BITS, ROUNDING, WRONG = "equal to the bit", "equal within rounding", "wrong"
SEQUENTIAL, NOT_BUILT = "sequential only", "could not be built"

INTRODUCTION = """\
# Architectures

What the packed forward makes of every model type in mlx-lm {version}. Each was built tiny, with seeded random
float32 weights and with sliding windows shorter than the prompts, and run on a CPU with MKL: four prompts of
{lengths} tokens and {steps} decode steps each.

- **{bits}**: the logits are those of the model's own forward within rounding, and the same bits whether a
  prompt runs alone, beside the others, in another order or in chunks.
- **{rounding}**: right, but a row's last bits depend on its company.
- **{sequential}**: the model can't run packed; the toolkit says so, and runs its rows one at a time.
- **{not_built}**: not tried.

{counts}

| model type | packed | what it takes, or why not |
|---|---|---|
"""


@dataclass(frozen=True)
class Verdict:
    """One line of the table."""

    model_type: str
    verdict: str
    note: str = ""


def examine(model_type: str, shapes: Shapes = SHAPES) -> Verdict:
    """Build a model type and compare its packed logits with its own, and with each other."""
    if model_type in tiny_architectures.BEYOND:
        return Verdict(model_type, NOT_BUILT, tiny_architectures.BEYOND[model_type])
    try:
        module = tiny_architectures.build(model_type)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a model's code says to a configuration not made for it
        return Verdict(model_type, NOT_BUILT, f"{type(error).__name__}: {error}".partition("\n")[0][:100])
    try:
        forward = PackedForward(as_model(module, model_type), shapes)
    except Unpackable as error:
        return Verdict(model_type, SEQUENTIAL, str(error))
    rng = np.random.default_rng(1)
    rows = {n: [int(t) for t in rng.integers(0, tiny_architectures.VOCAB, n + STEPS)] for n in LENGTHS}
    batched = run(forward, rows)
    own = {name: by_itself(module, tokens, len(tokens) - STEPS) for name, tokens in rows.items()}
    if not all(close(own[name], batched[name]) for name in rows):
        return Verdict(model_type, WRONG)
    others = [
        {name: run(forward, {name: tokens})[name] for name, tokens in rows.items()},
        run(forward, dict(reversed(rows.items()))),
        run(forward, rows, chunk=5),
    ]
    equal = all(same_bits(other[name], batched[name]) for other in others for name in rows)
    return Verdict(model_type, BITS if equal else ROUNDING, _features(module, forward))


def as_model(module: nn.Module, name: str) -> Model:
    """A module as the toolkit sees it; no tokenizer."""
    return Model(name, module, None, tiny_architectures.VOCAB, 400, frozenset(), {}, "float32")


def run(forward: PackedForward, rows: dict[int, list[int]], chunk: int = 0) -> dict[int, np.ndarray]:
    """Each row's logits, [1 + STEPS, vocab]: after its prompt, then after each of its last tokens."""
    outs: dict[int, list[mx.array]] = {name: [] for name in rows}
    ends = {name: len(tokens) - STEPS for name, tokens in rows.items()}
    for start in range(0, max(ends.values()) if chunk else 1, chunk or 1):
        stops = {name: min(end, start + chunk) if chunk else end for name, end in ends.items() if start < end}
        spans = [Span(n, start, rows[n][start:stop], sample=stop == ends[n]) for n, stop in stops.items()]
        _collect(outs, spans, forward)
    for step in range(STEPS):
        spans = [Span(n, ends[n] + step, [tokens[ends[n] + step]]) for n, tokens in rows.items()]
        _collect(outs, spans, forward)
    for name in rows:
        forward.release(name)
    return {name: np.array(mx.stack(out)) for name, out in outs.items()}


def _collect(outs: dict[int, list[mx.array]], spans: list[Span], forward: PackedForward) -> None:
    logits = forward.run(spans)
    mx.eval(logits, forward.state())
    for i, span in enumerate(s for s in spans if s.sample):
        outs[span.row].append(logits[i])


def by_itself(module: nn.Module, tokens: list[int], prompt: int) -> np.ndarray:
    """The same logits from the model's own forward and caches."""
    cache = mlx_cache.make_prompt_cache(module)
    parts = [tokens[:prompt], *([t] for t in tokens[prompt:])]
    return np.array(mx.stack([module(mx.array([part]), cache=cache)[0, -1] for part in parts]))


def close(own: np.ndarray, packed: np.ndarray) -> bool:
    """Equal but for rounding; ids that a model blots out are infinite in both."""
    finite = np.isfinite(own)
    return bool(np.allclose(own, packed, rtol=0, atol=1e-3 * own[finite].std()))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def _features(module: nn.Module, forward: PackedForward) -> str:
    caches = mlx_cache.make_prompt_cache(module)
    windows = any(isinstance(c, mlx_cache.RotatingKVCache) for c in caches)
    found = {
        "sliding window": windows,
        "latent attention": bool(forward.apart),
        "several caches a layer": any(isinstance(c, mlx_cache.CacheList) for c in caches),
        "layers that share keys": len(caches) < len(module.layers),
        "several passes": len(caches) > len(module.layers),
    }
    return ", ".join(name for name, there in found.items() if there)


def page(verdicts: Iterable[Verdict]) -> str:
    """The page, always the same for the same verdicts."""
    verdicts = list(verdicts)
    tally = Counter(v.verdict for v in verdicts)
    built = len(verdicts) - tally[NOT_BUILT]
    counts = (
        f"{len(verdicts)} model types, {built} built: {tally[BITS]} {BITS}, {tally[ROUNDING]} {ROUNDING}, "
    )
    counts += f"{tally[SEQUENTIAL]} {SEQUENTIAL}."
    names = {
        new: sorted(old for old, n in MODEL_REMAPPING.items() if n == new) for new in MODEL_REMAPPING.values()
    }
    text = INTRODUCTION.format(
        version=version("mlx-lm"),
        lengths=", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}",
        steps=STEPS,
        bits=BITS,
        rounding=ROUNDING,
        sequential=SEQUENTIAL,
        not_built=NOT_BUILT,
        counts=counts,
    )
    for v in verdicts:
        also = f" (also {', '.join(names[v.model_type])})" if v.model_type in names else ""
        text += f"| {v.model_type}{also} | {v.verdict} | {v.note} |\n"
    return text


if __name__ == "__main__":
    assert toolkit.backend.info().blas == "mkl", "the page is written with MKL"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(examine(t) for t in tiny_architectures.model_types()))
