"""Rounds applied late: what runs where, and what happens when something goes wrong. (Numbers: against_reference.)"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import edit
from problems import loss_of, net
from ranks import mesh, processes, threads
from test_state import sharded

SRC = Path(edit.__file__).parents[1]
SGD = partial(torch.optim.SGD, lr=0.05)


def build(delay: int, interval: int = 4, **settings: Any) -> tuple[nn.Module, edit.LocalSGDOptimizer]:
    model = settings.pop("model", None) or net()
    settings = {"schedule": edit.EverySteps(interval), "delay": delay} | settings
    return model, edit.LocalSGDOptimizer(model, SGD, **settings)


def train(model: nn.Module, optimizer: edit.LocalSGDOptimizer, steps: range, replica: int) -> None:
    for t in steps:
        loss_of(model, t, replica).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def runs_ahead(rank: int, folder: str) -> tuple[int, list[float]]:
    waited: list[float] = []
    model, optimizer = build(3)
    optimizer.register_round_hook(lambda report: waited.append(report.seconds_waited))
    here, there = Path(folder, str(rank)), Path(folder, str(1 - rank))
    if rank == 0:
        train(model, optimizer, range(6), rank)  # launched after 4
        assert optimizer.rounds == 0
        here.touch()
        train(model, optimizer, range(6, 7), rank)
    else:
        train(model, optimizer, range(3), rank)
        while not there.exists():  # only then the launch
            time.sleep(0.01)
        train(model, optimizer, range(3, 7), rank)
    assert optimizer.rounds == 1
    return optimizer.total_steps, waited


def test_a_replica_trains_on_while_another_has_not_launched(tmp_path: Path) -> None:
    (total, waited), (_, late) = processes(2, runs_ahead, str(tmp_path))
    assert total == 8
    assert len(waited) == len(late) == 1


def issues_nothing_later(rank: int) -> list[int]:
    grid = mesh(2, 2)
    model, optimizer = build(3, model=sharded(net(), grid), mesh=grid)
    calls: list[int] = []
    replicas = optimizer.replicas

    def counted(name: str) -> None:
        method = getattr(replicas, name)

        def call(*args: Any) -> Any:
            calls.append(optimizer.local_steps)
            return method(*args)

        setattr(replicas, name, call)

    for name in ("start_exchange", "start_from_leader", "start_sum", "start_sum_inside"):
        counted(name)
    for t in range(7):
        loss_of(model, t, rank // 2, rank % 2).backward()
        if t == 4:
            optimizer._round._carried.result(20)  # all traffic is over, two steps before it is applied
            calls.append(-1)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.rounds == 1
    return calls


def test_all_traffic_is_issued_at_the_launch() -> None:
    layers = 3
    for calls in processes(4, issues_nothing_later):
        # Norms, verdicts, (no) buffers, and a sum over replicas and one inside for each layer; nothing after it.
        assert len(calls) == 3 + 2 * layers + 1
        assert calls[-1] == -1
        assert set(calls[:-1]) <= {4}  # the launch is made when 4 steps are


def test_consensus_in_flight_is_the_old_anchor() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(2)
        start = values(model)
        train(model, optimizer, range(5), rank)  # launched after 4, to be applied after 6
        live = values(model)
        with optimizer.consensus():
            assert all(map(torch.equal, values(model), start))
        assert all(map(torch.equal, values(model), live))
        train(model, optimizer, range(5, 6), rank)
        with optimizer.consensus():
            assert not any(map(torch.equal, values(model), start))

    threads(2, fn)


def test_bf16_what_was_not_moved_has_a_norm_of_exactly_0() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(4, model=net().to(torch.bfloat16))
        reports: list[edit.RoundReport] = []
        optimizer.register_round_hook(reports.append)
        train(model, optimizer, range(4), rank)
        for _ in range(8):
            optimizer.step()  # without gradients nothing moves
        optimizer.sync()
        first, *others = (report.norms for report in reports)
        assert (first > 0).all()
        assert all((norms == 0).all() for norms in others)
        assert len(others) == 3

    threads(2, fn)


@pytest.mark.parametrize("moved", ["away", "to"])
def test_a_pending_round_survives_another_delay(moved: str) -> None:
    """Without a delay here or there the round is launched from the parameters as they are, with all steps so far."""

    def fn(rank: int) -> None:
        first, second = (2, 0) if moved == "away" else (0, 2)
        model, optimizer = build(first)
        train(model, optimizer, range(5 if first else 4), rank)
        state, live = optimizer.state_dict(), values(model)
        model, optimizer = build(second)
        with torch.no_grad():
            for p, value in zip(model.parameters(), live, strict=True):
                p.copy_(value)
        reports: list[edit.RoundReport] = []
        optimizer.register_round_hook(reports.append)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(5, 7), rank)
        assert [report.steps.tolist() for report in reports] == [[5, 5] if first else [4, 4]]
        # From the same parameters: one layer's norm by hand.
        start = dict(net().named_parameters())
        names = [name for name, _ in model.named_parameters() if name.startswith("blocks.0.")]
        now = dict(zip((name for name, _ in model.named_parameters()), live, strict=True))
        norm = sum((start[name] - now[name]).square().sum() for name in names).sqrt()
        torch.testing.assert_close(reports[0].norms[rank, 1], norm.detach())

    threads(2, fn)


def dies(rank: int) -> str:
    model, optimizer = build(2, timeout=timedelta(seconds=5))
    train(model, optimizer, range(3), rank)
    if rank == 1:
        os._exit(3)
    with pytest.raises(edit.SyncError) as caught:
        train(model, optimizer, range(3, 6), rank)
    assert optimizer.rounds == 0
    with pytest.raises(RuntimeError, match="can no longer be used"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="can no longer be used"):
        optimizer.sync()
    optimizer.close()
    return str(caught.value)


def test_a_dead_replica_is_an_error_when_the_round_is_applied() -> None:
    said, _ = processes(2, dies, expect_killed=[1])
    assert "round 1: exchange of norms failed on rank 0" in said


PROGRAM = """
import sys, torch, torch.distributed as dist, edit
from datetime import timedelta
rank, how = int(sys.argv[1]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = torch.nn.Linear(3, 1)
optimizer = edit.LocalSGDOptimizer(model, torch.optim.SGD, lr=0.1, schedule=edit.EverySteps(2), delay=2,
                                   timeout=timedelta(minutes=5))
for step in range(2 if rank == 0 else 1):  # replica 1 never launches
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
if how == "close":
    optimizer.close()
print("end", flush=True)
"""


@pytest.mark.parametrize("how", ["end", "close"])
def test_a_program_ends_though_a_round_is_under_way(tmp_path: Path, how: str) -> None:
    env = os.environ | {"PYTHONPATH": str(SRC), "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), how] for rank in range(2)]
    programs = [
        subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for c in commands
    ]
    try:
        for program in programs:
            out, err = program.communicate(timeout=110)
            assert out == b"end\n"
            assert program.returncode == 0, err
    finally:
        for program in programs:
            program.kill()


def test_groups_are_free_for_the_user_between_launch_and_application() -> None:
    """The user's own collectives on the default group do not meet the round's."""
    for total in processes(2, talks_meanwhile):
        assert total == 12.0


def talks_meanwhile(rank: int) -> float:
    model, optimizer = build(3)
    total = torch.zeros(())
    for t in range(12):
        train(model, optimizer, range(t, t + 1), rank)
        one = torch.tensor(0.5)
        dist.all_reduce(one)
        total += one
    optimizer.sync()
    optimizer.close()
    return total.item()


def asks_too_early(rank: int) -> None:
    model, optimizer = build(3, timeout=timedelta(seconds=20))
    train(model, optimizer, range(4), rank)  # a round is under way
    with pytest.raises(
        RuntimeError, match=r"refresh\(\) must be called at a round boundary.*which is under way"
    ):
        optimizer.refresh()
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) must be called at a round boundary"):
        optimizer.add_param_group({"params": []})
    train(model, optimizer, range(4, 8), rank)  # and goes on
    assert optimizer.rounds == 1
    optimizer.sync()
    optimizer.refresh()


def test_refresh_with_a_round_under_way_is_an_error_and_no_harm() -> None:
    processes(2, asks_too_early)
