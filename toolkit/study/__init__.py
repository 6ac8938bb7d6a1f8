"""Studies: questions asked of an engine, answered as tables."""

from .first_token import FirstTokens, first_tokens
from .prefilled import Prefilled, prefill
from .seed_matrix import SeedMatrix, seed_matrix

__all__ = ["FirstTokens", "Prefilled", "SeedMatrix", "first_tokens", "prefill", "seed_matrix"]
