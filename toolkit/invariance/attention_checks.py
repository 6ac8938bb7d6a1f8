"""Trials: one attention geometry on random queries, keys and values, compared with itself call by call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import numpy as np

from .. import backend
from ..forward import attention
from ..forward.kv_cache import Geometry
from ..forward.shapes import Shapes, round_up

MULTIPLES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
"""Of a bucket: the numbers of keys that are compared."""
GPU_MULTIPLES = (1, 2, 3, 4, 8, 32)
"""The same on a GPU, where every new shape costs a plan."""
LONGEST = 8192
BLOCK = 64
"""Keys among which each has its equal."""
LOUD = 512.0
"""Numbers whose products cancel are this large: what rounding leaves of them moves a probability's bits."""


@dataclass(frozen=True)
class Check:
    """One comparison of bits.

    Attributes
    ----------
    what : str
        "linear 576 x 1536", "attention 9 heads of 64, 3 KV: decode", "model: alone against in a batch", ...
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

    @classmethod
    def of(cls, what: str, shapes: str, apart: np.ndarray) -> Check:
        """From each row's largest difference."""
        return cls(what, shapes, apart.size, int((apart != 0).sum()), float(apart.max()))


class Trial:
    """Queries of one geometry, each at its own position, over keys that hold up to `longest` tokens.

    Two kinds, in each of which something cancels, so that another order of its sums shows in half precision
    too. "values": of every 64 keys half are the others again, with opposite values, so that every 64th query
    is left with rounding. "scores": queries and keys have equal halves, one of them negative, so that a score
    is what rounding leaves.
    """

    def __init__(
        self,
        layer: Geometry,
        heads: int,
        sinks: bool = False,
        longest: int = LONGEST,
        *,
        cancels: str = "values",
    ):
        self.layer, self.heads, self.longest, self.cpu = layer, heads, longest, backend.on_cpu()
        self.cancels, self.multiples = cancels, MULTIPLES if self.cpu else GPU_MULTIPLES
        self.rng = np.random.default_rng(0)
        self.q = self._random(1, longest, heads, layer.key_dim)
        self.k = self._random(1, layer.key_heads, longest, layer.key_dim)
        self.v = self._random(1, layer.value_heads, longest, layer.value_dim)
        if cancels == "scores":
            self.q, self.k = LOUD * self._halves(self.q, 1), LOUD * self._halves(self.k, -1)
        elif cancels == "values":
            self.k, self.v = self._pairs(self.k, 1), self._pairs(self.v, -1)
        self.sinks = self._random(heads) if sinks else None

    def __str__(self) -> str:
        sinks = "" if self.sinks is None else ", sinks"
        return f"{self.heads} heads of {self.layer.key_dim}, {self.layer.key_heads} KV{sinks}"

    @cached_property
    def narrow(self) -> Trial:
        """The same geometry for telling key counts apart: a CPU runs one matmul for each KV head anyway."""
        kv = self.layer.key_heads
        if not self.cpu or kv == 1 or self.layer.value_heads != kv:
            return self
        one = replace(self.layer, key_heads=1, value_heads=1)
        return Trial(one, self.heads // kv, self.sinks is not None, self.longest, cancels=self.cancels)

    def call(self, where: np.ndarray, keys: int, block: int, beside: bool = False) -> np.ndarray:
        """Queries at these positions over that many keys, in one call; other rows beside if asked."""
        count = len(where)
        size = count if count == 1 else round_up(count, block)
        where = np.pad(where, (0, size - count), mode="edge").astype(np.int32)
        q, k, v = self.q[:, mx.array(where)], self.k[:, :, :keys], self.v[:, :, :keys]
        if beside:  # two rows, made of other stretches of the same numbers
            q = mx.concatenate([self.q[:, -2 * size :].reshape(2, *q.shape[1:]), q])
            k, v = (mx.concatenate([a[:, :, -keys:], a[:, :, -2 * keys : -keys], part])
                    for a, part in ((self.k, k), (self.v, v)))  # fmt: skip
        if not self.cpu:  # token by token, as they lie in a GPU's slabs: a kernel is chosen by strides too
            k, v = (mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2) for a in (k, v))
        fold = attention.folded(size, self.heads, k.shape[1], self.sinks is not None, self.cpu)
        kind = None if self.cpu else q.dtype
        mask = attention.mask(mx.array(where)[None], keys, None, fold, block, kind)
        out = attention.attend(q, k, v, mask, q.shape[3] ** -0.5, self.sinks, block, self.cpu)
        out = out.reshape(len(q), size, self.heads, -1)[-1, :count]
        return np.array(out.astype(mx.float32))

    def skip(self, rule: Shapes) -> tuple[int, ...]:
        """Multiples of the bucket at which a result is not what it is at the largest."""
        counts = (n * rule.bucket for n in self.multiples[:-1])
        return tuple(keys for keys in counts if keys < self.longest and self.apart(keys, rule))

    def apart(self, keys: int, rule: Shapes) -> float:
        """How far results over that many keys are from those over most: the last query's, and eight's."""
        most = min(self.multiples[-1] * rule.bucket, self.longest)
        calls = (np.array([keys - 1]), np.linspace(0, keys - 1, 8).astype(int))
        pairs = [(self.call(w, keys, rule.block), self.call(w, most, rule.block)) for w in calls]
        return float(np.max([np.abs(a - b).max() for a, b in pairs]))  # NaN stays NaN

    def checks(self, shapes: Shapes) -> Iterator[Check]:
        """A row's queries in several calls: whole, in chunks, one by one; alone and beside other rows."""
        block, bucket = shapes.block, shapes.bucket
        rule = f"block {block}, bucket {bucket}"
        rule += f" without {', '.join(map(str, shapes.skip))}" if shapes.skip else ""
        length = 2 * bucket + 41
        whole = self.call(np.arange(length), shapes.keys(length), block)
        ways: dict[str, list[tuple[int, int, int, bool]]] = {
            "beside other rows": [(0, length, length, True)],
            "more keys, masked": [(length - 41, 41, length + n * bucket, False) for n in (0, 1, 5)],
            "chunks": [(0, 2, 2, False), (2, 3, 5, True), (5, 7, 12, False),
                       (12, length - 14, length - 2, True), (length - 2, 2, length, False)],
            "decode": [(at, 1, at + 1, beside) for beside in (False, True)
                       for at in (0, 6, bucket - 1, bucket, 2 * bucket - 1, 2 * bucket, length - 1)],
        }  # fmt: skip
        for what, calls in ways.items():
            apart = [np.abs(self.call(np.arange(first, first + count), shapes.keys(keys), block, beside)
                            - whole[first : first + count]).max((1, 2))
                     for first, count, keys, beside in calls]  # fmt: skip
            yield Check.of(f"attention {self}: {what}", rule, np.concatenate(apart))
        keys = shapes.keys(max(8 * bucket, 256))
        late = keys - 1 - np.arange(8)
        single = np.concatenate([self.call(late[i : i + 1], keys, block) for i in range(8)])
        far = np.abs(single - self.call(late, keys, block)).max((1, 2))
        yield Check.of(f"attention {self}: decode, far on", rule, far)

    def _pairs(self, numbers: mx.array, sign: int) -> mx.array:
        """Of every block of keys half are the others again, in mixed order, times the sign."""
        blocks = numbers.reshape(*numbers.shape[:2], -1, BLOCK, numbers.shape[-1])[:, :, :, : BLOCK // 2]
        both = mx.concatenate([blocks, sign * blocks], axis=3)
        return both[:, :, :, mx.array(np.random.default_rng(0).permutation(BLOCK))].reshape(numbers.shape)

    def _halves(self, numbers: mx.array, sign: int) -> mx.array:
        half = numbers.shape[-1] // 2
        first, rest = numbers[..., :half], 0 * numbers[..., 2 * half :]
        both = mx.concatenate([first, sign * first, rest], axis=-1)
        order = np.r_[np.random.default_rng(0).permutation(2 * half), 2 * half : numbers.shape[-1]]
        return both[..., mx.array(order)]

    def _random(self, *shape: int) -> mx.array:
        return mx.array(self.rng.standard_normal(shape, dtype=np.float32)).astype(self.layer.dtype)
