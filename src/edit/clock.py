"""How the ranks of one replica decide at the same step what a clock says (A-EDiT)."""

from __future__ import annotations

import torch

from .comm import Replicas, Work
from .schedule import Progress, Schedule


class ReplicaClock:
    """One rank of a replica asks the schedule; all read its answer a step later.

    At question step ``n`` the first rank broadcasts, in the background and on a group of its own, in how many
    steps to ask again (0: the round is due). Every rank reads it at step ``n + 1``, when it has long arrived.
    As each answer is half of the way that is left, a round takes logarithmically few questions.
    """

    def __init__(self, schedule: Schedule, replicas: Replicas) -> None:
        self._ask_again = getattr(schedule, "ask_again", None)
        self._schedule, self._replicas = schedule, replicas
        self._next = 0
        self._answer: tuple[int, torch.Tensor, Work | None] | None = None

    def due(self, progress: Progress) -> bool:
        """Whether a round is due after this step: the same on all ranks of the replica."""
        if self._ask_again is None or self._replicas.members == 1:
            return self._schedule.due(progress)
        if self._answer is not None:
            asked, value, work = self._answer
            self._answer = None
            self._wait(work)
            if value.item() == 0:
                return True
            self._next = asked + int(value.item())
        if progress.steps >= self._next:
            value = torch.zeros(1, dtype=torch.int64, device="cpu")
            if self._replicas.member == 0:
                value.fill_(self._ask_again(progress))
            self._answer = progress.steps, value, self._replicas.start_from_first_member(value)
        return False

    def save(self) -> list[float]:
        """Next question, and step and value of an answer not yet read (-1: none). Waits until it has come."""
        if self._answer is None:
            return [self._next, -1, -1]
        asked, value, work = self._answer
        self._wait(work)
        return [self._next, asked, value.item()]

    def load(self, saved: list[float]) -> None:
        """Set what :meth:`save` gave."""
        self._next, asked, value = map(int, saved)
        self._answer = None if asked < 0 else (asked, torch.tensor([value], device="cpu"), None)

    def restart(self) -> None:
        """A round begins: steps count from 0 again, and an answer under way is not wanted any more."""
        if self._answer is not None:
            self._wait(self._answer[2])
        self._answer, self._next = None, 0

    def _wait(self, work: Work | None) -> None:
        if work is not None:
            with self._replicas.naming("asking the first rank of this replica what its clock says"):
                work.wait()
