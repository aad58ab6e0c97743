"""Rounds: exchange, clock, buffers, healing, failures; and meshes that are not a plain grid."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import edit
from problems import IN, OUT, Net, layers_of, loss_of, net, random_steps, seeded
from ranks import Exited, RankError, mesh, processes, threads
from test_models import full, optimizer_of, same, shard


class Wide(nn.Module):
    """Two linear maps that tensor parallelism splits, and a norm that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class WideNet(Net):
    def __init__(self) -> None:
        super().__init__(depth=0)
        self.up, self.head = nn.Linear(IN, 6), nn.Linear(6, OUT)
        self.blocks = nn.ModuleList([Wide(), Wide()])


def tensor_parallel(rank: int, shape: tuple[int, int, int]) -> Any:
    grid = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    model = seeded(WideNet())
    if shape[2] > 1:
        for block in model.blocks:
            parallelize_module(block, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=grid["shard"])
    fully_shard(model, mesh=grid["shard"])
    replica, member = rank // (shape[1] * shape[2]), rank // shape[2] % shape[1]
    optimizer = optimizer_of(model, grid)
    norms, clips, seen = [], [], []
    optimizer.register_round_hook(lambda report: (norms.append(report.norms), clips.append(report.clip)))
    for step in range(11):
        loss_of(model, step, replica, member).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([full(p) for p in model.parameters()])
    optimizer.sync()
    seen.append([full(p) for p in model.parameters()])
    return seen, norms, clips


def test_trap_15_tensor_parallelism() -> None:
    """Norms and clips over FSDP2 + TP are those of the same model unsplit."""
    one = processes(2, tensor_parallel, (2, 1, 1))
    two = processes(4, tensor_parallel, (2, 1, 2))
    assert (torch.stack(one[0][2]) < 1).any()  # the clip is at work
    same(two[0], one[0], 1e-9)
    same(two[3], one[1], 1e-9)


def stages(rank: int) -> Any:
    """Two replicas of two pipeline stages: the ranks of a replica hold different layers."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pp"))
    whole = net()
    stage = nn.Module()
    stage.blocks = nn.ModuleDict({str(rank % 2): whole.blocks[rank % 2]})
    optimizer = optimizer_of(stage, grid, schedule=edit.EverySteps(2))
    reports: list[edit.RoundReport] = []
    optimizer.register_round_hook(reports.append)
    random_steps(optimizer, 4, rank)
    return reports[-1].layers, reports[-1].norms, reports[-1].clip, [full(p) for p in stage.parameters()]


def test_trap_15_pipeline_stages_hold_different_layers() -> None:
    a, b, c, d = threads(4, stages)
    assert a[0] == b[0] == ["blocks.0", "blocks.1"]
    same(a[1], b[1], 0)
    assert (a[1] > 0).all()
    same(a[3], c[3], 0)
    same(b[3], d[3], 0)


# ------------------------------------------------------------------------------------------------ clock


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def by_the_clock(rank: int, shards: int, seconds_per_step: list[float]) -> Any:
    clock = Clock()
    grid = mesh(2, shards)
    model = net() if shards == 1 else shard(net(), grid)
    optimizer = optimizer_of(model, grid, schedule=edit.EverySeconds(1.0, warmup_steps=1, clock=clock))
    broadcasts: list[int] = []
    ask = optimizer.replicas.start_from_first_member
    optimizer.replicas.start_from_first_member = lambda v: (broadcasts.append(optimizer.rounds), ask(v))[1]
    steps: list[Tensor] = []
    optimizer.register_round_hook(lambda report: steps.append(report.steps))
    replica = rank // shards
    while len(steps) < 4:
        loss = loss_of(model, optimizer.local_steps, replica, rank % shards)
        clock.now += seconds_per_step[replica] * (1 + 0.1 * (rank % shards))  # members' clocks differ
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.sync()
    return steps, [full(p) for p in model.parameters()], broadcasts, optimizer.total_steps


def test_fault_3_the_clock_resolves_and_fast_replicas_make_more_steps() -> None:
    (steps, params, _, total), (_, others, _, _) = threads(2, by_the_clock, 1, [1 / 32, 1 / 8])
    assert [s.tolist() for s in steps[:4]] == [[32, 8]] * 4
    assert total == 2 + int(torch.stack(steps).sum())
    same(params, others, 0)


def test_a_replica_of_two_ranks_decides_at_one_step_with_few_broadcasts() -> None:
    got = processes(4, by_the_clock, 2, [1 / 64, 1 / 16])
    steps = got[0][0][0]
    for other in got:
        same(other[0], got[0][0], 0)
        same(other[1], got[0][1], 0)
    assert 64 <= steps[0] <= 66  # known one step after the question
    assert 16 <= steps[1] <= 18
    asked = got[0][2].count(1)
    assert asked <= 2 * 6 + 2  # doubling up to the middle, halving from there: 2 log2(64), and the ends
    assert got[1][2].count(1) == asked


# ---------------------------------------------------------------------------------------------- buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(IN, 4)
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, OUT)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.lin(x)))


def batchnorm(rank: int, poison: int | None) -> Any:
    model = seeded(Normed())
    optimizer = optimizer_of(model, mesh(3, 1), schedule=edit.EverySteps(2), penalty=None)
    for step in range(2):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.scratch.fill_(rank)
    if rank == poison:
        model.bn.running_mean[1] = float("nan")
    if rank == 2:
        model.bn.num_batches_tracked += 5
    before = {k: v.clone() for k, v in model.named_buffers()}
    with torch.enable_grad():
        optimizer._advance(0)
    return before, {k: v.clone() for k, v in model.named_buffers()}


@pytest.mark.parametrize("poison", [None, 1])
def test_peers_batchnorm_statistics_are_averaged_over_finite_replicas(poison: int | None) -> None:
    got = threads(3, batchnorm, poison)
    means = [before["bn.running_mean"] for before, _ in got]
    variances = [before["bn.running_var"] for before, _ in got]
    finite = [mean for rank, mean in enumerate(means) if rank != poison]
    for rank, (_, after) in enumerate(got):
        same(after["bn.running_mean"], torch.stack(finite).mean(0))
        same(after["bn.running_var"], torch.stack(variances).mean(0))  # finite on all: tensor by tensor
        assert after["bn.num_batches_tracked"] == 2  # replica 0's
        assert (after["scratch"] == rank).all()  # not persistent: the replica's own


# ---------------------------------------------------------------------------------------------- failures


def poisoned(rank: int, value: float) -> Any:
    model = net()
    optimizer = optimizer_of(model, mesh(3, 1), schedule=edit.EverySteps(2))
    reports: list[edit.RoundReport] = []
    optimizer.register_round_hook(reports.append)
    for step in range(7):
        loss_of(model, step, rank).backward()
        if rank == 1 and step == 3:
            model.blocks[0].lin.weight.grad[0, 0] = value
        optimizer.step()
        optimizer.zero_grad()
    healed = {n: bool(optimizer.state[p]) for n, p in model.named_parameters() if p in optimizer.state}
    optimizer.sync()
    return reports, [full(p) for p in model.parameters()], healed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fault_2_a_non_finite_replica_is_out_spreads_nothing_and_heals(value: float) -> None:
    got = threads(3, poisoned, value)
    for reports, params, _ in got:
        assert all(p.isfinite().all() for p in params)
        same(params, got[0][1], 0)
        assert reports[1].out.tolist() == [[False] * 3, [False, True, False], [False] * 3]
        assert not reports[2].out.any()  # the next round: it is in again
    assert len(got[1][2]) == len(list(net().parameters()))


def drifting(rank: int) -> None:
    model = net()
    optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(1))
    for step in range(2):
        loss_of(model, step, rank).backward()
        optimizer.step()
        if rank == 1 and step == 0:
            optimizer._finish_round(asked=True)
            optimizer._anchor.flats[1].data[3] += 0.01
    optimizer.sync()


def test_fault_7_replicas_that_drift_apart_are_a_named_error() -> None:
    with pytest.raises(RankError, match=r"anchor of replica \[1\] differs from replica 0's"):
        threads(2, drifting)


class Faulty(edit.PseudoGradientPenalty):
    def weights(self, *args: Any) -> Tensor:
        raise ZeroDivisionError("of the user's")


def faulty(rank: int) -> str:
    model = net()
    optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(1), penalty=Faulty())
    loss_of(model, 0, rank).backward()
    optimizer.step()
    before = [flat.data.clone() for flat in optimizer._anchor.flats]
    with pytest.raises((ZeroDivisionError, edit.SyncError)) as caught:
        loss_of(model, 1, rank)
    same(before, [flat.data for flat in optimizer._anchor.flats], 0)
    with pytest.raises(RuntimeError, match="can no longer be used"):
        optimizer.step()
    return type(caught.value).__name__


def test_an_error_in_a_users_policy_reaches_every_rank_and_leaves_the_anchor() -> None:
    assert processes(2, faulty) == ["ZeroDivisionError", "SyncError"]


def killed(rank: int) -> str:
    model = net()
    optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(2), timeout=timedelta(seconds=5))
    for step in range(2):
        loss_of(model, step, rank).backward()
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    with pytest.raises(edit.SyncError) as caught:
        loss_of(model, 2, rank)
    return str(caught.value)


def test_a_killed_replica_is_a_named_error_and_not_a_hang() -> None:
    message, gone = processes(2, killed, expect_killed={1})
    assert isinstance(gone, Exited)
    assert message.startswith("round 1: exchange of norms failed on rank 0 (replica 0 of 2)")


def test_the_default_cut() -> None:
    model = net()
    optimizer = edit.LocalSGDOptimizer(model, lr=0.1)
    assert [layer.names for layer in optimizer._layers] == layers_of()


def counts(rank: int, steps: list[int]) -> Any:
    model = net()
    optimizer = optimizer_of(model, mesh(len(steps), 1), schedule=edit.EverySteps(3))
    for step in range(steps[rank]):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.sync()
    return [full(p) for p in model.parameters()], optimizer.total_steps


@pytest.mark.parametrize("steps", [[10, 7, 12, 3], [9, 6, 9, 6], [9, 9, 9, 10], [0, 5, 2, 14], [3, 0, 0, 0],
                                   [0, 0, 0, 0]])  # fmt: skip
def test_trap_18_sync_with_uneven_counts(steps: list[int]) -> None:
    got = processes(4, counts, steps)
    for params, total in got:
        same(params, got[0][0], 0)
        assert total == sum(steps)


def test_the_leader_judges_layers_that_it_does_not_hold() -> None:
    def run(rank: int) -> Any:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pp"))
        stage = nn.Module()
        stage.blocks = nn.ModuleDict({str(rank % 2): net().blocks[rank % 2]})
        penalty = edit.PseudoGradientPenalty(edit.EMAZTest(warmup_rounds=2))
        optimizer = optimizer_of(
            stage, grid, schedule=edit.EverySteps(1), penalty=penalty, inner=torch.optim.SGD
        )
        outs: list[Tensor] = []
        optimizer.register_round_hook(lambda report: outs.append(report.out))
        for step in range(6):
            for p in stage.parameters():
                p.grad = torch.full_like(p, 1000.0 if (rank // 2, step) == (1, 5) else 1.0)
            optimizer.step()
            optimizer._finish_round(asked=True)
        return outs[-1].tolist(), optimizer._memory["count"].tolist()

    for out, count in threads(4, run):
        assert out == [[False, False], [True, True]]
        assert count == [[6, 6], [5, 5]]


def test_batchnorm_under_activation_checkpointing_is_averaged_too() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def run(rank: int) -> Any:
        model = seeded(Normed())
        model.bn = checkpoint_wrapper(model.bn)
        optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(2))
        for step in range(2):
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.sync()
        return [b for n, b in model.named_buffers() if "running" in n]

    a, b = threads(2, run)
    assert len(a) == 2
    same(a, b, 0)


# ------------------------------------------------------------------------------- what a user's process may be set to


def grads_of(rank: int, probe: bool) -> list[list[Tensor]]:
    """Gradients in the warm-up, after a backward that failed, and with ``torch.autograd.grad`` before each backward."""
    model = net()
    optimizer = optimizer_of(model, None, schedule=edit.EverySteps(2, 4), lr=0.0)
    if probe:
        handle = model.up.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 9, rank).backward()
        handle.remove()
        model.zero_grad()
    seen = []
    for step in range(3):
        loss = loss_of(model, step, rank)
        if probe:
            assert all(
                g.isfinite().all()
                for g in torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            )
        loss.backward()
        seen.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return seen


def test_autograd_grad_and_a_failed_backward_in_the_warm_up() -> None:
    model = net()
    for probe in (False, True):
        got = threads(2, grads_of, probe)
        for step in range(3):
            model.zero_grad()
            (sum(loss_of(model, step, replica) for replica in range(2)) / 2).backward()
            for of_rank in got:
                same(of_rank[step], [p.grad for p in model.parameters()])


def trains(rank: int, offload: str | None, how: str) -> list[Tensor]:
    model = net()
    outer = lambda params: torch.optim.Adam(params, lr=0.01)  # noqa: E731
    optimizer = optimizer_of(model, None, schedule=edit.EverySteps(2), outer=outer, offload=offload)
    for step in range(5):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with torch.inference_mode(how == "inference"):
                optimizer.sync()
    optimizer.sync()
    optimizer.close()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("offload", [None, "cpu", "replicas"])
def test_sync_in_inference_mode(offload: str | None) -> None:
    """What it makes, the state of an outer Adam, lives on."""
    wanted = threads(2, trains, offload, "plain")
    same(threads(2, trains, offload, "inference"), wanted, 0)


def elsewhere(rank: int, offload: str | None) -> list[Tensor]:
    with torch.device("meta"):
        model = net().to_empty(device="cpu")
        model.load_state_dict(KEPT)
        optimizer = optimizer_of(model, None, schedule=edit.EverySteps(2), offload=offload)
        for step in range(5):
            with torch.device("cpu"):
                loss = loss_of(model, step, rank)
            loss.backward()
            optimizer.step()
        optimizer.sync()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
    return [p.detach() for p in model.parameters()]


KEPT = net().state_dict()


@pytest.mark.parametrize("offload", [None, "cpu", "replicas"])
def test_a_default_device_that_is_not_the_host(offload: str | None) -> None:
    one, two = threads(2, elsewhere, offload)
    same(one, two, 0)
    assert all(p.isfinite().all() and p.device.type == "cpu" for p in one)


def destroys_first(rank: int) -> None:
    optimizer = optimizer_of(net(), None)
    torch.distributed.destroy_process_group()
    optimizer.close()


def test_close_after_all_groups_were_destroyed() -> None:
    processes(2, destroys_first)
