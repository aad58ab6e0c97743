"""Every step of every replica against the slow reference, in fp64, to 1e-9 relative."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import edit
from problems import layers_of, loss_of, net, seeded
from ranks import processes, threads
from reference import Reference
from test_rounds import Normed, WideNet

TAU, WARMUP = 3, 2
Edit = Callable[[int, int, nn.Module], None]


def full(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def wide_layers() -> list[list[str]]:
    parts = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    root = ["up.weight", "up.bias", "head.weight", "head.bias"]
    return [root, *([f"blocks.{i}.{part}" for part in parts] for i in range(2))]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[list[str]]]] = {
    "net": (net, layers_of()),
    "uneven": (partial(net, width=5, depth=1), layers_of(1)),
    "wide": (lambda: seeded(WideNet()), wide_layers()),
    "batchnorm": (lambda: seeded(Normed()), [["lin.weight", "lin.bias", "bn.weight", "bn.bias", "head.weight",
                                              "head.bias"]]),
}  # fmt: skip
INNERS: dict[str, Callable] = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.05),
}
OUTERS: dict[str, Any] = {
    "nesterov": edit.Nesterov(0.8, 0.85),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "average": edit.Average(),
}


# What happens to gradients of replica i in its step t: spikes, lasting rises, NaN, Inf, everybody at once.


def scale(model: nn.Module, factor: float, only: str = "") -> None:
    for name, p in model.named_parameters():
        if p.grad is not None and only in name:
            p.grad.mul_(factor)


def nothing(i: int, t: int, model: nn.Module) -> None:
    pass


def spike(i: int, t: int, model: nn.Module) -> None:
    if (i, t) == (1, 13):
        scale(model, 40.0)
    if (i, t) == (0, 16):
        scale(model, 60.0, "blocks.0")


def rise(i: int, t: int, model: nn.Module) -> None:
    if i == 1 and t >= 13:
        scale(model, 6.0)


def nan(i: int, t: int, model: nn.Module) -> None:
    if (i, t) == (1, 6):
        scale(model, float("nan"), "blocks.0")


def inf(i: int, t: int, model: nn.Module) -> None:
    if (i, t) == (0, 7):
        scale(model, float("inf"))


def all_out(i: int, t: int, model: nn.Module) -> None:
    if t == 6:
        scale(model, float("nan"), "head")
    if t == 14:
        scale(model, 80.0)


EDITS: dict[str, Edit] = {f.__name__: f for f in (nothing, spike, rise, nan, inf, all_out)}


def ours(
    rank: int,
    shape: tuple[int, int, int],
    model_name: str,
    inner: str,
    outer: str,
    penalty: Any,
    edits: str,
    counts: list[int],
    offload: str | None,
    delay: int,
) -> Any:
    """Train as a user would; the full parameters after every step, and what every round reported."""
    _, shards, tp = shape
    grid = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    model = MODELS[model_name][0]()
    if tp > 1:
        for block in model.blocks:
            parallelize_module(block, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if shards > 1 or tp > 1:
        for block in model.blocks:
            fully_shard(block, mesh=grid["shard"])
        fully_shard(model, mesh=grid["shard"])
    optimizer = edit.LocalSGDOptimizer(model, INNERS[inner], OUTERS[outer], mesh=grid, penalty=penalty,
                                       schedule=edit.EverySteps(TAU, WARMUP), offload=offload, delay=delay)  # fmt: skip
    reports: list[edit.RoundReport] = []
    optimizer.register_round_hook(reports.append)
    replica, member = rank // (shards * tp), rank // tp % shards
    history, buffers = [], []
    for t in range(counts[replica]):
        loss_of(model, t, replica, member).backward()
        EDITS[edits](replica, t, model)
        optimizer.step()
        optimizer.zero_grad()
        if max(counts) == min(counts):  # else a full_tensor of one shard group only is fine, too
            history.append([full(p) for p in model.parameters()])
        buffers.append([b.clone() for n, b in model.named_buffers() if n in model.state_dict()])
    optimizer.sync()
    history.append([full(p) for p in model.parameters()])
    buffers.append([b.clone() for n, b in model.named_buffers() if n in model.state_dict()])
    fields = ("steps", "norms", "out", "weights", "clip")
    return history, buffers, [{f: getattr(r, f) for f in fields} for r in reports], optimizer.total_steps


def reference(
    shape: tuple[int, int, int], model_name: str, inner: str, outer: str, penalty: Any, edits: str, counts: list[int],
    delay: int,
) -> Reference:  # fmt: skip
    build, layers = MODELS[model_name]
    test = penalty.anomaly
    ref = Reference(
        build(),
        shape[0],
        inner=INNERS[inner],
        layers=layers,
        outer=OUTERS[outer],
        anomaly=None if test is None else {k: getattr(test, k) for k in
                                           ("alpha", "threshold", "warmup_rounds", "patience")},
        temperature=penalty.temperature,
        max_norm=penalty.max_norm,
        step_exponent=penalty.step_exponent,
        interval=TAU,
        warmup_steps=WARMUP,
        delay=delay,
    )  # fmt: skip

    def losses_of(i: int, t: int) -> Callable[[nn.Module], Tensor]:
        return lambda model: sum(loss_of(model, t, i, m) for m in range(shape[1])) / shape[1]

    ref.run(counts, losses_of, lambda i, model: EDITS[edits](i, ref.made[i], model))
    return ref


def check(
    run: Callable,
    shape: tuple[int, int, int],
    *,
    model: str = "net",
    inner: str = "sgd",
    outer: str = "nesterov",
    penalty: Any = None,
    edits: str = "nothing",
    counts: list[int] | None = None,
    offload: str | None = None,
    delay: int = 0,
) -> Reference:
    counts = counts or [23] * shape[0]
    penalty = penalty or edit.PseudoGradientPenalty(anomaly=edit.EMAZTest(warmup_rounds=2), max_norm=2.0)
    ranks = shape[0] * shape[1] * shape[2]
    got = run(ranks, ours, shape, model, inner, outer, penalty, edits, counts, offload, delay)
    ref = reference(shape, model, inner, outer, penalty, edits, counts, delay)
    # A round is applied in the next forward, or, late, at the end of a step.
    states = ref.after_step if delay else ref.history
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9, equal_nan=True)
    for step in itertools.chain(*ref.history):  # a run that explodes compares nothing but amplified rounding
        assert all(v.nan_to_num(0, 0, 0).abs().max() < 100 for v in step.values())
    last = ref.after_round[-1]
    rounds = [r for r in ref.rounds if not r.empty]
    for rank, (history, buffers, reports, total) in enumerate(got):
        i = rank // (shape[1] * shape[2])
        for mine, theirs in zip(history[:-1], states[i], strict=False):
            close(mine, [theirs[n] for n, _ in ref.models[i].named_parameters()])
        close(history[-1], [last[i][n] for n, _ in ref.models[i].named_parameters()])
        if shape[1] == 1:
            for mine, theirs in zip(buffers[:-1], states[i], strict=True):
                close(mine, [theirs[n] for n, _ in ref.models[i].named_buffers() if n in theirs])
            close(buffers[-1], [last[i][n] for n, _ in ref.models[i].named_buffers() if n in last[i]])
        full_rounds = [r for r in reports if r["steps"].any()]
        assert len(full_rounds) == len(rounds)
        for report, r in zip(full_rounds, rounds, strict=True):
            assert report["steps"].tolist() == r.steps
            close(report["norms"], torch.tensor(r.norms, dtype=torch.float64))
            close(report["weights"], torch.tensor(r.weights, dtype=torch.float64))
            # A weight may also be 0 because exp(-g/T) underflows; the report does not tell these apart.
            gone = [[o or (w == 0 and g != 0) for o, w, g in zip(*rows, strict=True)]
                    for rows in zip(r.out, r.weights, r.norms, strict=True)]  # fmt: skip
            assert report["out"].tolist() == gone
            close(
                report["clip"], torch.tensor([1.0 if c is None else c for c in r.clip], dtype=torch.float64)
            )
        assert total == sum(ref.made)
    return ref


P = edit.PseudoGradientPenalty
TEST = edit.EMAZTest(warmup_rounds=2)
COMBINATIONS = [
    P(anomaly=a, temperature=t, max_norm=m)
    for a, t, m in itertools.product([TEST, None], [1.0, None], [0.4, None])
]


@pytest.mark.parametrize("edits", list(EDITS))
@pytest.mark.parametrize(
    "penalty", COMBINATIONS, ids=lambda p: f"{p.anomaly is not None}-{p.temperature}-{p.max_norm}"
)
def test_all_penalty_combinations_and_all_injections(penalty: Any, edits: str) -> None:
    ref = check(threads, (2, 1, 1), penalty=penalty, edits=edits)
    outs = [any(itertools.chain(*r.out)) for r in ref.rounds if not r.empty]
    if edits in ("nan", "inf", "all_out") or (edits == "spike" and penalty.anomaly):
        assert any(outs)
    if edits == "all_out":
        assert any(any(r.rolled_back) for r in ref.rounds if not r.empty)
    if edits == "rise" and penalty.anomaly:  # out at first, and back within five rounds
        assert any(outs)
        assert not outs[-1] or sum(outs) <= 5
    if penalty.max_norm:
        assert any(c is not None and c < 1 for r in ref.rounds for c in r.clip)


@pytest.mark.parametrize("edits", ["spike", "all_out"])
def test_plain_four_replicas(edits: str) -> None:
    check(processes, (4, 1, 1), edits=edits)


@pytest.mark.parametrize("offload", [None, "cpu", "replicas"])
@pytest.mark.parametrize("edits", ["spike", "nan", "all_out"])
def test_fsdp2_2x2(edits: str, offload: str | None) -> None:
    check(processes, (2, 2, 1), edits=edits, offload=offload)


@pytest.mark.parametrize("inner", list(INNERS))
@pytest.mark.parametrize("outer", list(OUTERS))
def test_inner_and_outer_optimizers(inner: str, outer: str) -> None:
    check(threads, (2, 2, 1), inner=inner, outer=outer, edits="nan")


@pytest.mark.parametrize("edits", ["spike", "inf"])
def test_fsdp2_and_tensor_parallelism_2x1x2(edits: str) -> None:
    check(processes, (2, 1, 2), model="wide", edits=edits)


@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 3, 1)])
def test_uneven_and_empty_shards(shape: tuple[int, int, int]) -> None:
    check(threads, shape, model="uneven", edits="spike")


@pytest.mark.parametrize("edits", ["nothing", "nan"])
def test_buffers(edits: str) -> None:
    check(threads, (3, 1, 1), model="batchnorm", edits=edits)


@pytest.mark.parametrize(
    "counts", [[12, 9, 14, 5], [11, 8, 11, 8], [11, 11, 11, 12], [2, 7, 4, 16], [5, 2, 2, 2]]
)
def test_uneven_counts_and_sync_plain(counts: list[int]) -> None:
    check(processes, (4, 1, 1), counts=counts)


@pytest.mark.parametrize("counts", [[12, 9], [11, 8], [2, 16]])
def test_uneven_counts_and_sync_fsdp2(counts: list[int]) -> None:
    check(processes, (2, 2, 1), counts=counts)


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("edits", list(EDITS))
def test_delay_and_all_injections(edits: str, delay: int) -> None:
    ref = check(threads, (2, 1, 1), penalty=P(anomaly=TEST, max_norm=0.4), edits=edits, delay=delay)
    outs = [any(itertools.chain(*r.out)) for r in ref.rounds if not r.empty]
    assert any(outs) == (edits != "nothing") or edits == "rise"
    assert any(c is not None and c < 1 for r in ref.rounds for c in r.clip)


@pytest.mark.parametrize("offload", [None, "cpu", "replicas"])
@pytest.mark.parametrize(("edits", "delay"), [("spike", 1), ("nan", 2), ("all_out", 3)])
def test_delay_fsdp2_2x2(edits: str, delay: int, offload: str | None) -> None:
    check(processes, (2, 2, 1), edits=edits, offload=offload, delay=delay)


@pytest.mark.parametrize("delay", [1, 3])
def test_delay_fsdp2_and_tensor_parallelism_2x1x2(delay: int) -> None:
    check(processes, (2, 1, 2), model="wide", edits="spike", delay=delay)


@pytest.mark.parametrize("delay", [2, 3])
@pytest.mark.parametrize("inner", list(INNERS))
@pytest.mark.parametrize("outer", list(OUTERS))
def test_delay_inner_and_outer_optimizers(inner: str, outer: str, delay: int) -> None:
    check(threads, (2, 2, 1), inner=inner, outer=outer, edits="nan", delay=delay)


@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 3, 1)])
def test_delay_uneven_and_empty_shards(shape: tuple[int, int, int]) -> None:
    check(threads, shape, model="uneven", edits="spike", delay=2)


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("edits", ["nothing", "nan"])
def test_delay_buffers(edits: str, delay: int) -> None:
    check(threads, (3, 1, 1), model="batchnorm", edits=edits, delay=delay)


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize(
    "counts", [[12, 9, 14, 5], [11, 8, 11, 8], [11, 11, 11, 12], [2, 7, 4, 16], [5, 2, 2, 2]]
)
def test_delay_uneven_counts_and_sync_plain(counts: list[int], delay: int) -> None:
    check(processes, (4, 1, 1), counts=counts, delay=delay)


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("counts", [[12, 9], [11, 8], [2, 16]])
def test_delay_uneven_counts_and_sync_fsdp2(counts: list[int], delay: int) -> None:
    check(processes, (2, 2, 1), counts=counts, delay=delay)
