"""Each method of the paper, by its preset, against its own slow reference: every step, fp64, to 1e-9."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import edit
import reference
from problems import layers_of, loss_of, net
from ranks import mesh, processes, threads
from test_state import Clock, sharded

TAU, WARMUP, STEPS = 4, 3, 17
INNER = partial(torch.optim.AdamW, lr=0.02)
METHODS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[..., reference.Reference]]] = {
    "post_local_sgd": (
        lambda: edit.methods.post_local_sgd(TAU, WARMUP),
        partial(reference.post_local_sgd, warmup_steps=WARMUP),
    ),
    "diloco": (lambda: edit.methods.diloco(TAU), reference.diloco),
    "co2": (lambda: edit.methods.co2(TAU), reference.co2),
    "co2_star": (lambda: edit.methods.co2_star(TAU), reference.co2_star),
    "edit": (lambda: edit.methods.edit(TAU, WARMUP), partial(reference.edit, warmup_steps=WARMUP)),
}


def full(model: nn.Module) -> list[Tensor]:
    tensors = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [tensor.detach().clone() for tensor in tensors]


def trained(rank: int, replicas: int, shards: int, method: str, steps: int) -> list[list[Tensor]]:
    grid = mesh(replicas, shards)
    model = net()
    if shards > 1:
        sharded(model, grid)
    optimizer = edit.LocalSGDOptimizer(model, INNER, mesh=grid, **METHODS[method][0]())
    history = []
    for t in range(steps):
        loss_of(model, t, rank // shards, rank % shards).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(full(model))
    optimizer.sync()
    return [*history, full(model)]


def losses(shards: int) -> Callable[[int, int], reference.Loss]:
    return lambda i, t: lambda model: sum(loss_of(model, t, i, m) for m in range(shards)) / shards


def check(got: list[list[Tensor]], states: list[reference.State]) -> None:
    assert len(got) == len(states)
    names = [name for name, _ in net().named_parameters()]
    for mine, theirs in zip(got, states, strict=True):
        torch.testing.assert_close(mine, [theirs[name] for name in names], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize(("run", "replicas", "shards"), [(threads, 3, 1), (processes, 2, 2)])
def test_against_its_reference(run: Callable[..., Any], replicas: int, shards: int, method: str) -> None:
    ref = METHODS[method][1](net(), replicas, layers_of(), inner=INNER, interval=TAU)
    ref.run([STEPS] * replicas, losses(shards))
    for rank, got in enumerate(run(replicas * shards, trained, replicas, shards, method, STEPS)):
        i = rank // shards
        states = ref.after_step[i] if ref.delay else ref.history[i]  # late: applied at the end of a step
        check(got, [*states, ref.after_round[-1][i]])


@pytest.mark.parametrize("delay", [0, 2])
def test_a_edit(delay: int) -> None:
    """Replica 1 takes twice as long for a step."""
    seconds, rounds = 6.0, [[6, 3]] * 3

    def fn(rank: int) -> list[list[Tensor]]:
        clock, model = Clock(), net()
        settings = edit.methods.a_edit(seconds, WARMUP)
        settings["schedule"] = edit.EverySeconds(seconds, WARMUP, clock)
        optimizer = edit.LocalSGDOptimizer(model, INNER, **settings, delay=delay)
        history = []
        for t in range(WARMUP + sum(row[rank] for row in rounds)):
            loss_of(model, t, rank).backward()
            clock.now += 1.0 + rank  # after the forward, which ends the round
            optimizer.step()
            optimizer.zero_grad()
            history.append(full(model))
        optimizer.sync()
        assert optimizer.rounds == len(rounds) + 1  # the last one, by sync(): nobody moved
        assert optimizer.total_steps == 2 * WARMUP + sum(map(sum, rounds))
        return [*history, full(model)]

    ref = reference.a_edit(net(), 2, layers_of(), inner=INNER, warmup_steps=WARMUP, delay=delay)
    ref.run_rounds(rounds, losses(1))
    ref.sync()
    for i, got in enumerate(threads(2, fn)):
        states = ref.after_step[i] if delay else ref.history[i]
        check(got, [*states, ref.after_round[-1][i]])


def distributed(rank: int) -> list[list[Tensor]]:
    model = net()
    parallel = DistributedDataParallel(model)
    optimizer = INNER(model.parameters())
    history = []
    for t in range(STEPS):
        loss_of(parallel, t, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(full(model))
    return history


def test_the_reference_of_the_baseline_is_torchs_own() -> None:
    ref = reference.baseline(net(), 2, layers_of(), inner=INNER)
    for t in range(STEPS):
        ref.step([losses(1)(i, t) for i in range(2)])
    for i, got in enumerate(processes(2, distributed)):
        check(got, ref.history[i])
