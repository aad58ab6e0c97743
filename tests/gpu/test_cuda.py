"""The CUDA paths on one device, not yet run on one: against the same run on the CPU, with streams held back.

Ranks share the device as gloo processes (NCCL refuses two ranks on one device). Every course is trained twice: once as it
is, and once with long kernels behind every module and in front of every inner step, so that a wait that is missing reads
what has not been written yet. What needs NCCL between ranks, and FSDP2 that really gathers (trap 4), needs two devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import edit
from edit.background import Background
from problems import batch, net
from ranks import RankError, processes
from test_models import PENALTY, full, same

STEPS, INTERVAL, WARMUP = 14, 3, 2
HELD = 2_000_000  # cycles: a millisecond
CASES: dict[str, dict[str, Any]] = {
    "at once": {},
    "all layers ahead": {"prefetch": 9},
    "late": {"delay": 2},
    "late by the interval": {"delay": 3},
    "host memory": {"offload": "cpu"},
    "host memory, late": {"offload": "cpu", "delay": 1},
    "spread": {"offload": "replicas"},
}
cases = pytest.mark.parametrize("case", CASES)
pytestmark = pytest.mark.timeout(400)


def held_back(model: nn.Module, optimizer: Any) -> None:
    """Long kernels on the current stream, in forward and backward and before the inner step."""

    def hold(*_: Any) -> None:
        torch.cuda._sleep(HELD)

    def after_forward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        hold()
        if output.requires_grad:
            output.register_hook(hold)  # returns None: the gradient stays

    for module in model.modules():
        module.register_forward_hook(after_forward)
    optimizer.register_step_pre_hook(hold)


def train(model: nn.Module, optimizer: edit.LocalSGDOptimizer, replica: int, device: str) -> list[Any]:
    reports: list[edit.RoundReport] = []
    optimizer.register_round_hook(reports.append)
    for step in range(STEPS):
        x, y = (t.to(device) for t in batch(step, replica))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.sync()
    params = [full(p).cpu() for p in model.parameters()]
    optimizer.close()
    return [params, [r.norms for r in reports], [r.clip for r in reports]]


def settings(case: str) -> dict[str, Any]:
    return {
        "inner": torch.optim.AdamW,
        "lr": 0.05,
        "penalty": PENALTY,
        "schedule": edit.EverySteps(INTERVAL, WARMUP),
        **CASES[case],
    }


def plain(rank: int, case: str, device: str, hold: bool = False) -> list[Any]:
    model = net().to(device)
    optimizer = edit.LocalSGDOptimizer(model, **settings(case))
    if hold:
        held_back(model, optimizer)
    return train(model, optimizer, rank, device)


@cases
def test_replicas_on_the_device_as_on_the_cpu(case: str) -> None:
    wanted = processes(2, plain, case, "cpu", timeout=120)
    same(processes(2, plain, case, "cuda", timeout=120), wanted, 1e-9)
    same(processes(2, plain, case, "cuda", True, timeout=120), wanted, 1e-9)


def alone(case: str, device: str, sharded: bool, hold: bool = False) -> list[Any]:
    """One replica of one rank, with NCCL if on the device."""
    model: Any = net().to(device)
    kwargs = settings(case)
    if sharded:
        grid = init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=grid["shard"])
        fully_shard(model, mesh=grid["shard"])
        kwargs["mesh"] = grid
    optimizer = edit.LocalSGDOptimizer(model, **kwargs)
    if hold:
        held_back(model, optimizer)
    return train(model, optimizer, 0, device)


@pytest.fixture
def nccl() -> Any:
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


@cases
@pytest.mark.parametrize("hold", [False, True])
def test_fsdp2_units_of_one_rank(case: str, hold: bool, nccl: None) -> None:
    """Units are resharded, written and gathered again; over one rank, FSDP copies in place of gathering."""
    same(alone(case, "cuda", True, hold), alone(case, "cpu", False), 1e-9)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_between_rounds_the_host_waits_for_nothing() -> None:
    model = net(dtype=torch.float32).to("cuda")
    optimizer = edit.LocalSGDOptimizer(model, lr=0.01, fused=True, schedule=edit.EverySteps(4))
    x, y = (t.float().cuda() for t in batch(0, 0))
    try:
        for step in range(16):
            quiet = step % 4 in (1, 2)  # not the step that launches, nor the forward that applies
            torch.cuda.set_sync_debug_mode("error" if quiet else "default")
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    optimizer.sync()
    assert optimizer.rounds >= 4


def test_offloaded_anchors_are_pinned_and_a_round_ends_as_it_began() -> None:
    model = net().to("cuda")
    optimizer = edit.LocalSGDOptimizer(model, **settings("host memory"))
    assert all(flat.device.type == "cpu" and flat.is_pinned() for flat in optimizer._anchor.flats)
    memory = []
    for step in range(STEPS):
        x, y = (t.cuda() for t in batch(step, 0))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        memory.append(torch.cuda.memory_allocated())
    optimizer.sync()
    assert memory[-1] == memory[7]
    for state in optimizer._anchor.outer.state.values():
        assert all(v.is_pinned() for v in state.values() if isinstance(v, torch.Tensor) and v.dim())


def reduced(rank: int, device: str, hold: bool) -> list[torch.Tensor]:
    """Warm-up only: gradients averaged over two replicas, in FSDP's hook on its own stream."""
    model: Any = net(dtype=torch.float32).to(device)  # first: a mesh of CUDA wants to know the device
    grid = init_device_mesh(device, (2, 1), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for block in model.blocks:
        fully_shard(block, mesh=grid["shard"], mp_policy=policy)
    fully_shard(model, mesh=grid["shard"], mp_policy=policy)
    schedule = edit.EverySteps(4, warmup_steps=100)
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.SGD, lr=0.1, mesh=grid, schedule=schedule)
    if hold:
        held_back(model, optimizer)
    for step in range(6):
        x, y = (t.float().to(device) for t in batch(step, rank))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(p).cpu() for p in model.parameters()]


def test_gradients_reduced_in_another_dtype_are_averaged_in_the_warm_up() -> None:
    """Trap 2: the buffer of the reduce-scatter belongs to a stream that may free it early."""
    wanted = processes(2, reduced, "cpu", False, timeout=120)
    for hold in (False, True):
        same(processes(2, reduced, "cuda", hold, timeout=120), wanted, 1e-5)


def sanitized(rank: int, case: str, broken: bool) -> list[Any]:
    """torch's sanitizer in the training loop and in the thread of rounds, which has a stream of its own."""
    from torch.cuda._sanitizer import cuda_sanitizer, enable_cuda_sanitizer

    enable_cuda_sanitizer()  # raises where a tensor is used on two streams without a wait between
    run = Background.run

    def watched(self: Background, work: Callable[[], None]) -> Any:
        def dispatched() -> None:
            with cuda_sanitizer.dispatch:
                work()

        return run(self, dispatched)

    Background.run = watched
    if broken:
        torch.cuda.Stream.wait_stream = lambda self, other: None
    return plain(rank, case, "cuda")


@pytest.mark.parametrize("case", ["at once", "late", "host memory, late"])
def test_torchs_sanitizer_finds_no_race(case: str) -> None:
    processes(2, sanitized, case, False, timeout=300)


def test_torchs_sanitizer_finds_a_wait_that_is_missing() -> None:
    with pytest.raises(RankError):
        processes(2, sanitized, "late", True, timeout=300)
