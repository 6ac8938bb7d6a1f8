"""Charts: a function from a documented table to an Altair chart, with no state and no model.

Studies make the tables, `figure` shows the charts, `explorers` redraws them. Each function rounds what it
draws, so that a stored picture does not depend on the last bits of a logit, and says in one sentence, its
text alternative, what the picture shows. The data are named, so that an explorer can replace them in place.
"""

from .audit import audit
from .drift import drift, margins
from .equal_bits import equality, reach, reach_data, rules, rules_data
from .filters import chain, chain_data, stages
from .live_batch import company, company_data
from .plans import plan, plan_data
from .seeds import first_tokens, first_tokens_data, reading, seed_matrix, seed_matrix_data
from .sweep import sweep, sweep_data
from .timeline import timeline

__all__ = [
    "audit",
    "chain",
    "chain_data",
    "company",
    "company_data",
    "drift",
    "equality",
    "first_tokens",
    "first_tokens_data",
    "margins",
    "plan",
    "plan_data",
    "reach",
    "reach_data",
    "reading",
    "rules",
    "rules_data",
    "seed_matrix",
    "seed_matrix_data",
    "stages",
    "sweep",
    "sweep_data",
    "timeline",
]
