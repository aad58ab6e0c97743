"""HOW replicas are combined: weights and clip. Pure functions of the norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .anomaly import AnomalyTest, EMAZTest
from .checks import check_float


class Penalty(Protocol):
    """Weighs the replicas of each layer, and limits their combination (R replicas, L layers).

    A penalty may have one more member, for messages and reports:

    ``expected(steps, state) -> dict[str, Tensor]``
        By name, tables ``[R, L]`` of what the norms were judged by. Asked on every rank after a round, with the state
        before it.
    """

    def init(self, replicas: int, layers: int) -> dict[str, Tensor]:
        """The state before the first round: float64 tensors on the host whose *last* dimension is the layer
        (the state of a layer is replaced when that layer is done). May be empty."""
        ...

    def weights(self, norms: Tensor, steps: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Decide one round, and bring ``state`` up to date in place. Called on one rank; the others are told. With
        ``delay`` or ``offload="replicas"``, in a thread beside training.

        Args:
            norms: ``[R, L]`` float64: G, norms of the pseudo gradients. 0, NaN and Inf are possible.
            steps: ``[R]``: s, inner steps since the replica's last round; 0 for one that has nothing to say.
            state: as :meth:`init` made it.

        Returns:
            ``[R, L]`` float64, >= 0. Each column sums to 1, or is all 0: that layer goes back to the anchor
            on every replica, without an outer step.
        """
        ...

    def clip(self, norm: Tensor) -> Tensor:
        """The factor of the combined pseudo gradient of a layer whose norm is ``norm``.

        Both 0-dimensional, on one device. Must not read ``norm`` on the host: it would wait for the device.
        """
        ...


@dataclass(frozen=True)
class PseudoGradientPenalty:
    """EDiT's penalty (arXiv 2412.07210): leave out, weigh by ``exp(-g/T)``, clip.

    Each part can be switched off alone with ``None``.

    Args:
        anomaly: who is left out besides replicas without steps or with a norm that is not finite; a class
            stands for its defaults. ``None``: nobody.
        temperature: T of the softmax, in units of the norm. ``None``: equal weights over those not out.
        max_norm: φ, the largest norm of a layer's combined pseudo gradient; longer ones are clipped to it. ``None``:
            no clip.
        step_exponent: e. Norms are compared per ``(s/s̄)^e``, so that a replica that made few steps does not
            win by having moved little: 1/2 as for a random walk, 1 for a straight one, 0 as in the paper.

    Raises:
        TypeError, ValueError: a setting is not a finite number in its bounds, or ``anomaly`` no test.
    """

    anomaly: AnomalyTest | type[AnomalyTest] | None = EMAZTest()
    temperature: float | None = 1.0
    max_norm: float | None = 10.0
    step_exponent: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.anomaly, type):
            object.__setattr__(self, "anomaly", self.anomaly())
        needed = () if self.anomaly is None else ("init", "anomalous")
        if not all(hasattr(self.anomaly, name) for name in needed):
            raise TypeError(
                f"PseudoGradientPenalty: anomaly must have init and anomalous, but is {self.anomaly!r}: use "
                "EMAZTest(), None to switch it off, or a test of your own (AnomalyTest)"
            )
        for name, default in (("temperature", 1.0), ("max_norm", 10.0)):
            remedy = f"the default is {default}; None switches it off"
            check_float(self, name, "a finite number > 0 or None", lambda x: x > 0, remedy, none=True)
        check_float(self, "step_exponent", "a finite number >= 0", lambda x: x >= 0, "use 0.5, 1.0 or 0.0")

    def init(self, replicas: int, layers: int) -> dict[str, Tensor]:
        """The state of ``anomaly``; none without it."""
        return {} if self.anomaly is None else self._test.init(replicas, layers)

    def weights(self, norms: Tensor, steps: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Steps 1-5 of a sync; a layer that no replica moved has no weights (:meth:`Penalty.weights`)."""
        stepped = steps.unsqueeze(1) > 0
        g = norms / self._relative(steps)

        # G is finite wherever g is; the other way round, a quotient may overflow.
        eligible = stepped & g.isfinite()
        moved = eligible & (norms > 0)
        if self.anomaly is not None:
            eligible = eligible & ~self._test.anomalous(g, moved, state)
            moved = moved & eligible

        if self.temperature is None:
            w = (eligible & moved.any(0)).to(torch.float64)
        else:
            # From the least norm on, so that the best replica has exp(0): large norms don't all become 0.
            least = torch.where(moved, g, torch.inf).amin(0)
            w = torch.where(moved, torch.exp((least - g) / self.temperature), 0.0)
        total = w.sum(0)
        return torch.where(total > 0, w / total, 0.0)

    def expected(self, steps: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """For messages and reports: what the test expects of the norms G of replicas that made ``steps``."""
        expected = getattr(self.anomaly, "expected", None)
        tables = {} if expected is None else expected(state)
        return {name: table * self._relative(steps) for name, table in tables.items()}

    def _relative(self, steps: Tensor) -> Tensor:
        """``(s/s̄)^e``, ``[R, 1]``; 1 for a replica without steps."""
        s = steps.to(torch.float64).unsqueeze(1)
        mean = s.sum() / (s > 0).sum().clamp(min=1)
        return torch.where(s > 0, s / mean, 1.0) ** self.step_exponent

    def clip(self, norm: Tensor) -> Tensor:
        """``min(1, φ / (norm + 1e-6))``."""
        if self.max_norm is None:
            return torch.ones_like(norm)
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)

    @property
    def _test(self) -> AnomalyTest:
        assert self.anomaly is not None
        assert not isinstance(self.anomaly, type)
        return self.anomaly


MEAN = PseudoGradientPenalty(anomaly=None, temperature=None, max_norm=None)
"""``penalty=None``: the plain mean over the replicas that have made a step and whose norm is finite."""
