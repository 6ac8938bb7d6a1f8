"""Studies: questions asked of an engine, answered as tables."""

from .compositions import Composition
from .drift import Drift, drift
from .first_token import FirstTokens, first_tokens
from .prefilled import Prefilled, prefill
from .rounded import rounded
from .seed_matrix import SeedMatrix, seed_matrix
from .sweep import Sweep, sweep

__all__ = [
    "Composition",
    "Drift",
    "FirstTokens",
    "Prefilled",
    "SeedMatrix",
    "Sweep",
    "drift",
    "first_tokens",
    "prefill",
    "rounded",
    "seed_matrix",
    "sweep",
]
