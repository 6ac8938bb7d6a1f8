"""Draws on this device, side by side in one run: ratios count, times drift between machines.

    python benchmarks/draw.py [--rows 64] [--vocab 49152] [--json]

Each entry is timed in turn with the others, several rounds, and the median of the rounds' ratios is shown
beside the median time. "shared" is one `mx.random.categorical` over all rows.
"""

import argparse
import json
import statistics
import time

import toolkit  # noqa: F401  (first: binds the BLAS)

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler

from toolkit.requests import Request
from toolkit.sampling import Draw, Sampler, chain, unfiltered


def logits(rows: int, vocab: int, spread: float) -> mx.array:
    """Rows like a language model's: a few likely ids over a wide, unlikely rest."""
    rng = np.random.default_rng(7)
    return mx.array(rng.normal(size=(rows, vocab)).astype(np.float32) * spread)


def keyed(rows, parameters, values):
    sampler = Sampler([Draw(Request("x", seed=i, **parameters(i)), i) for i in range(rows)])
    positions = range(rows)

    def run():
        drawn = sampler.draw(values, positions)
        mx.eval(drawn.tokens, drawn.margins, drawn.max_drift, drawn.logprobs)

    return run


def without_margins(run):
    """The same draw with margins and drift left out, to see what they cost."""
    best = unfiltered.best_two_host
    drift = chain.max_drift

    def bare():
        unfiltered.best_two_host = lambda scores: (
            scores.argmax(axis=-1).astype(np.int32),
            np.zeros(len(scores)),
        )
        chain.max_drift = lambda lists, settings, stages, scores, drawn, margin, last, typical: margin
        try:
            run()
        finally:
            unfiltered.best_two_host, chain.max_drift = best, drift

    return bare


def mixed(i):
    """64 different parameter sets."""
    return [
        {"temperature": 0.5 + i / 64},
        {"top_k": 20 + i % 40},
        {"top_p": 0.8 + (i % 16) / 100},
        {"min_p": 0.02 + i / 2000},
        {"top_k": 50, "top_p": 0.9, "temperature": 0.8 + i / 100},
        {"temperature": 0.0},
        {"top_n_sigma": 1.0 + i / 64},
        {"min_p": 0.05, "top_p": 0.95, "temperature": 1.2},
    ][i % 8]


def peer_mixed(rows, values):
    """The same rows the way mlx-lm's batch generator samples them: a sampler a row, on [1, V] slices."""
    samplers = []
    for i in range(rows):
        p = {k: v for k, v in mixed(i).items() if k in ("temperature", "top_k", "top_p", "min_p")}
        samplers.append(make_sampler(temp=p.pop("temperature", 1.0), **p))

    def run():
        logprobs = values - mx.logsumexp(values, axis=-1, keepdims=True)
        mx.eval([s(logprobs[i : i + 1]) for i, s in enumerate(samplers)])

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, vocab = options.rows, options.vocab
    values, flat = logits(rows, vocab, 3.0), logits(rows, vocab, 1.0)
    mx.eval(values, flat)
    top_p = make_sampler(temp=1.0, top_p=0.95)
    top_k = make_sampler(temp=1.0, top_k=40)
    cases = {
        "shared": lambda: mx.eval(mx.random.categorical(values)),
        "argmax": lambda: mx.eval(mx.argmax(values, axis=-1)),
        "keyed": keyed(rows, lambda i: {}, values),
        "keyed top_k 40": keyed(rows, lambda i: {"top_k": 40}, values),
        "keyed top_p .95": keyed(rows, lambda i: {"top_p": 0.95}, values),
        "keyed top_p .95, flat": keyed(rows, lambda i: {"top_p": 0.95}, flat),
        "keyed min_p .05": keyed(rows, lambda i: {"min_p": 0.05}, values),
        "keyed mixed": keyed(rows, mixed, values),
        "mlx-lm top_p .95": lambda: mx.eval(top_p(values)),
        "mlx-lm top_p .95, flat": lambda: mx.eval(top_p(flat)),
        "mlx-lm top_k 40": lambda: mx.eval(top_k(values)),
        "mlx-lm mixed": peer_mixed(rows, values),
    }
    for name in ("keyed", "keyed top_k 40", "keyed top_p .95"):
        cases[f"{name}, no margins"] = without_margins(cases[name])
    times = {name: [] for name in cases}
    for turn in range(options.rounds + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if turn:  # the first round warms caches and compiles
                times[name].append(time.perf_counter() - start)
    pairs = [
        ("keyed", "shared", 1.2),
        ("keyed top_k 40", "shared", 0.5),
        ("keyed top_p .95", "mlx-lm top_p .95", 0.5),
        ("keyed top_p .95, flat", "mlx-lm top_p .95, flat", 0.5),
        ("keyed mixed", "keyed", 2.0),
        ("keyed", "keyed, no margins", 1.1),
        ("keyed top_k 40", "keyed top_k 40, no margins", None),
        ("keyed top_p .95", "keyed top_p .95, no margins", 1.1),
        ("keyed mixed", "mlx-lm mixed", None),
        ("keyed top_k 40", "mlx-lm top_k 40", None),
    ]
    ratios = {
        f"{a} / {b}": (statistics.median(x / y for x, y in zip(times[a], times[b], strict=True)), goal)
        for a, b, goal in pairs
    }
    milliseconds = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    if options.json:
        print(
            json.dumps({"ms": milliseconds, "ratios": {k: v for k, (v, _) in ratios.items()}}, sort_keys=True)
        )
        return
    for name, value in milliseconds.items():
        print(f"{name:26s} {value:8.2f} ms")
    for name, (value, goal) in ratios.items():
        print(f"{name:50s} {value:6.3f}" + (f"   (goal: at most {goal})" if goal else ""))


if __name__ == "__main__":
    main()
