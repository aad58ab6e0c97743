"""WHEN a round is due: after so many inner steps (EDiT), or after so many seconds (A-EDiT)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .checks import check_float, check_int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replica is, as a schedule sees it after an inner step."""

    steps: int
    """Inner steps of this replica since it launched the last round."""
    local_steps: int
    """Inner steps of this replica in the whole run, those of the warm-up and before a resume included."""
    rounds: int
    """Rounds completed."""
    total_steps: int
    """Inner steps of all replicas as of the last round: equal on all ranks."""
    seconds: float
    """Seconds since the last round was completed, or, with ``delay``, was launched, without those for which the
    training loop stood still; 0.0 if the schedule has no ``clock``."""


class Schedule(Protocol):
    """Says after each inner step of the local phase whether a round is due.

    A schedule may have two more members:

    ``clock: Callable[[], float]``
        Monotonic seconds, from which the engine fills ``progress.seconds``. Without it no clock is read. With it, an
        attribute ``interval`` is taken for seconds, four of which the default of ``timeout`` allows for.
    ``ask_again(progress) -> int``
        For answers that may differ between the ranks of one replica, as a clock's do. If a replica has several, the
        first is asked, in place of ``due``, and the others follow it. 0: a round is due now; ``n >= 1``: ask again in
        ``n`` steps.
    """

    @property
    def warmup_steps(self) -> int:
        """Inner steps, from the beginning of the run, in which gradients are averaged over all ranks. May be 0."""
        ...

    def due(self, progress: Progress) -> bool:
        """Whether a round is due after this step. Not asked in the warm-up, nor while a round is under way."""
        ...


@dataclass(frozen=True)
class EverySteps:
    """A round every ``interval`` inner steps: τ of EDiT.

    Args:
        interval: inner steps between two rounds.
        warmup_steps: inner steps of ordinary data-parallel training at first.

    Raises:
        TypeError, ValueError: ``interval`` is not an int >= 1, or ``warmup_steps`` not one >= 0.
    """

    interval: int = 128
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_int(self, "interval", 1, "inner steps", "the default is 128; EverySeconds goes by the clock")
        _check_warmup(self)

    def due(self, progress: Progress) -> bool:
        """Whether ``interval`` steps were made since the last round."""
        return progress.steps >= self.interval


@dataclass(frozen=True)
class EverySeconds:
    """A round every ``interval`` seconds, in which fast replicas make more steps: τ_time of A-EDiT.

    Args:
        interval: seconds from the end of a round, or, with ``delay``, from its launch, to the next.
        warmup_steps: inner steps of ordinary data-parallel training at first.
        clock: monotonic seconds. In neither ``repr`` nor comparisons: ranks may have clocks of their own.

    Raises:
        TypeError, ValueError: ``interval`` is not a finite number > 0, ``warmup_steps`` not an int >= 0, or
            ``clock`` not callable.
    """

    interval: float = 600.0
    warmup_steps: int = 0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_float(
            self,
            "interval",
            "a finite number > 0 (seconds)",
            lambda x: x > 0,
            "the default is 600.0; EverySteps counts steps",
        )
        _check_warmup(self)
        if not callable(self.clock):
            raise TypeError(
                f"EverySeconds: clock must be a callable that returns seconds, but is {self.clock!r}: the "
                "default is time.monotonic"
            )

    def due(self, progress: Progress) -> bool:
        """Whether ``interval`` seconds have passed since the last round: ``progress.seconds``."""
        return progress.seconds >= self.interval

    def ask_again(self, progress: Progress) -> int:
        """0 if due; else the steps that take half of the time left at this round's pace, but at least 1 and no
        more than were made since the round.

        Half, so that a replica that slows down is still asked in time; no more than were made, so that a
        first step of an unlike duration misleads nobody. The questions of a round stay logarithmically few.
        """
        if self.due(progress):
            return 0
        step_time = progress.seconds / max(1, progress.steps)
        if step_time <= 0:  # the clock is coarser than a step
            return 1
        steps = 0.5 * (self.interval - progress.seconds) / step_time
        return max(1, int(min(steps, progress.steps)))


def _check_warmup(schedule: object) -> None:
    check_int(schedule, "warmup_steps", 0, "inner steps", "use 0 for no warm-up")
