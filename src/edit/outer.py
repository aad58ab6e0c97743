"""HOW the anchor moves: the optimizer that takes the combined pseudo gradient for a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from .checks import check_float

Outer = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the outer optimizer on the anchor: one flat vector per layer, of which a rank holds its shard. The
optimizer must therefore work element by element: SGD or Adam, not one that needs shapes or norms. Its
``param_groups`` are live, so its lr can be scheduled."""


@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum (EDiT: 0.8 / 0.85; DiLoCo: 0.7 / 0.9).

    ``m <- βm + Δ̂``, ``a <- a - lr (Δ̂ + βm)``, as in ``torch.optim.SGD``.

    Args:
        lr: finite, >= 0.
        momentum: β, 0 <= β < 1; 0 is plain SGD.

    Raises:
        TypeError, ValueError: a setting is out of these bounds.
    """

    lr: float = 0.8
    momentum: float = 0.85

    def __post_init__(self) -> None:
        _check_lr_and_momentum(self, "EDiT uses 0.8", "EDiT uses 0.85")

    def __call__(self, params: ParamsT) -> Optimizer:
        """The optimizer of ``params``."""
        # Fused: one pass over memory, and no vector besides. (torch refuses nesterov=True with momentum 0,
        # where both are the same.)
        nesterov = self.momentum > 0
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, nesterov=nesterov, fused=True)


@dataclass(frozen=True)
class Average:
    """``a <- a - Δ̂``: the weighted mean of the replicas' parameters (Post Local SGD)."""

    def __call__(self, params: ParamsT) -> Optimizer:
        """The optimizer of ``params``."""
        return torch.optim.SGD(params, lr=1.0, fused=True)


@dataclass(frozen=True)
class HeavyBall:
    """CO2's outer step (Sun et al. 2024): heavy ball with a penalty for staleness, clipped by element.

    ``m <- βm + Δ̂/gap``, ``m <- clamp(m, -c, c)``, ``a <- a - lr m``. The authors' code computes the clamp and
    discards it; here it counts.

    Args:
        lr: finite, >= 0.
        momentum: β, 0 <= β < 1.
        gap: the staleness gap by which pseudo gradients are divided, > 0.
        clip: c, bound of each element of the momentum, in units of the parameters, > 0. ``None``: off.

    Raises:
        TypeError, ValueError: a setting is out of these bounds.
    """

    lr: float = 1.0
    momentum: float = 0.5
    gap: float = 1.0
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        _check_lr_and_momentum(self, "CO2 uses 1.0", "CO2 uses 0.5")
        check_float(self, "gap", "a finite number > 0", lambda x: x > 0, "use 1.0 for no penalty")
        rule = "a finite number > 0 or None"
        check_float(self, "clip", rule, lambda x: x > 0, "use None for no clip", none=True)

    def __call__(self, params: ParamsT) -> Optimizer:
        """The optimizer of ``params``."""
        return HeavyBallOptimizer(params, lr=self.lr, momentum=self.momentum, gap=self.gap, clip=self.clip)


class HeavyBallOptimizer(Optimizer):
    """Steps as :class:`HeavyBall` says. Its settings are in each group; ``m`` is ``momentum_buffer``."""

    def __init__(
        self, params: ParamsT, *, lr: float, momentum: float, gap: float, clip: float | None
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "gap": gap, "clip": clip})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the parameters that have a gradient. Returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for a in group["params"]:
                    if a.grad is None:
                        continue
                    state = self.state[a]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(a)
                    m = state["momentum_buffer"]
                    m.mul_(group["momentum"]).add_(a.grad, alpha=1 / group["gap"])
                    if group["clip"] is not None:
                        m.clamp_(-group["clip"], group["clip"])
                    a.add_(m, alpha=-group["lr"])
        return loss


def _check_lr_and_momentum(outer: object, lr: str, momentum: str) -> None:
    check_float(outer, "lr", "a finite number >= 0", lambda x: x >= 0, lr)
    check_float(outer, "momentum", "a number in [0, 1)", lambda x: 0 <= x < 1, momentum)
