"""The linear layers of a decode step on CUDA (`toolkit.forward.cuda_linear`): cuBLAS bits? how fast?

    python benchmarks/gpu_linear.py [--only checks|times]

Checks (exit 1 if one fails): every result equal to the bit to what MLX gives the same lines among 4,096 (for
wide layers cuBLAS gives other bits among 256: told); and a control that must differ: the same sums taken 8
products at a time. Times: microseconds on the host and in all for each call of a long chain.
"""

import argparse
import statistics
import sys
import time

import toolkit  # noqa: F401  (first: binds the BLAS)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from toolkit.forward import cuda_linear

CASES = (
    (1024, (2048, 1024, 1024), mx.bfloat16, False),
    (2048, (1024,), mx.bfloat16, False),
    (1024, (3072, 3072), mx.bfloat16, False),
    (3072, (1024,), mx.bfloat16, False),
    (896, (896, 128, 128), mx.bfloat16, True),
    (4096, (4096,), mx.bfloat16, False),
    (14336, (4096,), mx.bfloat16, False),
    (144, (40, 24), mx.bfloat16, False),
    (2048, (1024,), mx.float16, True),
)
"""Width, rows of the layers that read the same array, dtype, bias; the first four are Qwen3-0.6B's."""
HALVES = """asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.KIND.KIND.f32 "
        "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[AT]), "r"(a[LOW]), "r"(b[AT]));"""


def layers_of(width, rows, dtype, bias):
    rng = np.random.default_rng(width)
    made = []
    for count in rows:
        layer = nn.Linear(width, count, bias=bias)
        layer.weight = mx.array(rng.normal(size=(count, width)).astype(np.float32) * width**-0.5).astype(
            dtype
        )
        if bias:
            layer.bias = mx.array(rng.normal(size=count).astype(np.float32)).astype(dtype)
        made.append(layer)
    return made


def apart(ours, theirs):
    return sum(int((a != b).sum()) for a, b in zip(ours, theirs, strict=True))


def checks():
    failed = 0
    for width, rows, dtype, bias in CASES:
        layers = layers_of(width, rows, dtype, bias)
        x = mx.array(np.random.default_rng(1).normal(size=(4096, width)).astype(np.float32)).astype(dtype)
        theirs = [layer(x) for layer in layers]
        among_256 = apart([layer(x[:256]) for layer in layers], [out[:256] for out in theirs])
        counts = [
            apart(cuda_linear.linear(x[:lines], layers), [out[:lines] for out in theirs])
            for lines in (32, 64)
        ]
        failed += any(counts)
        word = "FAIL" if any(counts) else "PASS"
        what = f"{width} x {rows} {dtype}{', bias' if bias else ''}"
        print(f"{word}  {what}: {counts} differ; of cuBLAS's own among 256 lines {among_256}", flush=True)
    return failed


def control():
    """The same kernel with sums in another order: were the comparison blind, this would not differ."""
    start = cuda_linear.SOURCE.index('asm volatile("mma.sync')
    stop = cuda_linear.SOURCE.index(";\n    }", start)
    halves = "".join(
        HALVES.replace("AT", at).replace("LOW", low) for at, low in (("at", "low"), ("at + 4", "low + 4"))
    )
    source, cuda_linear.SOURCE = (
        cuda_linear.SOURCE,
        cuda_linear.SOURCE[:start] + halves + cuda_linear.SOURCE[stop + 1 :],
    )
    cuda_linear._kernel.cache_clear()
    layers = layers_of(1024, (2048,), mx.bfloat16, False)
    x = mx.array(np.random.default_rng(1).normal(size=(256, 1024)).astype(np.float32)).astype(mx.bfloat16)
    try:
        count = apart(cuda_linear.linear(x[:32], layers), [layers[0](x)[:32]])
    finally:
        cuda_linear.SOURCE = source
        cuda_linear._kernel.cache_clear()
    print(f"{'PASS' if count else 'FAIL'}  control, sums of 8: {count} of {32 * 2048} differ")
    return not count


def each(run, x, count=200):
    """Microseconds a call, on the host and in all."""

    def chain():
        out = x
        for _ in range(count):
            out = run(out)
        return out

    mx.eval(chain())
    host, whole = [], []
    for _ in range(7):
        out = chain()
        mx.synchronize()
        start = time.perf_counter()
        mx.async_eval(out)
        host.append(time.perf_counter() - start)
        mx.synchronize()
        whole.append(time.perf_counter() - start)
    return [statistics.median(times[2:]) / count * 1e6 for times in (host, whole)]


def times():
    square = layers_of(1024, (1024, 1024, 1024, 1024), mx.bfloat16, False)
    deep = layers_of(3072, (1024,), mx.bfloat16, False) + layers_of(1024, (3072,), mx.bfloat16, False)
    for lines in (32, 64):
        x = mx.random.normal((lines, 1024)).astype(mx.bfloat16)
        tile = mx.random.normal((256, 1024)).astype(mx.bfloat16)
        ours = {
            "1024 x 1024": (lambda a: cuda_linear.linear(a, square[:1])[0], square[0]),
            "4 of them side by side": (lambda a: sum(cuda_linear.linear(a, square)[1:]),
                                       lambda a: sum(layer(a) for layer in square)),
            "1024 x 3072, 3072 x 1024": (lambda a: cuda_linear.linear(
                                             cuda_linear.linear(a, deep[1:])[0], deep[:1])[0],
                                         lambda a: deep[0](deep[1](a))),
        }  # fmt: skip
        for what, (mine, theirs) in ours.items():
            (host, whole), (their_host, their_whole) = each(mine, x), each(theirs, tile)
            print(f"{lines} lines, {what}: host {host:.1f} us, in all {whole:.1f}; cuBLAS on 256 lines: host "
                  f"{their_host:.1f}, in all {their_whole:.1f}", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("checks", "times"), help="a part of the work")
    options = parser.parse_args()
    if not cuda_linear.available():
        sys.exit("toolkit: the kernel needs MLX's CUDA build and its device")
    print(mx.device_info(mx.default_device()).get("device_name", ""), mx.__version__)
    failed = 0
    if options.only != "times":
        failed = checks() + control()
    if options.only != "checks":
        times()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
