"""First tokens: what a row draws first, seed by seed, beside the distribution that it draws from."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from tqdm.auto import tqdm

from ...chart_lookup import chart_function
from ...models.load import Model
from ...requests import Request
from ...sampling import distribution
from ...sampling.distribution import softmax
from .prefilled import Prefilled, batch_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class FirstTokens:
    """One row's first token for many seeds.

    Attributes
    ----------
    policy, row : str
    distribution : pandas.DataFrame
        One row per token, most likely first: `token`, `text`, `logit` (the model's), `p` (exact, after the
        filters), `p_raw` (before them, temperature 1), `kept`.
    """

    policy: str
    row: str
    distribution: pd.DataFrame
    _observed: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """One row a seed: `policy, row, seed, token, text, p, logprob, margin, max_drift`."""
        return self._observed.copy()

    def counts(self) -> pd.DataFrame:
        """One row a token drawn: `token, text, count, expected`, most frequent first."""
        seen = self._observed.groupby(["token", "text"]).size().rename("count").reset_index()
        p = self.distribution.set_index("token")["p"]
        seen["expected"] = seen["token"].map(p) * len(self._observed)
        return seen.sort_values(["count", "token"], ascending=[False, True], ignore_index=True)

    def chart(self, **options: Any) -> Any:
        """Exact probabilities as bars, the observed shares over them."""
        return chart_function("first_tokens")(self.distribution, self._observed, **options)

    def __repr__(self) -> str:
        distinct = self._observed["token"].nunique()
        many = f"{distinct} distinct tokens for {len(self._observed)} seeds"
        return f'FirstTokens(row "{self.row}", {self.policy}: {many})'

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self), quote=False)}</p>" + str(self.counts().head(20)._repr_html_())


def first_tokens(
    model: Model,
    requests: Sequence[Request],
    *,
    row: str,
    seeds: Iterable[int],
    policy: str = "keyed",
    forward: str = "packed",
    planner: str | None = None,
    invariant: bool | str = "auto",
    prefilled: Prefilled | None = None,
    progress: bool = False,
) -> FirstTokens:
    """A row's first token for each of many own seeds, everything else in the batch held fixed.

    Parameters
    ----------
    model : Model
    requests : sequence of Request
        The batch. Ids that are missing become "r0", "r1", ...
    row : str
        Id of the row whose seed varies.
    seeds : iterable of int
    policy : {"keyed", "global", "reseed", "isolate"}
    forward, planner, invariant
        See `Engine`.
    prefilled : Prefilled, optional
        The same batch's logits, where they are at hand; no forward is run then.
    progress : bool
        Show a bar.

    Returns
    -------
    FirstTokens
    """
    import pandas as pd

    batch = batch_of(
        model,
        requests,
        {"row": row},
        prefilled,
        policy=policy,
        forward=forward,
        planner=planner,
        invariant=invariant,
    )
    records = []
    for seed in tqdm(
        list(seeds), desc=f"first tokens, {policy}", unit="seed", disable=not progress, leave=False
    ):
        drawn = batch.replay(policy, row, {row: seed})
        records.append((seed, drawn))
    mx.eval([[d.tokens, d.logprobs, d.margins, d.max_drift] for _, d in records])
    table = distribution_table(batch, row)
    p = table.set_index("token")["p"]
    rows = []
    for seed, d in records:
        token = d.tokens.item()
        rows.append(
            (
                policy,
                row,
                seed,
                token,
                model.token_text(token),
                float(p[token]),
                d.logprobs.item(),
                d.margins.item(),
                d.max_drift.item(),
            )
        )
    columns = ["policy", "row", "seed", "token", "text", "p", "logprob", "margin", "max_drift"]
    return FirstTokens(policy, row, table, pd.DataFrame(rows, columns=columns))


def distribution_table(batch: Prefilled, row: str) -> pd.DataFrame:
    """A row's exact first-token distribution: `token, text, logit, p, p_raw, kept`, most likely first."""
    import pandas as pd

    logits = batch.logits[row]
    request = batch.requests[row]
    p = np.array(distribution(logits, request, prompt=batch.prompts[row], generated=request.generated))
    raw = softmax(logits)
    order = np.lexsort((np.arange(len(p)), -raw, -p))
    columns = {
        "token": order,
        "text": batch.model.token_texts[order],
        "logit": np.array(logits.astype(mx.float32))[order],
        "p": p[order],
        "p_raw": raw[order].astype(np.float32),
        "kept": p[order] > 0,
    }
    return pd.DataFrame(columns)
