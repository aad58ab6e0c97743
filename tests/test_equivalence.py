"""Equivalences with DDP and with the inner optimizer, and what must not matter, over random trainings.

Each property compares two runs: with DDP (computed slowly and obviously by ``ddp``; in processes by torch's
own, too), or with the same run in which one thing that must not matter is another.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import edit
import ranks
from problems import Net, Winding, batch, loss_of, seeded
from ranks import mesh, processes
from test_rounds import Clock, Normed

Values = list[Tensor]
NAN, INF = math.nan, math.inf
LR = 0.02  # of SGD; training must not amplify rounding errors

INNERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=LR),
    "momentum": partial(torch.optim.SGD, lr=LR, momentum=0.9, dampening=0.3),
    "nesterov": partial(torch.optim.SGD, lr=LR, momentum=0.8, nesterov=True, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
    "amsgrad": partial(torch.optim.Adam, lr=0.02, amsgrad=True, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.02, momentum=0.5, centered=True),
    "adamax": partial(torch.optim.Adamax, lr=0.02),
    "nadam": partial(torch.optim.NAdam, lr=0.02),
    "radam": partial(torch.optim.RAdam, lr=0.02),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "asgd": partial(torch.optim.ASGD, lr=0.02, lambd=0.1),
}
PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {  # what doesn't go with FSDP2:
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),  # looks at whole tensors, not at elements
    "rprop": partial(torch.optim.Rprop, lr=0.01),  # torch has no DTensor for what it does
}
LINEAR = ["sgd", "momentum", "nesterov"]  # the mean of such steps is the step of the mean


def threads(*args: Any, **kwargs: Any) -> list[Any]:
    """On one core: threads that take turns with the interpreter lose a third of their time on two."""
    if not hasattr(os, "sched_setaffinity"):
        return ranks.threads(*args, **kwargs)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})  # of this thread and those it starts
    try:
        return ranks.threads(*args, **kwargs)
    finally:
        os.sched_setaffinity(0, cores)


def few(divisor: int) -> settings:
    """Fewer examples where one costs more: FSDP2 in threads, processes."""
    return settings(max_examples=max(2, settings().max_examples // divisor))


def same(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    """As ``assert_close``, which takes most of a test's time for many small tensors, and says where."""
    kinds = [[(tensor.shape, tensor.dtype) for tensor in leaves(tree)] for tree in (a, b)]
    flat = [
        torch.cat([tensor.flatten().double() for tensor in leaves(tree)] or [torch.empty(0)])
        for tree in (a, b)
    ]
    if kinds[0] != kinds[1] or not torch.allclose(*flat, rtol=tolerance, atol=tolerance, equal_nan=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def leaves(tree: Any) -> Values:
    if isinstance(tree, Tensor | int):
        return [torch.as_tensor(tree)]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


bitwise = partial(same, tolerance=0.0)


def grid_of(shape: tuple[int, int]) -> Any:
    """None where every rank is a replica: to make a mesh takes a good part of such a test's time."""
    return mesh(*shape) if shape[1] > 1 else None


def local(tensor: Tensor) -> Tensor:
    """A copy of this rank's part. The parts of a parameter, one after the other, are the whole."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def values(model: nn.Module) -> Values:
    return [local(p) for p in model.parameters()]


def whole(parts: list[Any]) -> Any:
    """What the ranks of one replica hold together, tensor by tensor."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return [whole(list(each)) for each in zip(*parts, strict=True)]


def shard(model: Any, grid: Any, units: Sequence[nn.Module] | None = None) -> None:
    for unit in [*(model.blocks if units is None else units), model]:
        fully_shard(unit, mesh=grid["shard"])


KEPT = {"anchor": "edit_anchor", "momentum": "edit_outer.momentum_buffer"}


def kept(optimizer: edit.LocalSGDOptimizer) -> dict[str, Values]:
    """The anchor and the outer momentum, parameter by parameter; [] if there is none."""
    states = optimizer.state_dict()["state"]
    return {
        name: [local(states[n][key]) for n in sorted(states) if key in states[n]]
        for name, key in KEPT.items()
    }


def lawful(report: edit.RoundReport) -> None:
    """What holds in every round, whatever happened in it."""
    w, live = report.weights, ~report.rolled_back
    assert ((w >= 0) & (w <= 1)).all()
    same(w.sum(0), live.double(), 1e-12)
    assert (w[:, ~live] == 0).all()
    gone = ~report.norms.isfinite() | (report.steps == 0).unsqueeze(1)
    assert report.out[gone].all()
    assert (w[report.out] == 0).all()
    effective = report.effective_replicas
    assert ((effective[live] > 1 - 1e-9) & (effective[live] < len(w) + 1e-9)).all()
    assert (effective[~live] == 0).all()
    assert ((report.clip > 0) & (report.clip <= 1)).all()
    assert (report.clip[~live] == 1).all()


# ------------------------------------------------------------------------------------------ equal to DDP


@dataclass(frozen=True)
class Lesson:
    """What the ranks of a data-parallel job learn: models, losses, accumulation and clipping.

    Attributes:
        ranks: each has data of its own.
        routes: per step, microbatch and rank, the blocks that its forward goes through.
        clip: bound of the norm of the gradients.
        to_none: what ``zero_grad`` does.
        tied, frozen: two blocks share a weight; a block and a weight of the root don't train.
    """

    ranks: int
    routes: list[list[list[tuple[int, ...]]]]
    width: int = 5
    depth: int = 2
    clip: float | None = None
    to_none: bool = True
    tied: bool = False
    frozen: bool = False

    def build(self) -> Any:
        model = Winding(self.width, self.depth)
        if self.tied:
            model.blocks[1].lin.weight = model.blocks[0].lin.weight
        if self.frozen:
            model.up.weight.requires_grad_(False)
            model.blocks[0].requires_grad_(False)
        return seeded(model)

    def loss(self, model: Any, step: int, micro: int, rank: int) -> Tensor:
        x, y = batch(step, rank, micro)
        getattr(model, "module", model).route = self.routes[step][micro][rank]
        return F.mse_loss(model(x), y) / len(self.routes[step])

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.clip is not None:
            clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=self.to_none)


@st.composite
def lessons(
    draw: st.DrawFn,
    ranks: int | None = None,
    *,
    winding: bool = False,
    clips: bool = True,
    zeros: bool = True,
) -> Lesson:
    ranks = ranks or draw(st.sampled_from([2, 2, 3, 1]))
    depth = draw(st.sampled_from([2, 2, 3]))
    route = st.just(tuple(range(depth)))
    if winding and draw(st.booleans()):
        route = st.lists(st.integers(0, depth - 1), max_size=4).map(tuple)
    micros = draw(st.sampled_from([1, 1, 2, 3]))
    return Lesson(
        ranks,
        [[[draw(route) for _ in range(ranks)] for _ in range(micros)] for _ in range(draw(st.integers(1, 4)))],
        width=draw(st.integers(2, 7)),
        depth=depth,
        clip=draw(st.sampled_from([None, 0.05, 1.0])) if clips else None,
        to_none=not zeros or draw(st.booleans()),
        tied=winding and draw(st.booleans()),
        frozen=winding and draw(st.booleans()),
    )  # fmt: skip


def ddp(lesson: Lesson, inner: Callable[..., torch.optim.Optimizer]) -> list[Values]:
    """DDP, slowly and obviously: the mean of the ranks' gradients, where any rank has one. Returns the
    parameters after every step."""
    model = lesson.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = inner(trained)
    after = []
    for step, micros in enumerate(lesson.routes):
        for micro in range(len(micros)):
            of_ranks = [
                torch.autograd.grad(lesson.loss(model, step, micro, rank), trained, allow_unused=True)
                for rank in range(lesson.ranks)
            ]
            for p, gradients in zip(trained, zip(*of_ranks, strict=True), strict=True):
                found = [g for g in gradients if g is not None]
                if found:
                    mean = sum(found) / lesson.ranks
                    p.grad = mean if p.grad is None else p.grad + mean
        lesson.step(model, optimizer)
        after.append(values(model))
    return after


def taught(
    rank: int,
    lesson: Lesson,
    shape: tuple[int, int] | None,
    inner: str,
    *,
    sharded: bool = False,
    lazily: bool = False,
    **kwargs: Any,
) -> tuple[list[Values], list[Values]]:
    """As a user trains. Returns the parameters after every step; the anchor after every round, and the
    parameters at the end.

    ``shape`` None: no process group. ``lazily``: FSDP2 reduces the gradients of the last microbatch only.
    """
    grid = mesh(*shape) if sharded and shape else None
    model = lesson.build()
    if sharded:
        shard(model, grid)
    optimizer = edit.LocalSGDOptimizer(model, (INNERS | PLAIN)[inner], mesh=grid, **kwargs)
    anchors: list[Values] = []
    optimizer.register_round_hook(lambda report: (lawful(report), anchors.append(kept(optimizer)["anchor"])))
    after = []
    for step, micros in enumerate(lesson.routes):
        for micro in range(len(micros)):
            if lazily:
                model.set_requires_gradient_sync(micro == len(micros) - 1)
            lesson.loss(model, step, micro, rank).backward()
        lesson.step(model, optimizer)
        after.append(values(model))
    optimizer.sync()
    anchors.append(values(model))
    optimizer.close()
    return after, anchors


WARMUP = edit.EverySteps(1, warmup_steps=1000)
EVERY_STEP = edit.EverySteps(1)


@given(lesson=lessons(winding=True), inner=st.sampled_from([*INNERS, *PLAIN]))
def test_warmup_is_ddp(lesson: Lesson, inner: str) -> None:
    """Any inner optimizer, accumulation, clipping; tied, frozen, repeated layers; layers that a rank skips."""
    run = partial(taught, schedule=WARMUP)
    expected = ddp(lesson, (INNERS | PLAIN)[inner])
    for after, _ in threads(lesson.ranks, run, lesson, (lesson.ranks, 1), inner):
        same(after, expected)


@few(8)
@given(data=st.data())
def test_warmup_is_ddp_on_fsdp2(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(2, 2), (2, 2), (2, 1), (1, 3), (3, 1)]))
    lesson = data.draw(lessons(shape[0] * shape[1]))
    inner = data.draw(st.sampled_from(list(INNERS)))
    run = partial(taught, schedule=WARMUP, sharded=True, lazily=data.draw(st.booleans()))
    got = threads(lesson.ranks, run, lesson, shape, inner)
    expected = ddp(lesson, INNERS[inner])
    for first in range(0, lesson.ranks, shape[1]):
        same(whole([after for after, _ in got[first : first + shape[1]]]), expected)


@given(data=st.data())
def test_interval_1_and_average_are_ddp_sgd(data: st.DataObject) -> None:
    """With any SGD that is linear in the gradients: each replica has momentum of its own, and the mean of
    them is DDP's. Without momentum also where replicas skip layers, which then have no momentum to go on."""
    winding = data.draw(st.booleans())
    inner = "sgd" if winding else data.draw(st.sampled_from(LINEAR))
    lesson = data.draw(lessons(winding=winding, clips=False, zeros=not winding))
    run = partial(taught, schedule=EVERY_STEP, outer=edit.Average(), penalty=None)
    expected = ddp(lesson, INNERS[inner])
    trained = [n for n, p in enumerate(lesson.build().parameters()) if p.requires_grad]
    for _, anchors in threads(lesson.ranks, run, lesson, (lesson.ranks, 1), inner):
        same(anchors.pop(), expected[-1])
        rounds = [*expected, expected[-1]]  # sync() adds one that nobody moved in
        same(anchors, [[params[n] for n in trained] for params in rounds])


OUTERS = {
    "nesterov": lambda lr, momentum: edit.Nesterov(lr, momentum),
    "heavy ball": lambda lr, momentum: edit.HeavyBall(lr, momentum, gap=1.0, clip=None),
}


@given(
    lesson=lessons(clips=False),
    outer=st.sampled_from(list(OUTERS)),
    lr=st.floats(0.1, 2.0),
    momentum=st.floats(0.0, 0.99),
)
def test_interval_1_and_outer_momentum_are_ddp_sgd_with_momentum(
    lesson: Lesson, outer: str, lr: float, momentum: float
) -> None:
    """inner SGD(lr), outer Nesterov(α, μ): SGD-Nesterov(α·lr, μ); the same for heavy balls."""
    run = partial(taught, schedule=EVERY_STEP, outer=OUTERS[outer](lr, momentum), penalty=None)
    sgd = partial(torch.optim.SGD, lr=lr * LR, momentum=momentum)
    expected = ddp(lesson, partial(sgd, nesterov=True) if outer == "nesterov" and momentum > 0 else sgd)
    for _, anchors in threads(lesson.ranks, run, lesson, (lesson.ranks, 1), "sgd"):
        same(anchors, [*expected, expected[-1], expected[-1]])


@few(16)
@given(lesson=lessons(4, clips=False), nesterov=st.booleans())
def test_interval_1_is_ddp_on_fsdp2(lesson: Lesson, nesterov: bool) -> None:
    outer = edit.Nesterov(0.6, 0.9) if nesterov else edit.Average()
    run = partial(taught, schedule=EVERY_STEP, outer=outer, penalty=None, sharded=True)
    got = threads(4, run, lesson, (2, 2), "sgd")
    sgd = partial(torch.optim.SGD, lr=0.6 * LR, momentum=0.9, nesterov=True)
    expected = ddp(lesson, sgd if nesterov else INNERS["sgd"])
    for first in (0, 2):
        same(whole([anchors for _, anchors in got[first : first + 2]]), [*expected, *expected[-1:] * 2])


ALONE = edit.PseudoGradientPenalty(anomaly=None, temperature=0.1, max_norm=None)


@given(
    lesson=lessons(1, winding=True, zeros=False),
    inner=st.sampled_from([*INNERS, *PLAIN]),
    schedule=st.builds(edit.EverySteps, st.integers(1, 5), st.integers(0, 3)),
    penalty=st.sampled_from([None, ALONE]),
    offload=st.sampled_from([None, "cpu"]),
    grouped=st.booleans(),
)
def test_one_replica_and_average_are_the_inner_optimizer(
    lesson: Lesson, inner: str, grouped: bool, **settings: Any
) -> None:
    expected = ddp(lesson, (INNERS | PLAIN)[inner])
    run = partial(taught, outer=edit.Average(), **settings)
    if grouped:
        [(after, anchors)] = threads(1, run, lesson, (1, 1), inner)
    else:
        after, anchors = run(0, lesson, None, inner)
    same(after, expected)
    same(anchors[-1], expected[-1])


@few(16)
@given(lesson=lessons(2), inner=st.sampled_from(list(INNERS)), interval=st.integers(1, 3))
def test_one_replica_and_average_are_the_inner_optimizer_on_fsdp2(
    lesson: Lesson, inner: str, interval: int
) -> None:
    run = partial(
        taught, schedule=edit.EverySteps(interval), outer=edit.Average(), penalty=ALONE, sharded=True
    )
    got = threads(2, run, lesson, (1, 2), inner)
    expected = ddp(lesson, INNERS[inner])
    same(whole([after for after, _ in got]), expected)
    same(whole([anchors[-1] for _, anchors in got]), expected[-1])


# ------------------------------------------------------------------------------------- torch's own DDP


def torchs(
    rank: int, lesson: Lesson, inner: Callable[..., torch.optim.Optimizer], lazily: bool
) -> list[Values]:
    model = lesson.build()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = inner([p for p in model.parameters() if p.requires_grad])
    after = []
    for step, micros in enumerate(lesson.routes):
        for micro in range(len(micros)):
            with wrapped.no_sync() if lazily and micro < len(micros) - 1 else nullcontext():
                lesson.loss(wrapped, step, micro, rank).backward()
        lesson.step(model, optimizer)
        after.append(values(model))
    return after


ALL = (0, 1)
LESSONS = {
    "accumulated and clipped": Lesson(2, [[[ALL, ALL]] * 2] * 4, clip=0.1),
    "tied and frozen": Lesson(2, [[[(0, 1, 2)] * 2]] * 4, width=4, depth=3, tied=True, frozen=True, to_none=False),
    "skipped by one": Lesson(2, [[[ALL, (0,)]], [[(), (1,)]], [[(1, 1), ()]], [[(), ()], [(0,), ALL]]], clip=1.0),
    "skipped by all": Lesson(2, [[[(), ()]], [[(1,), ()]], [[ALL, ALL]], [[(), ()]]], to_none=False),
}  # fmt: skip


def beside_ddp(rank: int, inners: list[str]) -> list[Any]:
    out = []
    for inner in inners:
        for name, lesson in LESSONS.items():
            ours, _ = taught(rank, lesson, (2, 1), inner, schedule=WARMUP)
            out.append((ours, torchs(rank, lesson, INNERS[inner], lazily="accumulated" in name)))
    lesson = replace(LESSONS["accumulated and clipped"], clip=None)
    _, ours = taught(
        rank, lesson, (2, 1), "nesterov", schedule=EVERY_STEP, outer=edit.Average(), penalty=None
    )
    out.append((ours[:-2], torchs(rank, lesson, INNERS["nesterov"], lazily=False)))
    outer = edit.Nesterov(0.7, 0.9)
    _, ours = taught(rank, lesson, (2, 1), "sgd", schedule=EVERY_STEP, outer=outer, penalty=None)
    sgd = partial(torch.optim.SGD, lr=0.7 * LR, momentum=0.9, nesterov=True)
    out.append((ours[:-2], torchs(rank, lesson, sgd, lazily=True)))
    return out


def test_torchs_ddp_on_plain_models() -> None:
    """Warm-up and interval 1 beside DDP itself; and ``ddp`` of this file is DDP."""
    inners = ["momentum", "adamw", "adagrad"]
    learnt = [(inner, lesson) for inner in inners for lesson in LESSONS.values()]
    for got in processes(2, beside_ddp, inners):
        for ours, theirs in got:
            same(ours, theirs)
        for (inner, lesson), (_, theirs) in zip(learnt, got, strict=False):
            same(theirs, ddp(lesson, INNERS[inner]))


def sharded_beside_ddp(rank: int, inner: str) -> Any:
    lesson = Lesson(4, [[[ALL] * 4] * 2] * 3, width=7, clip=0.5)
    ours, _ = taught(rank, lesson, (2, 2), inner, schedule=WARMUP, sharded=True, lazily=True)
    _, averaged = taught(rank, replace(lesson, clip=None), (2, 2), "sgd", schedule=EVERY_STEP, sharded=True,
                         outer=edit.Average(), penalty=None)  # fmt: skip
    theirs = torchs(rank, lesson, INNERS[inner], lazily=True)
    return (ours, averaged[:-2]), (
        theirs,
        torchs(rank, replace(lesson, clip=None), INNERS["sgd"], lazily=False),
    )


def test_torchs_ddp_on_fsdp2() -> None:
    got = processes(4, sharded_beside_ddp, "adamw")
    for first in (0, 2):
        (ours, averaged) = (whole([got[first + m][0][which] for m in (0, 1)]) for which in (0, 1))
        same(ours, got[0][1][0])
        same(averaged, got[0][1][1])


def normed_beside_ddp(rank: int) -> Any:
    """BatchNorm: DDP broadcasts rank 0's buffers before every forward."""
    out = []
    for wrap in (False, True):
        model = seeded(Normed())
        optimizer: torch.optim.Optimizer
        if wrap:
            called: nn.Module = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        else:
            called, optimizer = model, edit.LocalSGDOptimizer(model, lr=0.02, schedule=WARMUP)
        for step in range(4):
            x, y = batch(step, rank)
            F.mse_loss(called(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        out.append((values(model), [b.clone() for b in model.buffers()]))
    return out


def test_torchs_ddp_with_batchnorm() -> None:
    got = processes(2, normed_beside_ddp)
    for ours, theirs in got:
        same(ours[0], theirs[0])
    ours, theirs = got[0]
    same(ours[1], theirs[1])  # rank 0's buffers are the model's


# ----------------------------------------------------------------------------------- what must not matter


@dataclass(frozen=True)
class Course:
    """One run of local training: everything that a rank needs to know.

    Attributes:
        shape: replicas, shards.
        steps: inner steps of each stream of data before its replica calls ``sync()``.
        streams: whose data, steps and mishaps replica i has. Default: its own.
        members: batches per stream and step, shared out among the ranks of the replica.
        cut: names of the modules that are layers, or units of FSDP2. Default: the blocks.
        mishaps: by stream and step, the factor of the gradients whose names contain a text.
        spoilt: by stream and step, the factor of the inputs.
    """

    shape: tuple[int, int] = (2, 1)
    steps: tuple[int, ...] = (6, 6)
    streams: tuple[int, ...] | None = None
    members: int = 1
    interval: int = 2
    warmup: int = 0
    inner: str = "sgd"
    outer: Any = edit.Nesterov()
    penalty: Any = None
    offload: str | None = None
    prefetch: int = 1
    cut: tuple[str, ...] | None = None
    width: int = 5
    depth: int = 2
    normed: bool = False
    mishaps: dict[tuple[int, int], tuple[float, str]] = field(default_factory=dict)
    spoilt: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.shape[0] * self.shape[1]


def run(rank: int, course: Course) -> dict[str, Any]:
    """Train as a user does. Returns this rank's part of

    history, the parameters after every step; rounds, what each one reported and left: anchor, outer momentum,
    buffers; and in the end: params, buffers, counters.
    """
    shards = course.shape[1]
    grid = grid_of(course.shape)
    model: Any = seeded(Normed() if course.normed else Net(course.width, course.depth))
    cut = course.cut and [model.get_submodule(name) for name in course.cut]
    if shards > 1:
        shard(model, grid, cut)
    optimizer = edit.LocalSGDOptimizer(
        model,
        INNERS[course.inner],
        course.outer,
        mesh=grid,
        schedule=edit.EverySteps(course.interval, course.warmup),
        penalty=course.penalty,
        offload=course.offload,
        prefetch=course.prefetch,
        layers=cut if shards == 1 else None,
    )

    def buffers() -> Values:  # those that are averaged
        return [b.clone() for b in model.buffers() if b.is_floating_point()]

    rounds: list[dict[str, Any]] = []

    def record(report: edit.RoundReport) -> None:
        lawful(report)
        fields = ("steps", "norms", "out", "weights", "clip", "rolled_back")
        rounds.append({name: getattr(report, name) for name in fields})
        rounds[-1] |= kept(optimizer) | {"buffers": buffers()}
        if report.rolled_back.all() and len(rounds) > 1:  # momentum alone must not move a model
            bitwise([rounds[-1][key] for key in KEPT], [rounds[-2][key] for key in KEPT])

    optimizer.register_round_hook(record)
    stream = (course.streams or range(course.shape[0]))[rank // shards]
    members = range(course.members)[rank % shards :: shards]
    history = []
    for step in range(course.steps[stream]):
        loss: Any = 0.0
        for member in members:
            x, y = batch(step, stream, member)
            loss = loss + F.mse_loss(model(x * course.spoilt.get((stream, step), 1.0)), y) / len(members)
        loss.backward()
        factor, where = course.mishaps.get((stream, step), (1.0, ""))
        for name, p in model.named_parameters():
            if where in name:
                (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        history.append(values(model))
    optimizer.sync()
    optimizer.close()
    counters = {"number": optimizer.rounds, "total": optimizer.total_steps, "local": optimizer.local_steps}
    return {"history": history, "rounds": rounds, "params": values(model), "buffers": buffers(), **counters}


def outcome(course: Course, start: Any = threads) -> list[dict[str, Any]]:
    """By rank; all replicas are equal at the end."""
    got = start(course.ranks, run, course)
    for rank, one in enumerate(got):
        bitwise(
            [one["params"], one["buffers"]],
            [got[rank % course.shape[1]][key] for key in ("params", "buffers")],
        )
        assert one["rounds"]
        assert one["total"] == sum(each["local"] for each in got[:: course.shape[1]])
    return got


P, TEST = edit.PseudoGradientPenalty, edit.EMAZTest(alpha=0.2, warmup_rounds=1, patience=2)
PENALTIES = [None, P(), P(TEST, 0.1, 0.1), P(TEST, None, 0.1, 0.0), P(None, 0.02, None, 1.0)]
FINITE = [3.0, -1.0, 0.2]  # factors of gradients that leave training stable
MILD = [*FINITE, 0.0, 1e-200, NAN, INF]
WILD = [*MILD, 30.0, 1e4, -1e9, 1e160]


FEW = [(2, 1), (2, 1), (2, 1), (3, 1), (1, 1)]


@st.composite
def courses(draw: st.DrawFn, shapes: list[tuple[int, int]], factors: list[float], **fixed: Any) -> Course:
    shape = draw(st.sampled_from(shapes))
    warmup = fixed.setdefault("warmup", draw(st.sampled_from([0, 0, 1])))
    most = warmup + draw(st.integers(1, 4))
    where = st.sampled_from(["", "", "blocks.0", "head", "weight"])
    moment = st.tuples(st.integers(0, shape[0] - 1), st.integers(warmup, most - 1))
    mishap = st.tuples(st.sampled_from(factors), where)
    drawn = {
        "steps": tuple(draw(st.integers(warmup, most) | st.just(most)) for _ in range(shape[0])),
        "interval": draw(st.integers(1, 3)),
        "inner": draw(st.sampled_from(["sgd", "adamw", "momentum"])),
        "outer": draw(st.sampled_from([edit.Nesterov(), edit.Average(), edit.HeavyBall()])),
        "penalty": draw(st.sampled_from(PENALTIES)),
        "prefetch": draw(st.integers(0, 2)),
        "width": draw(st.integers(2, 7)),
        "depth": draw(st.sampled_from([1, 1, 2])),
        "mishaps": draw(st.dictionaries(moment, mishap, max_size=4)),
    }
    return Course(shape, **(drawn | fixed))


ANY_PENALTY = st.builds(
    P,
    st.none() | st.builds(edit.EMAZTest, st.floats(0.01, 1), st.floats(0.1, 5), st.integers(0, 3), st.integers(1, 3)),
    st.none() | st.floats(1e-6, 1e3),
    st.none() | st.floats(1e-3, 10),
    st.floats(0, 2),
)  # fmt: skip


@given(data=st.data(), penalty=ANY_PENALTY)
def test_weights_are_a_mean_or_nothing_whatever_happens(data: st.DataObject, penalty: Any) -> None:
    """``lawful`` holds in every round, and nothing that is not finite reaches the consensus."""
    for one in outcome(data.draw(courses([*FEW, (4, 1)], WILD, penalty=penalty))):
        assert all(p.isfinite().all() for p in one["params"])


HOW = st.fixed_dictionaries(
    {"offload": st.sampled_from([None, "cpu"]), "prefetch": st.sampled_from([0, 1, 3])}
)


@given(course=courses(FEW, WILD), normed=st.booleans(), how=HOW)
def test_offload_and_prefetch_change_no_bit(course: Course, normed: bool, how: Any) -> None:
    course = replace(course, normed=normed)
    bitwise(outcome(replace(course, **how)), outcome(course))


@few(16)
@given(course=courses([(2, 2)], WILD, members=2), how=HOW)
def test_offload_and_prefetch_change_no_bit_on_fsdp2(course: Course, how: Any) -> None:
    bitwise(outcome(replace(course, **how)), outcome(course))


MODULES = ["up", "head", *(f"blocks.{i}{part}" for i in range(2) for part in ("", ".lin", ".norm"))]


@given(
    course=courses(FEW, FINITE, penalty=None, depth=2),
    cut=st.lists(st.sampled_from(MODULES), unique=True).map(tuple),
)
def test_the_cut_does_not_matter_to_a_plain_mean(course: Course, cut: tuple[str, ...]) -> None:
    for a, b in zip(outcome(replace(course, cut=cut)), outcome(course), strict=True):
        same(a["history"], b["history"], 1e-12)
        same(a["params"], b["params"], 1e-12)


@few(16)
@given(
    course=courses([(2, 2)], FINITE, penalty=None, depth=2, members=2),
    cut=st.lists(st.sampled_from(MODULES), unique=True).map(tuple),
)
def test_the_cut_does_not_matter_to_a_plain_mean_on_fsdp2(course: Course, cut: tuple[str, ...]) -> None:
    inner_first = tuple(sorted(cut, key=lambda name: -name.count(".")))  # as fully_shard wants it
    for a, b in zip(outcome(replace(course, cut=inner_first)), outcome(course), strict=True):
        same([a["history"], a["params"]], [b["history"], b["params"]], 1e-12)


@given(data=st.data())
def test_the_order_of_replicas_does_not_matter(data: st.DataObject) -> None:
    """Which replica learns from which data changes nothing but the order of rows."""
    # A bias before BatchNorm has a gradient of rounding errors, of which AdamW would make steps. And the
    # warm-up ends with the buffers of replica 0, as DDP's.
    fixed: Any = {"normed": True, "inner": "momentum", "warmup": 0} if data.draw(st.booleans()) else {}
    course = data.draw(courses([(2, 1), (2, 1), (3, 1)], MILD, **fixed))
    streams = tuple(data.draw(st.permutations(range(course.shape[0]))))
    a, b = outcome(course), outcome(replace(course, streams=streams))
    for replica, stream in enumerate(streams):
        same(b[replica]["history"], a[stream]["history"], 1e-12)
        for there, here in zip(b[replica]["rounds"], a[stream]["rounds"], strict=True):
            rows = {name: here[name][list(streams)] for name in ("steps", "norms", "weights", "out")}
            same(there, here | rows, 1e-12)
    same([b[0]["params"], b[0]["buffers"]], [a[0]["params"], a[0]["buffers"]], 1e-12)


@few(8)
@given(data=st.data())
def test_sharded_is_unsharded(data: st.DataObject) -> None:
    """For any number of shards, uneven and empty ones among them: with the same data, the same course."""
    penalty = data.draw(st.sampled_from(PENALTIES[2:4]))  # those that clip
    course = data.draw(courses([(2, 1), (1, 1)], MILD, members=4, penalty=penalty))
    shards = data.draw(st.sampled_from([2, 4]))
    plain = outcome(course)
    got = outcome(replace(course, shape=(course.shape[0], shards)))
    for replica, expected in enumerate(plain):
        mine = got[replica * shards : (replica + 1) * shards]
        same(whole([one["history"] for one in mine]), expected["history"])
        same(whole([one["params"] for one in mine]), expected["params"])
        for number, there in enumerate(expected["rounds"]):
            here = dict(mine[0]["rounds"][number])
            here |= {key: whole([one["rounds"][number][key] for one in mine]) for key in KEPT}
            same(here, there)


# ---------------------------------------------------------------------------------- who is out says nothing


@given(data=st.data())
def test_a_replica_that_is_out_has_no_influence(data: st.DataObject) -> None:
    """Its round may end in NaN, in Inf or in a spike, from data or from gradients, sooner or later: nobody
    sees a difference, and it goes on from the same place."""
    replicas, interval, round = (
        data.draw(st.sampled_from([2, 2, 2, 3])),
        data.draw(st.sampled_from([1, 1, 2])),
        2,
    )
    inner = data.draw(st.sampled_from(["sgd", "adamw"]))
    steps = (interval * 3 + data.draw(st.integers(0, 1)),) * replicas
    penalty = replace(
        data.draw(st.sampled_from(PENALTIES[1:3])), anomaly=edit.EMAZTest(0.02, 1e6, warmup_rounds=1)
    )
    base = Course((replicas, 1), steps, depth=1, interval=interval, inner=inner, penalty=penalty,
                  outer=data.draw(st.sampled_from([edit.Nesterov(), edit.HeavyBall()])),
                  offload=data.draw(st.sampled_from([None, "cpu"])))  # fmt: skip
    out = data.draw(st.sets(st.integers(0, replicas - 1), min_size=1))
    # A spike stays in AdamW's moments; what is not finite is dropped with them.
    bad = st.sampled_from([NAN, INF, -INF] + ([1e5, -1e7] if inner == "sgd" else []))
    runs = []
    for _ in range(2):
        begins = {i: (round - 1) * interval + data.draw(st.integers(0, interval - 1)) for i in out}
        spoilt = {i: data.draw(st.sampled_from([1.0, 1.0, NAN, INF])) for i in out}
        runs.append(
            replace(
                base,
                mishaps={(i, begins[i]): (data.draw(bad), "") for i in out},
                spoilt={(i, begins[i]): spoilt[i] for i in out},
            )
        )
    a, b = (outcome(run) for run in runs)
    for i, (here, there) in enumerate(zip(a, b, strict=True)):
        untouched = slice((round - 1) * interval if i in out else None), slice(round * interval, None)
        for part in untouched:
            bitwise(here["history"][part], there["history"][part])
        for number, (one, other) in enumerate(zip(here["rounds"], there["rounds"], strict=True), 1):
            rows = [i for i in range(replicas) if number != round or i not in out]
            bitwise(one | {"norms": one["norms"][rows]}, other | {"norms": other["norms"][rows]})
            if number == round:
                assert one["out"][list(out)].all()
                assert len(out) < replicas or one["rolled_back"].all()
        assert all(p.isfinite().all() for step in here["history"][round * interval :] for p in step)  # healed
        bitwise(here["params"], there["params"])


@given(data=st.data())
def test_a_replica_without_steps_has_no_influence(data: st.DataObject) -> None:
    """Nor on buffers: as little as one that is not finite, which may have called ``sync()`` later."""
    replicas, interval, rounds = (
        data.draw(st.sampled_from([2, 2, 2, 3])),
        data.draw(st.sampled_from([1, 1, 2])),
        2,
    )
    out = data.draw(st.sets(st.integers(0, replicas - 1), min_size=1, max_size=replicas - 1))
    base = Course((replicas, 1), (rounds * interval,) * replicas, interval=interval, normed=True,
                  inner=data.draw(st.sampled_from(["sgd", "adamw"])),
                  penalty=data.draw(st.sampled_from(PENALTIES)))  # fmt: skip
    begin = (rounds - 1) * interval
    absent = replace(base, steps=tuple(begin if i in out else begin + interval for i in range(replicas)))
    spoilt = {(i, begin): data.draw(st.sampled_from([NAN, INF])) for i in out}
    a, b = outcome(absent), outcome(replace(base, spoilt=spoilt))
    kinds = "anchor", "momentum", "buffers", "weights", "out", "clip", "rolled_back"
    for i, (here, there) in enumerate(zip(a, b, strict=True)):
        end = begin if i in out else begin + interval
        bitwise(here["history"][:end], there["history"][:end])
        bitwise([here["params"], here["buffers"]], [there["params"], there["buffers"]])
        for one, other in zip(here["rounds"], there["rounds"], strict=True):
            bitwise([one[kind] for kind in kinds], [other[kind] for kind in kinds])
        assert here["rounds"][rounds - 1]["out"][list(out)].all()
        assert here["total"] == there["total"] - interval * len(out)


def spiked(rank: int, factor: float) -> Values:
    model = seeded(Normed())
    penalty = edit.PseudoGradientPenalty(edit.EMAZTest(0.02, 1e6, warmup_rounds=1))
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.SGD, lr=LR, schedule=EVERY_STEP, penalty=penalty)
    reports: list[edit.RoundReport] = []
    optimizer.register_round_hook(reports.append)
    for step in range(3):
        spike = factor if (rank, step) == (1, 2) else 1.0
        x, y = batch(step, rank)
        F.mse_loss(model(x * spike), y * spike).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.sync()
    assert reports[2].out.flatten().tolist() == [False, True]
    return [*values(model), model.bn.running_mean, model.bn.running_var]


def test_a_spiked_replica_has_no_influence_on_buffers() -> None:
    bitwise(threads(2, spiked, 1e4), threads(2, spiked, 1e6))


def test_a_layer_that_a_forward_skips_is_no_reason_to_warn() -> None:
    run = partial(taught, schedule=EVERY_STEP, outer=edit.Average(), penalty=None)
    lesson = Lesson(1, [[[(0, 1)]], [[(0,)]]], to_none=False)
    same(run(0, lesson, None, "sgd")[1][-1], ddp(lesson, INNERS["sgd"])[-1])


# --------------------------------------------------------------------------- sync() at any time, any skips


@dataclass(frozen=True)
class Walk:
    """What the replicas do, each at its own pace; they meet in a ``sync()`` after each of their parts.

    Attributes:
        acts: per replica and part: steps, skipped steps (as a GradScaler does), evaluations, another backward.
        seconds: that an act of each replica takes; None: rounds by steps.
    """

    shape: tuple[int, int]
    acts: list[list[list[str]]]
    warmup: int = 0
    interval: int = 2
    prefetch: int = 1
    penalty: Any = None
    seconds: list[float] | None = None


@st.composite
def walks(draw: st.DrawFn, shapes: list[tuple[int, int]]) -> Walk:
    shape, parts = draw(st.sampled_from(shapes)), draw(st.sampled_from([1, 2, 2, 3]))
    act = st.sampled_from(["step", "step", "step", "skip", "look", "more"])
    part = st.lists(act, max_size=4) | st.just(["step"] * 5) | st.just([])
    return Walk(
        shape,
        [[draw(part) for _ in range(parts)] for _ in range(shape[0])],
        draw(st.integers(0, 2)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from(PENALTIES)),
        draw(
            st.none() | st.lists(st.sampled_from([0.1, 0.3, 0.5, 1.0]), min_size=shape[0], max_size=shape[0])
        ),
    )


def walked(rank: int, walks: list[Walk]) -> list[Any]:
    """For each walk and ``sync()``: what this rank holds of the parameters, total steps, rounds."""
    return [[*_walk(rank, walk)] for walk in walks]


def _walk(rank: int, walk: Walk) -> Iterator[Any]:
    replica, member = divmod(rank, walk.shape[1])
    grid, model, clock = grid_of(walk.shape), Net(3, 2), Clock()
    seeded(model)
    if walk.shape[1] > 1:
        shard(model, grid)
    schedule = edit.EverySteps(walk.interval, walk.warmup)
    if walk.seconds is not None:
        schedule = edit.EverySeconds(1.0, walk.warmup, clock)
    optimizer = edit.LocalSGDOptimizer(
        model, lr=0.02, mesh=grid, schedule=schedule, penalty=walk.penalty, prefetch=walk.prefetch,
        timeout=timedelta(seconds=20),
    )  # fmt: skip
    optimizer.register_round_hook(lawful)
    for number, part in enumerate([["step"] * walk.warmup, *walk.acts[replica]]):
        for act in part:
            clock.now += walk.seconds[replica] if walk.seconds else 0.0
            with torch.set_grad_enabled(act != "look"):
                loss = loss_of(model, optimizer.local_steps, replica, member)
            if act != "look":
                loss.backward()
            if act == "step":
                optimizer.step()
            if act != "more":
                optimizer.zero_grad()
        if number:
            optimizer.sync()
            yield values(model), optimizer.total_steps, optimizer.rounds
    optimizer.close()


def meet(walk: Walk, got: list[Any]) -> None:
    """All replicas are equal after each ``sync()``, and know how many steps all of them made."""
    steps = walk.shape[0] * walk.warmup
    for number in range(len(walk.acts[0])):
        steps += sum(acts[number].count("step") for acts in walk.acts)
        for rank, one in enumerate(got):
            bitwise(one[number], got[rank % walk.shape[1]][number])
            assert one[number][1] == steps


@given(walk=walks([*FEW, (4, 1)]))
def test_skipped_steps_and_syncs_at_any_time(walk: Walk) -> None:
    meet(walk, [one[0] for one in threads(walk.shape[0], walked, [walk], timeout=20)])


@few(16)
@given(walk=walks([(2, 2), (3, 2)]))
def test_skipped_steps_and_syncs_at_any_time_on_fsdp2(walk: Walk) -> None:
    meet(walk, [one[0] for one in threads(walk.shape[0] * 2, walked, [walk], timeout=30)])


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 2)], ids=str)
@few(25)
@given(data=st.data())
def test_skipped_steps_and_syncs_at_any_time_between_processes(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    several = data.draw(st.lists(walks([shape]), min_size=2, max_size=5))
    got = processes(shape[0] * shape[1], walked, several, timeout=45)
    for number, walk in enumerate(several):
        meet(walk, [one[number] for one in got])


def test_what_must_not_matter_between_processes() -> None:
    """Offload and prefetch under asynchronous traffic, with a round that is left out and one rolled back."""
    mishaps = {(1, 3): (NAN, "blocks.0"), (0, 5): (1e3, ""), (0, 7): (INF, ""), (1, 7): (NAN, "")}
    base = Course((2, 1), (11, 9), interval=2, inner="adamw", penalty=PENALTIES[2], depth=3, mishaps=mishaps)
    got = processes(2, several, [replace(base, **other) for other in
                    ({}, {"prefetch": 0}, {"prefetch": 3, "offload": "cpu"})])  # fmt: skip
    for here, *there in got:
        assert any(round["rolled_back"].any() for round in here["rounds"])
        for other in there:
            bitwise(other, here)


def several(rank: int, courses: list[Course]) -> list[Any]:
    return [run(rank, course) for course in courses]
