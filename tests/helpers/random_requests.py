"""Requests and logits for tests of sampling: written by hand, or with random filters."""

import mlx.core as mx
import numpy as np

from toolkit.requests import Request


def log(p):
    with np.errstate(divide="ignore"):
        return mx.array(np.log(np.asarray(p, dtype=np.float64)).astype(np.float32))


def ask(**parameters):
    return Request("x", **parameters)


def some_request(rng, **more):
    p = {"temperature": float(rng.choice([0.3, 1.0, 2.5]))}
    for chance, name, make in (
        (0.4, "top_k", lambda: int(rng.integers(2, 80))),
        (0.4, "top_p", lambda: float(rng.uniform(0.05, 0.99))),
        (0.3, "min_p", lambda: float(rng.uniform(0.001, 0.5))),
        (0.2, "typical_p", lambda: float(rng.uniform(0.1, 0.95))),
        (0.3, "top_n_sigma", lambda: float(rng.uniform(0.3, 3))),
        (0.3, "xtc_threshold", lambda: float(rng.uniform(0.01, 0.3))),
    ):
        if rng.random() < chance:
            p[name] = make()
    if "xtc_threshold" in p:
        p["xtc_probability"] = 0.5
    return ask(**{**p, **more})
