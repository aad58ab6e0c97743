"""Who is late: while a rank waits long for others, one line says for whom, and since when.

Each rank has a thread that sleeps most of the time. When it wakes it leaves, in a store that all can read, a note of
how far the rank has come, and that it has waited long, if it has; then it compares the notes. Of those who wait, the
lowest rank speaks. The training loop never touches the store.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from . import background
from .events import Events

log = logging.getLogger(__name__)
BUILT, LAUNCHED, APPLYING = range(3)


class Watch:
    """What this rank waits for, and who has not come.

    Args:
        rank: of this process.
        grid: ranks as ``[replica][member]``.
        limit: seconds after which waiting is worth a line.
        timeout: of the groups, as text: what comes next.
        write: leaves this rank's note; must not wait.
        read: all ranks' notes.
        now: wall-clock seconds, as all hosts have them.
    """

    def __init__(
        self,
        rank: int,
        grid: Sequence[Sequence[int]],
        limit: float,
        timeout: str,
        write: Callable[[str], None],
        read: Callable[[], dict[int, str]],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.rank, self.limit, self._grid, self._timeout = rank, limit, grid, timeout
        self._write, self._read, self._now = write, read, now
        self._pending: dict[int, tuple[str, float]] = {}  # by thread: what it waits for, since when
        self._said: set[tuple[str, float]] = set()
        self._waits = ""  # for what, longer than the limit, at the last look
        self._left = ""  # the note that others can read
        self._stop: Callable[[], object] = lambda: None
        self._events = Events(log, seconds=10 * limit, clock=now)
        self.note(0, BUILT)

    def start(self) -> None:
        """Begin to look, now and then, until :meth:`close`, or until nobody else holds this object."""
        self._leave_note()
        # From here on only the thread touches the store. It may wait there for ever, for a host that has vanished, and
        # whoever else asks the store meanwhile waits with it.
        look = functools.partial(_look_again, weakref.ref(self), self.limit / 4)
        self._stop = background.start("edit.watch", look, self)

    def close(self) -> None:
        """No more looks."""
        self._stop()

    def note(self, round: int, stage: int) -> None:
        """Let others know how far this rank has come."""
        self._reached = round, stage, self._now()

    def _leave_note(self) -> None:
        round, stage, at = self._reached
        note = f"{round} {stage} {at} {self._waits}"
        if note != self._left:
            self._write(note)
            self._left = note

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """What happens inside may wait for other ranks."""
        me = threading.get_ident()
        self._pending[me] = what, self._now()
        try:
            yield
        finally:
            self._said.discard(self._pending.pop(me))

    def look(self) -> None:
        """Leave a note if there is news. If something has been waited for longer than the limit, say so, once, unless a
        lower rank that waits does."""
        long = [entry for entry in list(self._pending.values()) if self._now() - entry[1] >= self.limit]
        waited, self._waits = self._waits, long[0][0] if long else ""
        self._leave_note()
        if not waited:
            return  # whoever else waits has left its note by the next look
        for entry in long:
            if entry not in self._said:
                self._said.add(entry)
                if (line := self._line(*entry)) is not None:
                    self._events.warn("late", line)

    def _line(self, what: str, since: float) -> str | None:
        notes: dict[int, tuple[tuple[int, int], float, str]] = {}
        for rank, note in self._read().items():
            if note:
                number, reached, when, waits = note.split(" ", 3)
                notes[rank] = (int(number), int(reached)), float(when), waits
        if any(rank < self.rank and waits for rank, (_, _, waits) in notes.items()):
            return None
        waited = f"{what} has waited {self._now() - since:.0f} s, since {_clock(since)}"
        furthest = max(note[0] for note in notes.values())
        late = {rank for rank, note in notes.items() if note[0] < furthest and rank != self.rank}
        whom = []
        for replica, members in enumerate(self._grid):
            if behind := sorted(late.intersection(members)):
                (round, stage), at, waits = min(notes[rank] for rank in behind)
                did = ("built its optimizer", f"launched round {round}", f"came to apply round {round}")[
                    stage
                ]
                whom.append(
                    f"replica {replica} (rank {', '.join(map(str, behind))}), which {did} at {_clock(at)} and "
                    + (f"waits, too: {waits}" if waits else "has not been heard of since")
                )
        others: dict[str, list[int]] = {}
        for rank, (_, _, waits) in sorted(notes.items()):
            if rank != self.rank and waits != what:
                others.setdefault(waits, []).append(rank)
        if whom:
            rest = ", for " + "; ".join(whom)
        else:
            rest = "; no other rank is a round behind" + "".join(
                f"; rank {', '.join(map(str, ranks[:8]))} "
                + (f"waits elsewhere: {waits}" if waits else "does not wait for the others")
                for waits, ranks in others.items()
            )
        return f"{waited}{rest}. Time-out: {self._timeout}"


def _look_again(watch: weakref.ref[Watch], seconds: float) -> None:
    stop = background.stop_event()
    assert stop is not None
    while not stop.wait(seconds):
        if (alive := watch()) is None:
            return
        with suppress(RuntimeError):  # the store is gone
            alive.look()
        del alive


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
