"""Self-check: a forward of many rows against the model's own, on a few tokens, before anyone relies on it.

A packed or padded step runs a model's own code on shapes that its author didn't have in mind. Where that code
looks at more than its own row (a position taken from the number of keys, say), the logits come out wrong and
nothing else would tell. So they are compared: short prompts, a decode step, a prompt longer than each sliding
window where that is cheap, and far positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models import switch_layers

from .. import backend
from ..models.load import Model
from .layer_cache import Unpackable
from .patch import Caches, attached
from .spans import Span

LENGTHS = (13, 8, 3)
MANY = 300
"""Tokens of a step that is only run, on a GPU: some of its kernels can't be launched for many."""
FARTHEST = 30_000
ROUNDING = {"float32": 0.001, "float16": 0.006, "bfloat16": 0.024}
"""What rounding may make, times the square root of twice the number of layers. Tiny models of every family
make half of that and less; code that is wrong makes 0.1 and more, even where a window hides a single key."""
MOST = 0.25

_seen: weakref.WeakKeyDictionary[Model, dict[str, float]] = weakref.WeakKeyDictionary()
_allowed: weakref.WeakKeyDictionary[Model, float] = weakref.WeakKeyDictionary()
_EXPERTS = (switch_layers.SwitchLinear, switch_layers.QuantizedSwitchLinear)


def agrees(model: Model, forward: Any) -> float:
    """How far a forward's logits are from the model's own.

    Parameters
    ----------
    model : Model
    forward : PackedForward or PaddedForward
        Of that model; rows are added to it and released.

    Returns
    -------
    float
        Root mean square difference in standard deviations of the model's own logits: the largest over what is
        compared (in half precision, of medians over rows, since a router's near tie may flip in one).
        Remembered for as long as the model lives.

    Raises
    ------
    Unpackable
        MLX gets this model's experts wrong on this device.
    """
    seen = _seen.setdefault(model, {})
    if forward.name not in seen:
        if misread(model):
            raise Unpackable("MLX misreads its experts' lines on this device (ml-explore/mlx, pull request "
                             "3960): long prompts come out wrong, in mlx-lm too")  # fmt: skip
        seen[forward.name] = max(_differences(model, forward))
    return seen[forward.name]


def misread(model: Model) -> bool:
    """Whether this device's product of sorted lines and experts depends on how the lines came about.

    Some versions of MLX read lines wrongly on a GPU if an axis was added to them, as mlx-lm does to experts'
    biases (ml-explore/mlx, pull request 3960). Which layout a sum of both gets depends on what memory was
    free: 32 tokens and more then come out right at one time and wrong at another.
    """
    kinds = {}
    for layer in model.module.modules():
        if type(layer) in _EXPERTS and "bias" in layer:
            kinds[type(layer), layer.input_dims, getattr(layer, "bits", 0)] = layer
    for layer in kinds.values():
        count, width = 2 * layer.num_experts, layer.input_dims
        lines = mx.cos(mx.arange(count * width)).astype(layer.bias.dtype).reshape(count, width)
        expert = mx.arange(count) // 2
        ways = lines.reshape(count, 1, width), mx.expand_dims(lines, -2)
        right, found = (layer(x, expert, sorted_indices=True) for x in ways)
        if not mx.allclose(right, found, rtol=0.02, atol=0.02, equal_nan=True).item():
            return True
    return False


def allowance(model: Model) -> float:
    """The largest difference that is put down to rounding.

    More where the model's own decode differs from its own prefill by more than that; never much.
    """
    if model not in _allowed:
        layers = sum(1 for _ in _leaves(mlx_cache.make_prompt_cache(model.module)))
        usual = ROUNDING.get(model.dtype, 0.024) * (2 * layers) ** 0.5
        shortest = min(
            _windows(model), default=max(LENGTHS) + 1
        )  # beyond it, some differ by more than rounding
        prompts = _prompts(model, [min(n + 1, shortest) for n in LENGTHS])
        new = mlx_cache.make_prompt_cache
        whole = [model.module(mx.array(p[None]), cache=new(model.module))[:, -1] for p in prompts]
        noise = np.median(_apart(mx.concatenate(whole), mx.concatenate(_own(model, prompts)[1])))
        _allowed[model] = min(max(usual, 5 * float(noise)), MOST)
    return _allowed[model]


def _prompts(model: Model, lengths: Sequence[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, model.vocab_size, n) for n in lengths]


def _differences(model: Model, forward: Any) -> Iterator[float]:
    worst = np.max if model.dtype == "float32" else np.median
    yield from _rows(model, forward, _prompts(model, [n + 1 for n in LENGTHS]), worst)
    if not backend.on_cpu():
        _run(forward, _prompts(model, [min(MANY, model.context or MANY)])[0])
    for window in _windows(model):
        yield from _rows(model, forward, _prompts(model, [window + n for n in (2, 4, 7)]), worst)
    if forward.name == "packed" and (places := _far(model)):
        pairs = np.stack(_prompts(model, [2] * len(places)))
        each = zip(pairs, places, strict=True)
        own = [model.module(mx.array(pair[None]), cache=_beyond(model, at))[:, -1] for pair, at in each]
        yield float(worst(_apart(mx.concatenate(own), _packed_far(forward, pairs, places))))


def _rows(model: Model, forward: Any, prompts: list[np.ndarray], worst: Any) -> Iterator[float]:
    """Prefill, then decode of each prompt's last token."""
    own = _own(model, prompts)
    names = [object() for _ in prompts]
    try:
        for i, side in enumerate((slice(-1), slice(-1, None))):
            starts = [0 if i == 0 else len(p) - 1 for p in prompts]
            spans = [Span(n, s, p[side].tolist()) for n, s, p in zip(names, starts, prompts, strict=True)]
            yield float(worst(_apart(mx.concatenate(own[i]), forward.run(spans))))
    finally:
        for name in names:
            forward.release(name)


def _run(forward: Any, prompt: np.ndarray) -> None:
    """One long step; not compared, since in half precision a router has near ties among many tokens."""
    name = object()
    try:
        mx.eval(forward.run([Span(name, 0, prompt.tolist())]))
    finally:
        forward.release(name)


def _own(model: Model, prompts: list[np.ndarray]) -> list[list[mx.array]]:
    """The model's own logits before and after each prompt's last token, by its own caches."""
    outs: list[list[mx.array]] = [[], []]
    for prompt in prompts:
        cache = mlx_cache.make_prompt_cache(model.module)
        for out, part in zip(outs, (prompt[:-1], prompt[-1:]), strict=True):
            out.append(model.module(mx.array(part[None]), cache=cache)[:, -1])
            mx.eval(out[-1])
    return outs


def _apart(own: mx.array, packed: mx.array) -> np.ndarray:
    """Of each row: root mean square difference over standard deviation; infinite where one isn't a number."""
    a, b = (np.array(x.astype(mx.float32)) for x in (own, packed))
    same = (a == b) | ~np.isfinite(a) & ~np.isfinite(b)  # some models blot ids out
    with np.errstate(invalid="ignore"):
        difference = np.sqrt(np.mean(np.where(same, 0, a - b) ** 2, -1))
    spread = np.std(np.where(np.isfinite(a), a, 0), -1)
    return np.nan_to_num(difference / np.maximum(spread, 1e-9), nan=np.inf)


def _windows(model: Model) -> list[int]:
    """Sliding windows that are cheap to exceed: about a second's work."""
    caches = _leaves(mlx_cache.make_prompt_cache(model.module))
    sizes = {c.max_size for c in caches if isinstance(c, mlx_cache.RotatingKVCache)}
    weights = sum(a.nbytes for _, a in tree_flatten(model.module.parameters()))
    budget = 1e11 if backend.on_cpu() else 1e14
    return [size for size in sorted(sizes) if 3 * size * weights < budget]


def _far(model: Model) -> list[int]:
    """Positions near the context's end, and half way."""
    last = min(model.context or 0, FARTHEST) - 2
    return [last // 2, last] if last > 64 else []


class _Beyond(mlx_cache.KVCache):
    """A cache that says it is far along, and holds only what this call adds."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        self.offset += keys.shape[2]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def make_mask(self, length: int, return_array: bool = False, **_: Any) -> Any:
        return mx.tril(mx.ones((length, length), mx.bool_)) if return_array else "causal"


def _beyond(model: Model, offset: int) -> list[Any]:
    def build(cache: Any) -> Any:
        if isinstance(cache, mlx_cache.CacheList):
            return mlx_cache.CacheList(*(build(c) for c in cache.caches))
        far = _Beyond()
        far.offset = offset
        return far

    return [build(c) for c in mlx_cache.make_prompt_cache(model.module)]


def _leaves(caches: Any) -> Iterator[Any]:
    for cache in caches:
        yield from _leaves(cache.caches) if isinstance(cache, mlx_cache.CacheList) else (cache,)


class _Pairs:
    """Stands in for a packed step in which every row is two tokens, the second seeing the first."""

    def __init__(self, places: list[int], apart: set[int]):
        self.positions = mx.array([at + i for at in places for i in (0, 1)], mx.int32)
        self.apart = apart

    def attend(
        self,
        position: int,
        window: int | None,
        fresh: bool,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        q, k, v = (x.reshape(-1, 2, *x.shape[1:]).squeeze(3).swapaxes(1, 2) for x in (queries, keys, values))
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal", sinks=sinks)
        return out.swapaxes(1, 2).reshape(-1, out.shape[1], 1, out.shape[3])


def _packed_far(forward: Any, pairs: np.ndarray, places: list[int]) -> mx.array:
    caches = Caches(forward.caches(_Pairs(places, forward.apart)), lambda hidden: hidden)
    with attached(forward.names):
        return forward.view(mx.array(pairs.reshape(-1, 1)), cache=caches)[1::2, 0]
