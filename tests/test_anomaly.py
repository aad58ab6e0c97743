"""WHO is left out: the test on numbers checked by hand, and against one pair at a time in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edit.anomaly import EMAZTest

F64 = torch.float64


@dataclass
class Slow:
    """The statistics of one replica and layer, as docs and paper write them."""

    m: float = 0.0
    v: float = 0.0
    n: int = 0
    k: int = 0

    def step(self, test: EMAZTest, g: float, live: bool) -> bool:
        if not live:
            return False
        anomalous = False
        if self.n >= test.warmup_rounds and self.n > 0:
            c = 1 - (1 - test.alpha) ** self.n
            mu = self.m / c
            sigma = max(math.sqrt(self.v / c), 1e-6 * mu)
            anomalous = g > mu + test.threshold * sigma
        if anomalous:
            self.k += 1
            if self.k < test.patience:
                return True
            self.m, self.v, self.n = 0.0, 0.0, 0
        self.k = 0
        self.n += 1
        self.m = (1 - test.alpha) * self.m + test.alpha * g
        mu = self.m / (1 - (1 - test.alpha) ** self.n)
        self.v = (1 - test.alpha) * self.v + test.alpha * (g - mu) ** 2
        return anomalous


def see(test: EMAZTest, state: dict[str, Tensor], *norms: float) -> bool:
    """One round of one layer; a norm that says nothing is not live."""
    g = torch.tensor(norms, dtype=F64).unsqueeze(1)
    return bool(test.anomalous(g, g.isfinite() & (g > 0), state)[0, 0])


def warmed(test: EMAZTest, rounds: int = 20, level: float = 1.0) -> dict[str, Tensor]:
    """State after norms that alternate by ±5 % around ``level``."""
    state = test.init(1, 1)
    assert not any(see(test, state, level * (1 + 0.05 * (-1) ** r)) for r in range(rounds))
    return state


def copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor], *keys: str) -> bool:
    return all(torch.equal(a[key], b[key]) for key in keys or a)


def test_state() -> None:
    state = EMAZTest().init(3, 2)
    assert list(state) == ["mean", "var", "count", "streak"]
    assert all(t.shape == (3, 2) and t.dtype == F64 and not t.any() for t in state.values())


def test_by_hand() -> None:
    """α = 1/2, norms 1, 2:  m = 1/2, c = 1/2, μ' = 1, v = 0;
    then m = 1/4 + 1 = 5/4, c = 3/4, μ' = 5/3, v = 1/2 · (1/3)² = 1/18.
    Now μ = 5/3, σ = √(1/18 / (3/4)) = √(2/27) = 0.27217, and the bound μ + 3σ is 2.48317."""
    test = EMAZTest(alpha=0.5, threshold=3.0, warmup_rounds=2)
    state = test.init(1, 1)
    assert not see(test, state, 1.0)
    assert not see(test, state, 2.0)
    assert state["mean"].item() == pytest.approx(5 / 4, abs=1e-15)
    assert state["var"].item() == pytest.approx(1 / 18, abs=1e-15)
    assert not see(test, copy(state), 2.4831)
    assert see(test, copy(state), 2.4832)
    assert not see(test, copy(state), 1e-9)  # one-sided


def test_equal_norms_leave_a_band_of_a_millionth() -> None:
    """σ = 1e-6 μ where nothing varied: 1 + 3e-6 is the bound."""
    test = EMAZTest()
    state = test.init(1, 1)
    for _ in range(30):
        assert not see(test, state, 1.0)
    assert not see(test, copy(state), 1 + 2.9e-6)
    assert see(test, copy(state), 1 + 3.1e-6)


def test_warm_up_has_no_verdicts() -> None:
    test = EMAZTest(warmup_rounds=10)
    state = test.init(1, 1)
    assert not any(see(test, state, 10.0**r) for r in range(10))
    test = EMAZTest(warmup_rounds=0)
    state = test.init(1, 1)
    assert not see(test, state, 1.0)  # nothing to compare with
    assert see(test, state, 1.1)


NORM = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([0.0, math.nan, math.inf, 1e6, 1e12]))


@given(
    rounds=st.lists(st.lists(NORM, min_size=6, max_size=6), min_size=1, max_size=30),
    alpha=st.sampled_from([0.02, 0.37, 1.0]),
    warmup=st.integers(0, 4),
    patience=st.integers(1, 4),
)
def test_equals_the_slow_form(rounds: list[list[float]], alpha: float, warmup: int, patience: int) -> None:
    """3 replicas, 2 layers. The odd threshold keeps exact ties away, where the last bit decides."""
    test = EMAZTest(alpha=alpha, threshold=2.9371, warmup_rounds=warmup, patience=patience)
    state, slow = test.init(3, 2), [Slow() for _ in range(6)]
    for norms in rounds:
        live = [math.isfinite(g) and g > 0 for g in norms]
        got = test.anomalous(torch.tensor(norms, dtype=F64).view(3, 2), torch.tensor(live).view(3, 2), state)
        assert got.dtype == torch.bool
        assert got.flatten().tolist() == [s.step(test, *gl) for s, *gl in zip(slow, norms, live, strict=True)]
        for key, name in (("mean", "m"), ("var", "v"), ("count", "n"), ("streak", "k")):
            want = torch.tensor([float(getattr(s, name)) for s in slow], dtype=F64).view(3, 2)
            torch.testing.assert_close(state[key], want, rtol=1e-12, atol=1e-12)


def test_fault_1_an_anomaly_does_not_feed_the_statistics() -> None:
    """In the authors' code one anomaly fed ``G + 1e6``, and a later 5x spike went unseen for 1,145 syncs."""
    test = EMAZTest()
    state = warmed(test)
    before = copy(state)
    assert see(test, state, 1000.0)
    assert same(state, before, "mean", "var", "count")
    assert see(test, state, 5.0)  # at once
    assert not see(test, state, 1.0)
    assert see(test, state, 5.0)  # and later
    assert state["count"].item() == 21


@given(spike=st.floats(2.0, 1e100), norms=st.lists(st.floats(0.95, 1.05), min_size=15, max_size=30))
def test_one_spike_changes_nothing(spike: float, norms: list[float]) -> None:
    """Norms within ±5 %: whatever they are, σ <= 0.1, so that 2 is always too far."""
    test = EMAZTest(threshold=8.0)
    state = test.init(1, 1)
    for g in norms:
        see(test, state, g)
    before = copy(state)
    assert see(test, state, spike)
    assert same(state, before, "mean", "var", "count")
    assert state["streak"].item() == before["streak"].item() + 1 == 1
    assert see(test, state, spike)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
def test_fault_2_what_says_nothing_changes_nothing(bad: float) -> None:
    """In the authors' code a NaN norm was no outlier and made the averages NaN for good."""
    test = EMAZTest()
    state = warmed(test)
    assert see(test, state, 5.0)
    before = copy(state)
    assert not see(test, state, bad)  # NaN and Inf are out for another reason
    assert same(state, before)  # the streak too
    assert see(test, state, 5.0)
    assert not see(test, state, 1.0)


@given(
    noise=st.lists(st.floats(0.95, 1.05), min_size=40, max_size=40),
    factor=st.floats(2.0, 1e3),
    patience=st.integers(1, 7),
)
def test_a_lasting_rise_is_left_out_for_patience_rounds(
    noise: list[float], factor: float, patience: int
) -> None:
    """The last norm that is left out begins new statistics, in which the next ones are normal."""
    test = EMAZTest(threshold=8.0, patience=patience)
    state = test.init(1, 1)
    for g in noise[:20]:
        assert not see(test, state, g)
    out = [see(test, state, factor * g) for g in noise[20 : 20 + patience]]
    assert out == [True] * patience
    g = factor * noise[19 + patience]
    assert [state[key].item() for key in ("count", "streak")] == [1, 0]
    assert state["mean"].item() == pytest.approx(0.02 * g, rel=1e-12)
    assert state["var"].item() == pytest.approx(0, abs=1e-12 * g**2)
    assert not any(see(test, state, factor * g) for g in noise[20 + patience : 30 + patience])


def test_defaults_leave_a_doubling_out_for_five_rounds() -> None:
    test = EMAZTest()
    state = warmed(test)
    assert [see(test, state, 2.0) for _ in range(6)] == [True] * 5 + [False]


def test_a_normal_norm_ends_the_streak() -> None:
    test = EMAZTest()
    state = warmed(test)
    for _ in range(10):
        assert all(see(test, state, 5.0) for _ in range(4))
        assert not see(test, state, 1.0)


def test_pairs_are_independent() -> None:
    """A spike in one pair of [2, 2] is seen there alone; a dead pair stands still."""
    test = EMAZTest(warmup_rounds=3)
    state = test.init(2, 2)
    live = torch.tensor([[True, True], [True, False]])
    g = torch.tensor([[1.0, 10.0], [100.0, math.nan]], dtype=F64)
    for r in range(5):
        assert not test.anomalous(g * (1 + 0.05 * (-1) ** r), live, state).any()
    g[0, 1] *= 3
    assert test.anomalous(g, live, state).tolist() == [[False, True], [False, False]]
    assert state["count"].tolist() == [[6, 5], [6, 0]]
    assert g[1, 1].isnan()
    assert g[0, 0] == 1  # what was handed in is not written to
