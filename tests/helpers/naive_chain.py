"""The chain once more, a row at a time in float64 and as plainly as can be: what the tests compare with."""

import numpy as np

TIE = 1e-6


def ranked(z):
    """Allowed ids, most probable first, then the lower id."""
    return [i for i in sorted(range(len(z)), key=lambda i: (-z[i], i)) if z[i] > -np.inf]


def masses(z, ids, beta):
    e = np.exp((z[ids] - z[ids].max()) * beta)
    return e / e.sum()


def survivors(logits, request, order, gate=1.0):
    """Ids that survive the filters of a request, most probable first."""
    z = np.asarray(logits, dtype=np.float64)
    ids = ranked(z)
    sigma = np.std(z[ids])
    beta = 1.0
    for name in order:
        if name == "temperature":
            beta = 1 / request.temperature if not request.greedy else 1.0
        elif name == "top_n_sigma" and request.top_n_sigma:
            floor = max(z[ids]) - request.top_n_sigma * sigma
            ids = [i for i in ids if z[i] >= floor]
        elif name == "typical_p" and request.typical_p < 1:
            p = masses(z, ids, beta)
            entropy = -(p * np.log(p)).sum()
            away = np.abs(-np.log(p) - entropy)
            by = sorted(range(len(ids)), key=lambda n: (away[n], n))
            before = np.concatenate([[0], np.cumsum(p[by])[:-1]])
            kept = {ids[n] for n, b in zip(by, before, strict=True) if b < request.typical_p * (1 - TIE)}
            ids = [i for i in ids if i in kept]
        elif name == "top_k" and request.top_k:
            ids = ids[: request.top_k]
        elif name == "top_p" and request.top_p < 1:
            p = masses(z, ids, beta)
            before = np.concatenate([[0], np.cumsum(p)[:-1]])
            ids = [i for i, b in zip(ids, before, strict=True) if b < request.top_p * (1 - TIE)]
        elif name == "min_p" and request.min_p:
            floor = max(z[ids]) + (np.log(request.min_p) - TIE) / beta
            ids = [i for i in ids if z[i] >= floor]
        elif name == "xtc" and gate < request.xtc_probability:
            p = masses(z, ids, beta)
            reach = [n for n in range(len(ids)) if p[n] >= request.xtc_threshold * (1 - TIE)]
            ids = ids[max(len(reach) - 1, 0) :]
    return ids


def draw(logits, request, order, gumbel, gate=1.0):
    """The survivor with the best perturbed score, and its lead over the next."""
    z = np.asarray(logits, dtype=np.float64)
    ids = survivors(z, request, order, gate)
    scores = {i: z[i] / request.temperature + gumbel[i] for i in ids}
    best = sorted(ids, key=lambda i: (-scores[i], i))
    return best[0], (scores[best[0]] - scores[best[1]] if len(best) > 1 else np.inf)
