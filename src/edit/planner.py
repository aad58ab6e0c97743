"""What a link allows: time of a round, and from it interval and delay. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` expects. Seconds are of the training loop of one replica."""

    interval: int
    """Inner steps between two rounds."""
    delay: int
    """Inner steps by which a round is applied late."""
    bytes_per_round: int
    """That each rank sends to other replicas in a round: an all-reduce of float32, as a ring."""
    round_seconds: float
    """That these take."""
    exposed_seconds: float
    """Of these, what the loop stands still: what neither a forward nor ``delay`` steps hide."""
    seconds_per_step: float
    """Of an inner step, with its part of a round."""
    utilisation: float
    """``step_seconds / seconds_per_step``: 1 is the speed without communication."""
    baseline_seconds_per_step: float
    """Of a step that averages gradients, these as large as the parameters, behind its backward."""
    baseline_utilisation: float
    """As ``utilisation``, of that."""


def plan(
    parameters: int,
    bytes_per_second: float,
    step_seconds: float,
    replicas: int,
    *,
    interval: int | None = None,
    delay: int | None = None,
    target: float = 0.95,
) -> Plan:
    """Interval and delay for a link, and how fast training will be.

    A step is a third forward and two thirds backward. At once (``delay=0``) a round hides behind one forward, late
    behind ``delay`` steps; the baseline's all-reduce hides behind its backward. Time for computing a round,
    latency, and unequal replicas are left out. Checked against measurements: docs/benchmarks.md.

    Args:
        parameters: that a rank holds: of the model, divided by the ranks that share a replica.
        bytes_per_second: at which a rank sends to other replicas, all ranks sending at once. A rank has its share of
            its host's link.
        step_seconds: of an inner step, without communication.
        replicas: R.
        interval: inner steps. ``None``: the shortest that reaches ``target`` with this delay, at least 16. If the
            delay is chosen too, at most 128 while that holds the round, and a delay makes up for the rest.
        delay: inner steps. ``None``: 0 if that reaches ``target`` at this interval, otherwise the shortest that
            hides the round, at most the interval.
        target: utilisation to reach, 0 < target < 1.

    Raises:
        ValueError: an argument is out of these bounds.
    """
    for name, value in (("parameters", parameters), ("step_seconds", step_seconds), ("replicas", replicas)):
        if not 0 < value < math.inf:
            raise ValueError(f"plan: {name} must be > 0 and finite, but is {value!r}")
    if not bytes_per_second > 0:
        raise ValueError(
            f"plan: bytes_per_second must be > 0, but is {bytes_per_second!r}: give bytes, not bits; math.inf for a "
            "link that costs nothing"
        )
    if not 0 < target < 1:
        raise ValueError(f"plan: target must be between 0 and 1, but is {target!r}: the default is 0.95")
    traffic = 2 * (replicas - 1) * 4 * parameters // replicas
    seconds = traffic / bytes_per_second

    def exposed(late: int) -> float:
        return max(0.0, seconds - (late * step_seconds if late else step_seconds / 3))

    if interval is None:
        allowed = step_seconds * (1 / target - 1)  # to stand still, per step
        interval = max(16, delay or 0, math.ceil(exposed(delay or 0) / allowed - 1e-9))
        if delay is None:
            interval = min(interval, max(128, math.ceil(seconds / step_seconds)))
    if delay is None:
        reached = interval * step_seconds >= target * (interval * step_seconds + exposed(0))
        delay = 0 if reached else min(interval, math.ceil(seconds / step_seconds))
    if not 0 <= delay <= interval or interval < 1:
        raise ValueError(
            f"plan: interval must be >= 1 and 0 <= delay <= interval, but they are {interval!r} and {delay!r}"
        )
    per_step = step_seconds + exposed(delay) / interval
    baseline = step_seconds + max(0.0, seconds - step_seconds * 2 / 3)
    return Plan(
        interval=interval,
        delay=delay,
        bytes_per_round=traffic,
        round_seconds=seconds,
        exposed_seconds=exposed(delay),
        seconds_per_step=per_step,
        utilisation=step_seconds / per_step,
        baseline_seconds_per_step=baseline,
        baseline_utilisation=step_seconds / baseline,
    )
