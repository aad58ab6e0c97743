"""EDiT and A-EDiT for PyTorch: ``LocalSGDOptimizer`` replaces ``torch.optim.AdamW``.

Replicas of a plain or sharded model train on their own for many steps and synchronise layer by layer in the
forward pass. See :class:`LocalSGDOptimizer`. ``edit.monitor`` is imported when it is first used.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from . import methods
from .anomaly import AnomalyTest, EMAZTest
from .checkpoint import export_safetensors, latest, load, save
from .comm import SyncError
from .optimizer import LocalSGDOptimizer
from .outer import Average, HeavyBall, Nesterov, Outer
from .penalty import Penalty, PseudoGradientPenalty
from .planner import Plan, plan
from .round import RoundReport
from .schedule import EverySeconds, EverySteps, Progress, Schedule

__all__ = [
    "AnomalyTest",
    "Average",
    "EMAZTest",
    "EverySeconds",
    "EverySteps",
    "HeavyBall",
    "LocalSGDOptimizer",
    "Nesterov",
    "Outer",
    "Penalty",
    "Plan",
    "Progress",
    "PseudoGradientPenalty",
    "RoundReport",
    "Schedule",
    "SyncError",
    "export_safetensors",
    "latest",
    "load",
    "methods",
    "plan",
    "save",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    if name == "monitor":
        return _import_module(".monitor", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
