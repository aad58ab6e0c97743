"""What a person should hear of: one line per event, and not the same kind of line again and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

_SHOWN = 3  # layers that a line names


class Events:
    """Warnings to a logger: of each kind at most one line in ``seconds``; the next one says how many were left out.

    Args:
        log: where lines go.
        seconds: between two lines of a kind.
        clock: monotonic seconds.
    """

    def __init__(
        self, log: logging.Logger, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._seconds, self._clock = log, seconds, clock
        self._last: dict[
            str, tuple[float, int]
        ] = {}  # kind: when there was a line, and how many were not since

    def warn(self, kind: str, line: str) -> None:
        """Say ``line``, or count it."""
        now = self._clock()
        last, left_out = self._last.get(kind, (-float("inf"), 0))
        if now - last < self._seconds:
            self._last[kind] = last, left_out + 1
            return
        self._last[kind] = now, 0
        self._log.warning(
            line + f" ({left_out} more like this in the {now - last:.0f} s before)" * bool(left_out)
        )


def of_round(
    number: int,
    layers: Sequence[str],
    steps: Tensor,
    norms: Tensor,
    out: Tensor,
    weights: Tensor,
    expected: dict[str, Tensor],
) -> list[tuple[str, int | None, str]]:
    """``(kind, replica, line)`` for every replica that a round left out though it had made steps, and, the replica
    being ``None``, for the layers that it rolled back.

    Args:
        number: of the round.
        layers: names of the L layers.
        steps, norms, out, weights: as in a :class:`RoundReport`.
        expected: what the penalty judged norms by, each ``[R, L]``; may be empty.
    """
    found: list[tuple[str, int | None, str]] = []
    for replica in range(len(steps)):
        columns = out[replica].nonzero().flatten().tolist()
        if not columns or not steps[replica]:
            continue
        shown = []
        for column in columns[:_SHOWN]:
            numbers = {"norm": norms[replica, column].item()}
            numbers |= {name: table[replica, column].item() for name, table in expected.items()}
            shown.append(f"layer {layers[column]}: " + ", ".join(f"{k} {v:.4g}" for k, v in numbers.items()))
        where = f"{len(columns)} of {len(layers)} layers"
        line = f"round {number}: replica {replica} left out in {where}; " + "; ".join(shown) + _more(columns)
        found.append((f"replica {replica} left out", replica, line))
    went_back = (weights.sum(0) == 0) & (out & (steps > 0).unsqueeze(1)).any(0)  # not: nobody moved
    if back := went_back.nonzero().flatten().tolist():
        names = ", ".join(layers[column] for column in back[:_SHOWN]) + _more(back)
        line = f"round {number}: {len(back)} of {len(layers)} layers back to the anchor, as nobody was left: {names}"
        found.append(("back to the anchor", None, line))
    return found


def _more(columns: list[int]) -> str:
    return f"; {len(columns) - _SHOWN} more" * (len(columns) > _SHOWN)
