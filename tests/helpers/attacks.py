"""Logit errors of a given size meant to change a token: random ones, corners, and corners chosen to hurt."""

import numpy as np


def errors(rng, logits, scores, token, size, count):
    """float32 [count, vocab] with entries in [-size, size].

    `scores` are perturbed scores of every id, filters aside: whoever scores high is helped against `token`.
    """
    vocab = len(logits)
    made = [rng.uniform(-size, size, vocab) for _ in range(count // 4)]
    made += [rng.choice([-size, size], vocab) for _ in range(count // 4)]
    order = np.argsort(-logits, kind="stable")
    rank = np.empty(vocab, dtype=int)
    rank[order] = np.arange(vocab)
    rivals = [j for j in np.argsort(-scores)[:12] if j != token]
    while len(made) < count:
        # Raise all down to some rank and lower the rest, or the other way round: that moves masses,
        # thresholds and ends of runs. Then hold the token down, and help a rival or not.
        near = rank[token] if rng.random() < 0.3 else rank[rivals[rng.integers(len(rivals))]]
        cut = int(rng.integers(0, vocab)) if rng.random() < 0.4 else near + int(rng.integers(-3, 4))
        sign = rng.choice([-1, 1])
        error = np.where(rank < cut, sign, -sign) * size
        if rng.random() < 0.3:
            error = rng.choice([-size, size], vocab)
        if rng.random() < 0.8:
            error[token] = -size
        elif rng.random() < 0.5:
            error[token] = size
        if rng.random() < 0.7:
            error[rivals[rng.integers(len(rivals))]] = size
        made.append(error)
    return np.asarray(made, dtype=np.float32)
