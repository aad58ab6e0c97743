"""Who is late: while a rank waits long for others, one line says for whom, and since when.

Ranks leave a note in a store that all can read, twice in a round, when they get that far; nobody waits for a note.
One thread, which sleeps most of the time, compares the notes while something is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

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
        self._events = Events(log, seconds=10 * limit)
        self._stop = threading.Event()
        self.note(0, BUILT)

    def start(self) -> None:
        """Begin to look, now and then, until :meth:`close`, or until nobody else holds this object."""
        threading.Thread(
            target=_look_again,
            args=(weakref.ref(self), self._stop, self.limit / 4),
            name="edit.watch",
            daemon=True,
        ).start()

    def close(self) -> None:
        """No more looks."""
        self._stop.set()

    def note(self, round: int, stage: int) -> None:
        """Let others know how far this rank has come."""
        with suppress(
            RuntimeError
        ):  # a store that is gone shows in the next collective, with a better message
            self._write(f"{round} {stage} {self._now()}")

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
        """If something has been waited for longer than the limit, say so, once."""
        for entry in list(self._pending.values()):
            what, since = entry
            if self._now() - since >= self.limit and entry not in self._said:
                self._said.add(entry)
                if (line := self._line(what, since)) is not None:
                    self._events.warn("late", line)

    def _line(self, what: str, since: float) -> str | None:
        notes = {rank: note.split() for rank, note in self._read().items()}
        reached = {rank: (int(number), int(stage)) for rank, (number, stage, _) in notes.items()}
        late = {rank for rank in reached if reached[rank] < max(reached.values())}
        if self.rank != min(reached.keys() - late):  # one line, not one from every rank
            return None
        waited = f"{what} has waited {self._now() - since:.0f} s, since {_clock(since)},"
        if not late:
            return (
                f"{waited} though every rank has come to it: a link, or a rank in mid-transfer, hangs. Time-out: "
                f"{self._timeout}"
            )
        whom = []
        for replica, members in enumerate(self._grid):
            if behind := sorted(late.intersection(members)):
                number, stage, at = min((*reached[rank], float(notes[rank][2])) for rank in behind)
                did = ("built its optimizer", f"launched round {number}", f"came to apply round {number}")[
                    stage
                ]
                whom.append(
                    f"replica {replica} (rank {', '.join(map(str, behind))}), which {did} at {_clock(at)} and has not "
                    "been heard of since"
                )
        return f"{waited} for " + "; ".join(whom) + f". Time-out: {self._timeout}"


def _look_again(watch: weakref.ref[Watch], stop: threading.Event, seconds: float) -> None:
    while not stop.wait(seconds):
        if (alive := watch()) is None:
            return
        with suppress(RuntimeError):  # the store is gone
            alive.look()
        del alive


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
