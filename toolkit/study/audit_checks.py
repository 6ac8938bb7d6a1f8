"""The audit's checks: what is asked of a target, and what its answers prove.

A `Trial` asks one request in many companies and compares its answers in pairs, each a `Seen`. `judge` makes
a verdict of all pairs of a check. Answers that can't differ prove nothing, so the checks that want equality
stand on two that go first: the request repeats alone, and another seed gives another answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..requests import Request
from .targets import Answer, Answers, Target, Unanswered

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
    Kind("answered", True, SAME, "requests asked with answers given",
         "Every request got its own answer, in order.",
         "Some requests got no answer, or not in their place."),
    Kind("repeat", True, SAME, "alone, twice",
         "The same request with the same seed gives the same tokens again.",
         "The same request with the same seed gives other tokens the second time, even alone."),
    Kind("other_seed", True, DIFFER, "alone, with other seeds",
         "Another seed gives another answer, so equal answers prove something.",
         "Other seeds give the same answer, so equal answers prove nothing."),
    Kind("first_token", True, SAME, "alone with in a batch of seeded siblings, first token",
         "The first token is the same in company.",
         "The first token changes with company."),
    Kind("every_token", True, SAME, "alone with in a batch of seeded siblings, every token",
         "Every token is the same in company.",
         "Tokens change with company."),
    Kind("order", True, SAME, "each request in a batch with itself in the batch reversed",
         "The order of the batch changes nothing.",
         "The order of the batch changes answers."),
    Kind("sibling_seeds", True, SAME, "in a batch, with the siblings' seeds changed and nothing else",
         "Siblings' seeds change nothing.",
         "Siblings' seeds change the answer, though every shape is the same: randomness leaks."),
    Kind("own_seed", True, DIFFER, "in a batch, with its own seed changed and nothing else",
         "Its own seed counts in a batch too.",
         "In a batch its own seed does nothing."),
    Kind("unseeded_siblings", True, SAME, "alone with beside unseeded siblings",
         "Unseeded siblings change nothing.",
         "Unseeded siblings change the answer."),
    Kind("greedy_sibling", True, SAME, "alone with beside a greedy sibling that has a seed",
         "A greedy sibling's seed changes nothing.",
         "A greedy sibling with a seed changes the answer."),
    Kind("greedy", True, SAME, "a greedy request alone with in company",
         "A greedy request gives the same tokens in company.",
         "Even a greedy request changes with company, which no seed explains: its logits move."),
    Kind("midway", True, SAME, "alone with others arriving while it decodes",
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
    Kind("logprobs", False, SAME, "logprobs alone with in company, to the bit, as far as the tokens agree",
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


@dataclass(frozen=True)
class Seen:
    """Two answers side by side; `first` is where they part, None where they don't."""

    check: str
    trial: int
    row: str
    one: Answer
    other: Answer
    compared: int
    first: int | None


def compare(check: str, trial: int, row: str, one: Answer, other: Answer, most: int | None = None) -> Seen:
    """Token by token; an answer that ends sooner differs where it ends."""
    a, b = one.tokens[:most], other.tokens[:most]
    length = max(len(a), len(b))
    first = next((i for i in range(length) if a[i : i + 1] != b[i : i + 1]), None)
    return Seen(check, trial, row, one, other, length, first)


class Trial:
    """One request asked alone and in company.

    Parameters
    ----------
    target : Target
    batch : sequence of Request
        The request that is looked at, then its siblings; seeded, each seed and id once.
    number : int
    """

    def __init__(self, target: Target, batch: Sequence[Request], number: int):
        self.target, self.number = target, number
        self.mine, *self.others = batch
        self.batch = list(batch)

    # Checks, and what asks for them
    STEPS: tuple[tuple[tuple[str, ...], str], ...] = (
        (("repeat",), "repeat"),
        (("other_seed",), "other_seed"),
        (("first_token", "every_token", "logprobs"), "in_company"),
        (("order",), "order"),
        (("sibling_seeds",), "sibling_seeds"),
        (("own_seed",), "own_seed"),
        (("unseeded_siblings",), "unseeded_siblings"),
        (("greedy_sibling", "greedy"), "greedy"),
        (("midway",), "midway"),
        (("unseeded_together",), "unseeded_together"),
        (("unseeded_after_seeded",), "unseeded_after_seeded"),
        (("choices",), "choices"),
    )

    def step(self, name: str) -> Iterator[Seen]:
        """The pairs of one step."""
        asked: Callable[[], Iterator[Seen]] = getattr(self, name)
        return asked()

    @cached_property
    def alone(self) -> Answer:
        return self._one(self.target.ask([self.mine]), self.mine.id)

    @cached_property
    def with_other_seeds(self) -> dict[str, Answer]:
        """My answer alone, had I each sibling's seed."""
        return {
            sibling.id: self._one(self.target.ask([self.mine.replace(seed=sibling.seed)]), self.mine.id)
            for sibling in self.others
        }

    @cached_property
    def company(self) -> Answers:
        return self.target.ask(self.batch)

    @property
    def among(self) -> Answer:
        return self._one(self.company, self.mine.id)

    def repeat(self) -> Iterator[Seen]:
        first = self.alone
        yield self._pair("repeat", first, self._one(self.target.ask([self.mine]), self.mine.id))

    def other_seed(self) -> Iterator[Seen]:
        for id, answer in self.with_other_seeds.items():
            yield self._pair("other_seed", self.alone, answer, f"{self.mine.id} with {id}'s seed")

    def in_company(self) -> Iterator[Seen]:
        alone, among = self.alone, self.among
        whole = self._pair("every_token", alone, among)
        yield compare("first_token", self.number, self.mine.id, alone, among, 1)
        yield whole
        if whole.first == 0:  # whose answer is it, then? No check, but what a diagnosis is made of
            for id, answer in self.with_other_seeds.items():
                yield self._pair("whose_seed", answer, among, f"{self.mine.id} with {id}'s seed")
        yield from self._logprobs(whole)

    def order(self) -> Iterator[Seen]:
        reversed_ = self.target.ask(self.batch[::-1])
        for request in self.batch:
            one, other = (self._one(answers, request.id) for answers in (self.company, reversed_))
            yield self._pair("order", one, other, request.id)

    def sibling_seeds(self) -> Iterator[Seen]:
        for shift in (100, 200):
            changed = [self.mine, *(r.replace(seed=(r.seed or 0) + shift) for r in self.others)]
            yield self._pair("sibling_seeds", self.among, self._mine(changed))

    def own_seed(self) -> Iterator[Seen]:
        for shift in (100, 200):
            changed = [self.mine.replace(seed=(self.mine.seed or 0) + shift), *self.others]
            yield self._pair("own_seed", self.among, self._mine(changed))

    def unseeded_siblings(self) -> Iterator[Seen]:
        beside = [self.mine, *(r.replace(seed=None) for r in self.others)]
        pair = self._pair("unseeded_siblings", self.alone, self._mine(beside))
        yield pair
        yield from self._logprobs(pair)

    def greedy(self) -> Iterator[Seen]:
        greedy = self.others[0].replace(temperature=0)
        by_itself = self._one(self.target.ask([greedy]), greedy.id)
        # Last, so that its seed is the last one set.
        together = self.target.ask([self.mine, *self.others[1:], greedy])
        yield self._pair("greedy_sibling", self.alone, self._one(together, self.mine.id))
        yield self._pair("greedy", by_itself, self._one(together, greedy.id), greedy.id)

    def midway(self) -> Iterator[Seen]:
        steps = max(1, self.mine.max_tokens - 2)
        late = [r.replace(arrival=1 + i % steps) for i, r in enumerate(self.others)]
        pair = self._pair("midway", self.alone, self._mine([self.mine, *late], optional=True))
        yield pair
        yield from self._logprobs(pair)

    def unseeded_together(self) -> Iterator[Seen]:
        one, other = (self.mine.replace(id=f"{self.mine.id}{mark}", seed=None) for mark in "uv")
        answers = self.target.ask([one, other])
        yield self._pair("unseeded_together", self._one(answers, one.id), self._one(answers, other.id))

    def unseeded_after_seeded(self) -> Iterator[Seen]:
        def after_seeded() -> Answer:
            self.target.ask([self.mine])
            return self._mine([self.mine.replace(seed=None)])

        yield self._pair("unseeded_after_seeded", after_seeded(), after_seeded())

    def choices(self) -> Iterator[Seen]:
        answers = self.target.ask([self.mine.replace(n=3)], optional=True)
        made = [answers[self.mine.id, c] for c in range(3) if (self.mine.id, c) in answers]
        if len(made) < 2:
            raise Unanswered(f"{len(made)} of 3 choices came back; n is not supported")
        for i in range(len(made)):
            for j in range(i + 1, len(made)):
                yield self._pair("choices", made[i], made[j], f"{self.mine.id}, choices {i} and {j}")

    def _logprobs(self, pair: Seen) -> Iterator[Seen]:
        """The same pair's logprobs, where both have them, as far as the tokens agree."""
        agree = pair.compared if pair.first is None else pair.first
        given = [answer.logprobs[:agree] for answer in (pair.one, pair.other)]
        if agree and all(len(g) == agree and None not in g for g in given):
            one, other = (Answer(tuple(map(repr, g))) for g in given)  # repr tells floats apart to the bit
            yield self._pair("logprobs", one, other, pair.row)

    def _mine(self, requests: list[Request], optional: bool = False) -> Answer:
        return self._one(self.target.ask(requests, optional), self.mine.id)

    def _pair(self, check: str, one: Answer, other: Answer, row: str = "") -> Seen:
        return compare(check, self.number, row or self.mine.id, one, other)

    @staticmethod
    def _one(answers: Answers, id: str) -> Answer:
        if (id, 0) not in answers:
            raise Unanswered(f'request "{id}" got no answer')
        return answers[id, 0]


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
    repeats = bool(of["repeat"]) and not any(_differs(pair) for pair in of["repeat"])
    others = of["other_seed"]
    luck = sum(not _differs(pair) for pair in others) / len(others) if others else 1.0
    return tuple(_check(kind, of[kind.name], target, missing, repeats, luck) for kind in KINDS)


def _check(kind: Kind, pairs: Sequence[Seen], target: Target, missing: dict[str, str], repeats: bool,
           luck: float) -> Check:  # fmt: skip
    compared, differing = len(pairs), sum(map(_differs, pairs))
    first = min((pair.first for pair in pairs if pair.first is not None), default=None)
    if kind.name == "answered":
        compared, differing = target.asked, len(target.failures)
    reason, verdict = "", BROKEN if differing else KEPT
    if not compared:
        reason = missing.get(kind.name, "it was not reached")
        if kind.name == "logprobs" and kind.name not in missing:
            reason = "no logprobs to compare: none reported, or no token in common"
    elif kind.name in ("answered", "repeat", "greedy"):
        pass
    elif kind.name == "other_seed":
        verdict = KEPT if differing else BROKEN
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
        said = f"{said[:-1]}: {target.failures[0]}."
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
