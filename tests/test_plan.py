"""The time model, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edit


def test_by_hand() -> None:
    # 1M parameters: 4 MB; R = 4 sends 2·3/4 of it, 6 MB; at 6 MB/s that is a second.
    plan = edit.plan(1_000_000, 6e6, 0.3, 4, interval=32, delay=0)
    assert plan.bytes_per_round == 6_000_000
    assert plan.round_seconds == 1.0
    assert plan.exposed_seconds == pytest.approx(0.9)  # a forward is 0.1 s
    assert plan.seconds_per_step == pytest.approx(0.3 + 0.9 / 32)
    assert plan.utilisation == pytest.approx(9.6 / 10.5)
    assert plan.baseline_seconds_per_step == pytest.approx(0.3 + 0.8)  # a backward is 0.2 s
    assert plan.baseline_utilisation == pytest.approx(0.3 / 1.1)
    late = edit.plan(1_000_000, 6e6, 0.3, 4, interval=32, delay=3)
    assert late.exposed_seconds == pytest.approx(0.1)
    assert edit.plan(1_000_000, 6e6, 0.3, 4, interval=32, delay=4).utilisation == 1.0


def test_what_it_chooses() -> None:
    # 95 %: 0.3/19 s per step may be lost, so at once 0.9/(0.3/19) = 57 steps.
    plan = edit.plan(1_000_000, 6e6, 0.3, 4)
    assert (plan.interval, plan.delay) == (57, 0)
    assert plan.utilisation >= 0.95
    # At a tenth of the rate at once would take 627: 128, and a delay that hides 10 s.
    plan = edit.plan(1_000_000, 6e5, 0.3, 4)
    assert (plan.interval, plan.delay, plan.utilisation) == (128, 34, 1.0)
    # A round longer than 128 steps: the interval holds it.
    plan = edit.plan(1_000_000, 6e4, 0.3, 4)
    assert (plan.interval, plan.delay, plan.utilisation) == (334, 334, 1.0)
    assert edit.plan(1_000_000, math.inf, 0.3, 4).interval == 16
    assert edit.plan(1_000_000, 6e6, 0.3, 4, interval=8).delay == 4
    assert edit.plan(1_000_000, 1.0, 0.3, 1).utilisation == 1.0  # nobody to talk to


@given(
    st.integers(1, 10**12),
    st.floats(1e3, 1e12),
    st.floats(1e-3, 100),
    st.integers(1, 1000),
    st.none() | st.integers(1, 1000),
)
def test_always(parameters: int, rate: float, step: float, replicas: int, interval: int | None) -> None:
    plan = edit.plan(parameters, rate, step, replicas, interval=interval)
    assert 0 <= plan.delay <= plan.interval
    assert 0 < plan.utilisation <= 1
    assert plan.seconds_per_step * plan.interval == pytest.approx(step * plan.interval + plan.exposed_seconds)
    if interval is None:
        assert plan.utilisation >= 0.95 * (1 - 1e-9)
    faster = edit.plan(parameters, 2 * rate, step, replicas, interval=plan.interval, delay=plan.delay)
    assert faster.utilisation >= plan.utilisation


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parameters": 0}, "parameters must be > 0"),
        ({"bytes_per_second": 0.0}, "bytes_per_second must be > 0.*not bits"),
        ({"step_seconds": -1.0}, "step_seconds must be > 0"),
        ({"step_seconds": math.nan}, "step_seconds must be > 0"),
        ({"replicas": 0}, "replicas must be > 0"),
        ({"target": 1.0}, "target must be between 0 and 1"),
        ({"interval": 4, "delay": 5}, "0 <= delay <= interval"),
    ],
)
def test_wrong_use(change: dict[str, Any], said: str) -> None:
    arguments = {"parameters": 1, "bytes_per_second": 1.0, "step_seconds": 1.0, "replicas": 2} | change
    with pytest.raises(ValueError, match=said):
        edit.plan(**arguments)
