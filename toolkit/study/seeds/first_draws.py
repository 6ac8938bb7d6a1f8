"""First draws: first tokens of one batch for many seeds, tokens only, fast enough to follow a slider.

The same policies on the same logits as `Prefilled.replay`, which also gives margins and takes some
milliseconds a draw. Here a row's scores are kept per set of sampling parameters, and keyed noise per seed
and position. Under the policies that share MLX's generator it is seeded and drawn from in the engine's
order, as ever; two draws from one state of the generator are computed once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ... import noise
from ...engine import policies
from ...requests import Request
from ...sampling import Draw, process
from ...sampling.draws import library
from .prefilled import Prefilled

if TYPE_CHECKING:
    import pandas as pd

Seeds = Mapping[str, "int | None"]
_KEPT = 12  # sets of parameters, and blocks of noise, that are remembered
# A greedy draw takes the best id before any filter, which typical-p may drop.
_GREEDY = {"temperature": 0, "top_n_sigma": 0, "typical_p": 1, "top_k": 0, "top_p": 1, "min_p": 0,
           "xtc_probability": 0}  # fmt: skip


class Tries:
    """First tokens of a prefilled batch under seeds and parameters that vary.

    Parameters
    ----------
    batch : Prefilled
        Its logits are evaluated, so any thread may use this; but the policies that share MLX's generator
        seed the calling thread's.
    """

    def __init__(self, batch: Prefilled):
        self.batch = batch
        self._scores: OrderedDict[tuple[str, Request], mx.array] = OrderedDict()
        self._noise: OrderedDict[int, tuple[tuple[int, ...], mx.array]] = OrderedDict()

    def tokens(
        self,
        policy: str,
        row: str,
        seeds: Sequence[Seeds],
        changes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The row's first token, for each assignment of seeds to rows.

        Parameters
        ----------
        policy : str
        row : str
        seeds : sequence of dict
            Seeds that differ from the requests' own.
        changes : dict of str to dict, optional
            Sampling parameters that differ, by row.
        """
        requests = self._requests(changes)
        rule = policies.get(policy)
        if requests[row].greedy:
            return [int(mx.argmax(self._processed(row, requests[row])).item())] * len(seeds)
        if not rule.shares:
            own = [s.get(row, requests[row].seed) for s in seeds]
            return self._keyed(row, requests[row], tuple(0 if seed is None else seed for seed in own))
        return self._shared(rule, row, requests, seeds)

    def distribution(
        self, row: str, changes: Mapping[str, Mapping[str, Any]] | None = None, *, top: int = 12
    ) -> pd.DataFrame:
        """The likeliest tokens, `token, text, p, p_raw, kept`; the others are added up as token -1."""
        import pandas as pd

        request = self._requests(changes)[row]
        scores, logits = self._processed(row, request), self.batch.logits[row].astype(mx.float32)
        if request.greedy:
            exact = (mx.arange(scores.shape[-1]) == mx.argmax(scores)).astype(mx.float32)
        else:
            exact = mx.softmax(scores)
        p, raw = np.array(exact), np.array(mx.softmax(logits))
        some = min(top + 1, len(p)) - 1
        near = np.union1d(np.argpartition(-p, some)[: some + 1], np.argpartition(-raw, some)[: some + 1])
        ids = sorted(
            (int(i) for i in near), key=lambda i: (-round(float(p[i]), 3), -round(float(raw[i]), 3), i)
        )[:top]
        text = self.batch.model.token_text
        lines = [(i, text(i), float(p[i]), float(raw[i]), bool(p[i] > 0)) for i in ids]
        left = float(1 - p[ids].sum()), float(1 - raw[ids].sum())
        lines.append((-1, "", max(0.0, left[0]), max(0.0, left[1]), True))
        return pd.DataFrame(lines, columns=["token", "text", "p", "p_raw", "kept"])

    def _requests(self, changes: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Request]:
        changes = changes or {}
        return {id: r.replace(**changes[id]) if id in changes else r for id, r in self.batch.requests.items()}

    def _processed(self, row: str, request: Request) -> mx.array:
        """The row's scores [V] after the chain; a greedy row's without its filters."""
        request = request.replace(seed=None, **(_GREEDY if request.greedy else {}))
        if request.xtc_probability:
            raise ValueError(
                f'xtc_probability={request.xtc_probability} for request "{row}": must be 0 here; '
                "its gate differs from seed to seed, use first_tokens"
            )
        key = row, request
        if key not in self._scores:
            draw = self.batch.first(row, request, 0)
            scores = process(self.batch.logits[row][None], [draw])[0]
            mx.eval(scores)
            _keep(self._scores, key, scores)
        return self._scores[key]

    def _keyed(self, row: str, request: Request, seeds: tuple[int, ...]) -> list[int]:
        position = self.batch.first(row, request, 0).position
        distinct = tuple(dict.fromkeys(seeds))
        scores = self._processed(row, request)
        tokens = mx.argmax(self._drawn(distinct, position, scores.shape[-1]) + scores, axis=-1).tolist()
        by_seed = dict(zip(distinct, tokens, strict=True))
        return [by_seed[seed] for seed in seeds]

    def _drawn(self, seeds: tuple[int, ...], position: int, vocab: int) -> mx.array:
        """Those seeds' noise, [seeds, vocab]; what is asked for again, with some more or fewer, is kept."""
        known, drawn = self._noise.get(position, ((), mx.zeros((0, vocab))))
        if seeds == known[: len(seeds)]:
            return drawn[: len(seeds)]
        if known != seeds[: len(known)]:
            known, drawn = (), drawn[:0]
        new = seeds[len(known) :]
        keys = noise.row_keys(new, [0] * len(new), [position] * len(new))
        made = noise.bits(keys, vocab)
        # On a CPU as the engine draws there, in NumPy.
        made = noise.gumbel_from_bits(np.asarray(made) if library() is np else made)
        drawn = mx.concatenate([drawn, mx.array(made)]) if known else mx.array(made)
        mx.eval(drawn)
        _keep(self._noise, position, (seeds, drawn), 2)
        return drawn

    def _shared(
        self, rule: policies.Policy, row: str, requests: dict[str, Request], seeds: Sequence[Seeds]
    ) -> list[int]:
        drawn: dict[tuple[int, ...], mx.array] = {}
        states = []
        for assigned in seeds:
            draws = {id: self.batch.first(id, r, assigned.get(id, r.seed)) for id, r in requests.items()}
            self._until(rule, row, draws)
            state = tuple(mx.random.state[0].tolist())
            states.append(state)
            if state not in drawn:
                drawn[state] = mx.random.categorical(self._processed(row, requests[row])[None])
        mx.eval(drawn)
        return [int(drawn[state].item()) for state in states]

    def _until(self, rule: policies.Policy, row: str, draws: dict[str, Draw]) -> None:
        """Seed and draw as the engine would, up to where the row's own draw comes."""
        for group in self._groups(rule, row, draws):
            for id in group:
                rule.begin_prefill(draws[id])
            for id in group:
                if rule.name == "reseed":
                    rule.begin_prefill(draws[id])
                if id == row:
                    return
                if not draws[id].request.greedy:  # never computed, but the generator moves on
                    mx.random.categorical(self._processed(id, draws[id].request)[None])
        raise ValueError(f'row="{row}": must be one of {", ".join(draws)}')

    def _groups(self, rule: policies.Policy, row: str, draws: dict[str, Draw]) -> Iterator[list[str]]:
        for kind, ids in self.batch.cohorts:
            for group in [[id] for id in ids] if kind == "sequential" else [list(ids)]:
                alone = [id for id in group if rule.exclusive(draws[id].request)]
                yield from ([id] for id in alone) if row in alone else [group]


def _keep(cache: OrderedDict[Any, Any], key: Any, value: Any, limit: int = _KEPT) -> None:
    cache[key] = value
    while len(cache) > limit:
        cache.popitem(last=False)
