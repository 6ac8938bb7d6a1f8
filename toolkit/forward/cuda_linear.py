"""Narrow: the linear layers of a decode step on CUDA, in a kernel of our own.

MLX leaves matrix products to cuBLAS. To look one up and enqueue it keeps the host busy for 12 to 20 us, four
times as long as another kernel and more, and a decode step, seven of them a layer, waits for little else.
Besides, cuBLAS gives the bits of a prefill only to tiles of 256 tokens. This kernel takes tiles of 32, sums
16 products at a time in their order, as tensor-core kernels do that don't split a sum, and so gives the same
bits: the probe compares them (`invariance.search`), and a device where they differ does without. Layers that
read the same array (queries, keys and values; gate and up) run in one launch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..models.load import DTYPES, Model

TILE = 32
"""Tokens come in multiples of this: one size, since each takes seconds to compile."""
MOST = 64
"""Tokens of the largest step that is narrow."""
SIDE = 4
"""Layers of one launch."""
OUTPUTS = ("lm_head", "embed_out", "output", "head")
"""Layers of these names give logits, however many rows they have."""
POOL = 96 * 1024
"""Bytes of shared memory of a block: as many as every device of compute capability 8 and up has."""
_KINDS = {mx.bfloat16: "bf16", mx.float16: "f16"}

Hook = Callable[[nn.Linear, mx.array, Callable[..., mx.array]], mx.array]


def available() -> bool:
    """Whether the default device could run the kernel: CUDA, of compute capability 8 and up."""
    if mx.default_device().type == mx.DeviceType.cpu or not mx.cuda.is_available():
        return False
    number = re.search(r"\d+", str(mx.device_info(mx.default_device()).get("architecture", "")))
    return number is not None and int(number[0]) >= 80


def covers(model: Model) -> bool:
    """Whether the kernel takes every matrix that a decode step multiplies by, but for the head's."""
    for path, layer in model.module.named_modules():
        own = [a for a in layer.values() if isinstance(a, mx.array) and a.ndim > 1]
        if not own or isinstance(layer, nn.Embedding) or is_head(path, layer, model.vocab_size):
            continue
        if not fits(layer, model.vocab_size) or layer.weight.dtype != DTYPES.get(model.dtype):
            return False
    return True


def is_head(path: str, layer: Any, vocab: int) -> bool:
    """Whether a linear layer gives logits; a wide one of a small model's body may have more rows."""
    rows = len(layer.weight) if "weight" in layer else 0
    return rows == vocab or path.rpartition(".")[2] in OUTPUTS


def fits(layer: Any, vocab: int) -> bool:
    """Whether the kernel takes this layer; the output head has a tile of its own."""
    if type(layer) is not nn.Linear or layer.weight.dtype not in _KINDS:
        return False
    if "bias" in layer and layer.bias.dtype != layer.weight.dtype:
        return False
    rows, width = layer.weight.shape
    return rows % 8 == 0 and width % 16 == 0 and rows < vocab


class Readers:
    """Notes which linear layers read the same array, while a forward is traced."""

    def __init__(self) -> None:
        self.read: dict[int, tuple[mx.array, list[nn.Linear]]] = {}  # arrays held, so that ids stay theirs

    def __call__(self, layer: nn.Linear, x: mx.array, original: Callable[..., mx.array]) -> mx.array:
        self.read.setdefault(id(x), (x, []))[1].append(layer)
        return original(layer, x)

    def sets(self, vocab: int) -> dict[int, tuple[nn.Linear, ...]]:
        """By the id of each layer that the kernel takes: those that run with it, itself too."""
        found: dict[int, tuple[nn.Linear, ...]] = {}
        for _, layers in self.read.values():
            new = {id(layer): layer for layer in layers if fits(layer, vocab) and id(layer) not in found}
            for dtype in _KINDS:
                alike = [layer for layer in new.values() if layer.weight.dtype == dtype]
                for first in range(0, len(alike), SIDE):
                    some = tuple(alike[first : first + SIDE])
                    found |= {id(layer): some for layer in some}
        return found


class Linears:
    """Stands in for the linear layers of one narrow step."""

    def __init__(self, sets: dict[int, tuple[nn.Linear, ...]]):
        self.sets = sets
        self.made: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    def __call__(self, layer: nn.Linear, x: mx.array, original: Callable[..., mx.array]) -> mx.array:
        layers = self.sets.get(id(layer))
        lines = x.size // x.shape[-1]
        if layers is None or x.dtype != layer.weight.dtype or lines % TILE:
            return original(layer, x)
        key = id(layer), id(x)
        if key not in self.made:
            for each, out in zip(layers, linear(x, layers), strict=True):
                self.made[id(each), id(x)] = x, out
        return self.made.pop(key)[1]


def linear(x: mx.array, layers: Sequence[nn.Linear]) -> list[mx.array]:
    """What each of these layers makes of x, in one launch.

    Parameters
    ----------
    x : bfloat16 or float16, [..., width]
        A multiple of 32 lines.
    layers : sequence of nn.Linear
        That `fits`; of x's dtype and width.

    Returns
    -------
    list of arrays of that dtype, [..., rows of the layer's weight]
    """
    lines, width = x.size // x.shape[-1], x.shape[-1]
    rows = [layer.weight.shape[0] for layer in layers]
    across = 2 if all(n % 16 == 0 for n in rows) else 1
    slice_ = next(n for n in (128, 64, 32, 16) if width % n == 0)
    threads = 64 * across
    made = _kernel(_KINDS[x.dtype], tuple("bias" in layer for layer in layers))(
        inputs=[x, *(layer.weight for layer in layers), *(a.bias for a in layers if "bias" in a)],
        template=[("T", x.dtype), ("KS", slice_), ("NT", across)],
        grid=(sum(rows) // (8 * across) * threads, lines // TILE, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*x.shape[:-1], n) for n in rows],
        output_dtypes=[x.dtype] * len(rows),
    )
    return list(made)


@cache
def _kernel(kind: str, biased: tuple[bool, ...]) -> Any:
    source = START
    for i, bias in enumerate(biased):
        source += NEXT.replace("#", str(i)).replace("BIAS", f"b{i}" if bias else "nullptr")
    source += SOURCE.replace("KIND", kind).replace("POOL", str(POOL))
    # MLX keeps compiled kernels by name, on disk too: the name must change with the source.
    version = hashlib.sha256(source.encode()).hexdigest()[:12]
    biases = [f"b{i}" for i, bias in enumerate(biased) if bias]
    return mx.fast.cuda_kernel(
        name=f"linear_{version}",
        input_names=["x", *(f"w{i}" for i in range(len(biased))), *biases],
        output_names=[f"y{i}" for i in range(len(biased))],
        source=source,
        shared_memory=POOL,
    )


START = """
  int block = blockIdx.x, n = 0;
  const T *w = nullptr, *bias = nullptr;
  T* y = nullptr;
"""

NEXT = """
  if (w == nullptr || block >= n / (8 * NT)) {
    block -= n / (8 * NT);
    n = w#_shape[0], w = w#, bias = BIAS, y = y#;
  }
"""

SOURCE = r"""
  // A block: 32 lines of x by 8 NT rows of w, a warp to each 16 by 8. Both come in slices of KS products
  // through shared memory, S at a time; a line there is padded by 16 bytes, so that no two of a load share
  // a bank. Lines start at 16 bytes in memory too: arrays do, and widths are multiples of 16 numbers.
  constexpr int M = 32, LINES = M + 8 * NT, WIDE = KS / 8 + 1, SLICE = LINES * WIDE;
  constexpr int FIT = POOL / (16 * SLICE), S = FIT < 8 ? FIT : 8;
  extern __shared__ uint4 pool[];
  const int k = w0_shape[1], slices = k / KS, m0 = blockIdx.y * M, n0 = block * 8 * NT;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int m = warp % 2 * 16 + g, c = warp / 2 * 8;
  auto load = [&](int slice) {
    uint4* to = pool + slice % S * SLICE;
    for (int i = threadIdx.x; i < LINES * (KS / 8); i += 64 * NT) {
      const int line = i / (KS / 8), at = i % (KS / 8);
      const T* from = line < M ? x + (size_t)(m0 + line) * k : w + (size_t)(n0 + line - M) * k;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
        :: "r"((unsigned)__cvta_generic_to_shared(to + line * WIDE + at)), "l"(from + slice * KS + at * 8)
        : "memory");
    }
  };
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
  #pragma unroll
  for (int s = 0; s < S - 1; s++) {
    if (s < slices) load(s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  for (int slice = 0; slice < slices; slice++) {
    asm volatile("cp.async.wait_group %0;" :: "n"(S - 2) : "memory");
    __syncthreads();
    if (slice + S - 1 < slices) load(slice + S - 1);
    asm volatile("cp.async.commit_group;" ::: "memory");
    const unsigned* words = reinterpret_cast<const unsigned*>(pool + slice % S * SLICE);
    const unsigned* a = words + m * WIDE * 4 + t;
    const unsigned* b = words + (M + c + g) * WIDE * 4 + t;
    #pragma unroll
    for (int i = 0; i < KS / 16; i++) {
      const int at = i * 8, low = at + 32 * WIDE;
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[at]), "r"(a[low]), "r"(a[at + 4]), "r"(a[low + 4]), "r"(b[at]), "r"(b[at + 4]));
    }
  }
  const int column = n0 + c + 2 * t;
  if (bias != nullptr) {
    const float left = static_cast<float>(bias[column]), right = static_cast<float>(bias[column + 1]);
    sum[0] += left, sum[1] += right, sum[2] += left, sum[3] += right;
  }
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    unsigned pair;
    asm("cvt.rn.KINDx2.f32 %0, %1, %2;" : "=r"(pair) : "f"(sum[2 * half + 1]), "f"(sum[2 * half]));
    *reinterpret_cast<unsigned*>(y + (size_t)(m0 + m + 8 * half) * n + column) = pair;
  }
"""
