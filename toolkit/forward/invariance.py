"""Invariance: which shapes keep a row's arithmetic the same on this device."""

from __future__ import annotations

from .. import backend
from ..models import Model
from .shapes import PLAIN, Shapes


def resolve(model: Model, invariant: bool | str) -> tuple[Shapes, bool | None]:
    """The shapes to run with, and whether they were found invariant."""
    if invariant is False:
        return PLAIN, False
    return (Shapes(8, 8, 4, 128) if backend.on_cpu() else Shapes(256, 256, 8, 256)), True
