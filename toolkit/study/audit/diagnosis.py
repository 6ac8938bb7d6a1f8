"""Diagnosis: the likely cause behind an audit's verdicts, in the field's words.

Derived from the pairs that the checks compared, and nothing else. Causes are distinguished by whether a
change of siblings' seeds alone moves the answer (a leak) or only a change of shapes does (drift, or noise
that depends on shape); from which token on; and whose seed the first token follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .checks import BROKEN, KEPT, Check
from .trial import Seen

OFTEN = 0.3  # share of tokens that change where noise is drawn anew; drift flips far fewer


class Cause(NamedTuple):
    """A likely cause, what in the answers points to it, and whether it breaks the promise itself."""

    name: str
    why: str
    promise: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def diagnose(checks: Sequence[Check], seen: Sequence[Seen]) -> tuple[Cause, ...]:
    """Likely causes of what is broken; none where nothing is, or where nothing points to one."""
    verdict = {check.name: check.verdict for check in checks}
    causes = [_of_seeded(verdict, seen)]
    if verdict["unseeded_together"] == BROKEN:
        why = "equal unseeded requests give equal answers"
        causes.append(Cause("a missing seed is a fixed one", why, False))
    elif verdict["unseeded_after_seeded"] == BROKEN:
        why = "after the same seeded request an unseeded one gives the same answer again; the seeded one "
        why += "leaves the shared generator seeded"
        causes.append(Cause("unseeded requests follow the last seed", why, False))
    if verdict["logprobs"] == BROKEN and not any(cause and cause.name == _DRIFT for cause in causes):
        why = "logprobs differ in their last bits in company, though no token flipped by it here"
        causes.append(Cause(_DRIFT, why, False))
    return tuple(cause for cause in causes if cause)


_DRIFT = "drift of logits"


def _of_seeded(verdict: dict[str, str], seen: Sequence[Seen]) -> Cause | None:
    if verdict["repeat"] == BROKEN:
        at_once = {pair.check for pair in seen if pair.first == 0}
        if "repeat" not in at_once and "other_seed" in at_once:
            why = "alone the first token repeats, and moves with the seed; only later ones don't repeat"
            return Cause("leak after the first token, or arithmetic that doesn't repeat", why)
        return Cause("seeds ignored", "the same request with the same seed, alone, gives another answer")
    if verdict["other_seed"] == BROKEN:
        if verdict["unseeded_together"] == KEPT:
            return Cause("seeds ignored", "every seed gives the same answer, though unseeded requests vary")
        return Cause("constant output", "no seed changes the answer: greedy, or one fixed seed for all")
    if BROKEN not in (verdict[name] for name in _BY_COMPANY):
        return None
    return _follows_a_sibling(verdict, seen) or _leaks(verdict, seen) or _moves_with_shape(verdict, seen)


_BY_COMPANY = ("first_token", "every_token", "order", "sibling_seeds", "unseeded_siblings",
               "greedy_sibling", "greedy", "midway")  # fmt: skip


def _follows_a_sibling(verdict: dict[str, str], seen: Sequence[Seen]) -> Cause | None:
    """In company the answer, or its first token, is the one alone with a sibling's seed."""
    if verdict["sibling_seeds"] == KEPT:  # then they agree by luck: there are few likely tokens
        return None
    trials: dict[int, list[int]] = {pair.trial: [0] for pair in seen if pair.check == "every_token"}
    for pair in seen:
        if pair.check == "whose_seed":
            agree = pair.compared if pair.first is None else pair.first
            trials.setdefault(pair.trial, []).append(agree * (1 if pair.first is not None else 1000))
    best = [max(agreed) for agreed in trials.values()]
    if not best or sum(agreed > 0 for agreed in best) * 2 < len(best):
        return None
    if sum(agreed >= 1000 for agreed in best) * 2 >= len(best):
        return Cause(
            "seeds go to the wrong rows", "in company every token is the one alone with a sibling's seed"
        )
    return Cause(
        "last seed wins",
        "in company the first token is the one that a sibling's seed gives alone; the row's own seed was "
        "overwritten in a shared generator before the row drew",
    )


def _leaks(verdict: dict[str, str], seen: Sequence[Seen]) -> Cause | None:
    if verdict["sibling_seeds"] != BROKEN:
        return None
    firsts = [pair.first for pair in seen if pair.check == "sibling_seeds" and pair.first is not None]
    if min(firsts) > 0:
        return Cause(
            "leak after the first token",
            f"siblings' seeds never change the first token, but {len(firsts)} answers later on; "
            "the first draw is seeded, the next ones share a generator",
        )
    return Cause("leak of siblings' seeds", "siblings' seeds change the answer, from its first token on")


def _moves_with_shape(verdict: dict[str, str], seen: Sequence[Seen]) -> Cause:
    """Not siblings' seeds, as far as was seen: then what kind of company changes answers, and how often?"""
    counts = {name: _flips(seen, name) for name in (*_ALIKE, *_OTHERS, "midway", "greedy")}
    drastic = {name for name, (flips, tokens) in counts.items() if flips > OFTEN * tokens}
    seeds = "siblings' seeds change nothing"
    if verdict["sibling_seeds"] != KEPT:
        seeds = "whether siblings' seeds change anything was not testable"
    # One greedy flip may be a near tie; where most greedy answers move it is the logits, whatever the noise.
    if not drastic - {"greedy"} or ("greedy" in drastic and counts["greedy"][0] > 1):
        flips, tokens = (sum(n) for n in zip(*counts.values(), strict=True))
        return Cause(_DRIFT, f"{seeds}, but company flips tokens: {flips} of {tokens} here")
    if drastic & {*_ALIKE}:
        return Cause(
            "noise depends on shape",
            f"{seeds}, but their number or order nearly every token; "
            "one draw over the whole batch gives each row another part of it",
        )
    if drastic & {*_OTHERS}:
        seeded = "changes nothing" if verdict["every_token"] == KEPT else "changes little or was not testable"
        return Cause("leak from unseeded or greedy siblings", f"seeded company {seeded}, theirs does")
    return Cause("late arrivals change the noise", "company changes little or nothing unless it comes later")


_ALIKE, _OTHERS = ("every_token", "order"), ("unseeded_siblings", "greedy_sibling")


def _flips(seen: Sequence[Seen], check: str) -> tuple[int, int]:
    """Pairs that part, and tokens up to there; what follows a flip is no flip of its own."""
    pairs = [pair for pair in seen if pair.check == check]
    flips = sum(pair.first is not None for pair in pairs)
    return flips, flips + sum(pair.compared if pair.first is None else pair.first for pair in pairs)
