"""Seed matrix: my first token for each own seed and each seed of a sibling. The bug at a glance, and its end.

Under `global` every *column* is constant (the sibling, seeded last, decides); under `keyed` every *row* is.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ...chart_lookup import chart_function
from ...models.load import Model
from ...requests import Request
from .prefilled import Prefilled, batch_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class SeedMatrix:
    """First tokens of `row` by own seed and `sibling`'s seed."""

    policy: str
    row: str
    sibling: str
    _frame: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """One row a pair of seeds: `policy, row, sibling, seed, sibling_seed, token, text`."""
        return self._frame.copy()

    def table(self) -> pd.DataFrame:
        """Texts, own seeds down, the sibling's along."""
        return self._frame.pivot(index="seed", columns="sibling_seed", values="text")

    @property
    def constant_rows(self) -> bool:
        """Whether the sibling's seed never changes the token."""
        return bool((self._frame.groupby("seed")["token"].nunique() == 1).all())

    @property
    def constant_columns(self) -> bool:
        """Whether the row's own seed never changes the token."""
        return bool((self._frame.groupby("sibling_seed")["token"].nunique() == 1).all())

    @property
    def reading(self) -> str:
        """One sentence that says what the matrix shows."""
        own, theirs = not self.constant_columns, not self.constant_rows
        a, b = self.row, self.sibling
        if own and theirs:
            return f"{a}'s first token changes with {a}'s own seed and with {b}'s: {b} leaks into {a}."
        if theirs:
            decides = f"{b}'s seed decides {a}'s first token"
            return f"Every column is constant: {decides}, {a}'s own seed does nothing."
        if own:
            return f"Every row is constant: {a}'s own seed decides, {b}'s seed does nothing."
        return f"Neither seed changes {a}'s first token."

    def chart(self, **options: Any) -> Any:
        """The matrix as a picture: a colour and a label for each token."""
        return chart_function("seed_matrix")(self._frame, **options)

    def __repr__(self) -> str:
        return f"SeedMatrix({self.policy}: {self.reading})"

    def _repr_html_(self) -> str:
        reading = html.escape(self.reading, quote=False)
        return f"<p><b>{self.policy}</b>: {reading}</p>" + str(self.table()._repr_html_())


def seed_matrix(
    model: Model,
    requests: Sequence[Request],
    *,
    row: str,
    sibling: str,
    seeds: Iterable[int],
    sibling_seeds: Iterable[int],
    policy: str = "keyed",
    forward: str = "packed",
    planner: str | None = None,
    invariant: bool | str = "auto",
    prefilled: Prefilled | None = None,
    progress: bool = False,
) -> SeedMatrix:
    """A row's first token for every pair of its own seed and a sibling's, the batch held fixed.

    Parameters
    ----------
    model : Model
    requests : sequence of Request
    row, sibling : str
        Ids of two different rows.
    seeds, sibling_seeds : iterables of int
    policy : {"keyed", "global", "reseed", "isolate"}
    forward, planner, invariant
        See `Engine`.
    prefilled : Prefilled, optional
        The same batch's logits, where they are at hand.
    progress : bool
        Show a bar.

    Returns
    -------
    SeedMatrix
    """
    import pandas as pd

    if row == sibling:
        raise ValueError(f'sibling="{sibling}": must be another row than row="{row}"')
    batch = batch_of(
        model,
        requests,
        {"row": row, "sibling": sibling},
        prefilled,
        policy=policy,
        forward=forward,
        planner=planner,
        invariant=invariant,
    )
    pairs = [(own, theirs) for own in seeds for theirs in sibling_seeds]
    bar = tqdm(pairs, desc=f"seed matrix, {policy}", unit="draw", disable=not progress, leave=False)
    rows = []
    for own, theirs in bar:
        token = batch.replay(policy, row, {row: own, sibling: theirs}).tokens.item()
        rows.append((policy, row, sibling, own, theirs, token, model.token_text(token)))
    columns = ["policy", "row", "sibling", "seed", "sibling_seed", "token", "text"]
    return SeedMatrix(policy, row, sibling, pd.DataFrame(rows, columns=columns))
