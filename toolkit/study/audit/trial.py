"""A trial of an audit: one request asked alone and in many companies, its answers compared in pairs.

What the pairs prove is decided in `checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...requests import Request
from .answers import Answer, Answers, Target, Unanswered


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


def seeded(requests: Sequence[Request], number: int) -> list[Request]:
    """A trial's requests: the next one first, its siblings after it, with seeds that no other trial has."""
    first = number % len(requests)
    turned = [*requests[first:], *requests[:first]]
    stride = max(1000, 3 * _shift(requests))  # a trial also shifts its seeds, once and twice
    return [r.replace(seed=stride * (number + 1) + place) for place, r in enumerate(turned)]


def _shift(requests: Sequence[Request]) -> int:
    """How far to other seeds, that none of the requests has."""
    return max(100, len(requests))


class Trial:
    """One request asked alone and in company.

    Parameters
    ----------
    target : Target
    batch : sequence of Request
        The request that is looked at, then its siblings; ids once, seeds as from `seeded`.
    number : int
    """

    def __init__(self, target: Target, batch: Sequence[Request], number: int):
        self.target, self.number = target, number
        self.mine, *self.others = batch
        self.batch = list(batch)
        self._shifts = _shift(batch), 2 * _shift(batch)

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
        for shift in self._shifts:
            changed = [self.mine, *(r.replace(seed=(r.seed or 0) + shift) for r in self.others)]
            yield self._pair("sibling_seeds", self.among, self._mine(changed))

    def own_seed(self) -> Iterator[Seen]:
        for shift in self._shifts:
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
            one, other = (Answer(tuple(map(repr, g))) for g in given)  # repr distinguishes floats to the bit
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
