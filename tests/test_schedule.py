"""WHEN: schedules, on numbers that a reader can check, and a clock that the test turns."""

from __future__ import annotations

import math
import time

from hypothesis import given
from hypothesis import strategies as st

from edit.schedule import EverySeconds, EverySteps, Progress


def progress(steps: int = 1, seconds: float = 0.0) -> Progress:
    return Progress(steps=steps, local_steps=steps, rounds=0, total_steps=0, seconds=seconds)


def test_every_steps_is_due_from_its_interval_on() -> None:
    schedule = EverySteps(3)
    assert [schedule.due(progress(n)) for n in range(1, 6)] == [False, False, True, True, True]
    assert not hasattr(schedule, "clock")  # so no clock is read
    assert not hasattr(schedule, "ask_again")


def test_every_seconds_is_due_from_its_interval_on() -> None:
    schedule = EverySeconds(60.0)
    assert [schedule.due(progress(10, s)) for s in (0.0, 59.99, 60.0, 61.0)] == [False, False, True, True]
    assert schedule.clock is time.monotonic


def test_fault_3_the_clock_resolves_more_than_128_seconds() -> None:
    began = 1.7e9  # epoch seconds: the worst that a user's clock may count; float64 resolves 2.4e-7 s here
    assert not EverySeconds(60.0).due(progress(1, (began + 10.0) - began))
    assert EverySeconds(60.0).due(progress(1, (began + 60.0) - began))
    assert not EverySeconds(60.0).due(progress(1, (began + 59.999) - began))


def test_ask_again_after_half_of_the_way_that_is_left() -> None:
    schedule = EverySeconds(600.0)
    # 200 steps in 400 s: 2 s a step; 200 s left are 100 steps, half of them 50.
    assert schedule.ask_again(progress(200, 400.0)) == 50
    # 50 steps in 100 s: half of what is left are 125, but only 50 were made.
    assert schedule.ask_again(progress(50, 100.0)) == 50
    # 3 steps in 300 s: 0.5 · 300/100 = 1.5.
    assert schedule.ask_again(progress(3, 300.0)) == 1
    assert schedule.ask_again(progress(298, 596.0)) == 1  # 0.5 · 4/2
    assert schedule.ask_again(progress(299, 599.0)) == 1  # 0.5 · 1/2.003, but at least 1
    assert schedule.ask_again(progress(300, 600.0)) == 0


def test_ask_again_when_the_clock_has_not_moved_or_went_back() -> None:
    for seconds in (0.0, -3.0, 5e-324, 1e-300):
        later = EverySeconds(600.0).ask_again(progress(1, seconds))
        assert 1 <= later <= 2**31  # an answer at all, and one that fits into the int64 that is broadcast
    assert EverySeconds(600.0).ask_again(progress(0, 0.0)) == 1


@given(interval=st.floats(0.1, 1e4), pace=st.floats(1e-3, 1.0))
def test_a_steady_replica_is_asked_rarely_and_in_time(interval: float, pace: float) -> None:
    """The protocol of the replica's clock: an answer is read one step after the question."""
    schedule, step_time = EverySeconds(interval), interval * pace / 10
    steps, asked, next_question = 0, 0, 0
    answer: int | None = None
    while True:
        steps += 1
        if answer is not None:
            if answer == 0:
                break
            next_question, answer = steps - 1 + answer, None
        if steps >= next_question:
            answer, asked = schedule.ask_again(progress(steps, steps * step_time)), asked + 1
    assert interval <= steps * step_time <= interval + 3 * step_time
    # Doubling up to a third of the way, half of the rest from there.
    assert asked <= 2 * math.log2(interval / step_time) + 3
