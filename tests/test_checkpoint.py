"""Checkpoint files: exact and elastic resume, safe saving, what bad files get, export."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import edit
import killed_rank
from problems import IN, OUT, Net, loss_of, net, seeded
from ranks import Exited, processes
from test_state import INTERVAL, METHODS, STEPS, WARMUP, Run, equal, snapshot, values

# EDIT_THOROUGH=1 runs every combination, and 100 kills: 22 minutes instead of 3.
THOROUGH = "EDIT_THOROUGH" in os.environ
SLOW = "for EDIT_THOROUGH=1"
pytestmark = pytest.mark.timeout(3600 if THOROUGH else 120)
SHAPES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]  # replicas, ranks of each
if not THOROUGH:
    SHAPES = [(1, 1), (1, 3), (2, 2), (4, 1)]


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def state_of(run: Run) -> Any:
    """Everything that lasts: model with buffers, optimizer with anchor, detector, counters."""
    return snapshot({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})


def consensus_of(run: Run) -> dict[str, Tensor]:
    with run.optimizer.consensus():
        return {name: full(value) for name, value in run.model.state_dict().items()}


# ------------------------------------------------------------------------------------------- exact resume


def whole_run(rank: int, folder: Path, method: str, shards: int, at: list[int], make: Any) -> Any:
    """Train, saving after each step of ``at``; the states after each step, and at the end."""
    run = Run(rank, method, shards, replicas=4 // shards, model=make)
    states = []
    for step in range(STEPS):
        run.train([step])
        if step + 1 in at:
            edit.save(folder / f"{step + 1}", run.model, run.optimizer, {"step": step + 1, "rank": rank})
        states.append(state_of(run))
    run.optimizer.sync()
    return states, state_of(run)


def resumed_runs(rank: int, folder: Path, method: str, shards: int, at: list[int], make: Any) -> Any:
    """A new process resumes from each of the checkpoints in turn."""
    found = {}
    for step in at:
        run = Run(rank, method, shards, replicas=4 // shards, seed=7, model=make)
        run.clock.now = 1000.0  # another machine's clock
        extra = edit.load(folder / f"{step}", run.model, run.optimizer)
        assert extra == {"step": step, "rank": rank}
        states = [state_of(run)]
        for later in range(step, STEPS):
            run.train([later])
            states.append(state_of(run))
        run.optimizer.sync()
        found[step] = states, state_of(run)
        run.optimizer.close()
    return found


class Normalised(Net):
    """Each rank's statistics are those of its own data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def with_buffers(seed: int) -> nn.Module:
    return seeded(Normalised(), seed)


def each(rank: int, part: Callable[..., Any], folder: Path, methods: list[str], *rest: Any) -> Any:
    """``part`` of each method, in one process: starting it takes longer than a run."""
    return [part(rank, folder / method, method, *rest) for method in methods]


# In the warm-up, at its end, in mid-round, with a round pending and its exchange in flight.
AT = [1, WARMUP, 3, WARMUP + INTERVAL, 6, WARMUP + 2 * INTERVAL] if THOROUGH else [3, WARMUP + INTERVAL]


@pytest.mark.parametrize(
    ("shards", "make", "methods"),
    [
        (1, net, list(METHODS) if THOROUGH else ["edit-tight", "a_edit"]),
        (2, net, list(METHODS) if THOROUGH else ["edit-tight", "a_edit", "outer-adam", "co2_star"]),
        (1, with_buffers, list(METHODS) if THOROUGH else ["edit"]),
        (2, with_buffers, list(METHODS) if THOROUGH else ["edit"]),  # its ranks have each their own
    ],
    ids=["4x1", "2x2", "buffers-4x1", "buffers-2x2"],
)
def test_resume_is_exact(tmp_path: Path, shards: int, make: Any, methods: list[str]) -> None:
    """Bitwise the run that never stopped, after every step, with each method."""
    rest = tmp_path, methods, shards, AT, make
    whole = processes(4, each, whole_run, *rest, timeout=1500 if THOROUGH else 100)
    again = processes(4, each, resumed_runs, *rest, timeout=1500 if THOROUGH else 100)
    for of_rank, found_by_rank in zip(whole, again, strict=True):
        for (states, end), found in zip(of_rank, found_by_rank, strict=True):
            assert list(found) == AT
            for step, (later, last) in found.items():
                assert len(later) == STEPS - step + 1
                assert equal(states[step - 1 :], later)
                assert equal(end, last)


def drawn(rank: int, folder: Path, resume: bool) -> Any:
    """A run whose noise comes from the global random states."""
    import numpy

    random.seed(5 + rank + resume), torch.manual_seed(5 + rank + resume), numpy.random.seed(5 + rank + resume)
    run = Run(rank, "edit")
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    noise = []

    def step(number: int) -> None:
        x = torch.randn(4, IN, dtype=torch.float64) + random.random() + numpy.random.rand()
        noise.append(x.sum().item())
        run.model(x).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        scheduler.step()

    if resume:
        scheduler.load_state_dict(edit.load(folder / "4", run.model, run.optimizer))
    for number in range(4 if resume else 0, STEPS):
        step(number)
        if number == 3:
            edit.save(folder / "4", run.model, run.optimizer, scheduler.state_dict())
    return noise[-5:], values(run.model), scheduler.get_last_lr()


def test_random_states_and_schedulers_resume(tmp_path: Path) -> None:
    assert equal(processes(2, drawn, tmp_path, False), processes(2, drawn, tmp_path, True))


def not_touched(rank: int, folder: Path, save: bool, background: bool) -> Any:
    run = Run(rank, "edit-tight")
    torch.manual_seed(rank)
    states = []
    for step in range(STEPS):
        run.train([step])
        if save:
            edit.save(folder / f"{step}", run.model, run.optimizer, background=background)
        states.append((state_of(run), torch.get_rng_state()))
    run.optimizer.sync()
    run.optimizer.close()
    return states, values(run.model)


@pytest.mark.parametrize("background", [False, True])
def test_saving_changes_nothing(tmp_path: Path, background: bool) -> None:
    assert equal(
        processes(2, not_touched, tmp_path, False, background),
        processes(2, not_touched, tmp_path, True, background),
    )
    assert edit.latest(tmp_path) == tmp_path / f"{STEPS - 1}"


# ----------------------------------------------------------------------------------------- elastic resume


def begun(rank: int, folder: Path, shape: tuple[int, int], method: str, steps: int) -> Any:
    run = Run(rank, method, shape[1], replicas=shape[0])
    run.train(range(steps))
    before = consensus_of(run)
    edit.save(folder / "{}x{}".format(*shape), run.model, run.optimizer, rank)
    outer = {
        name: full(value)
        for name, entries in zip(before, run.optimizer.state_dict()["state"].values(), strict=False)
        for key, value in entries.items()
        if key == "edit_outer.momentum_buffer"
    }
    with run.optimizer.consensus():
        loss = loss_of(run.model, 0, 0).item()
    return before, outer, loss, run.optimizer.total_steps, run.optimizer.rounds


def went_on(
    rank: int, folder: Path, shape: tuple[int, int], method: str, others: list[tuple[int, int]]
) -> Any:
    found = []
    for other in others:
        run = Run(rank, method, shape[1], replicas=shape[0], seed=3)
        extra = edit.load(folder / "{}x{}".format(*other), run.model, run.optimizer)
        assert extra == run.replica % other[0] * other[1] + run.member % other[1]
        live = {name: full(value) for name, value in run.model.state_dict().items()}
        outer = {
            name: full(value)
            for name, entries in zip(live, run.optimizer.state_dict()["state"].values(), strict=False)
            for key, value in entries.items()
            if key == "edit_outer.momentum_buffer"
        }
        total, rounds, consensus = run.optimizer.total_steps, run.optimizer.rounds, consensus_of(run)
        loss = loss_of(run.model, 0, 0).item()
        run.train(range(9, 9 + 2 * INTERVAL))
        run.optimizer.sync()
        end = {name: full(value) for name, value in run.model.state_dict().items()}
        gained = run.optimizer.total_steps - total, run.optimizer.rounds - rounds
        found.append((live, consensus, outer, loss, total, rounds, gained, end))
        run.optimizer.close()
    return found


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        pytest.param("edit-tight", 10, id="local"),
        pytest.param("edit", WARMUP - 1, id="warmup", marks=pytest.mark.skipif(not THOROUGH, reason=SLOW)),
    ],
)
def test_elastic_from_every_mesh_to_every_mesh(tmp_path: Path, method: str, steps: int) -> None:
    """The anchor is bitwise the same, every replica starts from it, and training goes on."""
    saved = {shape: processes(shape[0] * shape[1], begun, tmp_path, shape, method, steps) for shape in SHAPES}
    for shape in SHAPES:
        ranks = processes(shape[0] * shape[1], went_on, tmp_path, shape, method, SHAPES)
        for number, other in enumerate(SHAPES):
            before, outer, loss, total, rounds = saved[other][0]
            for rank in ranks:
                live, consensus, momentum, at_start, total_then, rounds_then, gained, end = rank[number]
                assert equal(consensus, before)
                assert (
                    equal(live, before) or other == shape
                )  # which resumes exactly, from its live parameters
                assert equal(momentum, outer)
                assert (total_then, rounds_then) == (total, rounds)
                if other != shape:
                    assert at_start == pytest.approx(loss, rel=1e-12)
                assert equal(end, ranks[0][number][-1])
                assert all(value.isfinite().all() for value in end.values())
                assert gained[1] >= 1
                assert gained[0] >= 1


# ------------------------------------------------------------------- from plain training, and back to it


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(IN, 7), nn.Linear(7, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(x)))


def trained(model: nn.Module, optimizer: Any, steps: Any, rank: int) -> None:
    for step in steps:
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_then_edit(rank: int, folder: Path) -> Any:
    """DDP training, saved with DCP alone; from there the local phase; and back to DDP."""
    model = seeded(Plain(), 0)
    ddp = nn.parallel.DistributedDataParallel(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.05)
    trained(ddp, adamw, range(3), rank)
    dcp.save(
        dict(zip(("model", "optim"), get_state_dict(model, adamw), strict=True)), checkpoint_id=folder / "ddp"
    )

    local = seeded(Plain(), 1)
    optimizer = edit.LocalSGDOptimizer(
        local, lr=0.05, schedule=edit.EverySteps(2), penalty=None, outer=edit.Average()
    )
    parts = dict(zip(("model", "optim"), get_state_dict(local, optimizer.inner), strict=True))
    dcp.load(parts, checkpoint_id=folder / "ddp")
    set_state_dict(local, optimizer.inner, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
    assert equal(values(local), values(model))
    assert all(equal(optimizer.state[p], adamw.state[q]) for p, q in
               zip(local.parameters(), model.parameters(), strict=True))  # fmt: skip
    trained(local, optimizer, range(3, 5), rank)
    alone = values(local)  # of this replica, before the round
    optimizer.sync()
    met = values(local)
    parts = dict(zip(("model", "optim"), get_state_dict(local, optimizer.inner), strict=True))
    dcp.save(parts, checkpoint_id=folder / "edit")

    back = seeded(Plain(), 2)
    adamw = torch.optim.AdamW(back.parameters(), lr=0.05)
    parts = dict(zip(("model", "optim"), get_state_dict(back, adamw), strict=True))
    dcp.load(parts, checkpoint_id=folder / "edit")
    set_state_dict(back, adamw, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
    assert equal(values(back), met)
    assert {int(entry["step"]) for entry in adamw.state.values()} == {5}
    with pytest.raises(ValueError, match=r"must be a checkpoint of edit.save.*optimizer.inner"):
        edit.load(folder / "ddp", local, optimizer)
    return alone, met


def test_from_plain_training_and_back(tmp_path: Path) -> None:
    (a, met), (b, met_too) = processes(2, ddp_then_edit, tmp_path)
    assert equal(met, met_too)
    assert not equal(a, b)
    for one, other, mean in zip(a, b, met, strict=True):
        torch.testing.assert_close(mean, (one + other) / 2, rtol=1e-12, atol=1e-12)


def frozen_then_not(rank: int, folder: Path) -> None:
    """What was frozen when it was saved trains now, and the other way round."""
    run = Run(rank, "diloco", model=half_frozen)
    run.train(range(INTERVAL + 1))
    run.optimizer.sync()
    edit.save(folder / "1", run.model, run.optimizer)
    again = Run(rank, "diloco", seed=1, model=other_half_frozen)
    edit.load(folder / "1", again.model, again.optimizer)
    assert equal(values(again.model), values(run.model))
    assert equal(consensus_of(again), consensus_of(run))
    again.train(range(2 * INTERVAL))
    again.optimizer.sync()


def half_frozen(seed: int) -> nn.Module:
    model = net(seed)
    model.up.requires_grad_(False)
    return model


def other_half_frozen(seed: int) -> nn.Module:
    model = net(seed)
    model.head.requires_grad_(False)
    return model


def test_frozen_and_unfrozen_between_save_and_load(tmp_path: Path) -> None:
    processes(2, frozen_then_not, tmp_path)


# -------------------------------------------------------------------------------------------- safe saving


def marked(run: Run, number: int) -> None:
    """Everything that is saved becomes ``number``."""
    with torch.no_grad():
        for tensor in [*run.model.parameters(), *run.optimizer._anchor.flats]:
            tensor.fill_(number)
        for entry in run.optimizer.inner.state.values():
            for value in entry.values():
                value.fill_(number)
        for value in run.optimizer._memory.values():
            value.fill_(number)


def saves_until_killed(rank: int, folder: Path, first: int, delay: float, background: bool) -> None:
    run = Run(rank, "edit-tight")
    run.train(range(WARMUP + 1))
    run.optimizer.sync()
    for number in range(first, first + 10_000):
        if number == first + 1:  # one is complete, however slow this machine is
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        marked(run, number)
        edit.save(folder / f"{number}", run.model, run.optimizer, number, keep=3, background=background)


def loads_the_last(rank: int, folder: Path) -> int:
    run = Run(rank, "edit-tight", seed=5)
    path = edit.latest(folder)
    assert path is not None
    number = edit.load(path, run.model, run.optimizer)
    assert path.name == str(number)
    state = run.optimizer.state_dict()["state"]
    for value in [
        *values(run.model),
        *(entry[key] for entry in state.values() for key in ("edit_anchor", "exp_avg")),
    ]:
        assert (value == number).all()
    assert (state[0]["edit_penalty.mean"] == number).all()
    return number


KILLS = 100 if THOROUGH else 4


def test_killed_while_saving(tmp_path: Path) -> None:
    """The last complete checkpoint loads, never a mixture."""
    chance = random.Random(0)
    number = 0
    unfinished = 0
    for kill in range(KILLS):
        delay = 0.25 + chance.random()
        saving = (tmp_path, number + 1, delay, kill % 2 == 1)
        killed = processes(2, saves_until_killed, *saving, expect_killed=(0, 1))
        assert {type(end) for end in killed} == {Exited}
        complete = sorted(
            int(p.name) for p in tmp_path.iterdir() if (p / ".metadata").is_file() and p.suffix == ""
        )
        unfinished += any(p.suffix == ".partial" for p in tmp_path.iterdir())
        found = set(processes(2, loads_the_last, tmp_path))
        assert found == {complete[-1]}
        assert complete[-1] >= number
        number = complete[-1]
    assert unfinished  # some hit a save
    assert number > KILLS


def test_pruning_and_latest(tmp_path: Path) -> None:
    """The newest is the last saved, whatever clocks say; what is not ours, or not complete, does not count."""
    model = net()
    optimizer = edit.LocalSGDOptimizer(model, lr=0.1)
    assert edit.latest(tmp_path) is None
    assert edit.latest(tmp_path / "missing") is None
    for name in ("c", "b", "a"):
        edit.save(tmp_path / name, model, optimizer)
        assert edit.latest(tmp_path) == tmp_path / name
    ahead = 2_000_000_000
    for path in [tmp_path / "c", *(tmp_path / "c").iterdir()]:
        os.utime(path, (ahead, ahead))
    (tmp_path / "best").symlink_to("b")
    dcp.save({"weight": model.up.weight}, checkpoint_id=tmp_path / "pretrained", no_dist=True)
    shutil.copytree(
        tmp_path / "a", tmp_path / "e.partial"
    )  # killed while it was saved, or while it was pruned
    assert edit.latest(tmp_path) == tmp_path / "a"
    edit.save(tmp_path / "d", model, optimizer, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "best", "d", "pretrained"]
    assert edit.latest(tmp_path) == tmp_path / "d"
    edit.save(tmp_path / "e", model, optimizer, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir() if p.exists()) == ["e", "pretrained"]


def fails_in_the_background(rank: int, folder: Path) -> None:
    run = Run(rank, "edit")
    first = edit.save(folder / "1", run.model, run.optimizer, background=True)
    assert first.result() == folder / "1"
    allowed = limit(2000 if rank == 1 else None)
    broken = edit.save(folder / "2", run.model, run.optimizer, background=True)
    assert isinstance(broken.exception(), OSError)
    limit(allowed)
    with pytest.raises((OSError, RuntimeError), match="2 could not be written: rank 1"):
        edit.save(folder / "3", run.model, run.optimizer)
    edit.save(folder / "3", run.model, run.optimizer)
    assert edit.latest(folder) == folder / "3"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "3"]


def test_a_failed_save_in_the_background_is_told_by_the_next(tmp_path: Path) -> None:
    processes(2, fails_in_the_background, tmp_path)


def publishes_nothing(rank: int, folder: Path) -> None:
    """What fails on the first rank alone, after all have written, is told on all ranks, at the same place."""
    run = Run(rank, "edit")
    publish = edit.checkpoint._publish

    def fails(*_: Any) -> None:
        raise PermissionError("no")

    edit.checkpoint._publish = fails
    failed = edit.save(folder / "1", run.model, run.optimizer, background=True)
    assert isinstance(failed.exception(), PermissionError if rank == 0 else RuntimeError)
    edit.checkpoint._publish = publish
    with pytest.raises((PermissionError, RuntimeError), match="no"):
        edit.save(folder / "2", run.model, run.optimizer)
    assert not list(folder.iterdir())
    edit.save(folder / "3", run.model, run.optimizer)
    edit.checkpoint._publish = fails
    edit.save(folder / "4", run.model, run.optimizer, background=True)
    with pytest.raises((PermissionError, RuntimeError), match="no"):
        run.optimizer.close()


def test_a_failure_of_the_first_rank_alone(tmp_path: Path) -> None:
    processes(2, publishes_nothing, tmp_path)


def on_its_own_disk(rank: int, folder: Path) -> None:
    run = Run(rank, "edit")
    (folder / f"{rank}").mkdir()
    os.chdir(folder / f"{rank}")
    with pytest.raises((OSError, RuntimeError), match="file system that all ranks see"):
        edit.save("1", run.model, run.optimizer)
    assert edit.latest(".") is None


def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    processes(2, on_its_own_disk, tmp_path)


def a_step_ahead(rank: int, folder: Path) -> Any:
    """The next round is due on replica 0 already, and its exchange is under way, when both save."""
    run = Run(rank, "a_edit")
    step = 0
    while run.optimizer.rounds < 1:
        run.train([step])
        step += 1
    run.clock.now += 100 * INTERVAL * (rank == 0)
    run.train([step])
    due = run.optimizer._due
    edit.save(folder / "1", run.model, run.optimizer)
    run.train([step + 1])
    run.optimizer.sync()
    return due, values(run.model)


def test_a_replica_may_be_a_step_ahead(tmp_path: Path) -> None:
    (ahead, a), (behind, b) = processes(2, a_step_ahead, tmp_path)
    assert (ahead, behind) == (True, False)
    assert equal(a, b)


def test_in_the_background_of_a_single_process(tmp_path: Path) -> None:
    model = net()
    optimizer = edit.LocalSGDOptimizer(model, lr=0.1)
    before = values(model)
    saved = edit.save(tmp_path / "1", model, optimizer, "more", background=True)
    with torch.no_grad():
        for param in model.parameters():  # training goes on
            param.zero_()
    assert saved.result() == tmp_path / "1"
    assert edit.load(tmp_path / "1", model, optimizer) == "more"
    assert equal(values(model), before)


# --------------------------------------------------------------------------- what stands beside parameters


class Odd(nn.Module):
    """A teacher that does not train and is each replica's own; and a state that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(IN, OUT), nn.Linear(IN, OUT).requires_grad_(False)
        self.seen = torch.zeros(())

    def get_extra_state(self) -> Tensor:
        return self.seen

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def odd(seed: int) -> nn.Module:
    return seeded(Odd(), seed)


def own_teachers(rank: int, folder: Path) -> None:
    run = Run(rank, "edit", model=odd)
    weight = run.model.teacher.weight.detach()
    weight.copy_(torch.arange(weight.numel()).roll(rank).view_as(weight))  # the same numbers in another order
    own = weight.clone()
    run.model.seen = torch.tensor(7.0 + rank)
    run.train(range(3))
    edit.save(folder / "1", run.model, run.optimizer)
    again = Run(rank, "edit", seed=1, model=odd)
    edit.load(folder / "1", again.model, again.optimizer)
    assert equal(state_of(again), state_of(run))
    assert equal(again.model.teacher.weight.detach(), own)
    assert again.model.seen == 7.0 + rank


def test_frozen_parameters_and_extra_state_may_differ_between_replicas(tmp_path: Path) -> None:
    processes(2, own_teachers, tmp_path)


def test_groups_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    def built(order: list[int]) -> tuple[nn.Module, edit.LocalSGDOptimizer]:
        model = seeded(nn.Sequential(nn.Linear(2, 2)))
        groups = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model[0].bias], "lr": 0.5}]
        groups = [groups[index] for index in order]
        return model, edit.LocalSGDOptimizer(
            model, lambda _: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
        )

    model, optimizer = built([0, 1])
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    edit.save(tmp_path / "1", model, optimizer)
    again, other = built([1, 0])
    edit.load(tmp_path / "1", again, other)
    assert [(g["lr"], g["weight_decay"]) for g in other.param_groups] == [(0.5, 0.0), (0.1, 0.1)]
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert equal(other.state[theirs], optimizer.state[mine])


class Dotted(torch.optim.SGD):
    """Keeps the sum of its gradients, under a name with what separates names in a checkpoint."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total = self.state[p].setdefault("sum.of/all%2Ethat.came", torch.zeros_like(p.detach()))
                    total.add_(p.grad)
        return super().step(closure)


def test_states_with_dots_in_their_names(tmp_path: Path) -> None:
    def built(seed: int) -> tuple[nn.Module, edit.LocalSGDOptimizer]:
        model = net(seed)
        return model, edit.LocalSGDOptimizer(
            model, Dotted, partial(Dotted, lr=0.5), lr=0.1, schedule=edit.EverySteps(1)
        )

    model, optimizer = built(0)
    trained(model, optimizer, range(2), 0)
    optimizer.sync()
    edit.save(tmp_path / "1", model, optimizer)
    again, other = built(1)
    edit.load(tmp_path / "1", again, other)
    mine, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    for name in ("sum.of/all%2Ethat.came", "edit_outer.sum.of/all%2Ethat.came"):
        assert all(state[name].any() for state in mine.values())
        assert equal([s[name] for s in mine.values()], [s[name] for s in theirs.values()])


def test_names_are_those_without_wrappers(tmp_path: Path) -> None:
    """Saved with activation checkpointing, loaded without: also buffers, and the memory of layers."""
    model = with_buffers(0)
    model.norm = checkpoint_wrapper(model.norm)
    optimizer = edit.LocalSGDOptimizer(model, lr=0.1, schedule=edit.EverySteps(1))
    for step in range(3):
        loss_of(model, step, 0).backward()
        optimizer.step()
    edit.save(tmp_path / "1", model, optimizer)
    plain = with_buffers(1)
    other = edit.LocalSGDOptimizer(plain, lr=0.1, schedule=edit.EverySteps(1))
    edit.load(tmp_path / "1", plain, other)
    assert equal(other._buffers.agreed, optimizer._buffers.agreed)
    assert equal(plain.norm.state_dict(), model.norm._checkpoint_wrapped_module.state_dict())
    assert equal(other._memory, optimizer._memory)
    assert optimizer._memory["count"].any()


def counts_steps(rank: int, folder: Path, save: bool) -> Any:
    run = Run(rank, "edit", replicas=4 if save else 2)
    if save:
        run.train(range(WARMUP - 1))
        edit.save(folder / "1", run.model, run.optimizer)
        return run.optimizer.total_steps
    edit.load(folder / "1", run.model, run.optimizer)
    run.train(range(1))
    return run.optimizer.total_steps


def test_total_steps_go_on_in_the_warm_up_with_other_replicas(tmp_path: Path) -> None:
    assert processes(4, counts_steps, tmp_path, True) == [4 * (WARMUP - 1)] * 4
    assert processes(2, counts_steps, tmp_path, False) == [4 * (WARMUP - 1) + 2] * 2


# ---------------------------------------------------------------------------------------------- bad files


def spoilt(rank: int, folder: Path) -> None:
    """The error on every rank; model and optimizer as they were, and still of use."""
    run = Run(rank, "edit-tight", 2, seed=3)
    run.train(range(4))
    run.optimizer.sync()
    before = state_of(run)
    for kind, (_, error) in BAD.items():
        with pytest.raises((ValueError, OSError, RuntimeError), match=error):
            edit.load(folder / kind, run.model, run.optimizer)
        assert equal(state_of(run), before), kind
    run.train(range(4, 4 + INTERVAL))
    run.optimizer.sync()
    assert run.optimizer.rounds == 3


def written(rank: int, folder: Path) -> None:
    run = Run(rank, "edit-tight", 2)
    run.train(range(4))
    edit.save(folder, run.model, run.optimizer)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (shutil.rmtree, "complete checkpoint.*edit.latest"),
    "no metadata": (lambda path: (path / ".metadata").unlink(), "complete checkpoint.*FileNotFound"),
    "half of the metadata": (lambda path: truncate(path / ".metadata"), "complete checkpoint"),
    "half of a file": (
        lambda path: truncate(path / "__1_0.distcp"),
        "could not be read, and nothing was changed",
    ),
    "a file is missing": (
        lambda path: (path / "__2_0.distcp").unlink(),
        "could not be read, and nothing was changed",
    ),
    "an empty file": (lambda path: (path / "__3_0.distcp").write_bytes(b""), "could not be read"),
    "garbage": (lambda path: (path / "__0_0.distcp").write_bytes(os.urandom(200_000)), "could not be read"),
    "not a checkpoint": (
        lambda path: (path / ".metadata").write_bytes(pickle.dumps({})),
        "complete checkpoint",
    ),
}


def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    processes(4, written, tmp_path / "good")
    for kind, (spoil, _) in BAD.items():
        shutil.copytree(tmp_path / "good", tmp_path / kind)
        spoil(tmp_path / kind)
    processes(4, spoilt, tmp_path)


def another_model(rank: int, folder: Path) -> None:
    for make, error in ((wider, r"shape \(7, 5\), and \(9, 5\) in the model"), (deeper, "has no blocks.2")):
        run = Run(rank, "edit", model=make)
        run.train(range(2))
        before = state_of(run)
        with pytest.raises((ValueError, RuntimeError), match=error):
            edit.load(folder, run.model, run.optimizer)
        assert equal(state_of(run), before)
        run.optimizer.close()


def wider(seed: int) -> nn.Module:
    return net(seed, width=9)


def deeper(seed: int) -> nn.Module:
    return net(seed, depth=3)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    processes(4, written, tmp_path / "1")
    processes(2, another_model, tmp_path / "1")


def misused(rank: int, folder: Path) -> None:
    run = Run(rank, "edit")
    save = partial(edit.save, folder / "1", run.model, run.optimizer)
    raises = partial(pytest.raises, (ValueError, RuntimeError))
    with raises(match="keep must be an int >= 1 or None, but is 0"):
        save(keep=0)
    with raises(match="model must be the one that LocalSGDOptimizer was given"):
        edit.save(folder / "1", net(), run.optimizer)
    with raises(match="path must be the same on all ranks"):
        edit.save(folder / f"{rank}", run.model, run.optimizer)
    assert not list(folder.iterdir())
    save()
    with raises(match="path must not exist yet"):
        save()
    if rank == 1:  # one rank alone cannot
        run.optimizer._failure = RuntimeError("of a test")
    with raises(match=r"can no longer be used: of a test"):
        edit.save(folder / "2", run.model, run.optimizer)
    assert sorted(path.name for path in folder.iterdir() if path.suffix == "") == ["1"]
    run.optimizer._failure = None
    run.train(range(WARMUP + INTERVAL))
    with raises(match="while a round is under way.*nothing was loaded"):
        edit.load(folder / "1", run.model, run.optimizer)
    run.optimizer.sync()


def test_wrong_use_of_files(tmp_path: Path) -> None:
    processes(2, misused, tmp_path)


def limit(size: int | None) -> int | None:
    """Files of this process may have ``size`` bytes. Returns the last limit."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if size is None else size, hard))
    return None if soft == resource.RLIM_INFINITY else soft


def limited(rank: int, folder: Path) -> None:
    run = Run(rank, "edit")
    run.train(range(WARMUP + 1))
    before = state_of(run)
    allowed = limit(2000 if rank == 1 else None)
    with pytest.raises(
        (OSError, RuntimeError), match=r"could not be written: rank 1: .*(File too large|unexpected)"
    ):
        edit.save(folder / "1", run.model, run.optimizer)
    assert not list(folder.iterdir())
    limit(allowed)
    assert equal(state_of(run), before)
    edit.save(folder / "1", run.model, run.optimizer)


def test_a_full_disk(tmp_path: Path) -> None:
    """Of one rank: the same error on all, nothing left behind, and the next save succeeds."""
    processes(2, limited, tmp_path)


# ------------------------------------------------------------------------------------------------- export


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = (
            nn.Embedding(8, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 8, bias=False),
        )
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(self.embedding(x))))


def exported(rank: int, folder: Path, shards: int) -> Any:
    if shards == 1:
        model = seeded(Tied(), 0)
        optimizer = edit.LocalSGDOptimizer(model, lr=0.05, schedule=edit.EverySteps(2))
        for step in range(3):
            tokens = (torch.arange(12).view(2, 6) + rank + step) % 8
            F.cross_entropy(model(tokens).transpose(1, 2), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        run = Run(rank, "diloco", shards)
        run.train(range(INTERVAL + 1))
        model, optimizer = run.model, run.optimizer
    with optimizer.consensus():
        edit.export_safetensors(folder, model, max_shard_bytes=500)
        expected = {name: full(value) for name, value in model.state_dict().items()}
    optimizer.sync()
    dist.barrier()
    return expected


@pytest.mark.parametrize("shards", [1, 2])
def test_exported_weights_load_with_safetensors_alone(tmp_path: Path, shards: int) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    import json

    expected = processes(4 if shards > 1 else 2, exported, tmp_path, shards)[0]
    expected.pop("head.weight" if shards == 1 else "none", None)  # tied: written once
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = {path.name: safetensors.load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert len(files) > 1
    assert {name: file for file, tensors in files.items() for name in tensors} == index
    assert equal({name: files[index[name]][name] for name in expected}, expected)
    assert index.keys() == expected.keys()


# ------------------------------------------------------------------------------------------ a killed rank


@pytest.mark.parametrize("shards", [1, 2])
def test_a_killed_rank_is_a_named_error(shards: int, tmp_path: Path) -> None:
    """Whoever waits for the dead rank, or for one that waits for it, says in which round and layer, and for what."""
    ends = processes(4, killed_rank.train, tmp_path, "rank", shards, 3.0, expect_killed=[2])
    waits = "sum of pseudo gradients|norm of the clip"
    for rank in (0, 1, 3):
        error = rf"round 4, layer blocks\.1: ({waits}) failed on rank {rank} \(replica {rank // shards} of {4 // shards}\)"
        assert re.match(error, ends[rank]), ends[rank]


def torchrun(folder: Path, how: str, *flags: str, **env: str) -> subprocess.Popen[str]:
    # Without it torchrun hands the restarted ranks the store of the dead ones, and gloo connects to those.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | env
    command = [sys.executable, "-m", "torch.distributed.run", *flags, killed_rank.__file__, str(folder), how]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_killed_rank_under_torchrun(tmp_path: Path) -> None:
    """SIGKILL in the middle of a round; it resumes by itself and ends bitwise where the undisturbed run does."""
    job = torchrun(tmp_path, "rank", "--standalone", "--nproc-per-node", "4", "--max-restarts", "1")
    _, said = job.communicate(timeout=100)
    assert job.returncode == 0, said[-3000:]
    assert "exitcode: -9" in said
    killed = torch.load(tmp_path / "result.pt")
    assert (killed["restarts"], killed["first"], killed["replicas"]) == (1, 12, 2)
    assert equal(
        killed["model"], processes(4, killed_rank.train, tmp_path / "again", "undisturbed", 2)[0]["model"]
    )


@pytest.mark.skipif(not THOROUGH, reason=SLOW)
def test_a_killed_node_under_torchrun(tmp_path: Path) -> None:
    """Of two nodes of one replica each, the second dies; the first goes on alone, from the last checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--nproc-per-node", "2", "--nnodes", "1:2", "--max-restarts", "1", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "1", "--local-addr", "127.0.0.1"]  # fmt: skip
    conf = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    first = torchrun(tmp_path, "node", *flags, "--rdzv-conf", conf + "1")
    second = torchrun(tmp_path, "node", *flags, "--rdzv-conf", conf + "0", VICTIM="1")
    try:
        _, said = first.communicate(timeout=100)
    finally:
        first.kill()
        second.kill()
        second.communicate()
    assert (first.returncode, second.returncode) == (0, -signal.SIGKILL), said[-3000:]
    killed = torch.load(tmp_path / "result.pt")
    assert (killed["restarts"], killed["first"], killed["replicas"]) == (1, 12, 1)
    # The same from the same checkpoint, with one replica from the start.
    shutil.copytree(tmp_path / "step-12", tmp_path / "again" / "step-12")
    assert equal(
        killed["model"], processes(2, killed_rank.train, tmp_path / "again", "undisturbed", 2)[0]["model"]
    )
