"""What shows only after a while, or in company: 2,000 rounds, two optimizers, copies, deletion, fork."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import edit
from problems import IN, OUT, batch, loss_of, net, seeded
from ranks import mesh, processes, threads
from test_checkpoint import full
from test_models import optimizer_of, same, shard

ROUNDS, EVERY = 2000, 100


# ------------------------------------------------------------------------------------------------- soak


class Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def resident() -> float:
    """MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(rank: int, settings: dict[str, Any]) -> tuple[list[float], list[float], list[float], list[int]]:
    """Resident memory, what of the C heap is in use (MiB), CPU seconds and live tensors after every 100 rounds."""
    # Of one heap glibc can tell how much is in use; new threads otherwise have others, which fill up one by one.
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Heap
    assert libc.mallopt(-8, 1)  # M_ARENA_MAX
    model = net(dtype=torch.float32)
    optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(1), **settings)
    rounds = itertools.count(1)  # a list of them would itself grow
    wrong: list[int] = []
    optimizer.register_round_hook(
        lambda report: wrong.append(report.round) if report.round != next(rounds) else None
    )
    x, y = batch(0, rank, dtype=torch.float32)
    memory, heap, times, tensors = [], [], [], []
    for step in range(ROUNDS + 1):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            optimizer.sync()  # no thread is under way
            gc.collect()
            memory.append(resident())
            heap.append((libc.mallinfo2().uordblks + libc.mallinfo2().hblkhd) / 2**20)
            times.append(time.process_time())
            tensors.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
    optimizer.sync()
    assert not wrong
    assert next(rounds) - 1 == optimizer.rounds >= ROUNDS
    optimizer.close()
    return memory, heap, times, tensors


def slope(values: list[float]) -> tuple[float, float]:
    """Of a line through ``values``, and the standard error of that."""
    n = len(values)
    x = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
    y = torch.tensor(values, dtype=torch.float64)
    b = (x @ y) / (x @ x)
    rest = y - y.mean() - b * x
    return b.item(), ((rest @ rest) / (n - 2) / (x @ x)).sqrt().item()


thorough = pytest.mark.skipif("EDIT_THOROUGH" not in os.environ, reason="with EDIT_THOROUGH=1")
KINDS = [
    pytest.param({}, id="at once"),
    pytest.param({"delay": 1}, id="late", marks=thorough),
    pytest.param({"offload": "replicas"}, id="spread", marks=thorough),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", KINDS)
def test_two_thousand_rounds(settings: dict[str, Any]) -> None:
    for memory, heap, times, tensors in processes(2, soak, settings, timeout=280):
        # The allocator settles in the first quarter. A tensor kept per round would be 2,000 x 0.6 kB and more.
        assert len(set(tensors[2:])) == 1, tensors
        kept, error = slope(memory[5:])
        assert kept < 0.02 or kept < 3 * error, (kept, error, memory)  # MiB in 100 rounds
        # 32 bytes a round: malloc's least piece, or a list that grows by a pointer.
        kept, error = slope(heap[5:])
        assert kept < 0.003 or kept < 3 * error, (kept, error, heap)
        took = [b - a for a, b in itertools.pairwise(times)]
        first, last = sorted(took[:9])[4], sorted(took[-9:])[4]
        assert last < 1.5 * first, took


# ------------------------------------------------------------------------------------------------ company


class Maps(nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(ins, 6), nn.Linear(6, outs)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x)))


def gan_losses(step: int, members: list[int], g: nn.Module, d: nn.Module, which: str) -> Tensor:
    """Of the replicas ``members`` together."""
    losses = []
    for replica in members:
        x, y = batch(step, replica)
        fake = g(x)
        if which == "d":
            losses.append(F.softplus(-d(y)).mean() + F.softplus(d(fake.detach())).mean())
        else:
            losses.append(F.softplus(-d(fake)).mean())
    return torch.stack(losses).mean()


def gan(rank: int, optimized: bool) -> list[Tensor]:
    """Generator and discriminator, a round after every step: what synchronous training of both does."""
    g, d = seeded(Maps(IN, OUT), 1), seeded(Maps(OUT, 1), 2)
    if optimized:
        settings = {"outer": edit.Average(), "penalty": None, "schedule": edit.EverySteps(1)}
        of_g = edit.LocalSGDOptimizer(g, torch.optim.SGD, lr=0.1, **settings)
        of_d = edit.LocalSGDOptimizer(d, torch.optim.SGD, lr=0.2, **settings)
    else:
        of_g, of_d = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.2)
    for step in range(9):
        for which, optimizer in (("d", of_d), ("g", of_g)):
            g.zero_grad()
            d.zero_grad()
            gan_losses(step, [rank] if optimized else [0, 1, 2], g, d, which).backward()
            optimizer.step()
    if optimized:
        of_d.sync()
        of_g.sync()
        of_d.close()
        of_g.close()
    return [p.detach() for p in [*g.parameters(), *d.parameters()]]


def test_two_models_and_two_optimizers_are_a_synchronous_gan() -> None:
    for got in threads(3, gan, True):
        same(got, gan(0, False), 1e-10)


def averaged(rank: int) -> Any:
    """``swa_utils`` beside it: an average of the weights as they were after each step."""
    model = net()
    optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(3))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    wanted: list[Tensor] = []
    for step in range(8):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        now = [p.detach().clone() for p in model.parameters()]
        wanted = [0.75 * a + 0.25 * b for a, b in zip(wanted, now, strict=True)] if step else now
        if rank == 0:
            average(batch(0, 0)[0]).sum().backward()  # would hang if it took part in a round
    optimizer.sync()
    optimizer.close()
    return [p.detach() for p in average.module.parameters()], wanted


def test_an_average_of_the_weights_beside_it() -> None:
    for got, wanted in threads(2, averaged):
        same(got, wanted, 1e-12)


# ------------------------------------------------------------------------------------------------ the end


def deleted(rank: int, close: bool) -> None:
    model = net()
    optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(2), delay=1)
    for step in range(4):
        loss_of(model, step, rank).backward()
        optimizer.step()
    optimizer.sync()
    if close:
        optimizer.close()
        assert not any(m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    gone = [weakref.ref(optimizer), weakref.ref(optimizer.replicas), weakref.ref(optimizer._anchor)]
    del optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    loss_of(model, 0, rank).backward()  # the model is anybody's


@pytest.mark.parametrize("close", [True, False])
def test_deletion_leaves_nothing(close: bool) -> None:
    threads(2, deleted, close)


def deleted_in_the_warm_up(rank: int, shards: int) -> None:
    grid = mesh(2, shards)
    model = net() if shards == 1 else shard(net(), grid)
    optimizer = optimizer_of(model, grid, schedule=edit.EverySteps(2, warmup_steps=9))
    loss_of(model, 0, rank // shards).backward()
    alone = net()
    for step in range(2):
        wanted = []
        for replica in range(2) if step == 0 else [rank // shards]:
            alone.zero_grad()
            loss_of(alone, step, replica).backward()
            wanted.append([p.grad.clone() for p in alone.parameters()])
        if step == 1:
            del optimizer
            gc.collect()
            model.zero_grad()
            loss_of(model, 1, rank // shards).backward()
        mean = [torch.stack(of).mean(0) for of in zip(*wanted, strict=True)]
        same([full(p.grad) for p in model.parameters()], mean, 1e-12)


@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_are_averaged_no_more_after_deletion_in_the_warm_up(shards: int) -> None:
    threads(2 * shards, deleted_in_the_warm_up, shards)


def ended(rank: int, close: bool) -> tuple[int, list[bool], list[str]]:
    """Groups more than before, what of it is left, and threads."""
    model = net()
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    optimizer = optimizer_of(model, None, schedule=edit.EverySteps(1), delay=1)
    for step in range(3):
        loss_of(model, step, rank).backward()
        optimizer.step()
    optimizer.sync()
    assert "edit.watch" in [thread.name for thread in threading.enumerate()]
    if close:
        optimizer.close()
    groups = len(torch.distributed.distributed_c10d._world.pg_map) - before
    parts = [optimizer, optimizer.replicas, optimizer.replicas.watch, optimizer._anchor]
    gone = [weakref.ref(part) for part in parts]
    del optimizer, parts
    gc.collect()
    left = [ref() is not None for ref in gone]
    return groups, left, [thread.name for thread in threading.enumerate() if "edit" in thread.name]


@pytest.mark.parametrize("close", [True, False])
def test_the_end_of_an_optimizer_ends_its_threads_and_close_destroys_its_groups(close: bool) -> None:
    for groups, left, names in processes(2, ended, close):
        assert (groups == 0) == close
        assert left == [False] * 4
        assert names == []


def forked(rank: int) -> list[int]:
    """A child forked in mid-run, a round being under way in a thread, as a data loader forks its workers."""
    model = net()
    optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(2), delay=1)
    codes = []
    for step in range(6):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (child := os.fork()) == 0:
            signal.alarm(10)  # a child that hangs is killed
            with torch.no_grad():
                model(batch(0, 0)[0])
            del optimizer
            gc.collect()
            os._exit(7)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    optimizer.sync()
    optimizer.close()
    return codes


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork() -> None:
    assert processes(2, forked) == [[7] * 6] * 2


def test_problems_of_this_file_learn() -> None:
    """The GAN moves: equal parameters would otherwise say nothing."""
    start = [p.detach() for m in (seeded(Maps(IN, OUT), 1), seeded(Maps(OUT, 1), 2)) for p in m.parameters()]
    moved = [(a - b).norm().item() for a, b in zip(gan(0, False), start, strict=True)]
    assert min(moved) > 1e-4
