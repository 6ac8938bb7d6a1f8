"""Stages: one distribution after each of its filters, in the chain's order, exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ...chart_lookup import chart_function
from ...requests import Request
from ...sampling import distribution
from .prefilled import Prefilled

if TYPE_CHECKING:
    import pandas as pd

_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_NEUTRAL = 1.0
WORDS = {"top_k": "top-k", "top_p": "top-p", "min_p": "min-p", "temperature": "temperature"}


@dataclass(frozen=True, eq=False)
class Stages:
    """A row's next-token distribution, filter by filter.

    Attributes
    ----------
    names : tuple of str
        "model", then the filters that are on, as "top-k 20", then "temperature 0.8" if it is not 1.
    p : float32 array, [stages, vocab]
        Exact probabilities after each.
    """

    names: tuple[str, ...]
    p: np.ndarray
    _batch: Prefilled

    def removed(self) -> np.ndarray:
        """For each id, the stage that excluded it, or 0: int [vocab]."""
        gone = self.p == 0
        return np.where(gone.any(axis=0), gone.argmax(axis=0), 0)

    def shown(self, top: int = 12) -> np.ndarray:
        """The ids that the model finds likeliest; ties at print precision go by id."""
        raw = self.p[0]
        near = np.argpartition(-raw, min(2 * top, len(raw) - 1))[: 2 * top]
        return np.array(sorted(near, key=lambda i: (-round(float(raw[i]), 3), i))[:top])

    def to_frame(self, top: int = 12) -> pd.DataFrame:
        """One row a stage and token: `stage, token, text, p, kept`; the others are added up as token -1."""
        import pandas as pd

        ids, lines = self.shown(top), []
        text = [self._batch.model.token_text(int(i)) for i in ids]
        for name, p in zip(self.names, self.p, strict=True):
            told = zip(ids, text, strict=True)
            lines += [(name, int(i), word, float(p[i]), bool(p[i] > 0)) for i, word in told]
            rest = max(0.0, float(1 - p[ids].sum()))
            lines.append((name, -1, "", rest, int((p > 0).sum()) > int((p[ids] > 0).sum())))
        return pd.DataFrame(lines, columns=["stage", "token", "text", "p", "kept"])

    def chart(self, **options: Any) -> Any:
        """A panel for each stage; what a filter excluded stays, in grey."""
        return chart_function("stages")(self.to_frame(), **options)

    def __repr__(self) -> str:
        left = ", ".join(f"{n}: {int((p > 0).sum()):,}" for n, p in zip(self.names, self.p, strict=True))
        return f"Stages(tokens left: {left})"

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>"


def stages(batch: Prefilled, row: str, request: Request | None = None) -> Stages:
    """A row's distribution after each of its filters.

    Parameters
    ----------
    batch : Prefilled
    row : str
    request : Request, optional
        With other sampling parameters than the batch's. Of the filters, top-k, top-p and min-p are told
        apart; any other counts as the model's.
    """
    wanted = request or batch.requests[row]
    prompt, logits = batch.prompts[row], batch.logits[row]

    def after(so_far: Request) -> mx.array:
        return distribution(logits, so_far, prompt=prompt, generated=so_far.generated)

    so_far = wanted.replace(**_OFF, temperature=_NEUTRAL)
    names, steps = ["model"], [after(so_far)]
    for field, neutral in (*_OFF.items(), ("temperature", _NEUTRAL)):
        value = getattr(wanted, field)
        if value != neutral:
            so_far = so_far.replace(**{field: value})
            names.append(f"{WORDS[field]} {value:g}")
            steps.append(after(so_far))
    return Stages(tuple(names), np.array(mx.stack(steps)), batch)
