"""The methods of the paper, as keyword arguments of ``LocalSGDOptimizer``.

``LocalSGDOptimizer(model, lr=3e-4, mesh=mesh, **edit.methods.diloco())``
"""

from __future__ import annotations

from typing import Any

from .outer import Average, HeavyBall, Nesterov
from .penalty import PseudoGradientPenalty
from .schedule import EverySeconds, EverySteps


def edit(interval: int = 128, warmup_steps: int = 1000) -> dict[str, Any]:
    """EDiT (Cheng et al., ICLR 2025): every ``interval`` inner steps, with the whole penalty."""
    return {
        "schedule": EverySteps(interval, warmup_steps),
        "penalty": PseudoGradientPenalty(),
        "outer": Nesterov(lr=0.8, momentum=0.85),
    }


def a_edit(interval_seconds: float = 600.0, warmup_steps: int = 1000) -> dict[str, Any]:
    """A-EDiT: as EDiT, every ``interval_seconds``; fast replicas make more steps."""
    return {**edit(), "schedule": EverySeconds(interval_seconds, warmup_steps)}


def diloco(interval: int = 500) -> dict[str, Any]:
    """DiLoCo (Douillard et al. 2023): plain mean, Nesterov 0.7 / 0.9, no warm-up."""
    return {"schedule": EverySteps(interval), "penalty": None, "outer": Nesterov(lr=0.7, momentum=0.9)}


def post_local_sgd(interval: int = 16, warmup_steps: int = 1000) -> dict[str, Any]:
    """Post Local SGD (Lin et al. 2020): warm-up, then the mean of the parameters."""
    return {"schedule": EverySteps(interval, warmup_steps), "penalty": None, "outer": Average()}


def co2(interval: int = 48) -> dict[str, Any]:
    """CO2 (Sun et al. 2024): plain mean, clipped heavy ball, applied one round late, no warm-up."""
    return {"schedule": EverySteps(interval), "penalty": None, "outer": HeavyBall(), "delay": interval}


def co2_star(interval: int = 48) -> dict[str, Any]:
    """CO2*: as CO2, with anchor and momentum spread over the replicas."""
    return {**co2(interval), "offload": "replicas"}
