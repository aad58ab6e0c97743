"""The reference itself, against numbers worked out by hand and against plain training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import reference
from reference import CO2, Detector, Reference, Statistics, co2_outer, penalty_weights

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
NAN, INF = math.nan, math.inf


def close(x: float) -> object:
    return pytest.approx(x, rel=1e-13, abs=1e-15)


class One(nn.Module):
    """One number per layer; with ``slope`` as the loss's gradient for each of them."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.x = nn.ParameterList(nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in values)


def slopes(*c: float):
    """A loss with gradient c[l] for layer l."""
    return lambda model: sum(c_l * x for c_l, x in zip(c, model.x, strict=True))


def one(replicas: int, *values: float, **kw) -> Reference:
    """Inner SGD(0.1), outer SGD(1) on layers of one number each."""
    kw = {
        "inner": lambda ps: SGD(ps, lr=0.1),
        "outer": lambda ps: SGD(ps, lr=1.0),
        "anomaly": None,
        "temperature": None,
        "max_norm": None,
        "interval": None,
    } | kw
    return Reference(One(*values), replicas, layers=[[f"x.{l}"] for l in range(len(values))], **kw)


def value(ref: Reference, i: int, l: int = 0) -> float:
    return float(ref.models[i].x[l].detach())


def move(ref: Reference, *by: float | None) -> None:
    """One inner step of every replica: θ_i ← θ_i − by_i in every layer; None: no step."""
    ref.step([None if b is None else slopes(*[10 * b] * ref.L) for b in by])


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


LAYERS = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]


def batch(i: int, t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * i + t)
    x, y = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return x, y + i


def mse(i: int, t: int):
    x, y = batch(i, t)
    return lambda model: ((model(x) - y) ** 2).mean()


def same(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=1e-14, equal_nan=True)


# --- by hand -----------------------------------------------------------------------------------------


def test_two_rounds_by_hand():
    ref = one(
        2,
        1.0,
        temperature=1.0,
        max_norm=0.1,
        interval=2,
        outer=lambda ps: SGD(ps, lr=0.8, momentum=0.85, nesterov=True),
    )
    # inner SGD(0.1), gradients 1 and 3, two steps: θ = 1 − 0.2 = 0.8 and 1 − 0.6 = 0.4
    losses = [slopes(1.0), slopes(3.0)]
    ref.step(losses)
    assert (value(ref, 0), value(ref, 1)) == (close(0.9), close(0.7))
    assert not ref.due(0)
    ref.step(losses)
    assert (value(ref, 0), value(ref, 1)) == (close(0.8), close(0.4))
    assert ref.due(0)
    with pytest.raises(RuntimeError, match="is due"):
        ref.step(losses)
    done = ref.round()
    # Δ = 0.2, 0.6; w_0 = e^-0.2/(e^-0.2 + e^-0.6) = 1/(1 + e^-0.4) = 0.598687660112452
    # Δ̄ = 0.6 − 0.4·w_0 = 0.3605249359550192; factor = 0.1/(0.3605249359550192 + 1e-6)
    # first Nesterov step: momentum = Δ̂, a = 1 − 0.8·(1 + 0.85)·Δ̂
    assert done.norms == [[close(0.2)], [close(0.6)]]
    assert done.weights == [[close(0.598687660112452)], [close(0.401312339887548)]]
    factor = 0.1 / (0.3605249359550192 + 1e-6)
    assert done.clip == [close(factor)]
    d = factor * 0.3605249359550192
    a = 1 - 0.8 * 1.85 * d
    assert value(ref, 0) == value(ref, 1) == close(a)
    assert float(ref.anchor[0][0]) == value(ref, 0)
    assert (ref.s, ref.made) == ([0, 0], [2, 2])
    assert [float(h["x.0"]) for h in ref.history[1]] == [close(0.7), close(0.4)]
    assert float(ref.after_round[0][1]["x.0"]) == value(ref, 1)

    # The same again: the same Δ̂, momentum = 0.85·d + d
    ref.step(losses)
    ref.step(losses)
    ref.round()
    assert value(ref, 0) == close(a - 0.8 * (d + 0.85 * 1.85 * d))


def test_norm_over_the_layer_and_layers_apart():
    ref = Reference(
        One(1.0, 2.0, 3.0),
        2,
        layers=[["x.2", "x.0"], ["x.1"]],
        inner=lambda ps: SGD(ps, lr=1.0),
        outer=None,
        anomaly=None,
        max_norm=None,
        interval=1,
    )
    ref.step([slopes(3.0, 1.0, 4.0), slopes(0.3, 1.0, 0.4)])
    done = ref.round()
    assert done.norms == [[close(5.0), close(1.0)], [close(0.5), close(1.0)]]
    w = 1 / (1 + math.exp(4.5))
    assert done.weights == [[close(w), 0.5], [close(1 - w), 0.5]]
    assert value(ref, 1, 0) == close(1 - (3 * w + 0.3 * (1 - w)))
    assert value(ref, 1, 2) == close(3 - (4 * w + 0.4 * (1 - w)))
    assert value(ref, 0, 1) == close(1.0)


def test_step_exponent_by_hand():
    # s = 1, 3, 0: s̄ = 2 (the third has not stepped); G = 0.1, 0.3; (s/s̄)^½ = √½, √1.5
    ref = one(3, 1.0, temperature=1.0, step_exponent=0.5)
    move(ref, 0.1, 0.1, None)
    move(ref, None, 0.1, None)
    move(ref, None, 0.1, None)
    done = ref.round()
    g0, g1 = 0.1 / math.sqrt(0.5), 0.3 / math.sqrt(1.5)
    assert done.steps == [1, 3, 0]
    assert done.scaled == [[close(g0)], [close(g1)], [0.0]]
    assert done.out == [[False], [False], [True]]
    w0 = math.exp(-g0) / (math.exp(-g0) + math.exp(-g1))
    assert done.weights == [[close(w0)], [close(1 - w0)], [0.0]]
    assert [value(ref, i) for i in range(3)] == [close(1 - 0.1 * w0 - 0.3 * (1 - w0))] * 3


def test_temperature_and_large_norms():
    assert penalty_weights([1e6, 1e6 + 2], [1, 1], [False, False], T=2.0)[0] == close(1 / (1 + math.exp(-1)))


def test_statistics_by_hand():
    # α = ½. g = 2: n=1, m=1, μ'=1/½=2, v=0. g = 4: n=2, m=½+2=2.5, μ'=2.5/¾=10/3, v=½(2/3)²=2/9
    detector = Detector(alpha=0.5, threshold=2.0, warmup_rounds=2, patience=3)
    stat = Statistics()
    assert not detector.anomalous(stat, 1e9)
    detector.feed(stat, 2.0, False)
    assert stat == Statistics(1.0, 0.0, 1, 0)
    assert not detector.anomalous(stat, 1e9)  # n < warmup_rounds
    detector.feed(stat, 4.0, False)
    assert (stat.m, stat.v, stat.n, stat.k) == (2.5, close(2 / 9), 2, 0)
    # the test: μ = 10/3, σ = √(2/9/¾) = √(8/27); the limit is 10/3 + 2·0.54433…
    limit = 10 / 3 + 2 * math.sqrt(8 / 27)
    assert not detector.anomalous(stat, limit - 1e-9)
    assert detector.anomalous(stat, limit + 1e-9)
    assert not detector.anomalous(stat, 0.1)  # one-sided
    before = copy.copy(stat)
    detector.feed(stat, 100.0, True)
    detector.feed(stat, 100.0, True)
    assert (stat.m, stat.v, stat.n, stat.k) == (before.m, before.v, 2, 2)
    normal = copy.copy(stat)
    detector.feed(normal, 3.0, False)  # a normal one in between: the row is broken
    assert (normal.m, normal.n, normal.k) == (2.75, 3, 0)
    detector.feed(stat, 100.0, True)  # k = patience: afresh from this one
    assert stat == Statistics(50.0, 0.0, 1, 0)


def test_sigma_has_a_floor_and_no_warmup_needs_one_value():
    detector = Detector(warmup_rounds=0)
    stat = Statistics()
    assert not detector.anomalous(stat, 5.0)
    detector.feed(stat, 1.0, False)
    assert not detector.anomalous(stat, 1 + 2.9e-6)
    assert detector.anomalous(stat, 1 + 3.1e-6)


# --- against plain training --------------------------------------------------------------------------


def test_warm_up_is_training_on_the_mean_gradient():
    # with SGD, which shows a wrong divisor
    ref = Reference(mlp(), 3, inner=lambda ps: SGD(ps, lr=0.1), layers=LAYERS, outer=None, warmup_steps=4)
    ref.warm_up(mse)
    plain = mlp()
    optimizer = SGD(plain.parameters(), lr=0.1)
    for t in range(4):
        optimizer.zero_grad()
        (sum(mse(i, t)(plain) for i in range(3)) / 3).backward()
        optimizer.step()
        for i in range(3):
            same(ref.history[i][t], plain.state_dict())
    assert (ref.s, ref.made, ref.rounds) == ([0] * 3, [4] * 3, [])
    # the anchor of the first round is the model at t_warm; the fifth step is local
    same(dict(zip(LAYERS[0], ref.anchor[0], strict=True)), {n: plain.state_dict()[n] for n in LAYERS[0]})
    ref.step([mse(i, 4) for i in range(3)])
    optimizer.zero_grad()
    mse(2, 4)(plain).backward()
    optimizer.step()
    same(ref.history[2][4], plain.state_dict())
    assert not torch.equal(ref.history[0][4]["0.bias"], ref.history[2][4]["0.bias"])
    assert ref.s == [1] * 3


def test_warm_up_is_not_for_uneven_data_nor_rounds():
    ref = one(2, 1.0, warmup_steps=2)
    with pytest.raises(RuntimeError, match="every replica"):
        move(ref, 1.0, None)
    with pytest.raises(RuntimeError, match="no rounds"):
        ref.round()
    with pytest.raises(ValueError, match="unevenly"):
        ref.run((1, 3), lambda i, t: slopes(1.0))
    ref.run((1, 1), lambda i, t: slopes(1.0))
    assert (ref.made, ref.rounds) == ([1, 1], [])


def test_mean_and_outer_sgd_average_the_parameters():
    ref = Reference(
        mlp(),
        4,
        inner=lambda ps: AdamW(ps, lr=0.01),
        layers=LAYERS,
        outer=lambda ps: SGD(ps, lr=1.0),
        anomaly=None,
        temperature=None,
        max_norm=None,
        interval=3,
    )
    ref.run((6, 6, 6, 6), mse)
    assert [r.steps for r in ref.rounds] == [[3] * 4, [3] * 4, [0] * 4]
    for k in range(2):
        last = [ref.history[i][3 * k + 2] for i in range(4)]
        mean = {name: sum(state[name] for state in last) / 4 for name in last[0]}
        for i in range(4):
            same(ref.after_round[k][i], mean)
    same(ref.after_round[2][1], ref.after_round[1][1], rtol=0)  # nobody made a step: nothing moves


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_one_replica_is_the_inner_optimizer(delay: int):
    ref = Reference(
        mlp(),
        1,
        inner=lambda ps: AdamW(ps, lr=0.01),
        layers=LAYERS,
        outer=None,
        max_norm=None,
        interval=3,
        delay=delay,
    )
    ref.run((10,), mse)
    plain = mlp()
    optimizer = AdamW(plain.parameters(), lr=0.01)
    for t in range(10):
        optimizer.zero_grad()
        mse(0, t)(plain).backward()
        optimizer.step()
        same(ref.history[0][t], plain.state_dict())
        same(ref.after_step[0][t], plain.state_dict())
    same(ref.after_round[-1][0], plain.state_dict())
    assert [r.steps for r in ref.rounds] == [[3], [3], [3], [1]]


def test_everything_is_float64():
    ref = Reference(mlp().float(), 2, inner=lambda ps: SGD(ps, lr=0.1), layers=LAYERS, outer=None, interval=1)
    ref.run((1, 1), mse)
    assert {t.dtype for state in ref.after_round[0] for t in state.values()} == {torch.float64}


# --- the penalty -------------------------------------------------------------------------------------


def test_spike_is_excluded_and_leaves_no_trace():
    ref = one(2, 0.0, anomaly={"warmup_rounds": 3, "patience": 2})
    for k in range(4):
        move(ref, 0.1 + 0.001 * (k % 2), 0.1 + 0.001 * (k % 2))
        assert ref.round().out == [[False], [False]]
    before, anchor = copy.deepcopy(ref.statistics), value(ref, 0)
    move(ref, 0.1, 50.0)
    done = ref.round()
    assert done.out == [[False], [True]]
    assert done.weights == [[1.0], [0.0]]  # the divisor is the number of those left
    assert value(ref, 1) == close(anchor - 0.1)
    before[1][0].k = 1
    assert ref.statistics[1] == before[1]
    assert done.statistics[0][0].n == 5
    move(ref, 0.1, 50.0)  # the second in a row: out once more, then it starts again
    assert ref.round().out == [[False], [True]]
    assert ref.statistics[1][0] == Statistics(close(1.0), close(0.0), 1, 0)
    move(ref, 0.1, 50.0)
    assert ref.round().out == [[False], [False]]


def test_all_out_rolls_back():
    ref = one(2, 0.0, anomaly={"warmup_rounds": 2}, outer=lambda ps: SGD(ps, lr=0.5, momentum=0.9))
    for _ in range(2):
        move(ref, 0.1, 0.1)
        ref.round()
    anchor = value(ref, 0)
    momentum = ref.outer_optimizers[0].state[ref.anchor[0][0]]["momentum_buffer"].clone()
    move(ref, 9.0, 8.0)
    done = ref.round()
    assert (done.rolled_back, done.stepped, done.clip) == ([True], [False], [None])
    assert done.weights == [[0.0], [0.0]]
    assert value(ref, 0) == value(ref, 1) == anchor
    assert ref.outer_optimizers[0].state[ref.anchor[0][0]]["momentum_buffer"] == momentum


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("parts", [{}, {"anomaly": None}, {"temperature": None}])
def test_non_finite_is_out_and_heals(bad: float, parts: dict):
    ref = Reference(
        mlp(), 3, inner=lambda ps: AdamW(ps, lr=0.01), layers=LAYERS, outer=None, interval=2, **parts
    )

    def spoil(i: int, model: nn.Module) -> None:
        if i == 1 and ref.made[i] == 0:
            model[0].bias.grad[2] = bad

    ref.step([mse(i, 0) for i in range(3)], spoil)
    # no second step of the spoilt replica: its second layer is still finite
    ref.step([mse(i, 1) for i in (0,)] + [None, mse(2, 1)])
    done = ref.round()
    assert done.out == [[False, False], [True, False], [False, False]]
    assert done.healed == [[False, False], [True, False], [False, False]]
    assert done.weights[1][0] == 0
    assert sum(w[0] for w in done.weights) == close(1.0)
    assert ref.statistics[1][0] == Statistics()
    state = ref.optimizers[1].state
    assert not any(p in state for p in ref.parameters(1, 0))
    assert all(p in state for p in ref.parameters(1, 1))
    ref.run((2, 2, 2), mse, spoil)
    assert not any(o for replica in ref.rounds[-2].out for o in replica)
    assert all(t.isfinite().all() for state in ref.after_round[-1] for t in state.values())


def test_all_non_finite_rolls_back_and_heals():
    ref = one(2, 1.0, inner=lambda ps: AdamW(ps, lr=0.1))
    ref.step([slopes(NAN), slopes(INF)])
    done = ref.round()
    assert (done.rolled_back, done.healed) == ([True], [[True], [True]])
    assert value(ref, 0) == value(ref, 1) == 1.0
    assert not ref.optimizers[0].state
    assert not ref.optimizers[1].state


def test_a_layer_that_did_not_move():
    # with weights on it has none (and no part in the denominator); with equal weights it counts
    ref = one(3, 0.0, temperature=1.0, anomaly={})
    move(ref, 0.2, 0.0, 0.2)
    done = ref.round()
    assert done.out == [[False]] * 3
    assert done.weights == [[0.5], [0.0], [0.5]]
    assert [ref.statistics[i][0].n for i in range(3)] == [1, 0, 1]
    ref = one(3, 0.0)
    move(ref, 0.3, 0.0, 0.3)
    ref.round()
    assert value(ref, 1) == close(-0.2)


@pytest.mark.parametrize("T", [None, 1.0])
def test_momentum_alone_moves_nothing(T: float | None):
    ref = one(2, 0.0, temperature=T, outer=lambda ps: SGD(ps, lr=1.0, momentum=0.9))
    move(ref, 0.1, 0.1)
    ref.round()
    move(ref, 0.0, 0.0)
    done = ref.round()
    assert (done.rolled_back, done.stepped) == ([False], [False])
    assert value(ref, 0) == close(-0.1)
    done = ref.round()  # nobody stepped
    assert (done.rolled_back, done.stepped, done.empty) == ([True], [False], True)
    assert value(ref, 1) == close(-0.1)


# --- coming together ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "steps"),
    [
        ((10, 7, 12, 3), [[3, 3, 3, 3], [3, 3, 3, 0], [3, 1, 3, 0], [1, 0, 3, 0], [0, 0, 0, 0]]),
        ((9, 6, 9, 6), [[3, 3, 3, 3], [3, 3, 3, 3], [3, 0, 3, 0], [0, 0, 0, 0]]),
        ((9, 9, 9, 10), [[3] * 4, [3] * 4, [3] * 4, [0, 0, 0, 1]]),
        ((0, 5, 2, 14), [[0, 3, 2, 3], [0, 2, 0, 3], [0, 0, 0, 3], [0, 0, 0, 3], [0, 0, 0, 2]]),
        ((3, 0, 0, 0), [[3, 0, 0, 0], [0, 0, 0, 0]]),
        ((0, 0, 0, 0), [[0, 0, 0, 0]]),
    ],
)
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_uneven_counts(counts: tuple[int, ...], steps: list[list[int]], delay: int):
    def build() -> Reference:
        return Reference(
            mlp(),
            4,
            inner=lambda ps: AdamW(ps, lr=0.01),
            layers=LAYERS,
            outer=lambda ps: SGD(ps, lr=0.8, momentum=0.85, nesterov=True),
            interval=3,
            delay=delay,
        )

    ref = build()
    ref.run(counts, mse)
    assert [r.steps for r in ref.rounds] == steps
    assert tuple(ref.made) == counts
    assert tuple(len(h) for h in ref.history) == counts
    for i in range(1, 4):
        same(ref.after_round[-1][i], ref.after_round[-1][0], rtol=0)
    told = build()  # the same counts told round by round
    told.run_rounds(steps, mse)
    told.sync()
    for i in range(4):
        same(ref.after_round[-1][i], told.after_round[-1][i], rtol=0)
        for a, b in zip(ref.history[i], told.history[i], strict=True):
            same(a, b, rtol=0)


def test_runs_go_on_after_a_sync_and_after_a_warm_up():
    ref = one(2, 0.0, interval=2, warmup_steps=1)
    seen = []

    def losses_of(i: int, t: int):
        seen.append((i, t))
        return slopes(1.0)

    ref.run((2, 4), losses_of)
    ref.run((1, 0), losses_of)
    assert [r.steps for r in ref.rounds] == [[1, 2], [0, 1], [1, 0]]
    assert sorted(seen) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]


# --- applied late ------------------------------------------------------------------------------------


def states(ref: Reference) -> tuple[list[float], ...]:
    """After every step of every replica, before and after what is applied at its end."""
    get = lambda of: [[float(state["x.0"]) for state in h] for h in of]  # noqa: E731
    return *get(ref.history), *get(ref.after_step)


def test_delay_by_hand():
    ref = one(2, 1.0, interval=2, delay=1)
    move(ref, 0.1, 0.3)
    move(ref, 0.1, 0.3)  # 0.8, 0.4
    assert (ref.s, ref.due(0)) == ([2, 2], True)
    done = ref.round()  # launched: Δ = 0.2, 0.6, so a_new = 1 − 0.4 = 0.6
    assert (done.norms, done.weights) == ([[close(0.2)], [close(0.6)]], [[0.5], [0.5]])
    assert (value(ref, 0), value(ref, 1)) == (close(0.8), close(0.4))  # and nobody has applied it
    assert (ref.s, ref.due(0), ref.after_round) == ([0, 0], False, [[None, None]])
    assert all(p is not None for p in ref.pending)
    with pytest.raises(RuntimeError, match="under way"):
        ref.round()
    move(ref, 0.1, 0.3)  # 0.7, 0.1; then 0.6 − 0.1 and 0.6 − 0.3
    assert (value(ref, 0), value(ref, 1)) == (close(0.5), close(0.3))
    assert [float(state["x.0"]) for state in ref.after_round[0]] == [close(0.5), close(0.3)]
    assert (ref.s, ref.pending) == ([1, 1], [None, None])
    move(ref, 0.2, 0.0)  # 0.3, 0.3: what was learned since the launch is 0.1 + 0.2 and 0.3 + 0
    done = ref.round()
    assert (done.steps, done.norms) == ([2, 2], [[close(0.3)], [close(0.3)]])
    move(ref, 0.0, 0.1)  # a_new = 0.6 − 0.3; then 0.3 and 0.3 − 0.1
    h0, h1, a0, a1 = states(ref)
    assert (h0, h1) == (close([0.9, 0.8, 0.7, 0.3, 0.3]), close([0.7, 0.4, 0.1, 0.3, 0.2]))
    assert (a0, a1) == (close([0.9, 0.8, 0.5, 0.3, 0.3]), close([0.7, 0.4, 0.3, 0.3, 0.2]))


def test_delay_of_tau_and_momentum_by_hand():
    # heavy ball, β = ½: applied just before the next launch, two rounds are never under way
    ref = one(2, 1.0, interval=2, delay=2, outer=lambda ps: SGD(ps, lr=1.0, momentum=0.5))
    ref.run((6, 6), lambda i, t: slopes((1.0, 3.0)[i]))
    # launch 1: θ = 0.8, 0.4; Δ̄ = 0.4 = m, a = 0.6. Two steps on: 0.6, −0.2; applied: 0.6 − 0.2, 0.6 − 0.6
    # launch 2: Δ̄ = 0.4, m = 0.2 + 0.4, a = 0. Two steps on: 0.2, −0.6; applied: −0.2, −0.6
    # launch 3: Δ̄ = 0.4, m = 0.3 + 0.4, a = −0.7; sync() applies it: nobody has moved since
    h0, h1, a0, a1 = states(ref)
    assert (h0, h1) == (close([0.9, 0.8, 0.7, 0.6, 0.3, 0.2]), close([0.7, 0.4, 0.1, -0.2, -0.3, -0.6]))
    assert (a0, a1) == (close([0.9, 0.8, 0.7, 0.4, 0.3, -0.2]), close([0.7, 0.4, 0.1, 0.0, -0.3, -0.6]))
    assert [r.norms for r in ref.rounds] == [[[close(0.2)], [close(0.6)]]] * 3 + [[[0.0], [0.0]]]
    assert [r.called for r in ref.rounds] == [[False, False]] * 3 + [[True, True]]
    assert (value(ref, 0), value(ref, 1)) == (close(-0.7), close(-0.7))


def test_out_with_delay_starts_from_the_anchor_alone():
    # two layers: replica 1 is out in the first one (its norm rose a hundredfold), in the second it is not
    ref = one(2, 0.0, 0.0, interval=1, delay=1, anomaly={"warmup_rounds": 2})
    both = [slopes(1.0, 1.0)] * 2
    for _ in range(3):
        ref.step(both)
        ref.round()
    # a = −0.3 decided, and every replica at −0.3: −0.2 + (−0.3 − −0.2)
    ref.step([slopes(1.0, 1.0), slopes(100.0, 1.0)])
    # at its end a_new = −0.3 was applied: θ = −0.4 and −0.3 − 10
    assert (value(ref, 0), value(ref, 1)) == (close(-0.4), close(-10.3))
    done = ref.round()
    assert done.out == [[False, False], [True, False]]
    ref.step([slopes(2.0, 2.0), slopes(3.0, 3.0)])
    # first layer: a = −0.3 − 0.1, replica 0 at −0.4 − 0.2, replica 1 has lost its 0.3; second: both keep theirs
    assert [value(ref, i, l) for i in (0, 1) for l in (0, 1)] == close([-0.6, -0.6, -0.4, -0.7])


def test_rolled_back_with_delay():
    ref = one(2, 0.0, interval=1, delay=1, anomaly={"warmup_rounds": 2})
    for _ in range(3):
        move(ref, 0.1, 0.1)
        ref.round()
    move(ref, 5.0, 6.0)
    done = ref.round()
    assert done.rolled_back == [True]
    move(ref, 0.1, 0.1)  # on top of 5 and 6: all of it is gone
    assert (value(ref, 0), value(ref, 1)) == (close(-0.3), close(-0.3))


def test_no_outer_step_with_delay_keeps_progress():
    ref = one(2, 1.0, interval=1, delay=1, outer=lambda ps: SGD(ps, lr=1.0, momentum=0.9))
    move(ref, 0.0, 0.0)
    assert ref.round().stepped == [False]
    move(ref, 0.1, 0.2)
    assert (value(ref, 0), value(ref, 1)) == (close(0.9), close(0.8))


def test_sync_with_a_pending_round():
    ref = one(2, 1.0, interval=3, delay=2)
    ref.run_rounds([[3, 3]], lambda i, t: slopes((1.0, 3.0)[i]))  # 0.7, 0.1: Δ̄ = 0.6, a = 0.4
    move(ref, 0.1, 0.3)  # one step of the two
    assert [p is not None for p in ref.pending] == [True, True]
    assert (value(ref, 0), value(ref, 1)) == (close(0.6), close(-0.2))
    ref.sync()
    # applied: 0.4 − 0.1, 0.4 − 0.3; then a round at once: Δ̄ = 0.2
    assert [float(state["x.0"]) for state in ref.after_round[0]] == close([0.3, 0.1])
    assert [float(state["x.0"]) for state in ref.after_round[1]] == close([0.2, 0.2])
    assert [r.steps for r in ref.rounds] == [[3, 3], [1, 1]]
    assert (ref.s, ref.pending) == ([0, 0], [None, None])
    assert [h[-1]["x.0"] for h in ref.after_step] == close([0.6, -0.2])  # sync() is no step's end
    ref.sync()
    assert ref.rounds[-1].empty
    assert (value(ref, 0), value(ref, 1)) == (close(0.2), close(0.2))


def test_uneven_sync_with_delay_by_hand():
    # τ = 2, d = 1; replica 0 makes 5 steps of 0.1, replica 1 makes 2 steps of 0.3
    ref = one(2, 1.0, interval=2, delay=1)
    ref.run((5, 2), lambda i, t: slopes((1.0, 3.0)[i]))
    # round 0: 0.8, 0.4, a = 0.6. Replica 1 calls: at 0.6. Replica 0 makes one step: 0.7, then 0.6 − 0.1 = 0.5
    # and one more, 0.4: round 1 with s = 2, 0: a = 0.6 − 0.2 = 0.4. Replica 1 at 0.4 at once.
    # Replica 0: 0.3, then 0.4 − 0.1 = 0.3. Both call. Round 2 with s = 1, 0: a = 0.3
    assert [r.steps for r in ref.rounds] == [[2, 2], [2, 0], [1, 0]]
    assert [r.called for r in ref.rounds] == [[False, False], [False, True], [True, True]]
    h0, h1, a0, a1 = states(ref)
    assert (h0, a0) == (close([0.9, 0.8, 0.7, 0.4, 0.3]), close([0.9, 0.8, 0.5, 0.4, 0.3]))
    assert (h1, a1) == (close([0.7, 0.4]), close([0.7, 0.4]))
    rounds = [[float(state["x.0"]) for state in both] for both in ref.after_round]
    assert rounds == [close([0.5, 0.6]), close([0.3, 0.4]), close([0.3, 0.3])]


def test_replicas_launch_each_on_its_own():
    ref = one(2, 1.0, interval=2, delay=1)
    move(ref, 0.1, 0.3)
    move(ref, 0.1, None)
    ref.launch(0)
    move(ref, 0.1, None)  # 0.7: its d steps are over, and replica 1 has not launched
    assert ref.rounds == []
    with pytest.raises(RuntimeError, match="replica 0 waits"):
        move(ref, 0.1, None)
    move(ref, None, 0.3)  # 0.4
    ref.launch(1)  # a = 0.6; replica 0 applies, replica 1 has a step to go
    assert (value(ref, 0), value(ref, 1)) == (close(0.5), close(0.4))
    assert states(ref)[2] == close([0.9, 0.8, 0.5])
    move(ref, 0.1, None)
    ref.launch(0)  # the next round, before replica 1 applied the last one
    move(ref, None, 0.3)
    assert value(ref, 1) == close(0.3)
    assert len(ref.rounds) == 1
    move(ref, None, 0.3)
    ref.launch(1)
    assert ref.rounds[1].norms == [[close(0.2)], [close(0.6)]]


def still(i: int, t: int):
    """Steps 3, 4 and 6, 7 and so on leave a parameter where it is: gradient 0."""
    x, y = batch(i, t)
    return lambda model: ((model(x) - y) ** 2).mean() * float(t < 3 or t % 3 == 2)


@pytest.mark.parametrize("delay", [1, 2])
def test_without_movement_after_the_launch_it_is_not_late(delay: int):
    def build(d: int) -> Reference:
        outer = lambda ps: SGD(ps, lr=0.8, momentum=0.85, nesterov=True)  # noqa: E731
        return Reference(
            mlp(), 3, inner=lambda ps: SGD(ps, lr=0.1), layers=LAYERS, outer=outer, interval=3, delay=d
        )

    late, now = build(delay), build(0)
    late.run((12, 12, 12), still)
    now.run((12, 12, 12), still)
    for i in range(3):
        for t in range(12):  # at the end of a round's d-th step and of every step to the next launch
            if t < 3 or t % 3 >= delay - 1:
                same(late.after_step[i][t], now.history[i][t])
        same(late.after_round[-1][i], now.after_round[-1][i])


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_delay_heals_a_non_finite_replica(delay: int):
    ref = Reference(
        mlp(), 3, inner=lambda ps: AdamW(ps, lr=0.01), layers=LAYERS, outer=None, interval=3, delay=delay
    )

    def spoil(i: int, model: nn.Module) -> None:
        if (i, ref.made[i]) == (1, 2):
            model[2].bias.grad[1] = NAN

    ref.run_rounds([[3] * 3], mse, spoil)
    assert ref.rounds[0].out[1] == [False, True]
    assert ref.rounds[0].healed[1] == [False, True]
    assert all(p in ref.optimizers[1].state for p in ref.parameters(1, 1))  # not yet: at the application
    for t in range(3, 3 + delay):
        ref.step([mse(i, t) for i in range(3)], spoil)
    # what it did since was NaN in the first layer too, through the backward: both start afresh
    assert not any(p in ref.optimizers[1].state for l in range(2) for p in ref.parameters(1, l))
    for l in range(2):
        for p, a in zip(ref.parameters(1, l), ref.anchor[l], strict=True):
            assert torch.equal(p, a)
    ref.run([3 - delay + 9] * 3, mse, spoil)
    assert [r.out[1] for r in ref.rounds[1:-1]] == [[False, False]] * 4
    assert all(t.isfinite().all() for state in ref.after_round[-1] for t in state.values())


def test_delay_is_at_most_the_interval():
    for delay in (-1, 4):
        with pytest.raises(ValueError, match="delay"):
            one(1, 0.0, interval=3, delay=delay)


# --- CO2 and CO2* ------------------------------------------------------------------------------------


def test_co2_recurrence_by_hand():
    a = torch.tensor([1.0, 1.0], dtype=torch.float64)
    optimizer = CO2([a], lr=0.5, beta=0.5, gap=2.0, c=0.3)
    m = []
    for delta in ([0.4, 0.1], [1.0, 0.1], [0.0, -2.0]):
        a.grad = torch.tensor(delta, dtype=torch.float64)
        optimizer.step()
        m.append(optimizer.state[a]["m"].tolist())
    # first element: 0.2; 0.1 + 0.5 → 0.3; 0.15.   second: 0.05; 0.025 + 0.05; 0.0375 − 1 → −0.3
    assert m == [close([0.2, 0.05]), close([0.3, 0.075]), close([0.15, -0.3])]
    assert a.tolist() == close([1 - 0.5 * (0.2 + 0.3 + 0.15), 1 - 0.5 * (0.05 + 0.075 - 0.3)])


@pytest.mark.parametrize("sharded", [False, True])
def test_co2_run_by_hand(sharded: bool):
    # τ = d = 2; Δ̄ = 0.4 in every round; m = 0.4, 0.2 + 0.4 → 0.5, 0.25 + 0.4 → 0.5; a = 0.6, 0.1, −0.4
    ref = one(2, 1.0, interval=2, delay=2, outer=co2_outer(c=0.5), sharded_anchor=sharded)
    ref.run((6, 6), lambda i, t: slopes((1.0, 3.0)[i]))
    # at step 4: 0.6 + (0.6 − 0.8) and 0.6 + (−0.2 − 0.4); at step 6: 0.1 + (0.2 − 0.4), 0.1 + (−0.6 − 0)
    h0, h1, a0, a1 = states(ref)
    assert (h0, h1) == (close([0.9, 0.8, 0.7, 0.6, 0.3, 0.2]), close([0.7, 0.4, 0.1, -0.2, -0.3, -0.6]))
    assert (a0, a1) == (close([0.9, 0.8, 0.7, 0.4, 0.3, -0.1]), close([0.7, 0.4, 0.1, 0.0, -0.3, -0.5]))
    assert (value(ref, 0), value(ref, 1)) == (close(-0.4), close(-0.4))


def test_co2_without_clamp_is_heavy_ball():
    ours, torchs = (
        Reference(mlp(), 3, inner=reference.adamw, layers=LAYERS, outer=outer, max_norm=None, interval=2)
        for outer in (co2_outer(0.7, 0.6, 2.0, None), lambda ps: SGD(ps, lr=0.35, momentum=0.6))
    )
    for ref in (ours, torchs):
        ref.run((8, 8, 8), mse)
    same(ours.after_round[-1][0], torchs.after_round[-1][0])


def test_sharded_anchor_by_hand():
    # a layer of three elements and two ranks: parts of two and one
    ref = Reference(
        One(1.0, 2.0, 3.0),
        2,
        inner=lambda ps: SGD(ps, lr=0.1),
        layers=[["x.2", "x.0", "x.1"]],
        outer=co2_outer(c=0.15),
        anomaly=None,
        temperature=None,
        max_norm=None,
        interval=1,
        sharded_anchor=True,
    )
    assert [part.tolist() for part in ref.anchor_parts[0]] == [[3.0, 1.0], [2.0]]
    ref.step([slopes(1.0, 2.0, -1.0), slopes(1.0, 0.0, -3.0)])
    ref.round()  # the mean of the parameters: 0.9, 1.9, 3.2; Δ̄ = 0.1, 0.1, −0.2 → −0.15
    assert [part.tolist() for part in ref.anchor_parts[0]] == [close([3.15, 0.9]), close([1.9])]
    assert [value(ref, 1, l) for l in range(3)] == close([0.9, 1.9, 3.15])
    sizes = [[m["m"].numel() for m in optimizer.state.values()] for optimizer in ref.outer_optimizers[0]]
    assert sizes == [[2], [1]]


@pytest.mark.parametrize("delay", [0, 2, 3])
@pytest.mark.parametrize("R", [1, 2, 3, 11])
def test_co2_star_gives_what_co2_gives(R: int, delay: int):
    inner = lambda ps: AdamW(ps, lr=0.02)  # noqa: E731
    arguments = {"inner": inner, "interval": 3, "delay": delay, "c": 0.02, "warmup_steps": 2}
    co2 = reference.co2(mlp(), R, LAYERS, **arguments)
    star = reference.co2_star(mlp(), R, LAYERS, **arguments)
    for ref in (co2, star):
        ref.run([13 - i % 3 for i in range(R)], mse)
    for i in range(R):
        for t in range(len(co2.history[i])):
            same(co2.history[i][t], star.history[i][t], rtol=1e-9)
            same(co2.after_step[i][t], star.after_step[i][t], rtol=1e-9)
        same(co2.after_round[-1][i], star.after_round[-1][i], rtol=1e-9)
    m = torch.cat([s["m"].flatten() for o in co2.outer_optimizers for s in o.state.values()])
    assert m.abs().max() == 0.02  # the clamp was at work
    assert len(star.outer_optimizers[1]) == R


def test_sharded_anchor_with_the_whole_penalty():
    def spoil(i: int, model: nn.Module) -> None:
        if (i, ref.made[i]) == (1, 4):
            model[0].bias.grad.fill_(NAN)

    runs = []
    for sharded in (False, True):
        ref = reference.edit(
            mlp(),
            3,
            LAYERS,
            interval=3,
            inner=lambda ps: AdamW(ps, lr=0.02),
            max_norm=0.1,
            sharded_anchor=sharded,
        )
        ref.run((12, 12, 11), mse, spoil)
        runs.append(ref)
    assert any(o for r in runs[0].rounds[:-1] for replica in r.out for o in replica)
    assert any(c is not None and c < 1 for r in runs[0].rounds for c in r.clip)
    for a, b in zip(runs[0].after_round, runs[1].after_round, strict=True):
        for i in range(3):
            same(a[i], b[i], rtol=1e-9)


# --- the methods -------------------------------------------------------------------------------------


def test_settings_of_the_methods():
    def settings(ref: Reference) -> tuple:
        outer = ref.outer_optimizers[0]
        parts = (ref.detector is not None, ref.T, ref.phi)
        return (ref.interval, ref.delay, parts, (outer[0] if ref.sharded_anchor else outer).defaults)

    def check(ref: Reference, interval, delay, parts, **outer) -> None:
        got = settings(ref)
        assert got[:3] == (interval, delay, parts)
        assert outer.items() <= got[3].items()
        assert (ref.R, ref.warmup_steps) == (2, 0)
        group = ref.optimizers[1].param_groups[0]
        assert isinstance(ref.optimizers[1], AdamW)
        assert (group["lr"], group["betas"]) == (1.5e-4, (0.9, 0.999))

    none, whole = (False, None, None), (True, 1.0, 10.0)
    heavy = {"lr": 1.0, "beta": 0.5, "gap": 1.0, "c": 1.0}
    args = mlp(), 2, LAYERS
    check(reference.post_local_sgd(*args), 128, 0, none, lr=1.0, momentum=0)
    check(reference.diloco(*args), 500, 0, none, lr=0.7, momentum=0.9, nesterov=True)
    check(reference.co2(*args), 48, 48, none, **heavy)
    check(reference.co2_star(*args), 48, 48, none, **heavy)
    check(reference.edit(*args), 128, 0, whole, lr=0.8, momentum=0.85, nesterov=True)
    check(reference.a_edit(*args), None, 0, whole, lr=0.8, momentum=0.85, nesterov=True)
    assert reference.edit(*args).detector == Detector(0.02, 3.0, 10, 5)
    assert reference.edit(*args).e == 0.5
    assert reference.baseline(*args).warm_up_left == INF
    assert reference.edit(*args, interval=7, warmup_steps=3, delay=2, max_norm=None).phi is None


def test_baseline_is_adamw_on_the_mean_gradient_and_post_local_sgd_begins_like_it():
    inner = lambda ps: AdamW(ps, lr=0.01)  # noqa: E731
    base = reference.baseline(mlp(), 3, LAYERS, inner=inner)
    base.run((7, 7, 7), mse)
    base.sync()
    post = reference.post_local_sgd(mlp(), 3, LAYERS, inner=inner, interval=2, warmup_steps=4)
    post.run((8, 8, 8), mse)
    plain = mlp()
    optimizer = AdamW(plain.parameters(), lr=0.01)
    for t in range(7):
        optimizer.zero_grad()
        (sum(mse(i, t)(plain) for i in range(3)) / 3).backward()
        optimizer.step()
        for i in range(3):
            same(base.history[i][t], plain.state_dict())
            if t < 4:
                same(post.after_step[i][t], plain.state_dict())
    assert (base.rounds, base.made) == ([], [7, 7, 7])
    for t in (5, 7):
        last = [post.history[i][t] for i in range(3)]
        mean = {name: sum(state[name] for state in last) / 3 for name in last[0]}
        for i in range(3):
            same(post.after_step[i][t], mean)
    assert [r.steps for r in post.rounds] == [[2] * 3, [2] * 3, [0] * 3]


def test_diloco_by_hand():
    ref = reference.diloco(One(1.0), 2, [["x.0"]], inner=lambda ps: SGD(ps, lr=0.1), interval=2)
    ref.run((4, 4), lambda i, t: slopes((1.0, 3.0)[i]))
    # Δ̄ = 0.4 twice; m = 0.4, 0.36 + 0.4; the step is 0.7·(Δ̄ + 0.9 m)
    assert ref.after_round[0][1]["x.0"] == close(1 - 0.7 * (0.4 + 0.36))
    assert ref.after_round[1][0]["x.0"] == close(1 - 0.7 * (0.76 + 0.4 + 0.9 * 0.76))


def test_edit_and_a_edit():
    inner = lambda ps: AdamW(ps, lr=0.01)  # noqa: E731
    by_steps = reference.edit(mlp(), 3, LAYERS, inner=inner, interval=2, warmup_steps=2)
    by_clock = reference.a_edit(mlp(), 3, LAYERS, inner=inner, warmup_steps=2)
    by_steps.run((8, 8, 8), mse)
    by_clock.run_rounds([[2] * 3] * 3, mse)
    for i in range(3):
        same(by_steps.after_round[2][i], by_clock.after_round[2][i], rtol=0)
    by_clock.run_rounds([[1, 5, 2]], mse)
    assert by_clock.rounds[-1].steps == [1, 5, 2]
    s_bar = 8 / 3
    for i, s in enumerate((1, 5, 2)):
        for l in range(2):
            G, g = by_clock.rounds[-1].norms[i][l], by_clock.rounds[-1].scaled[i][l]
            assert g == close(G / math.sqrt(s / s_bar))


# --- buffers -----------------------------------------------------------------------------------------


class Counted(One):
    def __init__(self) -> None:
        super().__init__(1.0)
        self.register_buffer("mean", torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("own", torch.tensor(3.0), persistent=False)


def test_buffers():
    ref = Reference(Counted(), 4, inner=lambda ps: SGD(ps, lr=0.1), layers=[["x.0"]], outer=None, interval=1)

    def fill(*values: float) -> None:
        for i, v in enumerate(values):
            ref.models[i].mean.fill_(v)
            ref.models[i].count.fill_(i + 5)
            ref.models[i].own.fill_(i)

    fill(NAN, NAN, INF, 4.0)
    move(ref, 0.1, 0.1, 0.1, None)
    ref.round()  # none is finite of those that stepped: as at construction
    for m in ref.models:
        assert m.mean.tolist() == [1.0, 2.0]
        assert m.count == 5
    fill(1.0, 2.0, INF, 100.0)
    ref.models[2].mean[0] = 6.0  # one bad element spoils the tensor
    move(ref, 0.1, 0.1, 0.1, None)
    ref.round()
    assert [m.mean.tolist() for m in ref.models] == [[1.5, 1.5]] * 4
    assert [float(m.own) for m in ref.models] == [0.0, 1.0, 2.0, 3.0]
    fill(NAN, NAN, NAN, NAN)
    ref.round()  # nobody stepped: as of the last round
    assert [m.mean.tolist() for m in ref.models] == [[1.5, 1.5]] * 4


def test_buffers_applied_late():
    ref = Reference(
        Counted(), 6, inner=lambda ps: SGD(ps, lr=0.1), layers=[["x.0"]], outer=None, interval=1, delay=1
    )
    for i, v in enumerate((1.0, 2.0, 3.0, 4.0, 5.0, 60.0)):
        ref.models[i].mean.fill_(v)
        ref.models[i].count.fill_(10 + i)
    ref.step([slopes(1.0)] * 4 + [slopes(NAN), slopes(1.0)])
    ref.models[5].mean.fill_(NAN)
    ref.round()  # mean of 1, 2, 3, 4: replica 4 has no part, replica 5's is not finite
    assert [float(m.mean[0]) for m in ref.models[:5]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert ref.last_buffers["mean"].tolist() == [2.5, 2.5]
    ref.models[1].mean[0] = 20.0  # changed since the launch
    ref.models[2].mean[0] = INF  # changed, and is not finite
    ref.models[4].mean[0] = 50.0  # changed, of a replica without part
    ref.models[5].mean.fill_(61.0)  # changed; finite again
    for i in (0, 1, 4):
        ref.models[i].count.add_(1)
    ref.step([slopes(0.0)] * 6)
    means = [[2.5, 2.5], [20.0, 2.0], [2.5, 2.5], [2.5, 2.5], [2.5, 2.5], [61.0, 61.0]]
    assert [m.mean.tolist() for m in ref.models] == means
    assert [int(m.count) for m in ref.models] == [11, 12, 10, 10, 10, 10]


def test_layers_must_name_every_parameter_once():
    for layers in ([["0.weight"]], [*LAYERS, ["0.bias"]], [*LAYERS, ["nothing"]]):
        with pytest.raises(ValueError, match="exactly once"):
            Reference(mlp(), 1, inner=lambda ps: SGD(ps, lr=0.1), layers=layers, outer=None)
