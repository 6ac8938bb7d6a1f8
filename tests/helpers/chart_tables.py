"""Small hand-made tables, one per chart function, for the tests of `toolkit.view`."""

import math

import altair as alt
import numpy as np
import pandas as pd

from toolkit.cohorts.plan import compare
from toolkit.cohorts.types import Row
from toolkit.study.drift.runs import Apart
from toolkit.view import charts

WORDS = [
    " toy",
    " ball",
    " large",
    " small",
    " child",
    " dog",
    "toy",
    " kite",
    " new",
    "\n",
    " very",
    " big",
    " red",
    " 日本",
    " wooden",
    " stick",
]


def distribution(top_k: int = 0) -> pd.DataFrame:
    raw = [0.31 / (i + 2.3) for i in range(len(WORDS))]
    kept = [not top_k or i < top_k for i in range(len(WORDS))]
    total = sum(p for p, k in zip(raw, kept, strict=True) if k)
    p = [r / total if k else 0.0 for r, k in zip(raw, kept, strict=True)]
    tokens = range(100, 100 + len(WORDS))
    return pd.DataFrame({"token": tokens, "text": WORDS, "p": p, "p_raw": raw, "kept": kept})


def observed() -> pd.DataFrame:
    keyed = [100 + (i * i) % 13 for i in range(60)]
    lines = [("global", "a", s, 104) for s in range(60)] + [("keyed", "a", s, t) for s, t in enumerate(keyed)]
    return pd.DataFrame(lines, columns=["policy", "row", "seed", "token"])


def matrix(size: int = 6) -> pd.DataFrame:
    lines = []
    for policy in ("global", "reseed", "isolate", "keyed"):
        for mine in range(size):
            for theirs in range(size):
                pick = (theirs if policy == "global" else mine) * 3 % 11
                lines.append((policy, "a", "b", mine, theirs, 100 + pick, WORDS[pick]))
    return pd.DataFrame(lines, columns=["policy", "row", "sibling", "seed", "sibling_seed", "token", "text"])


def trace() -> pd.DataFrame:
    nan = math.nan
    lines = [
        ("begin_prefill", "admit", "a", nan, None, "00000000-00000000"),
        ("begin_prefill", "seed", "a", 7, None, "00000000-00000007"),
        ("begin_prefill", "admit", "b", nan, None, "00000000-00000007"),
        ("begin_prefill", "seed", "b", 3, None, "00000000-00000003"),
        ("forward", "forward", "a b", nan, None, "00000000-00000003"),
        ("finish_prefill", "draw", "a", nan, " toy", "5a3c1b2d-9f000001"),
        ("finish_prefill", "draw", "b", nan, " gym", "5a3c1b2d-9f000002"),
        ("decode", "forward", "a b", nan, None, "5a3c1b2d-9f000002"),
        ("decode", "draw", "a", nan, " truck", "5a3c1b2d-9f000003"),
        ("decode", "draw", "b", nan, " with", "5a3c1b2d-9f000003"),
        ("decode", "finish", "a", nan, None, "5a3c1b2d-9f000003"),
    ]
    frame = pd.DataFrame(lines, columns=["phase", "event", "row", "seed", "text", "state"])
    return frame.assign(index=range(len(frame)), step=[0] * 7 + [1] * 4)


def plans() -> pd.DataFrame:
    rows = [Row("a", 50), Row("b", 12), Row("c", 40, cached=33), Row("d", 33)]
    return pd.concat([plan.to_frame() for plan in compare(rows, token_budget=128).plans])


def drifts() -> pd.DataFrame:
    lines = [
        ("with b", "padded", False, 3.8e-5, 6.1e-6),
        ("with b", "packed", True, 0.0, 0.0),
        ("with b, c, d", "padded", False, 4.4e-5, 7.7e-6),
        ("with b, c, d", "packed", True, 0.0, 0.0),
        ("in two chunks", "padded", False, 2.1e-5, 3.3e-6),
        ("in two chunks", "packed", True, 0.0, 0.0),
    ]
    return pd.DataFrame(lines, columns=["composition", "forward", "invariant", "max_abs", "mean_abs"])


def tokens() -> pd.DataFrame:
    lines = [
        (name, i, WORDS[(3 * i + k) % 16], 10.0 ** (-3.5 + ((5 * i + 3 * k) % 9) / 2))
        for k, name in enumerate("abc")
        for i in range(12)
    ]
    lines.append(("c", 12, " dog", math.nan))
    return pd.DataFrame(lines, columns=["id", "index", "text", "max_drift"])


def under_rules() -> pd.DataFrame:
    """As the notebook on batch invariance makes it: rules, composition, max_abs."""
    ways = ["with 1 other", "with 1 other, in chunks of 3"]
    lines = [("no rules", way, apart) for way, apart in zip(ways, (3e-5, 2e-5), strict=True)]
    return pd.DataFrame(
        [*lines, *(("these rules", way, 0.0) for way in ways)], columns=["rules", "composition", "max_abs"]
    )


def apart() -> Apart:
    """Eight logits that moved a little, and five seeds: two that could change, one that did."""
    moved = np.array([0, 0, 1e-9, 1e-3, 2e-3, 3e-2, 0.1, 0.2], np.float32)
    reach = np.array([0.01, 0.1, 0.5, 2.0, np.nan], np.float32)
    return Apart(moved, reach, np.array([True, False, False, False, False]))


def chain() -> dict:
    """Before and after a filter that keeps eight of twelve, and what ten seeds drew."""
    ids = np.arange(12)
    before = np.array([0.31 / (i + 2.3) for i in ids], np.float32)
    after = np.where(ids < 8, before / before[:8].sum(), 0).astype(np.float32)
    draws = np.array([0, 0, 0, 0, 1, 1, 2, 4, 4, 6])
    texts, reach = [WORDS[i] for i in draws], [10.0 ** (k / 2 - 3) for k in range(10)]
    threads = pd.DataFrame({"seed": range(10), "text": texts, "max_drift": reach})
    return charts.chain_data(ids, WORDS[:12], before, after, [""] * 8 + ["top-k"] * 4, draws, threads)


def staged() -> pd.DataFrame:
    """As `Stages.to_frame()` gives: stage, token, text, p, kept."""
    lines = []
    for stage, kept in (("model", 6), ("top-k 4", 4), ("min-p 0.2", 2)):
        total = sum(1 / (i + 1) for i in range(kept))
        lines += [(stage, 100 + i, WORDS[i], (i < kept) / (i + 1) / total, i < kept) for i in range(6)]
    return pd.DataFrame(lines, columns=["stage", "token", "text", "p", "kept"])


def visitors() -> dict[str, pd.DataFrame]:
    """Two rows of which one comes late, pauses and goes, and what the other draws alone."""
    lines = [(s, "a", s, 5 if s == 0 else 1, 100 + s, WORDS[s]) for s in range(5)]
    lines += [(2, "b", 0, 4, 108, WORDS[8]), (4, "b", 1, 1, 109, WORDS[10])]
    frame = pd.DataFrame(lines, columns=["step", "row", "index", "span", "token", "text"])
    acts = [(1, "arrive", "b"), (3, "pause", "b"), (4, "resume", "b"), (5, "cancel", "b")]
    alone = pd.DataFrame(
        {"index": range(5), "token": [100, 101, 102, 103, 111], "text": [*WORDS[:4], " stick"]}
    )
    return {
        "frame": frame,
        "actions": pd.DataFrame(acts, columns=["step", "action", "row"]),
        "reference": alone,
    }


def audited() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Pairs of answers, as `Audit.to_frame()` and `summary()` give them: a leak after the first token."""
    pairs = [("other_seed", 3, 0), ("first_token", 1, None), ("every_token", 3, 1), ("every_token", 3, 1)]
    pairs += [("sibling_seeds", 3, 1), ("sibling_seeds", 3, None), ("greedy", 2, None)]
    frame = pd.DataFrame(pairs, columns=["check", "compared", "first"]).astype({"first": "Int64"})
    lines = [
        ("answered", "kept", "same", True),
        ("other_seed", "kept", "different", True),
        ("first_token", "kept", "same", True),
        ("every_token", "broken", "same", True),
        ("sibling_seeds", "broken", "same", True),
        ("greedy", "kept", "same", True),
        ("choices", "not testable", "different", False),
    ]
    return frame, pd.DataFrame(lines, columns=["name", "verdict", "expects", "promise"])


def swept() -> pd.DataFrame:
    """As `Sweep.to_frame()` gives: two policies, three temperatures, four seeds each."""
    lines = []
    for policy in ("global", "keyed"):
        for k, temperature in enumerate((0.4, 0.7, 1.0)):
            lines += [(policy, temperature, s, 100 + (policy == "keyed") * (s % (k + 2))) for s in range(4)]
    return pd.DataFrame(lines, columns=["policy", "temperature", "seed", "token"])


def all_charts() -> dict[str, alt.TopLevelMixin]:
    return {
        "first_tokens": charts.first_tokens(distribution(), observed()),
        "first_tokens_alone": charts.first_tokens(distribution()),
        "first_tokens_filtered": charts.first_tokens(distribution(top_k=5), observed()),
        "seed_matrix": charts.seed_matrix(matrix()),
        "timeline": charts.timeline(trace()),
        "plan": charts.plan(plans()),
        "chain": charts.chain(chain(), seeds=10),
        "stages": charts.stages(staged()),
        "company": charts.company(row="a", **visitors()),
        "drift": charts.drift(drifts()),
        "equality": charts.equality(under_rules()),
        "reach": charts.reach(charts.reach_data(apart())),
        "rules": charts.rules(under_rules()),
        "margins": charts.margins(tokens(), drift=1e-3),
        "margins_alone": charts.margins(tokens()),
        "audit": charts.audit(*audited()),
        "sweep": charts.sweep(swept(), y="token", how="nunique", x="temperature", color="policy"),
        "sweep_alone": charts.sweep(swept(), y="token", x="policy"),
    }
