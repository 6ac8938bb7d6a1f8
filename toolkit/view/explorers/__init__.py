"""Explorers: controls around pictures. Logic is in `study`, pictures are in `view.charts`."""

from .audit import AuditExplorer
from .base import Explorer
from .distribution import ChainExplorer
from .drift import DriftExplorer, RulesExplorer
from .live_batch import StreamExplorer
from .planner import PlanExplorer
from .seeds import FirstTokenExplorer, SeedMatrixExplorer, StepExplorer
from .sweep import SweepExplorer

__all__ = [
    "AuditExplorer",
    "ChainExplorer",
    "DriftExplorer",
    "Explorer",
    "FirstTokenExplorer",
    "PlanExplorer",
    "RulesExplorer",
    "SeedMatrixExplorer",
    "StepExplorer",
    "StreamExplorer",
    "SweepExplorer",
]
