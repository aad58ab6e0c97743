"""HOW replicas are combined: weights and clip, on numbers checked by hand, and what holds for any norms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from edit.anomaly import EMAZTest
from edit.penalty import MEAN, PseudoGradientPenalty

F64 = torch.float64
NAN, INF, LN2 = math.nan, math.inf, math.log(2)


def weigh(penalty: PseudoGradientPenalty, norms: list[Any], steps: list[int] | None = None) -> list[Any]:
    """Weights of one round from a fresh state. A flat list is one layer, and gives a flat list."""
    g = torch.tensor(norms, dtype=F64)
    flat = g.dim() == 1
    g = g.unsqueeze(1) if flat else g
    s = torch.tensor([8] * len(norms) if steps is None else steps)
    w = penalty.weights(g, s, penalty.init(*g.shape))
    return (w[:, 0] if flat else w).tolist()


def close(got: list[float], *want: float) -> None:
    assert got == pytest.approx(want, rel=0, abs=1e-9)
    assert [g == 0 for g in got] == [w == 0 for w in want]


FULL = PseudoGradientPenalty()
EQUAL = PseudoGradientPenalty(temperature=None)


# --------------------------------------------------------------------------------------------- by hand


def test_softmax_by_hand() -> None:
    """exp(−1) : exp(−1 − ln 2) = 2 : 1; with T = 2 it is √2 : 1, and 1/(1 + √½) = 0.585786438."""
    close(weigh(FULL, [1.0, 1.0 + LN2]), 2 / 3, 1 / 3)
    close(weigh(PseudoGradientPenalty(temperature=2.0), [1.0, 1.0 + LN2]), 0.585786438, 0.414213562)
    close(weigh(FULL, [[1.0, 5.0 + LN2], [1.0 + LN2, 5.0]])[0], 2 / 3, 1 / 3)  # layers on their own


def test_steps_by_hand() -> None:
    """s = 4, 16, s̄ = 10.  e = ½: G = √0.4 · 1, √1.6 · (1 + ln 2) give g = 1, 1 + ln 2.
    e = 1: G = 0.4, 1.6 (1 + ln 2) do."""
    g = [1.0, 1.0 + LN2]
    close(weigh(FULL, [0.4**0.5 * g[0], 1.6**0.5 * g[1]], [4, 16]), 2 / 3, 1 / 3)
    straight = PseudoGradientPenalty(step_exponent=1.0)
    close(weigh(straight, [0.4 * g[0], 1.6 * g[1]], [4, 16]), 2 / 3, 1 / 3)
    close(weigh(PseudoGradientPenalty(step_exponent=0.0), g, [4, 16]), 2 / 3, 1 / 3)


def test_mean_of_steps_is_over_replicas_that_stepped() -> None:
    """s = 4, 16, 0: s̄ = 10 and not 20/3."""
    close(weigh(FULL, [0.4**0.5, 1.6**0.5 * (1 + LN2), 7.0], [4, 16, 0]), 2 / 3, 1 / 3, 0)


def test_huge_norms_do_not_underflow() -> None:
    close(weigh(FULL, [1e6, 1e6 + LN2]), 2 / 3, 1 / 3)
    close(weigh(FULL, [1e150, 1e150, 2e150]), 1 / 2, 1 / 2, 0)
    close(weigh(PseudoGradientPenalty(temperature=1e-300), [1.0, 2.0]), 1, 0)


def test_nothing_moved_takes_no_outer_step() -> None:
    for penalty in (FULL, EQUAL, MEAN):
        close(weigh(penalty, [0.0, 0.0]), 0, 0)
        close(weigh(penalty, [1.0, 1.0], [0, 0]), 0, 0)
        close(weigh(penalty, [0.0, NAN]), 0, 0)
        close(weigh(penalty, [0.0, 1.0], [8, 0]), 0, 0)


def test_a_layer_that_did_not_move() -> None:
    """It would take almost all of the softmax; in a mean it counts. Layers are on their own."""
    close(weigh(FULL, [0.0, 1.0, 1.0 + LN2]), 0, 2 / 3, 1 / 3)
    close(weigh(EQUAL, [0.0, 1.0, 9.0]), 1 / 3, 1 / 3, 1 / 3)
    assert weigh(EQUAL, [[0.0, 0.0], [0.0, 1.0]]) == [[0, 0.5], [0, 0.5]]


def test_fault_6_an_excluded_replica_does_not_count_in_the_divisor() -> None:
    """In the authors' code equal weights were 0.5 here, not 1.0."""
    for penalty in (EQUAL, MEAN):
        assert weigh(penalty, [1.0, NAN]) == [1.0, 0.0]
        assert weigh(penalty, [1.0, 1.0], [8, 0]) == [1.0, 0.0]
    assert warmed_round(EQUAL, [1.0, 9.0])[0] == [1.0, 0.0]


def warmed_round(
    penalty: PseudoGradientPenalty, *rounds: list[float]
) -> tuple[list[float], dict[str, Tensor]]:
    """Weights of the last of ``rounds`` after 20 rounds of norms of about 1; the state after it."""
    state, steps = penalty.init(len(rounds[0]), 1), torch.full((len(rounds[0]),), 8)
    for r in range(20):
        g = torch.full((len(rounds[0]), 1), 1 + 0.05 * (-1) ** r, dtype=F64)
        assert (penalty.weights(g, steps, state) > 0).all()
    for norms in rounds:
        w = penalty.weights(torch.tensor(norms, dtype=F64).unsqueeze(1), steps, state)
    return w[:, 0].tolist(), state


def test_fault_1_a_spike_does_not_hide_the_next_one() -> None:
    for penalty in (FULL, EQUAL):
        assert warmed_round(penalty, [1.0, 1e6])[0] == [1.0, 0.0]
        assert warmed_round(penalty, [1.0, 1e6], [1.0, 1.0], [1.0, 5.0])[0] == [1.0, 0.0]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_fault_2_a_norm_that_is_not_finite_is_out_and_leaves_no_trace(bad: float) -> None:
    for penalty in (FULL, EQUAL):
        w, state = warmed_round(penalty, [1.0, bad])
        assert w == [1.0, 0.0]
        assert state["count"].flatten().tolist() == [21, 20]
        assert all(t.isfinite().all() for t in state.values())
        close(warmed_round(penalty, [1.0, bad], [1.0, 1.0])[0], 1 / 2, 1 / 2)
        assert warmed_round(penalty, [bad, bad])[0] == [0.0, 0.0]  # roll back
    assert weigh(MEAN, [1.0, bad]) == [1.0, 0.0]


def test_all_anomalous_rolls_back_until_patience_ends() -> None:
    """As at a rise of the inner lr: five rounds go back, then the new norms are the normal ones."""
    for rounds in range(1, 6):
        assert warmed_round(FULL, *[[5.0, 5.0]] * rounds)[0] == [0.0, 0.0]
    close(warmed_round(FULL, *[[5.0, 5.0]] * 6)[0], 1 / 2, 1 / 2)


def test_the_detector_sees_norms_per_step() -> None:
    """Twice the norm after four times the steps (of the others, s̄ near theirs) is no anomaly."""
    state, r = FULL.init(2, 1), torch.ones(2, 1, dtype=F64)
    for k in range(20):
        FULL.weights(r * (1 + 0.05 * (-1) ** k), torch.tensor([10, 10]), state)
    before = {key: value.clone() for key, value in state.items()}
    norms, steps = torch.tensor([[0.4**0.5], [1.6**0.5]], dtype=F64), torch.tensor([4, 16])
    assert (FULL.weights(norms, steps, state) > 0).all()  # g = 1, 1
    raw = PseudoGradientPenalty(step_exponent=0.0)
    assert raw.weights(norms, steps, before).flatten().tolist() == [1.0, 0.0]


# -------------------------------------------------------------------------------------------- any norms

NORM = st.one_of(st.floats(1e-6, 1e4), st.sampled_from([0.0, 0.0, 1.0, 1e6, 1e30, 1e150, 1e-300, NAN, INF]))
PENALTY = st.builds(
    PseudoGradientPenalty,
    anomaly=st.sampled_from(
        [None, EMAZTest(warmup_rounds=1, patience=3), EMAZTest(alpha=0.3, warmup_rounds=0)]
    ),
    temperature=st.sampled_from([None, 0.1, 1.0, 100.0]),
    step_exponent=st.sampled_from([0.0, 0.5, 1.0]),
)


@st.composite
def rounds_of(draw: st.DrawFn) -> list[tuple[Tensor, Tensor]]:
    """A few rounds of norms ``[R, L]`` and steps ``[R]``."""
    r, l = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    made = []
    for _ in range(draw(st.integers(1, 6))):
        norms = draw(st.lists(NORM, min_size=r * l, max_size=r * l))
        steps = draw(st.lists(st.integers(0, 20), min_size=r, max_size=r))
        made.append((torch.tensor(norms, dtype=F64).view(r, l), torch.tensor(steps)))
    return made


def run(
    penalty: PseudoGradientPenalty, rounds: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights of all rounds ``[rounds, R, L]``, and the state after them."""
    state = penalty.init(*rounds[0][0].shape)
    return torch.stack([penalty.weights(norms, steps, state) for norms, steps in rounds]), state


@given(PENALTY, rounds_of())
def test_weights_are_a_distribution_or_nothing(penalty: Any, rounds: Any) -> None:
    w, state = run(penalty, rounds)
    norms = torch.stack([n for n, _ in rounds])
    steps = torch.stack([s for _, s in rounds])
    sums = w.sum(1)
    assert w.dtype == F64
    assert (w >= 0).all()  # no NaN either
    assert (((sums - 1).abs() < 1e-12) | (sums == 0)).all()
    assert not w[~norms.isfinite()].any()
    assert not w[steps == 0].any()
    assert penalty.temperature is None or not w[norms == 0].any()
    moved = (norms.isfinite() & (norms > 0) & (steps > 0).unsqueeze(2)).any(1)
    assert not sums[~moved].any()
    if penalty.anomaly is None:
        assert (sums[moved] > 0).all()
    assert all(t.isfinite().all() for t in state.values())


@given(PENALTY, rounds_of(), st.randoms(use_true_random=False))
def test_replicas_are_interchangeable(penalty: Any, rounds: Any, random: Any) -> None:
    order = list(range(len(rounds[0][1])))
    random.shuffle(order)
    w, state = run(penalty, rounds)
    permuted, new = run(penalty, [(norms[order], steps[order]) for norms, steps in rounds])
    torch.testing.assert_close(permuted, w[:, order], rtol=1e-12, atol=1e-15)
    for key, value in state.items():
        torch.testing.assert_close(new[key], value[order], rtol=1e-12, atol=1e-15)


@given(PENALTY, rounds_of(), st.sampled_from([0.0, 1e-9, 3.0, 1e100, NAN, INF]), st.data())
def test_who_is_out_has_no_influence(penalty: Any, rounds: Any, junk: float, data: Any) -> None:
    """Whatever stands in the row of a replica without steps, and whatever is not finite about another."""
    *past, (norms, steps) = rounds
    idle = data.draw(st.integers(0, len(steps) - 1))
    steps = steps.clone()
    steps[idle] = 0
    a, b = norms.clone(), norms.clone()
    b[idle] = junk
    (wa, sa), (wb, sb) = (run(penalty, [*past, (n, steps)]) for n in (a, b))
    assert not wa[-1, idle].any()
    assert torch.equal(wa, wb)
    assert all(torch.equal(sa[key], sb[key]) for key in sa)

    a[~norms.isfinite()], b = NAN, a.clone()
    b[~norms.isfinite()] = INF
    assert torch.equal(run(penalty, [*past, (a, steps)])[0], run(penalty, [*past, (b, steps)])[0])


@given(
    st.lists(st.floats(0.9, 1.1), min_size=1, max_size=4),
    st.floats(2, 1e100),
    st.floats(2, 1e100),
    st.booleans(),
)
def test_an_anomaly_has_no_influence(others: list[float], junk: float, other: float, equal: bool) -> None:
    penalty = EQUAL if equal else FULL
    w, state = warmed_round(penalty, [*others, junk])
    v, new = warmed_round(penalty, [*others, other])
    assert w == v
    assert w[-1] == 0
    assert all(torch.equal(state[key], new[key]) for key in state)
    alone, _ = warmed_round(penalty, others)
    assert w[:-1] == pytest.approx(alone, rel=1e-12)


@given(PENALTY, rounds_of(), st.integers(1, 100), st.floats(0, 3))
def test_with_equal_steps_the_exponent_is_irrelevant(penalty: Any, rounds: Any, s: int, e: float) -> None:
    rounds = [(norms, torch.full_like(steps, s)) for norms, steps in rounds]
    other = PseudoGradientPenalty(penalty.anomaly, penalty.temperature, penalty.max_norm, e)
    assert torch.equal(run(penalty, rounds)[0], run(other, rounds)[0])


@given(PENALTY, rounds_of(), st.integers(-8, 8))
def test_norms_and_temperature_have_one_unit(penalty: Any, rounds: Any, power: int) -> None:
    """Powers of two scale exactly; a detector of ratios sees no difference."""
    assume(not any((norms == 1e-300).any() for norms, _ in rounds))  # its square is 0, which does not scale
    c = 2.0**power
    t = penalty.temperature
    scaled = PseudoGradientPenalty(
        penalty.anomaly, None if t is None else t * c, penalty.max_norm, penalty.step_exponent
    )
    w, v = run(penalty, rounds)[0], run(scaled, [(norms * c, steps) for norms, steps in rounds])[0]
    torch.testing.assert_close(v, w, rtol=1e-12, atol=0)


def test_inputs_are_not_written_to() -> None:
    norms, steps = torch.tensor([[1.0], [NAN]], dtype=F64), torch.tensor([3, 4])
    FULL.weights(norms, steps, FULL.init(2, 1))
    assert norms[0].item() == 1
    assert norms[1].isnan()
    assert steps.tolist() == [3, 4]
    assert FULL.weights(norms, steps.double(), FULL.init(2, 1)).flatten().tolist() == [1, 0]


# ------------------------------------------------------------------------------------------------ clip


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_clip_by_hand(dtype: torch.dtype) -> None:
    """φ = 10: 20 → 10/(20 + 1e-6); 5 and 0 stay."""
    for norm, factor in ((20.0, 10 / (20 + 1e-6)), (5.0, 1.0), (0.0, 1.0), (1e30, 1e-29)):
        got = FULL.clip(torch.tensor(norm, dtype=dtype))
        assert got.shape == ()
        assert got.dtype == dtype
        assert got.item() == pytest.approx(factor, rel=1e-6 if dtype == torch.float32 else 1e-15)
    assert MEAN.clip(torch.tensor(20.0, dtype=dtype)).item() == 1.0


@given(st.floats(0, 1e30), st.floats(1e-3, 1e6))
def test_clipped_norms_are_at_most_max_norm(norm: float, bound: float) -> None:
    factor = PseudoGradientPenalty(max_norm=bound).clip(torch.tensor(norm, dtype=F64)).item()
    assert 0 < factor <= 1
    assert norm * factor <= bound * (1 + 1e-12)
    assert factor == 1 or norm + 1e-6 > bound


def test_clip_reads_nothing_on_the_host() -> None:
    """A meta tensor has no value to read."""
    norm = torch.tensor(20.0, dtype=F64, device="meta")
    for penalty in (FULL, MEAN):
        assert penalty.clip(norm).device.type == "meta"
