"""Tests of fit, with thresholds for one chance in a million; seeds are fixed by the tests that use them."""

import math

import numpy as np

ALPHA = 1e-6
Z = 4.892  # two-sided normal quantile of ALPHA


def chi_square_z(counts, p, least=12.0):
    """How many standard deviations a chi-square of these counts lies above its mean (Wilson and Hilferty).

    Outcomes expected fewer than `least` times are taken together.
    """
    counts, expected = np.asarray(counts, float), np.asarray(p, float) * np.sum(counts)
    assert not counts[expected == 0].any(), "drew what has no probability"
    rare = expected < least
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < least:  # too little even together: leave it to the tail test
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    if freedom < 1:
        return 0.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def poisson_p(observed, expected):
    """Probability of a count at least as far out as this on its side, doubled."""
    if expected > 1e4:
        return math.erfc(abs(observed - expected) / math.sqrt(2 * expected))
    log_terms = [k * math.log(expected) - expected - math.lgamma(k + 1) for k in range(int(observed) + 1)]
    below = sum(math.exp(t) for t in log_terms)
    above = 1 - below + math.exp(log_terms[-1])
    if above < 1e-12:  # 1 - below has lost its digits: sum the upper tail itself
        above = sum(
            math.exp(k * math.log(expected) - expected - math.lgamma(k + 1))
            for k in range(int(observed), int(observed) + 400)
        )
    return min(1.0, 2 * min(below, above))
