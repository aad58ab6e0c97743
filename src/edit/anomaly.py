"""WHO is left out: replicas whose norms are unlike their own past. Pure functions of the norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .checks import check_float, check_int


class AnomalyTest(Protocol):
    """Finds the replicas that are to be left out of a round, layer by layer (R replicas, L layers).

    A test may have one more member, for messages and reports:

    ``expected(state) -> dict[str, Tensor]``
        By name, tables ``[R, L]`` of what norms are judged by.
    """

    def init(self, replicas: int, layers: int) -> dict[str, Tensor]:
        """The state before the first round: float64 tensors on the host whose *last* dimension is the layer
        (the state of a layer is replaced when that layer is done)."""
        ...

    def anomalous(self, norms: Tensor, live: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Test ``norms`` against ``state``, then bring ``state`` up to date in place.

        Args:
            norms: ``[R, L]`` float64: g, the norms of the pseudo gradients per ``(s/s̄)^e``.
            live: ``[R, L]`` bool: where False (no steps, no movement, not finite), ``norms`` says nothing:
                the verdict must be False and the state stay as it is.
            state: as :meth:`init` made it.

        Returns:
            ``[R, L]`` bool: who is left out.
        """
        ...


@dataclass(frozen=True)
class EMAZTest:
    """One-sided z-test of each replica's norm of each layer against its own moving average.

    EDiT (arXiv 2412.07210), with three choices where the paper is silent: averages are corrected for their
    start at 0; anomalies don't enter them, or one spike would blind the test; and ``patience`` anomalies in a
    row start them afresh, or a norm that has risen for good would be left out forever.

    Args:
        alpha: weight α of the newest norm in the averages, 0 < α <= 1.
        threshold: δ, how many standard deviations above the mean is too far.
        warmup_rounds: norms to see before any verdict, per replica and layer.
        patience: exclusions in a row after which the statistics start afresh from the last one.

    Raises:
        TypeError, ValueError: a setting is out of these bounds.
    """

    alpha: float = 0.02
    threshold: float = 3.0
    warmup_rounds: int = 10
    patience: int = 5

    def __post_init__(self) -> None:
        check_float(self, "alpha", "a number in (0, 1]", lambda x: 0 < x <= 1, "the default is 0.02")
        check_float(
            self,
            "threshold",
            "a finite number > 0 (standard deviations)",
            lambda x: x > 0,
            "the default is 3.0; anomaly=None switches the test off",
        )
        check_int(self, "warmup_rounds", 0, "rounds", "the default is 10; 0 tests from the second norm on")
        check_int(self, "patience", 1, "rounds", "the default is 5; anomaly=None switches the test off")

    def init(self, replicas: int, layers: int) -> dict[str, Tensor]:
        """m ``mean``, v ``var``, n ``count``, k ``streak`` of anomalies; each ``[R, L]`` float64, all 0."""
        keys = ("mean", "var", "count", "streak")
        return {key: torch.zeros(replicas, layers, dtype=torch.float64, device="cpu") for key in keys}

    def expected(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """For messages and reports: μ ``mean`` and σ ``sigma`` of each replica's norms so far, ``[R, L]``; NaN where
        there were none."""
        mu, sigma = self._moments(state)
        return {"mean": mu, "sigma": sigma}

    def _moments(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        c = 1 - (1 - self.alpha) ** state["count"]
        mu = state["mean"] / c
        # The floor, because equal norms would forbid any change.
        return mu, torch.maximum((state["var"] / c).sqrt(), 1e-6 * mu)

    def anomalous(self, norms: Tensor, live: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Who is too far above its mean (:meth:`AnomalyTest.anomalous`).

        A norm that completes a streak of ``patience`` is left out like the others of the streak, and begins
        new statistics: the next one like it is normal.
        """
        m, v, n, k = (state[key] for key in ("mean", "var", "count", "streak"))
        a, g = self.alpha, norms

        mu, sigma = self._moments(state)  # where n = 0, NaN, and not used
        anomalous = live & (n > 0) & (n >= self.warmup_rounds) & (g > mu + self.threshold * sigma)

        k.copy_(torch.where(live, torch.where(anomalous, k + 1, 0.0), k))
        restart = anomalous & (k >= self.patience)
        for tensor in (m, v, n, k):
            tensor.masked_fill_(restart, 0.0)

        # `where`, not arithmetic with 0: g may be NaN where it is not live.
        normal = live & (~anomalous | restart)
        n.copy_(torch.where(normal, n + 1, n))
        m.copy_(torch.where(normal, (1 - a) * m + a * g, m))
        mu = m / (1 - (1 - a) ** n)
        v.copy_(torch.where(normal, (1 - a) * v + a * (g - mu).square(), v))
        return anomalous
