"""Invariance: which shapes give a row the same bits whatever runs beside it. Measured, on this device.

A kernel is chosen by shape, so only shapes can carry a row's company into its arithmetic. The probe tries
candidates for each rule, cheapest first, on the model's own linear layers and attention geometry; then it runs
the whole model on short prompts, alone, in company, permuted, chunked, and decoded, and compares bits. What
passes is cached by everything that the last bits may depend on: device, instruction set, threads, BLAS,
versions, dtype, quantization and shapes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import backend
from ..models import Model
from . import attention
from .kv import Geometry
from .packed import PackedForward, Unpackable
from .shapes import PLAIN, Shapes, round_up
from .spans import Span

if TYPE_CHECKING:
    import pandas as pd

TILES = (1, 8, 16, 32, 64, 128, 256, 512)
BLOCKS = (1, 2, 4, 8, 16)
BUCKETS = (128, 256)
MULTIPLES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
"""Of a bucket: the numbers of keys that are compared."""
GPU_BUCKETS, GPU_MULTIPLES = (256, 512), (1, 2, 3, 4, 8, 32)
"""The same on a GPU, where every new shape costs a plan, and few slabs are faster than snug ones."""
LENGTHS = (5, 24, 11, 40, 3)
"""Prompts of the whole-model check: short, and together more tokens than any small tile."""


@dataclass(frozen=True)
class Check:
    """One comparison of bits.

    Attributes
    ----------
    what : str
        "linear 576 x 1536", "attention: decode against prefill", "model: alone against batch", ...
    shapes : str
        The rule under test: "tile 8", "block 4, bucket 128".
    compared, differing : int
        Rows compared, and rows of which some bit differs.
    largest : float
        Largest absolute difference.
    """

    what: str
    shapes: str
    compared: int
    differing: int
    largest: float


@dataclass(frozen=True)
class Verdict:
    """What the probe found: the shapes to run with, and whether everything passed with them.

    Attributes
    ----------
    shapes : Shapes
    holds : bool
    checks : tuple of Check
        Those of the chosen shapes, or of the last candidate tried where none passed.
    where : dict
        Device, BLAS, versions: what the verdict is valid for.
    """

    shapes: Shapes
    holds: bool
    checks: tuple[Check, ...]
    where: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """One row a check: `what, shapes, compared, differing, largest`."""
        import pandas as pd

        return pd.DataFrame([asdict(c) for c in self.checks], columns=list(Check.__dataclass_fields__))

    def to_json(self) -> dict[str, Any]:
        """Plain values, as they are cached."""
        return {"shapes": asdict(self.shapes), "holds": self.holds, "checks": [asdict(c) for c in self.checks],
                "where": self.where}

    def __repr__(self) -> str:
        s = self.shapes
        rule = f"tile {s.tile}, head {s.head}, block {s.block}, bucket {s.bucket}"
        rule += f" without {', '.join(map(str, s.skip))}" if s.skip else ""
        return f"Verdict({'holds' if self.holds else 'does not hold'}: {rule})"

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>" + str(self.to_frame()._repr_html_())


def resolve(model: Model, invariant: bool | str) -> tuple[PackedForward, bool]:
    """A packed forward for that setting, and whether it is batch-invariant.

    Raises
    ------
    Unpackable
        The model can't run packed.
    ValueError
        `invariant=True` and nothing passed.
    """
    if invariant is False:
        return PackedForward(model, PLAIN), False
    found = verdict(model)
    if found.holds:
        return PackedForward(model, found.shapes), True
    failed = next((c for c in found.checks if c.differing), None)
    why = f"{failed.what} ({failed.shapes}): {failed.differing} of {failed.compared} rows differ" if failed else ""
    if invariant is True:
        raise ValueError(f"invariant=True: {model.name} is not batch-invariant on this device: {why}; "
                         'forward="sequential" is slower and runs every row alone')
    warnings.warn(f"{model.name} is not batch-invariant on this device: {why}. Running without; results say so.",
                  stacklevel=4)
    return PackedForward(model, PLAIN), False


def verdict(model: Model, *, fresh: bool = False) -> Verdict:
    """The probe's verdict for a model on this device: from the cache, or measured now.

    Parameters
    ----------
    model : Model
    fresh : bool
        Measure even where a verdict is cached.

    Returns
    -------
    Verdict
    """
    where = backend.fingerprint() | {"model": _signature(model)}
    name = hashlib.sha256(json.dumps(where, sort_keys=True).encode()).hexdigest()[:24]
    path = backend.cache_dir() / "invariance" / f"{name}.json"
    if not fresh:
        try:
            kept = json.loads(path.read_text())
            shapes = Shapes(**kept["shapes"] | {"skip": tuple(kept["shapes"]["skip"])})
            return Verdict(shapes, kept["holds"], tuple(Check(**c) for c in kept["checks"]), where)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not measured yet, or written by another release
    print(f"measuring batch invariance of {model.name} on this device (once) ...", file=sys.stderr)
    found = replace(probe(model), where=where)
    _keep(path, json.dumps(found.to_json(), sort_keys=True, indent=1))
    return found


def probe(model: Model, shapes: Shapes | None = None) -> Verdict:
    """Compare bits on the model's own layers and on the whole model.

    Parameters
    ----------
    model : Model
    shapes : Shapes, optional
        Try only these, to see what fails without a rule; else the cheapest that pass are looked for.

    Returns
    -------
    Verdict
    """
    if shapes is not None:
        checks = [*_linears(model, shapes.tile), *_head(model, shapes.head),
                  *_attention(model, shapes), *_whole(model, shapes)]
        return Verdict(shapes, not any(c.differing for c in checks), tuple(checks), {})
    tile, linear = _first(TILES, lambda t: _linears(model, t))
    head, output = _first(TILES, lambda t: _head(model, t))
    rules = (Shapes(1, 1, block, bucket, _skip(model, block, bucket)) for bucket in (BUCKETS if backend.on_cpu() else GPU_BUCKETS) for block in BLOCKS)
    rule, attending = _first(rules, lambda rule: _attention(model, rule))
    # Layers of other kinds (experts) are seen only by the whole model: where it fails, a larger tile may pass.
    for larger in (tile, 2 * tile, 4 * tile):
        chosen = replace(rule, tile=larger, head=head)
        whole = list(_whole(model, chosen))
        if not any(c.differing for c in whole):
            break
    checks = (*linear, *output, *attending, *whole)
    return Verdict(chosen, not any(c.differing for c in checks), checks, {})


def _first(candidates: Iterable[Any], measure: Callable[[Any], Iterator[Check]]) -> tuple[Any, list[Check]]:
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


def _layers(model: Model) -> tuple[dict[str, Callable[[mx.array], mx.array]], dict[str, Callable[[mx.array], mx.array]]]:
    """The model's linear layers of distinct shape, and those that give logits."""
    body: dict[str, Callable[[mx.array], mx.array]] = {}
    head: dict[str, Callable[[mx.array], mx.array]] = {}
    for _, layer in model.module.named_modules():
        weight = layer.get("weight") if isinstance(layer, nn.Module) else None
        if weight is None or weight.ndim != 2:
            continue
        bits = f", {layer.bits} bits" if hasattr(layer, "bits") else ""
        width = weight.shape[1] * 32 // layer.bits if bits else weight.shape[1]
        kind = head if weight.shape[0] >= model.vocab_size else body
        if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding):
            if kind is head:
                kind.setdefault(f"{width} x {weight.shape[0]}{bits}", layer.as_linear)
        elif isinstance(layer, nn.Linear | nn.QuantizedLinear):
            kind.setdefault(f"{width} x {weight.shape[0]}{bits}", layer)
    return body, head


def _linears(model: Model, tile: int) -> Iterator[Check]:
    most = 1024 if backend.on_cpu() else 8192
    for name, layer in _layers(model)[0].items():
        yield _lines(model, f"linear {name}", layer, int(name.split()[0]), tile, most, "tile")


def _head(model: Model, tile: int) -> Iterator[Check]:
    most = 64 if backend.on_cpu() else 512
    for name, layer in _layers(model)[1].items():
        yield _lines(model, f"head {name}", layer, int(name.split()[0]), tile, most, "head")


def _lines(model: Model, what: str, layer: Callable[[mx.array], mx.array], width: int, tile: int, most: int, rule: str
           ) -> Check:
    """The same lines among other lines, at every kind of place, in batches of several sizes."""
    rng = np.random.default_rng(0)
    dtype = _dtype(model)
    probe = rng.standard_normal((3, width), dtype=np.float32)

    def run(size: int, places: list[int]) -> np.ndarray:
        lines = rng.standard_normal((size, width), dtype=np.float32)
        for i, place in enumerate(places):
            lines[place] = probe[i % 3]
        out = layer(mx.array(lines).astype(dtype)[:, None])[:, 0]
        return np.array(out[mx.array(places)].astype(mx.float32))

    least = round_up(3, tile)
    alone = run(least, [0, 1, 2])
    compared = differing = 0
    largest = 0.0
    sizes = sorted({round_up(n, tile) for n in (tile, 2 * tile, 3 * tile, 24, 33, 100, 200, 257, most // 2, most) if n <= most})
    for size in sizes:
        places = sorted({0, 1, 2, 3, size // 2, size - 2, size - 1} & set(range(size)))
        got = run(size, places)
        for i in range(len(places)):
            apart = float(np.max(np.abs(got[i] - alone[i % 3])))
            compared, differing, largest = compared + 1, differing + (apart > 0), max(largest, apart)
    return Check(what, f"{rule} {tile}", compared, differing, largest)


def _skip(model: Model, block: int, bucket: int) -> tuple[int, ...]:
    """Multiples of the bucket at which some query's result is not what it is at the largest."""
    skip: set[int] = set()
    for trial in _trials(model):
        multiples = MULTIPLES if trial.cpu else GPU_MULTIPLES
        most = min(multiples[-1] * bucket, trial.LIMIT)
        for keys in (n * bucket for n in multiples if n * bucket < most):
            where = np.arange(0, keys, max(1, keys // 64))
            a, b = (trial.call(where, size, block) for size in (keys, most))
            if (a != b).any():
                skip.add(keys)
    return tuple(sorted(skip))


def _attention(model: Model, shapes: Shapes) -> Iterator[Check]:
    """One row's queries in several calls: whole, chunked, a token at a time; alone and beside other rows."""
    block, bucket = shapes.block, shapes.bucket
    rule = f"block {block}, bucket {bucket}" + (f" without {', '.join(map(str, shapes.skip))}" if shapes.skip else "")
    length = 2 * bucket + 41
    for trial in _trials(model):
        whole = trial.call(np.arange(length), shapes.keys(length), block)
        ways: dict[str, list[tuple[int, int, int, bool]]] = {
            "beside other rows": [(0, length, length, True)],
            "more keys, masked": [(0, length, shapes.keys(n), False) for n in (length + bucket, length + 5 * bucket)],
            "chunks": [(0, 2, 2, False), (2, 3, 5, True), (5, 7, 12, False), (12, length - 12, length, False)],
            "decode": [(at, 1, at + 1, beside) for beside in (False, True)
                       for at in (0, 6, bucket - 1, bucket, 2 * bucket - 1, 2 * bucket, length - 1)],
        }
        for what, calls in ways.items():
            compared = differing = 0
            largest = 0.0
            for first, count, keys, beside in calls:
                got = trial.call(np.arange(first, first + count), shapes.keys(keys), block, beside=beside)
                apart = np.abs(got - whole[first : first + count]).max((1, 2))
                compared, differing = compared + count, differing + int((apart > 0).sum())
                largest = max(largest, float(apart.max()))
            yield Check(f"attention {trial}: {what}", rule, compared, differing, largest)


class _Trial:
    """Random queries, keys and values of one attention geometry; each query is at its own position."""

    LIMIT = 8192

    def __init__(self, layer: Geometry, heads: int):
        self.layer, self.heads, self.cpu = layer, heads, backend.on_cpu()
        self.rng = np.random.default_rng(0)
        self.q = self._random(1, self.LIMIT, heads, layer.key_dim)
        self.k = self._random(1, self.LIMIT, layer.key_heads, layer.key_dim)
        self.v = self._random(1, self.LIMIT, layer.value_heads, layer.value_dim)

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.layer.key_dim}, {self.layer.key_heads} KV"

    def call(self, where: np.ndarray, keys: int, block: int, beside: bool = False) -> np.ndarray:
        """Queries at these positions over that many keys, in one call; other rows beside if asked."""
        count = len(where)
        size = count if count == 1 else round_up(count, block)
        where = np.pad(where, (0, size - count), mode="edge").astype(np.int32)
        q, k, v = self.q[:, mx.array(where)], self.k[:, :keys], self.v[:, :keys]
        if beside:
            q, k, v = (mx.concatenate([self._random(2, *a.shape[1:]), a]) for a in (q, k, v))
        mask = attention.visible(mx.array(where)[None], keys, None)
        mask = mask if self.cpu else mx.where(mask, 0, -mx.inf).astype(q.dtype)
        out = attention.attend(q, k, v, mask, q.shape[3] ** -0.5, None, block, self.cpu)
        return np.array(out[-1, :count].astype(mx.float32))

    def _random(self, *shape: int) -> mx.array:
        return mx.array(self.rng.standard_normal(shape, dtype=np.float32)).astype(self.layer.dtype)


def _trials(model: Model) -> list[_Trial]:
    try:
        return [_Trial(layer, heads) for layer, heads in PackedForward(model, PLAIN).attending]
    except Unpackable:
        return []


def _whole(model: Model, shapes: Shapes) -> Iterator[Check]:
    """The model itself: five prompts and two decode steps, in five ways."""
    try:
        forward = PackedForward(model, shapes)
    except Unpackable:
        return
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, n + 2).tolist() for n in LENGTHS]
    rule = f"tile {shapes.tile}, head {shapes.head}, block {shapes.block}, bucket {shapes.bucket}"
    serial = iter(range(1 << 30))

    def run(order: list[int], cuts: Callable[[int], list[int]]) -> dict[int, np.ndarray]:
        """Each prompt's last logits, its tokens fed in the given pieces, side by side."""
        names = {i: next(serial) for i in order}
        todo = {i: [*cuts(len(prompts[i])), len(prompts[i])] for i in order}
        done, out = dict.fromkeys(order, 0), {}
        while any(todo.values()):
            spans, now = [], [i for i in order if todo[i]]
            for i in now:
                stop = todo[i].pop(0)
                spans.append(Span(names[i], done[i], prompts[i][done[i] : stop]))
                done[i] = stop
            logits = np.array(forward.run(spans).astype(mx.float32))
            for i, line in zip(now, logits, strict=True):
                out[i] = line
        for name in names.values():
            forward.release(name)
        return out

    everyone = list(range(len(prompts)))
    alone = {i: run([i], lambda n: [])[i] for i in everyone}
    ways: dict[str, tuple[list[int], Callable[[int], list[int]]]] = {
        "in a batch": (everyone, lambda n: []),
        "permuted": (everyone[::-1], lambda n: []),
        "chunked": (everyone, lambda n: [2, n - 2]),
        "decoded": (everyone, lambda n: [n - 2, n - 1]),
    }
    for what, (order, cuts) in ways.items():
        got = run(order, cuts)
        apart = [float(np.max(np.abs(got[i] - alone[i]))) for i in everyone]
        yield Check(f"model: alone against {what}", rule, len(apart), sum(a > 0 for a in apart), max(apart))


def _dtype(model: Model) -> mx.Dtype:
    return {"float16": mx.float16, "bfloat16": mx.bfloat16}.get(model.dtype, mx.float32)


def _signature(model: Model) -> str:
    """What of a model its shapes follow from."""
    body, head = _layers(model)
    kinds = sorted({type(m).__name__ for _, m in model.module.named_modules()})
    config = {k: v for k, v in model.config.items() if isinstance(v, int | float | str | bool)}
    text = json.dumps([model.dtype, sorted(body), sorted(head), kinds, config], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _keep(path: Any, text: str) -> None:
    """Write at once and whole; a cache that can't be written is no reason to stop."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"could not keep the invariance verdict: {error}", stacklevel=2)
