"""The reference itself, against numbers worked out by hand and against plain training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from reference import Detector, Reference, Statistics, penalty_weights

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


def test_one_replica_is_the_inner_optimizer():
    ref = Reference(
        mlp(), 1, inner=lambda ps: AdamW(ps, lr=0.01), layers=LAYERS, outer=None, max_norm=None, interval=3
    )
    ref.run((10,), mse)
    plain = mlp()
    optimizer = AdamW(plain.parameters(), lr=0.01)
    for t in range(10):
        optimizer.zero_grad()
        mse(0, t)(plain).backward()
        optimizer.step()
        same(ref.history[0][t], plain.state_dict())
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
def test_uneven_counts(counts: tuple[int, ...], steps: list[list[int]]):
    def build() -> Reference:
        return Reference(
            mlp(),
            4,
            inner=lambda ps: AdamW(ps, lr=0.01),
            layers=LAYERS,
            outer=lambda ps: SGD(ps, lr=0.8, momentum=0.85, nesterov=True),
            interval=3,
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
    for i in range(4):
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


def test_layers_must_name_every_parameter_once():
    for layers in ([["0.weight"]], [*LAYERS, ["0.bias"]], [*LAYERS, ["nothing"]]):
        with pytest.raises(ValueError, match="exactly once"):
            Reference(mlp(), 1, inner=lambda ps: SGD(ps, lr=0.1), layers=layers, outer=None)
