"""A forward by its name, with the shapes that were found to keep bits."""

from __future__ import annotations

import warnings

from ..fields import show
from ..forward.packed import Unpackable
from ..forward.padded import PaddedForward, SequentialForward
from ..forward.spans import Forward
from ..models.load import Model
from .verdict import resolve

FORWARDS = ("packed", "padded", "sequential")
METHODS = ("name", "can_batch", "can_pad", "run", "state", "length", "release")

__all__ = ["FORWARDS", "build"]


def build(model: Model, name: str | Forward, invariant: bool | str) -> tuple[Forward, bool | None]:
    """The forward of that name, or the one given, and whether it is batch-invariant: None is not known.

    A model that can't run packed runs sequentially, with a warning that says why; where invariance was
    demanded it is refused.
    """
    if not isinstance(name, str):
        missing = [method for method in METHODS if not hasattr(name, method)]
        if missing or isinstance(name, type):
            lacks = f"a Forward has {', '.join(METHODS)}; this has no {', '.join(missing)}"
            lacks = lacks if missing else "is a class; give an object of it"
            raise ValueError(f"forward={show(name)}: {lacks}")
        if invariant is True:
            raise ValueError(
                'invariant=True with a forward object: only forward="packed" is measured to be invariant'
            )
        return name, None if invariant == "auto" else False
    if name not in FORWARDS:
        raise ValueError(f"forward={name!r}: must be one of {', '.join(FORWARDS)}")
    if not (isinstance(invariant, bool) or (isinstance(invariant, str) and invariant == "auto")):
        # 1 and NumPy's True equal True but aren't it, and would be taken for "auto" below.
        raise ValueError(f'invariant={invariant!r}: must be "auto", True or False')
    if name != "packed":
        if invariant is True:
            raise ValueError(
                f'invariant=True with forward="{name}": only forward="packed" can be batch-invariant'
            )
        return (PaddedForward(model) if name == "padded" else SequentialForward(model)), False
    try:
        return resolve(model, invariant)
    except Unpackable as error:
        if invariant is True:
            raise ValueError(
                f"invariant=True: {model.name} can't run packed: {error}; leave invariant out"
            ) from None
        warnings.warn(f"{model.name} can't run packed: {error}. Its rows run one at a time.", stacklevel=3)
        return SequentialForward(model), False
