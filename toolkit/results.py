"""What an engine answers: a `Completion` for each request and choice, gathered in `Results`.

Values only: nothing here runs a model. `to_json` is the command line's output format, `to_frame` the
table that studies and notebooks start from.
"""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, overload

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FINISH_REASONS", "Completion", "Results", "shortest_float32"]

FINISH_REASONS = ("length", "stop", "eos", "cancelled", "error")

# Beside a text and its token pieces, what `to_json` leaves out of a line.
_NOT_IN_JSON = {"pieces", "top_logprobs"}


def shortest_float32(value: float | None) -> float | None:
    """The float whose shortest decimal form reads back to the same float32 bits; None where undefined.

    Infinities are undefined too, because JSON has no word for them.
    """
    if value is None or not math.isfinite(value):
        return None
    return float(str(np.float32(value)))


def _defined(values: Iterable[float | None]) -> tuple[float | None, ...]:
    """Plain floats with NaN as None, so that equal completions compare equal."""
    return tuple(None if v is None or math.isnan(v) else float(v) for v in values)


@dataclass(frozen=True, kw_only=True, repr=False)
class Completion:
    """One choice's output, and what it takes to judge whether it would come out again.

    Attributes
    ----------
    id, choice : str, int
        The request, and which of its `n` choices this is.
    tokens : tuple of int
        Ids generated now; of a resumed request, those after its `generated` ones.
    text : str
        Decoded output; it ends before a stop string or an end-of-sequence token.
    finish_reason : {"length", "stop", "eos", "cancelled", "error"}
    seed : int or None
        The seed in force, also where the operating system chose it; None if the row drew unseeded.
    prompt_tokens, cached, resumed : int
        Prompt length; how many of those came from the prefix cache; how many `generated` ids it began with.
    cohort, cohort_kind, cohort_index : int, str, int
        The cohort that ran the first token, its kind, and the row's place in it.
    logprobs, margins, max_drift : tuples, one entry a token
        Natural log probability after the filters; gap between best and second-best perturbed score, in
        nats; lower bound on the logit error (sup norm) that could change the token. None is undefined.
    policy, forward, invariant, stream : str, str, bool or None, int
        How it was made; `stream` is the version of the noise.
    error : str or None
        One line that names the request and position, where finish_reason is "error".
    top_logprobs : tuple, one entry a token
        Pairs (id, logprob), best first; empty unless the request asked for `logprobs`.
    pieces : tuple of str
        Readable text of each token, for tables.
    """

    id: str
    choice: int = 0
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = "length"
    seed: int | None = None
    prompt_tokens: int = 0
    cached: int = 0
    resumed: int = 0
    cohort: int = 0
    cohort_kind: str = ""
    cohort_index: int = 0
    logprobs: tuple[float | None, ...] = ()
    margins: tuple[float | None, ...] = ()
    max_drift: tuple[float | None, ...] = ()
    policy: str = ""
    forward: str = ""
    invariant: bool | None = None
    stream: int = 1
    error: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    pieces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.finish_reason not in FINISH_REASONS:
            allowed = ", ".join(FINISH_REASONS)
            raise ValueError(f"finish_reason={self.finish_reason!r}: must be one of {allowed}")
        put = object.__setattr__
        put(self, "tokens", tuple(int(t) for t in self.tokens))
        for name in ("logprobs", "margins", "max_drift"):
            put(self, name, _defined(getattr(self, name)))
        top = tuple(tuple((int(i), float(p)) for i, p in step) for step in self.top_logprobs)
        put(self, "top_logprobs", top)
        put(self, "pieces", tuple(self.pieces))

    def to_json(self) -> dict[str, Any]:
        """One line of output: documented fields, sorted; float32 in shortest form, undefined as None.

        `top_logprobs`, a list of `[id, logprob]` pairs for each token, is there if the request asked.
        """
        line = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_IN_JSON}
        line["tokens"] = list(self.tokens)
        for name in ("logprobs", "margins", "max_drift"):
            line[name] = [shortest_float32(v) for v in line[name]]
        if self.top_logprobs:
            line["top_logprobs"] = [[[i, shortest_float32(p)] for i, p in step] for step in self.top_logprobs]
        return dict(sorted(line.items()))

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:59] + "…"
        shown = self.error if self.finish_reason == "error" else json.dumps(text, ensure_ascii=False)
        return f'Completion("{self.id}", choice={self.choice}, {self.finish_reason}: {shown})'


class Results(Sequence[Completion]):
    """The completions of a run, in the order of the requests, choices in order within one.

    Index by place, by request id (its choice 0), or by `(id, choice)`.
    """

    def __init__(self, completions: Iterable[Completion] = ()) -> None:
        self._all = tuple(completions)
        self._by_id = {(c.id, c.choice): c for c in self._all}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self._all)

    @overload
    def __getitem__(self, key: int | str | tuple[str, int]) -> Completion: ...
    @overload
    def __getitem__(self, key: slice) -> Results: ...
    def __getitem__(self, key: int | str | tuple[str, int] | slice) -> Completion | Results:
        if isinstance(key, slice):
            return Results(self._all[key])
        if isinstance(key, str):
            key = (key, 0)
        if isinstance(key, tuple):
            if key not in self._by_id:
                raise KeyError(f'no choice {key[1]} of request "{key[0]}" among {len(self)} completions')
            return self._by_id[key]
        return self._all[key]

    def __eq__(self, other: object) -> bool:
        return self._all == other._all if isinstance(other, Results) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> list[dict[str, Any]]:
        """Each completion's line, in order."""
        return [c.to_json() for c in self._all]

    def to_frame(self) -> pd.DataFrame:
        """One row for each generated token.

        Returns
        -------
        pandas.DataFrame
            Columns: id, choice; index (0 is the request's first generated token), position (in the whole
            sequence), token (id), text; logprob, margin, max_drift (nats; NaN where undefined); seed,
            policy, forward, invariant, stream, finish_reason.
        """
        import pandas as pd

        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for c in self._all:
            for k, token in enumerate(c.tokens):
                index = c.resumed + k
                what = (c.id, c.choice, index, c.prompt_tokens + index, token, _at(c.pieces, k, ""))
                how_sure = (_at(c.logprobs, k), _at(c.margins, k), _at(c.max_drift, k))
                how_made = (c.seed, c.policy, c.forward, c.invariant, c.stream, c.finish_reason)
                for name, value in zip(_COLUMNS, (*what, *how_sure, *how_made), strict=True):
                    columns[name].append(value)
        # Beside a missing seed pandas would make floats, which have not all of a seed's 64 bits.
        seeds = pd.array(columns.pop("seed"), dtype="Int64")
        frame = pd.DataFrame(columns).astype({name: "float64" for name in ("logprob", "margin", "max_drift")})
        frame.insert(_COLUMNS.index("seed"), "seed", seeds)
        return frame

    def __repr__(self) -> str:
        ends = Counter(c.finish_reason for c in self._all)
        counts = ", ".join(f"{ends[reason]} {reason}" for reason in FINISH_REASONS if ends[reason])
        noun = "completion" if len(self) == 1 else "completions"
        return f"Results({len(self)} {noun}{': ' if counts else ''}{counts})"

    def _repr_html_(self, limit: int = 50) -> str:
        head = ("id", "choice", "seed", "text", "tokens", "finish", "least margin")
        lines = ["<table><thead><tr>", *(f"<th>{name}</th>" for name in head), "</tr></thead><tbody>"]
        for c in self._all[:limit]:
            margins = [m for m in c.margins if m is not None]
            cells = (c.id, c.choice, "" if c.seed is None else c.seed, c.error or c.text, len(c.tokens),
                     c.finish_reason, f"{min(margins):.3g}" if margins else "")  # fmt: skip
            lines.append("<tr>")
            for name, cell in zip(head, cells, strict=True):
                # Spaces and line breaks are part of a completion; colours are left to the reader's theme.
                style = ' style="text-align:left;white-space:pre-wrap"' if name == "text" else ""
                lines.append(f"<td{style}>{html.escape(str(cell))}</td>")
            lines.append("</tr>")
        lines.append("</tbody></table>")
        if len(self) > limit:
            lines.append(f"<p>{len(self) - limit:,} more; to_frame() has them all</p>")
        return "".join(lines)


_COLUMNS = ("id", "choice", "index", "position", "token", "text", "logprob", "margin", "max_drift", "seed",
            "policy", "forward", "invariant", "stream", "finish_reason")  # fmt: skip


def _at(values: Sequence[Any], k: int, default: Any = None) -> Any:
    return values[k] if k < len(values) else default
