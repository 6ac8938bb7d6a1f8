"""Seeds in batched language-model inference on MLX: shown, measured, fixed.

Import this before `mlx`: `backend` binds a fast BLAS, which must come first. The other public names are
found where they are written when first used, so that a script pays only for what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import backend

if TYPE_CHECKING:  # for editors and type checkers; the table below says the same to Python
    from .cohorts.plan import drain_window, plan_cohorts
    from .cohorts.types import Cohort, Row
    from .engine.engine import Engine, generate
    from .engine.policies import POLICIES
    from .engine.trace import Trace
    from .models.load import Model, load, loaded, tiny
    from .requests import Request
    from .results import Completion, Results
    from .study.audit.run import audit
    from .study.doctor import doctor
    from .study.drift.study import drift
    from .study.seeds.first_token import first_tokens
    from .study.seeds.seed_matrix import seed_matrix
    from .study.sweep.run import sweep

__version__ = "0.1.0"

_HOME = {
    "load": "models.load",
    "loaded": "models.load",
    "tiny": "models.load",
    "Model": "models.load",
    "Request": "requests",
    "Completion": "results",
    "Results": "results",
    "Row": "cohorts.types",
    "Cohort": "cohorts.types",
    "plan_cohorts": "cohorts.plan",
    "drain_window": "cohorts.plan",
    "generate": "engine.engine",
    "Engine": "engine.engine",
    "Trace": "engine.trace",
    "POLICIES": "engine.policies",
    "first_tokens": "study.seeds.first_token",
    "seed_matrix": "study.seeds.seed_matrix",
    "drift": "study.drift.study",
    "audit": "study.audit.run",
    "doctor": "study.doctor",
    "sweep": "study.sweep.run",
}

__all__ = ["backend"]
__all__ += list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend.bind()  # a TOOLKIT_BLAS that can't be honoured stops here
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
