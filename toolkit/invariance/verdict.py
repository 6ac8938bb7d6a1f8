"""Invariance: whether a row's logits have the same bits whatever runs beside it, and with which shapes.

A kernel is chosen by shape, so only shapes can carry a row's company into its arithmetic. `search` measures
which are safe; here a verdict is kept, by everything that the last bits may depend on (device, instruction
set, threads, BLAS, versions, dtype, quantization, shapes), and turned into a forward that keeps the promise
or refuses it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import warnings
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, backend
from ..forward.cuda_linear import MOST
from ..forward.packed import PackedForward
from ..forward.shapes import PLAIN, Shapes
from ..models.load import Model
from .attention_checks import Check
from .cancelling_layers import layers_of
from .search import search

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Check", "Verdict", "resolve", "verdict"]

PROBE = 5
"""Raised when the probe or the arithmetic of `attention` changes: older verdicts are not believed."""

_known: dict[Path, Verdict] = {}
_warned: weakref.WeakSet[Model] = weakref.WeakSet()


@dataclass(frozen=True)
class Verdict:
    """What the probe found: the shapes to run with, and whether everything passed with them.

    Attributes
    ----------
    shapes : Shapes
    holds : bool
    checks : tuple of Check
        Those of the chosen shapes, or of the last candidate tried where none passed.
    where : dict
        Device, BLAS, versions: what the verdict is valid for.
    """

    shapes: Shapes
    holds: bool
    checks: tuple[Check, ...]
    where: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """One row a check: `what, shapes, compared, differing, largest`."""
        import pandas as pd

        return pd.DataFrame([asdict(c) for c in self.checks], columns=list(Check.__dataclass_fields__))

    def to_json(self) -> dict[str, Any]:
        """Plain values, as they are cached."""
        checks = [
            asdict(c) | {"largest": c.largest if math.isfinite(c.largest) else None} for c in self.checks
        ]
        return {"shapes": asdict(self.shapes), "holds": self.holds, "checks": checks, "where": self.where}

    def __repr__(self) -> str:
        s = self.shapes
        rule = f"tile {s.tile}, head {s.head}, block {s.block}, bucket {s.bucket}"
        rule += f" without {', '.join(map(str, s.skip))}" if s.skip else ""
        rule += f", narrow {s.narrow}" if s.narrow else ""
        return f"Verdict({'holds' if self.holds else 'does not hold'}: {rule})"

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>" + str(self.to_frame()._repr_html_())


def resolve(model: Model, invariant: bool | str) -> tuple[PackedForward, bool]:
    """A packed forward for that setting, and whether it is batch-invariant.

    Raises
    ------
    Unpackable
        The model can't run packed.
    ValueError
        `invariant=True` and nothing passed.
    """
    if invariant is False:
        return PackedForward(model, PLAIN), False
    found = verdict(model)
    if found.holds:
        return PackedForward(model, found.shapes), True
    failed = next((c for c in found.checks if c.differing), None)
    why = (
        f"{failed.what} ({failed.shapes}): {failed.differing} of {failed.compared} rows differ"
        if failed
        else ""
    )
    if invariant is True:
        raise ValueError(
            f"invariant=True: {model.name} is not batch-invariant on this device: {why}; "
            'forward="sequential" is slower and runs every row alone'
        )
    if model not in _warned:
        _warned.add(model)
        warnings.warn(
            f"{model.name} is not batch-invariant on this device: {why}. Running without; results say so.",
            stacklevel=4,
        )
    return PackedForward(model, PLAIN), False


def verdict(model: Model, *, fresh: bool = False) -> Verdict:
    """The probe's verdict for a model on this device: from the cache, or measured now.

    Parameters
    ----------
    model : Model
    fresh : bool
        Measure even where a verdict is cached.

    Returns
    -------
    Verdict
    """
    where = backend.fingerprint() | {"model": _signature(model), "toolkit": __version__, "probe": PROBE}
    name = hashlib.sha256(json.dumps(where, sort_keys=True).encode()).hexdigest()[:24]
    path = backend.cache_dir() / "invariance" / f"{name}.json"
    if not fresh:
        kept = _known.get(path) or _read(path, where)
        if kept is not None:
            return kept
    PackedForward(model, PLAIN)  # what can't run packed is refused here, before anything is said
    print(f"measuring batch invariance of {model.name} on this device (once) ...", file=sys.stderr)
    shapes, checks = search(model)
    found = _known[path] = Verdict(shapes, not any(c.differing for c in checks), checks, where)
    _keep(path, json.dumps(found.to_json(), sort_keys=True, indent=1))
    return found


def _signature(model: Model) -> str:
    """What of a model its shapes follow from."""
    body, head, _ = layers_of(model)
    kinds = sorted({type(m).__name__ for _, m in model.module.named_modules()})
    layers = (m for _, m in model.module.named_modules() if hasattr(m, "bits"))
    # Each way to quantize has a kernel of its own.
    packing = sorted({(m.bits, getattr(m, "group_size", 0), getattr(m, "mode", "")) for m in layers})
    parts = [model.dtype, sorted(body), sorted(head), kinds, model.config, *packing]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path, where: dict[str, Any]) -> Verdict | None:
    """A verdict that was kept; None where there is none, or what is there makes no sense."""
    try:
        kept = json.loads(path.read_text())
        shapes = Shapes(**kept["shapes"] | {"skip": tuple(kept["shapes"]["skip"])})
        checks = tuple(
            Check(**c | {"largest": math.nan if c["largest"] is None else c["largest"]})
            for c in kept["checks"]
        )
        numbers = (shapes.tile, shapes.head, shapes.block, shapes.bucket, *shapes.skip)
        narrow = shapes.narrow in (0, MOST)
        if kept["where"] != where or not narrow or not all(type(n) is int and n > 0 for n in numbers):
            return None
        return Verdict(shapes, bool(kept["holds"]) and not any(c.differing for c in checks), checks, where)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, text: str) -> None:
    """Write at once and whole; a cache that can't be written is no reason to stop."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"could not keep the invariance verdict: {error}", stacklevel=2)
