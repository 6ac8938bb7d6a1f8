"""Prefilled: a batch after its forward, before any draw. Seeds are then tried on it without another forward.

An engine runs the batch once, and its logits and cohorts are kept. `replay` goes through the policy's
begin_prefill and finish_prefill in the engine's own order, with whatever seeds and sampling parameters are
asked: logits don't depend on either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import mlx.core as mx

from ...engine import policies
from ...engine.admission import check
from ...engine.engine import Engine
from ...models.load import Model
from ...requests import Request, named
from ...sampling import Draw, Drawn


@dataclass(frozen=True, eq=False)
class Prefilled:
    """Logits of a batch's first tokens, and the cohorts that ran it.

    Attributes
    ----------
    requests : dict of str to Request
        By id, in order.
    logits : dict of str to array
        `[vocab]`, evaluated: any thread may use them.
    prompts : dict of str to list of int
        Each row's prompt, as tokens.
    cohorts : tuple of (kind, ids)
        In the order in which they ran.
    forward, invariant : str, bool or None
    """

    model: Model
    requests: dict[str, Request]
    logits: dict[str, mx.array]
    prompts: dict[str, list[int]]
    cohorts: tuple[tuple[str, tuple[str, ...]], ...]
    forward: str
    invariant: bool | None

    def __repr__(self) -> str:
        return f"Prefilled({', '.join(self.requests)}; {self.forward})"

    def draw(self, id: str, seed: int | None, **changes: Any) -> Draw:
        """The first draw of a row, with this seed and these sampling parameters."""
        request = self.requests[id]
        if changes or seed != request.seed:
            request = request.replace(seed=seed, **changes)
        return self.first(id, request, seed)

    def first(self, id: str, request: Request, seed: int | None) -> Draw:
        """A row's first draw, as that request; penalties see its prompt."""
        prompt = self.prompts[id]
        return Draw(request, seed, 0, len(prompt) + len(request.generated), prompt, request.generated)

    def replay(
        self,
        policy: str,
        row: str,
        seeds: Mapping[str, int | None] | None = None,
        changes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Drawn:
        """A row's first token under a policy.

        Parameters
        ----------
        policy : str
        row : str
            Whose token.
        seeds : dict of str to int or None
            Seeds that differ from the requests' own.
        changes : dict of str to dict
            Sampling parameters that differ, by row.
        """
        rule = policies.get(policy)
        seeds, changes = seeds or {}, changes or {}
        draws = {
            id: self.draw(id, seeds.get(id, r.seed), **changes.get(id, {})) for id, r in self.requests.items()
        }
        if not rule.shares:
            return rule.finish_prefill(self.logits[row][None], draws[row])[0]
        for kind, ids in self.cohorts:
            groups = [[id] for id in ids] if kind == "sequential" else [list(ids)]
            for group in groups:
                alone = [id for id in group if rule.exclusive(draws[id].request)]
                for together in ([id] for id in alone) if alone and row in alone else [group]:
                    drawn = _begin_then_finish(self, rule, together, draws, row)
                    if drawn is not None:
                        return drawn
        raise ValueError(f'row="{row}": must be one of {", ".join(self.requests)}')


def _begin_then_finish(
    batch: Prefilled, rule: policies.Policy, ids: Sequence[str], draws: dict[str, Draw], row: str
) -> Drawn | None:
    for id in ids:
        rule.begin_prefill(draws[id])
    for id in ids:
        drawn, _ = rule.finish_prefill(batch.logits[id][None], draws[id])
        if id == row:
            return drawn
    return None


class _Recording(policies.Keyed):
    """Draws as `keyed` does, and keeps the logits."""

    def __init__(self, like: policies.Policy):
        super().__init__()
        self.like = like
        self.logits: dict[str, mx.array] = {}

    def exclusive(self, request: Request) -> bool:
        return self.like.exclusive(request)

    def decode(self, logits: mx.array, draws: Sequence[Draw]) -> Drawn:
        for i, draw in enumerate(draws):
            self.logits[draw.request.id] = logits[i]
        return super().decode(logits, draws)


def prefill(
    model: Model,
    requests: Sequence[Request],
    *,
    policy: str = "keyed",
    forward: str = "packed",
    planner: str | None = None,
    invariant: bool | str = "auto",
) -> Prefilled:
    """Run a batch's forward once, as the engine would.

    Parameters
    ----------
    model : Model
    requests : sequence of Request
        Their seeds and sampling parameters may be changed at `replay`.
    policy : str
        Only `isolate` changes who runs with whom.
    forward, planner, invariant
        See `Engine`.

    Returns
    -------
    Prefilled
    """
    batch = named(requests)
    engine = Engine(model, "keyed", forward, planner, invariant, max_rows=max(1, len(batch)), token_budget=0)
    recording = engine.policy = _Recording(policies.get(policy))
    for request in batch:
        seed = 0 if request.seed is None else request.seed
        # Without stop strings: one among the resumed tokens would end the row before its forward.
        engine.submit(request.replace(max_tokens=len(request.generated) + 1, n=1, seed=seed, stop=()))
    done = engine.run()
    mx.eval(recording.logits)
    ordered = sorted(done, key=lambda c: (c.cohort, c.cohort_index))
    cohorts = tuple(
        (kind, tuple(c.id for c in group))
        for (_, kind), group in groupby(ordered, key=lambda c: (c.cohort, c.cohort_kind))
    )
    return Prefilled(
        model,
        {r.id: r for r in batch},
        recording.logits,
        {r.id: check(r, model) for r in batch},
        cohorts,
        engine.forward.name,
        engine.invariant,
    )


def batch_of(
    model: Model,
    requests: Sequence[Request],
    rows: Mapping[str, str],
    prefilled: Prefilled | None = None,
    **how: Any,
) -> Prefilled:
    """The logits of a batch that is asked about: those at hand, for these very requests, or a forward's.

    Parameters
    ----------
    model, requests, **how
        As for `prefill`.
    rows : dict of str to str
        Ids that the question names, by argument; they are looked up before anything runs.
    prefilled : Prefilled, optional
        Logits at hand. Seeds and sampling parameters are taken from `requests` all the same.
    """
    batch = named(requests)
    ids = [request.id for request in batch]
    for argument, id in rows.items():
        if id not in ids:
            raise ValueError(f'{argument}="{id}": must be one of {", ".join(ids)}')
    if prefilled is None:
        return prefill(model, batch, **how)
    if ids != list(prefilled.requests):
        raise ValueError(f"prefilled={prefilled!r}: is of other rows; give the logits of this very batch")
    return replace(prefilled, requests=dict(zip(ids, batch, strict=True)))
