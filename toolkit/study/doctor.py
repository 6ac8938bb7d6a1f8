"""Doctor: what computes here, and what may be promised of a model on it. The page for a bug report."""

from __future__ import annotations

import html
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import backend
from ..backend import Backend
from ..forward.packed import PackedForward, Unpackable
from ..forward.shapes import PLAIN
from ..invariance.verdict import Verdict, verdict
from ..models.load import Model

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What `doctor` found.

    Attributes
    ----------
    backend : Backend
    model : str
        Empty if none was asked about.
    verdict : Verdict or None
        None without a model, and where it can't run packed.
    promised : bool or None
        Whether a row's logits do not depend on its company, to the bit. None without a model.
    reason : str
        In words.
    """

    backend: Backend
    model: str = ""
    verdict: Verdict | None = None
    promised: bool | None = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        """False where a promise can't be kept: invariance, of the model that was asked about."""
        return self.promised is not False

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of what computes here."""
        system = [("python", platform.python_version()), ("system", platform.platform())]
        return [*self.backend.rows(), *system]

    def to_frame(self) -> pd.DataFrame:
        """One row a check of the invariance probe: `what, shapes, compared, differing, largest`."""
        return (self.verdict or Verdict(PLAIN, False, (), {})).to_frame()

    def to_json(self) -> dict[str, Any]:
        """Plain values: `backend`, `model`, and `invariance` with its checks (null without a model)."""
        found = None
        if self.model:
            measured = self.verdict.to_json() if self.verdict else {"checks": [], "shapes": None}
            measured.pop("where", None)
            found = measured | {"holds": self.promised, "reason": self.reason}
        values = {name.replace(" ", "_"): value for name, value in self.rows()}
        return {"backend": values, "invariance": found, "model": self.model or None}

    def __repr__(self) -> str:
        return f"Diagnosis({self.backend!r}{'; ' if self.reason else ''}{self.reason})"

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><th>{n}</th><td>{html.escape(value)}</td></tr>" for n, value in self.rows())
        checks = str(self.to_frame()._repr_html_()) if self.verdict else ""
        return f"<table>{cells}</table><p>{html.escape(self.reason)}</p>{checks}"


def doctor(model: Model | None = None, *, fresh: bool = False) -> Diagnosis:
    """What computes here; of a model, whether it is batch-invariant on it.

    Parameters
    ----------
    model : Model, optional
    fresh : bool
        Measure invariance again, even where a verdict is cached.

    Returns
    -------
    Diagnosis
    """
    here = backend.info()
    if model is None:
        return Diagnosis(here)
    try:
        PackedForward(model, PLAIN)  # the probe looks at layers, and would pass ones that never pack
        found = verdict(model, fresh=fresh)
    except Unpackable as error:
        return Diagnosis(here, model.name, None, False, f"{model.name} can't run packed: {error}")
    failed = sum(check.differing > 0 for check in found.checks)
    if found.holds:
        shapes = repr(found).partition(": ")[2].rstrip(")")
        reason = f"{model.name} is batch-invariant here, with {shapes}: {len(found.checks)} checks passed"
    else:
        reason = f"{model.name} is not batch-invariant here: {failed} of {len(found.checks)} checks failed"
    return Diagnosis(here, model.name, found, found.holds, reason)
