"""The audit's checks: what each means, and what pairs of answers prove.

Answers that can't differ prove nothing, so the checks that want equality stand on two that go first: the
request repeats alone, and another seed gives another answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .answers import Excused, Target
from .trial import Seen

SAME, DIFFER = "same", "different"
KEPT, BROKEN, NOT_TESTABLE = "kept", "broken", "not testable"
COINCIDENCE = 0.01  # chance of equal answers by luck above which "always equal" says nothing


@dataclass(frozen=True)
class Kind:
    """A check before it was made: whether it is part of the promise, what it expects, what it means."""

    name: str
    promise: bool
    expects: str
    compares: str
    kept: str
    broken: str


# In the order asked. Those after `midway` lie beside the promise to seeded requests.
KINDS = (
    Kind("answered", True, SAME, "requests, and the answers to them",
         "Every request got its own answer, in order.",
         "Some requests got no answer, or not in their place."),
    Kind("repeat", True, SAME, "alone, twice",
         "The same request with the same seed gives the same tokens again.",
         "The same request with the same seed gives other tokens the second time, even alone."),
    Kind("other_seed", True, DIFFER, "alone, with each of several seeds",
         "Another seed gives another answer, so equal answers prove something.",
         "Other seeds give the same answer, so equal answers prove nothing."),
    Kind("first_token", True, SAME, "alone, and in a batch of seeded siblings: first token",
         "The first token is the same in company.",
         "The first token changes with company."),
    Kind("every_token", True, SAME, "alone, and in a batch of seeded siblings: every token",
         "Every token is the same in company.",
         "Tokens change with company."),
    Kind("order", True, SAME, "each request in a batch, and in the batch reversed",
         "The order of the batch changes nothing.",
         "The order of the batch changes answers."),
    Kind("sibling_seeds", True, SAME, "in a batch, and in it with other seeds for the siblings",
         "Siblings' seeds change nothing.",
         "Siblings' seeds change the answer, though every shape is the same: randomness leaks."),
    Kind("own_seed", True, DIFFER, "in a batch, and in it with another seed of its own",
         "Its own seed counts in a batch too.",
         "In a batch its own seed does nothing."),
    Kind("unseeded_siblings", True, SAME, "alone, and beside unseeded siblings",
         "Unseeded siblings change nothing.",
         "Unseeded siblings change the answer."),
    Kind("greedy_sibling", True, SAME, "alone, and beside a greedy sibling that has a seed",
         "A greedy sibling's seed changes nothing.",
         "A greedy sibling with a seed changes the answer."),
    Kind("greedy", True, SAME, "a greedy request alone, and in company",
         "A greedy request gives the same tokens in company.",
         "Even a greedy request changes with company, which no seed explains: its logits move."),
    Kind("midway", True, SAME, "alone, and with others arriving while it decodes",
         "Others that arrive while it decodes change nothing.",
         "Others that arrive while it decodes change the answer."),
    Kind("unseeded_together", False, DIFFER, "two equal requests without a seed, in one batch",
         "Unseeded requests differ from each other.",
         "Equal unseeded requests give equal answers: a missing seed is a fixed one."),
    Kind("unseeded_after_seeded", False, DIFFER, "an unseeded request, twice, each after the same seeded one",
         "Unseeded requests differ also when a seeded one ran just before.",
         "An unseeded request repeats itself after a seeded one: the seed stays in force."),
    Kind("choices", False, DIFFER, "the choices of one request with each other",
         "The choices of one request differ.",
         "Some choices of one request are always the same."),
    Kind("logprobs", False, SAME, "logprobs alone, and in company, as far as the tokens agree: every bit",
         "Logprobs are the same bits in company.",
         "Logprobs change with company: the logits drift, and sooner or later a token flips."),
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class Check:
    """A check and its verdict.

    Attributes
    ----------
    name : str
    promise : bool
        Whether it is part of the promise to seeded requests, and counts in `Audit.ok`.
    compares, expects : str
        What was compared with what; "same" or "different".
    compared, differing : int
        Pairs of answers; of `answered`, requests and those without a right answer.
    first : int or None
        Earliest token at which a pair differs; 0 is the first.
    verdict : {"kept", "broken", "not testable"}
    reason : str
        Why it could not be tested; empty otherwise.
    sentence : str
    """

    name: str
    promise: bool
    compares: str
    expects: str
    compared: int
    differing: int
    first: int | None
    verdict: str
    reason: str
    sentence: str


def judge(seen: Sequence[Seen], target: Target, missing: dict[str, str]) -> tuple[Check, ...]:
    """Every check's verdict.

    Parameters
    ----------
    seen : sequence of Seen
    target : Target
        For what it failed to answer.
    missing : dict of str to str
        Why a check has no pairs.
    """
    of = {kind.name: [pair for pair in seen if pair.check == kind.name] for kind in KINDS}
    for name, pairs in of.items():  # two empty answers are alike whatever the seed does
        of[name] = [pair for pair in pairs if pair.compared]
        if pairs and not of[name]:
            missing = {name: "the answers are empty", **missing}
    repeats = bool(of["repeat"]) and not any(_differs(pair) for pair in of["repeat"])
    others = of["other_seed"]
    luck = sum(not _differs(pair) for pair in others) / len(others) if others else 1.0
    if luck == 1.0 and repeats and any(_differs(pair) for pair in of["own_seed"]):
        why = "answers hardly vary with the seed; ask with less certain prompts"
        missing = {"other_seed": why, **missing}
    return tuple(_check(kind, of[kind.name], target, missing, repeats, luck) for kind in KINDS)


def _check(kind: Kind, pairs: Sequence[Seen], target: Target, missing: dict[str, str], repeats: bool,
           luck: float) -> Check:  # fmt: skip
    compared, differing = len(pairs), sum(map(_differs, pairs))
    first = min((pair.first for pair in pairs if pair.first is not None), default=None)
    if kind.name == "answered":
        excuses = [why for why in target.failures if isinstance(why, Excused)]
        failures = [why for why in target.failures if not isinstance(why, Excused)]
        compared, differing = target.asked, len(failures)
    reason, verdict = "", BROKEN if differing else KEPT
    if not compared:
        reason = missing.get(kind.name, "it was not reached")
        if kind.name == "logprobs" and kind.name not in missing:
            reason = "no logprobs to compare: none reported, or no token in common"
    elif kind.name == "answered":
        reason = str(excuses[0]) if excuses and not failures else ""
    elif kind.name in ("repeat", "greedy"):
        pass
    elif kind.name == "other_seed":
        verdict = KEPT if differing else BROKEN
        reason = "" if differing else missing.get(kind.name, "")
    elif kind.expects == DIFFER:
        always = _always_equal(pairs)
        verdict = BROKEN if always else KEPT
        if always and luck**always > COINCIDENCE:
            reason = "other seeds gave equal answers too, so equal ones tell nothing"
    elif not repeats and kind.name != "logprobs":
        reason = "the request does not even repeat alone"
    elif not differing and luck == 1.0 and kind.name != "logprobs":
        reason = "no seed changes the answer, so equal answers prove nothing"
    verdict = NOT_TESTABLE if reason else verdict
    said = {KEPT: kind.kept, BROKEN: kind.broken, NOT_TESTABLE: f"Not tested: {reason}."}[verdict]
    if kind.name == "answered" and verdict == BROKEN:
        said = f"{said[:-1]}: {failures[0]}."
    return Check(kind.name, kind.promise, kind.compares, kind.expects, compared, differing, first, verdict,
                 reason, said)  # fmt: skip


def _always_equal(pairs: Sequence[Seen]) -> int:
    """How many pairs were equal without exception, for those of one sort (say, choices 0 and 1); else 0."""
    sorts: dict[str, list[bool]] = {}
    for pair in pairs:
        sort = pair.row.partition(", ")[2]
        sorts.setdefault(sort, []).append(_differs(pair))
    return max((len(found) for found in sorts.values() if not any(found)), default=0)


def _differs(pair: Seen) -> bool:
    return pair.first is not None
