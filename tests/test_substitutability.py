"""In place of the inner optimizer: everything that torch and its users do with an optimizer works as on it."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map

import edit
from problems import Net, loss_of, net
from ranks import mesh, threads

NEVER = edit.EverySteps(10**6)  # no round: bitwise the inner optimizer
STEPS = 8
KEYS = {"edit_anchor", "edit_outer.momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


def wrapped(model: nn.Module, inner: Any = torch.optim.AdamW, **kwargs: Any) -> edit.LocalSGDOptimizer:
    return edit.LocalSGDOptimizer(model, inner, **({"schedule": NEVER} | kwargs))


def bare(model: nn.Module, inner: Any = torch.optim.AdamW, **kwargs: Any) -> torch.optim.Optimizer:
    return inner(model.parameters(), **kwargs)


def values(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def equal(a: Any, b: Any) -> bool:
    """Bitwise, at any depth."""
    if isinstance(a, DTensor):
        return isinstance(b, DTensor) and a.placements == b.placements and equal(a.to_local(), b.to_local())
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any = STEPS, rank: int = 0
) -> list[float]:
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alike(course: Callable[[nn.Module, torch.optim.Optimizer], Any], **kwargs: Any) -> None:
    """``course`` gives bitwise the same with the wrapper and with the bare optimizer."""
    results = []
    for make in (bare, wrapped):
        model = net()
        optimizer = make(model, **({"lr": 0.05} | kwargs))
        results.append((course(model, optimizer), values(model)))
    assert equal(*results)


# --------------------------------------------------------------------------------------- what it shows


def public(cls: type) -> list[str]:
    """Names of its methods."""
    return sorted(name for name, value in vars(cls).items() if name[0] != "_" and inspect.isfunction(value))


@pytest.mark.parametrize("name", public(torch.optim.Optimizer))
def test_signatures_are_those_of_an_optimizer(name: str) -> None:
    theirs = inspect.signature(getattr(torch.optim.Optimizer, name)).parameters
    ours = inspect.signature(getattr(edit.LocalSGDOptimizer, name)).parameters
    assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]
    for key in theirs:
        if (name, key) != ("step", "closure"):  # which tells "not given" from None (trap 10)
            assert ours[key].default == theirs[key].default
        assert (ours[key].default is inspect.Parameter.empty) == (
            theirs[key].default is inspect.Parameter.empty
        )


@pytest.mark.parametrize("name", public(torch.optim.Optimizer))
def test_every_public_method_is_the_wrappers_own(name: str) -> None:
    """What is inherited would work on the wrapper's own, empty, hooks and state."""
    assert getattr(edit.LocalSGDOptimizer, name) is not getattr(torch.optim.Optimizer, name)


def test_isinstance_defaults_and_live_attributes() -> None:
    model = net()
    optimizer = wrapped(model, lr=0.05, weight_decay=0.1)
    inner = optimizer.inner
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults == bare(model, lr=0.05, weight_decay=0.1).defaults
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert len(inner.param_groups) == 1  # Optimizer.__init__ has added nothing
    train(model, optimizer, 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    groups, state = [dict(group) for group in inner.param_groups], copy.copy(inner.state)
    optimizer.param_groups, optimizer.state = groups, state
    assert inner.param_groups is groups
    assert inner.state is state


def test_repr_shows_settings_and_inner() -> None:
    text = repr(wrapped(net(), lr=0.05, outer=edit.Average()))
    for word in (
        "LocalSGDOptimizer",
        "EverySteps(interval=1000000",
        "Average()",
        "replicas: 1",
        "AdamW",
        "lr: 0.05",
    ):
        assert word in text


def test_any_way_to_give_the_inner_optimizer() -> None:
    def run(make: Callable[[Net], edit.LocalSGDOptimizer]) -> list[Tensor]:
        model = net()
        train(model, make(model))
        return values(model)

    ways = [
        lambda m: edit.LocalSGDOptimizer(m, torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda m: edit.LocalSGDOptimizer(m, partial(torch.optim.SGD, momentum=0.9), lr=0.1),
        lambda m: edit.LocalSGDOptimizer(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
        lambda m: edit.LocalSGDOptimizer(m, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        lambda m: edit.LocalSGDOptimizer(
            m, torch.optim.SGD([{"params": m.up.parameters()}, {"params": [*m.blocks.parameters(), *m.head.parameters()]}], lr=0.1, momentum=0.9)
        ),
    ]  # fmt: skip
    first, *others = map(run, ways)
    for other in others:
        assert equal(first, other)


@pytest.mark.parametrize(
    ("inner", "kwargs"),
    [
        (torch.optim.AdamW, {"lr": 0.05}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.05), "foreach": False}),
        (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
        (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.05}),
        (torch.optim.RMSprop, {"lr": 0.05}),
        (torch.optim.Adagrad, {"lr": 0.05}),
        (torch.optim.Adadelta, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ",".join(value),
)
def test_inner_optimizers(inner: Any, kwargs: dict[str, Any]) -> None:
    """Alone without a round bitwise the inner; with rounds and ``Average()`` up to rounding."""
    alike(train, inner=inner, **kwargs)
    plain, averaged = net(), net()
    train(plain, bare(plain, inner, **kwargs))
    optimizer = wrapped(
        averaged, inner, schedule=edit.EverySteps(3), outer=edit.Average(), penalty=None, **kwargs
    )
    train(averaged, optimizer)
    assert optimizer.rounds == 2
    torch.testing.assert_close(values(averaged), values(plain), rtol=1e-9, atol=1e-9)


def test_tensor_lr_is_one_tensor() -> None:
    lr = torch.tensor(0.05)
    model = net()
    optimizer = wrapped(model, lr=lr, foreach=False)
    assert optimizer.param_groups[0]["lr"] is lr
    lr.fill_(0.0)
    before = values(model)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    train(model, optimizer, 1)
    assert equal(before, values(model))
    assert optimizer.local_steps == 1


# -------------------------------------------------------------------------------------- lr schedulers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 4)),  # starts from lr 0
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=2 * STEPS),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
}


def scheduled(
    make: Callable, model: nn.Module, optimizer: Any, steps: Any, scheduler: Any = None
) -> list[Any]:
    scheduler = scheduler or make(optimizer)
    seen = []
    for step in steps:
        loss = train(model, optimizer, [step])[0]
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group.get("betas"), group.get("initial_lr")))
    return seen


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers(name: str) -> None:
    alike(lambda model, optimizer: scheduled(SCHEDULERS[name], model, optimizer, range(STEPS)))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_peers_post_local_sgd_scheduler_after_load_state_dict(name: str) -> None:
    """The groups that a scheduler moves are those that the inner optimizer reads, after loading too."""
    make = SCHEDULERS[name]

    def course(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        scheduler = make(optimizer)
        seen = scheduled(make, model, optimizer, range(4), scheduler)
        kwargs = {"lr": 0.7}  # the saved one must win
        fresh = (
            wrapped(model, **kwargs)
            if isinstance(optimizer, edit.LocalSGDOptimizer)
            else bare(model, **kwargs)
        )
        again = make(fresh)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again.load_state_dict(scheduler.state_dict())
        seen += scheduled(make, model, fresh, range(4, STEPS), again)
        optimizer.load_state_dict(fresh.state_dict())  # and into the object that a scheduler already holds
        return seen + scheduled(make, model, optimizer, range(STEPS, STEPS + 2), scheduler)

    alike(course)


def test_a_first_step_with_lr_0_is_a_step() -> None:
    """A warm-up from 0 (LambdaLR) is no dry run, whether or not ``None`` is given for the closure."""
    for call in (lambda o: o.step(), lambda o: o.step(None), lambda o: o.step(lambda: None)):
        model = net()
        optimizer = wrapped(model, lr=0.0, schedule=edit.EverySteps(1))
        loss_of(model, 0, 0).backward()
        call(optimizer)
        assert optimizer.local_steps == 1


# ---------------------------------------------------------------------------------------- GradScaler


def scaled(model: nn.Module, optimizer: Any, overflow: set[int] = frozenset(), rank: int = 0, clip: bool = True) -> list[Any]:  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    seen = []
    for step in range(STEPS):
        scaler.scale(loss_of(model, step, rank) * (torch.inf if step in overflow else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return [str(x) for x in seen]  # a NaN norm equals itself


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler(clip: bool, fused: bool) -> None:
    alike(partial(scaled, overflow={2, 5}, clip=clip), fused=fused)


@pytest.mark.parametrize("skips", [{0}, {2}, {3}, {1, 2, 3}, {6, 7}], ids=str)
def test_peers_post_local_sgd_grad_scaler_skips_on_one_replica(skips: set[int]) -> None:
    """``GradScaler`` does not call ``step()`` where it finds an Inf: the other replica must not wait for it."""

    def fn(rank: int) -> Any:
        model = net()
        optimizer = wrapped(model, lr=0.05, schedule=edit.EverySteps(2))
        reports: list[edit.RoundReport] = []
        optimizer.register_round_hook(reports.append)
        scaled(model, optimizer, skips if rank == 1 else set(), rank)
        optimizer.sync()
        assert optimizer.total_steps == sum(int(report.steps.sum()) for report in reports)
        return optimizer.local_steps, optimizer.total_steps, values(model)

    (steps_0, total_0, model_0), (steps_1, total_1, model_1) = threads(2, fn)
    assert (steps_0, steps_1) == (STEPS, STEPS - len(skips))
    assert total_0 == total_1 == steps_0 + steps_1
    assert equal(model_0, model_1)
    assert all(p.isfinite().all() for p in model_0)


def test_grad_scaler_skips_in_the_warm_up_on_all_replicas() -> None:
    """There the average of gradients is Inf on all of them."""

    def fn(rank: int) -> Any:
        model = net()
        optimizer = wrapped(model, lr=0.05, schedule=edit.EverySteps(2, warmup_steps=4))
        scaled(model, optimizer, {1} if rank == 1 else set(), rank)
        optimizer.sync()
        return optimizer.local_steps, values(model)

    (steps_0, model_0), (steps_1, model_1) = threads(2, fn)
    assert steps_0 == steps_1 == STEPS - 1
    assert equal(model_0, model_1)


# ------------------------------------------------------------------------------ clipping, zero_grad, hooks


def test_clip_grad_norm() -> None:
    def course(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        norms = []
        for step in range(STEPS):
            loss_of(model, step, 0).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    alike(course)
    alike(course, inner=torch.optim.SGD)


def test_fault_4_clipping_sees_the_right_divisor_in_both_phases() -> None:
    """The norm that ``clip_grad_norm_`` returns: of the mean gradient in the warm-up, then of one's own."""

    def fn(rank: int) -> list[float]:
        model = net()
        optimizer = wrapped(model, torch.optim.SGD, lr=0.0, schedule=edit.EverySteps(2, warmup_steps=2))
        norms = []
        for step in range(4):
            loss_of(model, step, rank).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    got = threads(2, fn)
    for step in range(4):
        gradients = []
        for rank in range(2):
            model = net()
            loss_of(model, step, rank).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        mean = sum(gradients) / 2
        for rank in range(2):
            expected = mean if step < 2 else gradients[rank]
            assert got[rank][step] == pytest.approx(expected.norm().item(), rel=1e-12)


def test_zero_grad() -> None:
    model = net()
    optimizer = wrapped(model, lr=0.05)
    loss_of(model, 0, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_peers_post_local_sgd_step_hooks() -> None:
    """Once a step, in order, with the wrapper as the optimizer and the arguments of ``step``."""

    def course(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []

        def note(name: str, hooked: Any, args: Any, kwargs: Any) -> None:
            seen.append((name, hooked is optimizer, [arg is optimizer for arg in args], list(kwargs)))

        handles = [
            optimizer.register_step_pre_hook(partial(note, "pre")),
            optimizer.register_step_pre_hook(partial(note, "pre 2")),
            optimizer.register_step_post_hook(partial(note, "post")),
        ]
        train(model, optimizer, 2)
        for handle in handles[1:]:
            handle.remove()
        train(model, optimizer, 1)
        return seen

    alike(course)


def test_step_hooks_of_all_optimizers_run_once() -> None:
    def course(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        seen: list[str] = []
        pre = register_optimizer_step_pre_hook(lambda *_: seen.append("pre"))
        post = register_optimizer_step_post_hook(lambda *_: seen.append("post"))
        train(model, optimizer, 2)
        pre.remove()
        post.remove()
        return seen

    alike(course)


def test_a_pre_hook_may_change_the_arguments() -> None:
    def course(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def scale() -> float:
            for p in model.parameters():
                p.grad.mul_(0.5)
            return 7.0

        optimizer.register_step_pre_hook(lambda hooked, args, kwargs: ((*args, scale), kwargs))
        loss_of(model, 0, 0).backward()
        return optimizer.step()

    alike(course, inner=torch.optim.SGD)


def test_a_hook_sees_the_gradients_and_parameters_of_its_step() -> None:
    """In a round too: the pre hook after the round was applied, the post hook before the next begins."""
    model = net()
    optimizer = wrapped(model, lr=0.05, schedule=edit.EverySteps(1))
    rounds: list[tuple[str, int]] = []
    optimizer.register_step_pre_hook(lambda *_: rounds.append(("pre", optimizer.rounds)))
    optimizer.register_step_post_hook(lambda *_: rounds.append(("post", optimizer.rounds)))
    train(model, optimizer, 3)
    assert rounds == [("pre", 0), ("post", 0), ("pre", 1), ("post", 1), ("pre", 2), ("post", 2)]


def test_state_dict_hooks() -> None:
    def course(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []

        def note(name: str, hooked: Any, *rest: Any) -> None:
            seen.append((name, hooked is optimizer, [sorted(state) for state in rest]))

        def extend(name: str, hooked: Any, state: dict[str, Any]) -> dict[str, Any]:
            note(name, hooked, state)
            return {**state, name: 1}

        optimizer.register_state_dict_pre_hook(partial(note, "save pre"))
        optimizer.register_state_dict_pre_hook(partial(note, "save pre first"), prepend=True)
        optimizer.register_state_dict_post_hook(partial(extend, "save post"))
        optimizer.register_state_dict_post_hook(partial(note, "save post first"), prepend=True)
        optimizer.register_load_state_dict_pre_hook(partial(extend, "load pre"))
        optimizer.register_load_state_dict_pre_hook(partial(note, "load pre first"), prepend=True)
        optimizer.register_load_state_dict_post_hook(partial(note, "load post"))
        handle = optimizer.register_load_state_dict_post_hook(partial(note, "load post first"), prepend=True)
        train(model, optimizer, 1)
        state = optimizer.state_dict()
        seen.append(sorted(state))
        optimizer.load_state_dict(state)
        handle.remove()
        optimizer.load_state_dict(state)
        return seen

    alike(course)


# ------------------------------------------------------------------------------------------- closures


def closed(model: nn.Module, optimizer: Any, steps: Any = STEPS, rank: int = 0) -> list[float]:
    losses = []
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


INNER_WITH_CLOSURE = [
    (torch.optim.AdamW, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3, "history_size": 3}),
    (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
]


@pytest.mark.parametrize(("inner", "kwargs"), INNER_WITH_CLOSURE)
def test_peers_post_local_sgd_closure(inner: Any, kwargs: dict[str, Any]) -> None:
    alike(closed, inner=inner, **kwargs)


@pytest.mark.parametrize(("inner", "kwargs"), INNER_WITH_CLOSURE)
def test_a_round_is_applied_in_the_closures_forward(inner: Any, kwargs: dict[str, Any]) -> None:
    """As without a closure: the first forward inside ``step`` applies what the last ``step`` launched."""

    def fn(rank: int, run: Callable) -> Any:
        model = net()
        optimizer = wrapped(model, inner, schedule=edit.EverySteps(2), **kwargs)
        losses = run(model, optimizer, STEPS, rank)
        assert optimizer.rounds == STEPS // 2 - 1  # the last is due
        optimizer.sync()
        return losses, values(model)

    (losses_0, model_0), (losses_1, model_1) = threads(2, fn, closed)
    assert equal(model_0, model_1)
    assert losses_0 != losses_1
    if inner is not torch.optim.LBFGS:
        assert equal(threads(2, fn, train), [(losses_0, model_0), (losses_1, model_1)])


def test_lbfgs_on_one_replica_only_may_stop_early() -> None:
    """Replicas whose closures run different numbers of times still meet: rounds don't count forwards."""

    def fn(rank: int) -> Any:
        model = net()
        inner = partial(torch.optim.LBFGS, max_iter=2 + 3 * rank, lr=0.1)
        optimizer = wrapped(model, inner, schedule=edit.EverySteps(2))
        closed(model, optimizer, STEPS, rank)
        optimizer.sync()
        return values(model)

    assert equal(*threads(2, fn))


# --------------------------------------------------------------------------------------- param groups


def test_groups_with_their_own_settings() -> None:
    def course(model: Net, optimizer: torch.optim.Optimizer) -> Any:
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
        return train(model, optimizer)

    def groups(model: Net) -> list[dict[str, Any]]:
        rest = [*model.blocks.parameters(), *model.head.parameters()]
        return [{"params": list(model.up.parameters()), "lr": 0.1}, {"params": rest, "weight_decay": 0.5}]

    results = []
    for make in (lambda m, o: o, edit.LocalSGDOptimizer):
        model = net()
        results.append((course(model, make(model, torch.optim.AdamW(groups(model), lr=0.01))), values(model)))
    assert equal(*results)


class Extended(nn.Module):
    def __init__(self, base: Net) -> None:
        super().__init__()
        self.base = base
        self.extra: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.base(x))


def test_add_param_group() -> None:
    """The new parameters start from replica 0's, train with their own settings and are synchronised."""

    def fn(rank: int) -> Any:
        model = Extended(net())
        optimizer = wrapped(model, lr=0.05, schedule=edit.EverySteps(2))
        names: list[list[str]] = []
        optimizer.register_round_hook(lambda report: names.append(report.layers))
        train(model, optimizer, 4, rank)
        optimizer.sync()
        before = snapshot(optimizer.state_dict()["state"])
        model.extra = nn.Linear(3, 3, dtype=torch.float64)
        nn.init.constant_(model.extra.weight, rank + 1.0)
        nn.init.zeros_(model.extra.bias)
        optimizer.add_param_group({"params": model.extra.parameters(), "lr": 0.01})
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
        assert (model.extra.weight == 1.0).all()
        after = optimizer.state_dict()["state"]
        kept = {key: all(equal(before[p][key], after[p][key]) for p in before) for key in KEYS}
        train(model, optimizer, range(4, 8), rank)
        optimizer.sync()
        assert (model.extra.weight != 1.0).any()
        return kept, optimizer.rounds, names[-1], values(model)

    (kept, rounds, layers, model_0), (_, _, _, model_1) = threads(2, fn)
    assert all(kept.values()), kept
    assert rounds == 6  # two, one to meet (nothing moved), two, one to meet
    assert layers[0] == "(root)"
    assert equal(model_0, model_1)


def test_add_param_group_alone_is_as_on_the_inner_optimizer() -> None:
    def run(wrap: bool) -> Any:
        model = net()
        model.head.requires_grad_(False)
        inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        optimizer: Any = edit.LocalSGDOptimizer(model, inner, schedule=NEVER) if wrap else inner
        model.head.requires_grad_(True)
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.01})
        return train(model, optimizer), values(model), [group["lr"] for group in optimizer.param_groups]

    assert equal(run(True), run(False))


# --------------------------------------------------------------------- torch.distributed.checkpoint's helpers


def sharded(grid: Any, seed: int = 0) -> Net:
    model = net(seed)
    for block in model.blocks:
        fully_shard(block, mesh=grid["shard"])
    return fully_shard(model, mesh=grid["shard"])


def on_mesh(shape: tuple[int, int] | None, fn: Callable[..., Any]) -> list[Any]:
    """``fn(rank, replica, member, model_of(seed), mesh)``, plain if ``shape`` is None."""

    def on_rank(rank: int) -> Any:
        if shape is None:
            return fn(rank, 0, net, None)
        grid = mesh(*shape)
        return fn(rank // shape[1], rank % shape[1], net if shape[1] == 1 else partial(sharded, grid), grid)

    return threads(1 if shape is None else shape[0] * shape[1], on_rank)


SHAPES = pytest.mark.parametrize("shape", [None, (2, 1), (2, 2)], ids=["alone", "plain", "fsdp2"])


@SHAPES
@pytest.mark.parametrize(("lr", "warmup"), [("float", 0), ("tensor", 2)])
def test_trap_10_checkpoint_initialisation_is_not_a_step(shape: Any, lr: str, warmup: int) -> None:
    """``get_optimizer_state_dict`` makes a fresh optimizer step with lr 0: on one rank alone if it likes."""

    def fn(replica: int, member: int, model_of: Callable, grid: Any) -> Any:
        model = model_of()
        rate = 0.05 if lr == "float" else torch.tensor(0.05, dtype=torch.float64)
        settings = {"lr": rate, "foreach": False, "schedule": edit.EverySteps(1, warmup)}
        optimizer = wrapped(model, mesh=grid, **settings)
        hooks: list[Any] = []
        optimizer.register_round_hook(hooks.append)
        before = values(model)
        if (
            replica == 0 or warmup
        ):  # Adam's own count of steps is 1 afterwards, and the warm-up wants it equal
            state = get_optimizer_state_dict(model, optimizer)
            assert state["state"]["up.weight"].keys() >= KEYS
            assert {"edit_anchor", "edit_outer.momentum_buffer"} <= state["state"]["blocks.1.lin.bias"].keys()
        assert (optimizer.local_steps, optimizer.rounds, hooks) == (0, 0, [])
        assert optimizer.state_dict()["state"][0]["edit_run"][1:8].count_nonzero() == 0  # no anchor
        assert optimizer.param_groups[0]["lr"] == rate
        assert all(p.grad is None for p in model.parameters())
        assert equal(before, values(model))
        train(model, optimizer, 3, 10 * replica + member)  # and the run begins as if nothing had been
        optimizer.sync()
        assert optimizer.local_steps == 3
        return values(model)

    results = on_mesh(shape, fn)
    assert all(equal(results[0], result) for result in results)


def snapshot(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


@SHAPES
@pytest.mark.parametrize(
    ("after", "options"),
    [(1, {}), (4, {}), (5, {}), (4, {"full_state_dict": True}), (4, {"cpu_offload": True})],
    ids=["in a round", "due", "in the next round", "full", "offloaded"],
)
def test_optimizer_state_dict_helpers_carry_the_whole_state(shape: Any, options: Any, after: int) -> None:
    options = StateDictOptions(**options)

    def fn(replica: int, member: int, model_of: Callable, grid: Any) -> None:
        settings = {"lr": 0.05, "schedule": edit.EverySteps(2), "mesh": grid}
        data = 10 * replica + member
        model = model_of()
        optimizer = wrapped(model, **settings)
        train(model, optimizer, after, data)
        state = snapshot(get_optimizer_state_dict(model, optimizer, options=options))
        weights = snapshot(model.state_dict())
        assert set(state["state"]) == {name for name, _ in model.named_parameters()}

        again = model_of(seed=1)
        other = wrapped(again, **(settings | {"lr": 0.7}))
        again.load_state_dict(weights)
        set_optimizer_state_dict(again, other, state, options=options)
        assert other.param_groups[0]["lr"] == 0.05
        assert (other.local_steps, other.rounds) == (optimizer.local_steps, optimizer.rounds)
        train(model, optimizer, range(after, STEPS), data)
        train(again, other, range(after, STEPS), data)
        assert equal(optimizer.state_dict(), other.state_dict())
        assert equal(values(model), values(again))

    on_mesh(shape, fn)


@SHAPES
def test_peers_the_state_dict_can_be_copied(shape: Any) -> None:
    """``copy.deepcopy(optimizer.state_dict())``, a snapshot in memory, as of any optimizer."""

    def fn(replica: int, member: int, model_of: Callable, grid: Any) -> None:
        model = model_of()
        optimizer = wrapped(model, lr=0.05, schedule=edit.EverySteps(2), mesh=grid)
        train(model, optimizer, 3, 10 * replica + member)
        state = optimizer.state_dict()
        assert equal(copy.deepcopy(state), state)

    on_mesh(shape, fn)


def test_flattened_optimizer_state_dict_is_whole_or_warns(caplog: pytest.LogCaptureFixture) -> None:
    """``flatten_optimizer_state_dict=True`` asks ``optimizer.state`` which entries there are to load, and
    drops the others: the loss of the anchor must not pass in silence."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = net()
    optimizer = wrapped(model, lr=0.05, schedule=edit.EverySteps(2))
    train(model, optimizer, 5)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    again = net()
    again.load_state_dict(model.state_dict())
    other = wrapped(again, lr=0.05, schedule=edit.EverySteps(2))
    with caplog.at_level("WARNING", logger="edit"):
        set_optimizer_state_dict(again, other, state, options=options)
    assert equal(optimizer.state_dict(), other.state_dict()) or "no anchor" in caplog.text


# ----------------------------------------------------------------------------------- copies of the model


def copies_of(model: nn.Module) -> list[nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    return [copy.deepcopy(model), averaged, torch.load(buffer, weights_only=False)]


@pytest.mark.parametrize("warmup", [0, 4])
def test_trap_12_copies_of_the_model_do_nothing(warmup: int) -> None:
    """EMA, ``copy.deepcopy``, ``torch.save(model)``: hooks travel along, and are inert in the copy."""

    def fn(rank: int) -> Any:
        model = net()
        optimizer = wrapped(model, lr=0.05, schedule=edit.EverySteps(1, warmup))
        train(
            model, optimizer, 2, rank
        )  # without warm-up a round is due: the model's next forward applies it
        rounds = optimizer.rounds
        live = values(model)
        copies = copies_of(model)
        if rank == 0:  # alone: would any of them take part in a round or an average, it would hang
            for other in copies:
                before = values(other)
                loss_of(other, 0, rank).backward()
                assert equal(before, values(other))
                assert len(other.state_dict()) in (len(model.state_dict()), len(model.state_dict()) + 1)
        assert optimizer.rounds == rounds
        assert equal(live, values(model))
        train(model, optimizer, range(2, STEPS), rank)
        optimizer.sync()
        return optimizer.rounds, values(model), [values(other) for other in copies[:1]]

    with_copies = threads(2, fn)
    assert equal(with_copies[0][1], with_copies[1][1])
    assert with_copies[0][0] >= STEPS - max(1, warmup)


def test_a_model_does_not_keep_its_optimizer_alive() -> None:
    model = net()
    optimizer = wrapped(model, lr=0.05, schedule=edit.EverySteps(1))
    train(model, optimizer, 2)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    loss_of(model, 0, 0).backward()  # with what is left of the hooks


def test_a_second_optimizer_may_take_over() -> None:
    """After ``close()`` (or without it) a new one on the same model is the only one that acts."""

    def fn(rank: int, close: bool) -> Any:
        model = net()
        first = wrapped(model, lr=0.05, schedule=edit.EverySteps(1, warmup_steps=2))
        train(model, first, 3, rank)
        first.sync()
        if close:
            first.close()
        second = wrapped(model, lr=0.05, schedule=edit.EverySteps(1))
        train(model, second, 4, rank)
        second.sync()
        assert first.rounds == 2
        return values(model)

    for close in (True, False):
        assert equal(*threads(2, fn, close))


def test_fault_11_two_models_do_not_interfere() -> None:
    """Two models with two optimizers in one process, their steps interleaved, as a GAN has them."""

    def fn(rank: int, together: bool) -> Any:
        models = [net(0), net(1)]
        settings = [
            {"schedule": edit.EverySteps(2, 1)},
            {"schedule": edit.EverySteps(3), "outer": edit.Average()},
        ]
        optimizers = [wrapped(m, lr=0.05, **s) for m, s in zip(models, settings, strict=True)]
        pairs = list(zip(models, optimizers, strict=True))
        if together:
            for step in range(STEPS):
                for model, optimizer in pairs:
                    train(model, optimizer, [step], rank)
        else:
            for model, optimizer in pairs:
                train(model, optimizer, STEPS, rank)
        for optimizer in optimizers:
            optimizer.sync()
        return [values(model) for model in models]

    assert equal(threads(2, fn, True), threads(2, fn, False))
