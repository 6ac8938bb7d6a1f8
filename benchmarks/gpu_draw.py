"""The fused draw on a GPU: does it agree with the plain one, and how fast is it?

    python benchmarks/gpu_draw.py [--json FILE] [--only kernels|mixed|times]

Checks, each printed with PASS or FAIL (exit 1 on any failure): noise words equal to the bit; tokens equal
wherever the margin exceeds 1e-4, log probabilities, maxima and margins close; a row's result the same alone,
batched and permuted; bad rows flagged; ties in the stable order; the CPU's tokens. Then times, medians of
many runs, with ratios to one shared `mx.random.categorical` (goals: fused 0.5 for 64 rows, 0.4 for 256) and
what margins cost.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time

import toolkit  # noqa: F401  (first: binds the BLAS)

# isort: split
import mlx.core as mx
import numpy as np

from toolkit import noise
from toolkit.requests import Request
from toolkit.sampling import Draw, Sampler, kernels, unfiltered
from toolkit.sampling.ranking import rank

FAILED = []


def check(name, right, note=""):
    print(f"{'PASS' if right else 'FAIL'}  {name}  {note}", flush=True)
    if not right:
        FAILED.append(name)


def rows_of(rows, vocab, dtype=mx.float32, seed=3, spread=3.0):
    values = np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * spread
    return mx.array(values).astype(dtype)


def setup(rows, greedy=False):
    keys = mx.array(noise.row_keys(range(rows), [0] * rows, range(100, 100 + rows)))
    inverse = mx.array((1 / np.linspace(0.5, 2.0, rows, dtype=np.float32))[:, None])
    mask = mx.array((np.arange(rows) % 3 == 0)[:, None]) if greedy else None
    return inverse, mask, keys


def agreement(rows, vocab, dtype):
    logits = rows_of(rows, vocab, dtype)
    inverse, mask, keys = setup(rows, greedy=True)
    ours = kernels.draw_fused(logits, inverse, mask, keys)
    reference = unfiltered.draw_lazy(logits, inverse, mask, keys)
    mx.eval(ours, reference)
    (a, *floats), (b, *expected) = ([np.array(x) for x in xs] for xs in (ours, reference))
    clear = expected[0] > 1e-4
    what = f"[{rows}, {vocab}] {dtype}"
    check(f"tokens, {what}", bool((a == b)[clear].all()), f"{int(clear.sum())} of {rows} rows clear")
    for name, x, y in zip(("margins", "logprobs", "maxima"), floats, expected, strict=True):
        close = np.allclose(x, y, rtol=1e-5, atol=3e-4, equal_nan=True)
        finite = np.isfinite(x) & np.isfinite(y)
        check(
            f"{name}, {what}", close, f"worst difference {np.abs(x[finite] - y[finite]).max(initial=0):.2e}"
        )


def correctness():
    check("the kernels pass their own check", kernels.fused())
    keys = noise.row_keys(range(5), [0, 1, 2, 3, 4], range(5))
    with mx.stream(mx.cpu):
        words = np.array(noise.bits(keys, 151_936))
    check("words by block equal the CPU's", bool((np.array(noise.bits(keys, 151_936)) == words).all()))
    ids = np.random.default_rng(0).integers(0, 151_936, (5, 4096)).astype(np.int32)
    some = np.array(kernels.bits_at_fused(mx.array(keys), mx.array(ids)))
    check("words by id equal the CPU's", bool((some == np.take_along_axis(words, ids, axis=-1)).all()))
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        for vocab in (151_936, 49_152, 50_257, 8192, 258, 1):
            agreement(16, vocab, dtype)
    agreement(256, 151_936, mx.bfloat16)

    logits = rows_of(64, 151_936, mx.bfloat16)
    inverse, mask, keys = setup(64, greedy=True)
    whole = [np.array(x) for x in kernels.draw_fused(logits, inverse, mask, keys)]
    same = True
    for rows in ([0], [63], [5, 9, 1], list(range(63, -1, -1))):
        at = mx.array(rows)
        part = kernels.draw_fused(logits[at], inverse[at], mask[at], keys[at])
        same &= all(bool((np.array(p) == w[rows]).all()) for p, w in zip(part, whole, strict=True))
    check("a row alone, batched, permuted: the same bits", same)

    tied = mx.array(np.random.default_rng(1).integers(-4, 1, (8, 151_936)).astype(np.float32))
    tied = tied - tied.max(axis=-1, keepdims=True)
    lists = rank(tied, 151_936)
    order = np.argsort(-np.array(tied), axis=-1, kind="stable")
    check("ranking settles ties by id", bool((np.array(lists.ids) == order).all()))


def mixed():
    """Rows of every kind together, against the CPU and alone."""
    requests = [
        Request("x"), Request("x", temperature=0), Request("x", top_k=40), Request("x", top_p=0.9),
        Request("x", min_p=0.05, temperature=0.7), Request("x", typical_p=0.6), Request("x", top_n_sigma=1.5),
        Request("x", xtc_probability=0.5, xtc_threshold=0.05, top_k=50), Request("x", top_k=20, top_p=0.8),
        Request("x", repetition_penalty=1.3, presence_penalty=0.5, top_k=30, logit_bias={5: 2.0}),
        Request("x", allowed_tokens=[3]), Request("x", allowed_tokens=[]), Request("x"),
        Request("x", top_k=9),
    ]  # fmt: skip
    draws = [Draw(r, 1000 + i) for i, r in enumerate(requests)]
    logits = np.array(rows_of(len(requests), 49_152, spread=4.0))
    logits[-2:, 17] = np.nan
    history = [([5, 9], [9, 77])] * len(requests)
    gpu = Sampler(draws).draw(mx.array(logits), [9] * len(draws), history)
    mx.eval(gpu.arrays())
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    cpu = Sampler(draws).draw(mx.array(logits), [9] * len(draws), history)
    mx.eval(cpu.arrays())
    mx.set_default_device(device)
    check("mixed rows: the CPU's tokens", gpu.tokens.tolist()[:-3] == cpu.tokens.tolist()[:-3])
    check("mixed rows: bad ones flagged", gpu.bad.tolist() == cpu.bad.tolist() == [False] * 11 + [True] * 3)
    for name in ("margins", "logprobs"):
        a, b = np.array(getattr(gpu, name)), np.array(getattr(cpu, name))
        close = np.allclose(a, b, rtol=1e-4, atol=2e-4, equal_nan=True)
        check(f"mixed rows: {name} as on the CPU", close, "" if close else f"{a} {b}")
    a, b = np.array(gpu.max_drift), np.array(cpu.max_drift)
    near = ((a > b * 0.5 - 1e-4) & (b > a * 0.1)) | (a == b) | (np.isnan(a) & np.isnan(b))
    check(
        "mixed rows: max_drift as on the CPU, within the grids",
        bool(near.all()),
        "" if near.all() else f"{a} {b}",
    )
    same = True
    for i in range(len(draws) - 2):
        alone = Sampler(draws[i : i + 1]).draw(mx.array(logits[i : i + 1]), [9], history[:1])
        for name in ("tokens", "margins", "logprobs", "max_drift", "bad"):
            a, b = np.array(getattr(alone, name)), np.array(getattr(gpu, name))[i : i + 1]
            same &= bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    check("mixed rows: each as alone, to the bit", same)


def median_ms(run, count=60):
    for _ in range(5):
        run()
    mx.synchronize()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def pipelined_ms(make, count=60):
    """Time a draw in a queue of them: what a decode loop that never waits pays."""
    for _ in range(5):
        mx.eval(make())
    start = time.perf_counter()
    for _ in range(count):
        mx.async_eval(make())
    mx.synchronize()
    return (time.perf_counter() - start) * 1e3 / count


@contextlib.contextmanager
def without_margins():
    """Within the block, kernels that track no runner-up: what margins cost."""
    headers = kernels.CUDA, kernels.METAL
    line = "out.second = loser > third ? loser : third;"
    assert all(line in header for header in headers)
    kernels.CUDA, kernels.METAL = (header.replace(line, "") for header in headers)
    kernels._kernel.cache_clear()
    try:
        yield
    finally:
        kernels.CUDA, kernels.METAL = headers
        kernels._kernel.cache_clear()


def speed(rows, vocab, dtype):
    logits = rows_of(rows, vocab, dtype)
    mx.eval(logits)
    inverse, _, keys = setup(rows)
    mx.eval(inverse, keys)
    hot = mx.ones((rows, 1))
    request = [Draw(Request("x", seed=i), i) for i in range(rows)]
    filtered = {
        "Sampler top_k 40": [Draw(Request("x", seed=i, top_k=40), i) for i in range(rows)],
        "Sampler top_p .95": [Draw(Request("x", seed=i, top_p=0.95), i) for i in range(rows)],
    }
    sampler = Sampler(request)
    positions = (np.arange(rows) + step for step in itertools.count())
    cases = {
        "shared": lambda: mx.random.categorical(logits.astype(mx.float32)),
        "argmax": lambda: mx.argmax(logits, axis=-1),
        "fused": lambda: list(kernels.draw_fused(logits, inverse, None, keys)),
        "fused, tokens only": lambda: kernels.draw_fused(logits, hot, None, keys)[0],
        "plain": lambda: list(unfiltered.draw_lazy(logits, inverse, None, keys)),
        "Sampler": lambda: sampler.draw(logits, next(positions)).arrays(),
    }
    for name, draws in filtered.items():
        other = Sampler(draws)
        cases[name] = lambda other=other: other.draw(logits, next(positions)).arrays()
    result = {}
    for name, make in cases.items():
        result[name] = {
            "ms": median_ms(lambda make=make: mx.eval(make())),
            "pipelined_ms": pipelined_ms(make),
        }
    with without_margins():
        result["fused, no margins"] = {
            "ms": median_ms(lambda: mx.eval(cases["fused"]())),
            "pipelined_ms": pipelined_ms(cases["fused"]),
        }
    start = time.perf_counter()
    for _ in range(50):
        sampler.draw(logits, next(positions))
    result["Sampler"]["python_ms"] = (time.perf_counter() - start) * 20
    for name in ("fused", "Sampler"):
        ratio = result[name]["ms"] / result["shared"]["ms"]
        queued = result[name]["pipelined_ms"] / result["shared"]["pipelined_ms"]
        print(f"{name} / shared: {ratio:.3f}, in a queue {queued:.3f}")
    cost = result["fused"]["pipelined_ms"] / result["fused, no margins"]["pipelined_ms"] - 1
    print(f"margins, of the fused draw: {cost:.1%} (goal: under 3%)")
    print(f"[{rows}, {vocab}] {dtype}")
    for name, values in result.items():
        print(f"  {name:20s} " + "  ".join(f"{k} {v:.3f}" for k, v in values.items()), flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the times to this file")
    parser.add_argument("--only", choices=("kernels", "mixed", "times"), help="a part of the work")
    options = parser.parse_args()
    print(mx.device_info(mx.default_device()).get("device_name", ""), mx.__version__)
    if options.only in (None, "kernels"):
        correctness()
    if options.only in (None, "mixed"):
        mixed()
    times = {}
    for rows in (32, 64, 256) if options.only in (None, "times") else ():
        for dtype in (mx.float32, mx.bfloat16):
            times[f"{rows} {dtype}"] = speed(rows, 151_936, dtype)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"times": times, "failed": FAILED}, file, indent=1, sort_keys=True)
    print("failed:", FAILED or "none")
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
