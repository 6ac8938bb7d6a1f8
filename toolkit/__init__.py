"""Seeds in batched language-model inference on MLX: shown, measured, fixed.

Import this before `mlx`: `backend` binds a fast BLAS, which must come first. The other public names are
found where they are written when first used, so that a script pays only for what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import backend

if TYPE_CHECKING:  # for editors and type checkers; the table below says the same to Python
    from .cohorts import Cohort, Row, drain_window, plan_cohorts
    from .engine import Engine
    from .models import Model, load, loaded, tiny
    from .policies import POLICIES
    from .requests import Completion, Request, Results
    from .study.audit import audit
    from .study.doctor import doctor
    from .study.sweep import sweep
    from .trace import Trace

__version__ = "0.1.0"

_HOME = {
    "load": "models",
    "loaded": "models",
    "tiny": "models",
    "Model": "models",
    "Request": "requests",
    "Completion": "requests",
    "Results": "requests",
    "Row": "cohorts",
    "Cohort": "cohorts",
    "plan_cohorts": "cohorts",
    "drain_window": "cohorts",
    "generate": "engine",
    "Engine": "engine",
    "Trace": "trace",
    "POLICIES": "policies",
    "first_tokens": "study.first_token",
    "seed_matrix": "study.seed_matrix",
    "drift": "study.drift",
    "audit": "study.audit",
    "doctor": "study.doctor",
    "sweep": "study.sweep",
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
