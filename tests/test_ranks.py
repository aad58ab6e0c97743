"""The tests' own ranks: what they return, and that every way to fail fails in seconds and says why."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ranks import Exited, RankError, mesh, processes, threads

both = pytest.mark.parametrize("run", [threads, processes])


def collectives(rank, scale):
    work = dist.all_reduce(total := torch.full((2,), rank * scale), async_op=True)
    work.wait()
    assert work.is_completed()
    dist.broadcast(sent := torch.tensor(rank), src=1)
    dist.all_gather_object(names := [None] * dist.get_world_size(), f"rank {rank}")
    return {"total": total, "sent": sent, "names": names, "threads": torch.get_num_threads(), "rank": rank}


@both
@pytest.mark.parametrize("world_size", [2, 4])
def test_results_come_by_rank(run, world_size):
    results = run(world_size, collectives, 2.0)
    assert [result["rank"] for result in results] == list(range(world_size))
    for result in results:
        assert result["total"].tolist() == [world_size * (world_size - 1.0)] * 2
        assert result["sent"] == 1
        assert result["names"] == [f"rank {rank}" for rank in range(world_size)]
        assert result["threads"] == 1


def test_one_rank():
    assert threads(1, lambda rank: dist.get_world_size()) == [1]


def subgroups(rank, backend, local):
    pairs = [[0, 1], [2, 3]]
    mine = pairs[rank // 2]
    if local:
        group = dist.new_group(
            mine, backend=backend, use_local_synchronization=True, timeout=timedelta(seconds=10)
        )
    else:
        group = [dist.new_group(pair, backend=backend) for pair in pairs][rank // 2]
    value = torch.tensor(float(rank))
    dist.all_reduce(value, group=group)
    served = dist.get_backend_config(group)
    dist.destroy_process_group(group)
    return value.item(), served


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    ("run", "backend"),
    [(threads, None), (threads, "threaded"), (threads, "gloo"), (processes, None), (processes, "gloo")],
)
def test_new_groups(run, backend, local):
    results = run(4, subgroups, backend, local)
    assert [value for value, _ in results] == [1, 1, 5, 5]
    expected = backend or {threads: "threaded", processes: "gloo"}[run]
    assert all(f"cpu:{expected}" in served for _, served in results)


def sharded_gradients(rank, replicas, shards):
    grid = mesh(replicas, shards)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = torch.randn(replicas * shards, 4, generator=generator)
    if shards > 1:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=grid["shard"])
        inputs = inputs[rank : rank + 1]
    model(inputs).square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if shards > 1 else grad for grad in grads]


@both
def test_fsdp_on_a_2d_mesh(run):
    """Each replica's gradient is the mean over its two shards; over both replicas, that of all the data."""
    reference = threads(1, sharded_gradients, 1, 1)  # one row of the data
    results = run(4, sharded_gradients, 2, 2)
    for a, b in zip(results[0], results[1], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(results[0][0], results[2][0])
    assert [grad.shape for grad in results[0]] == [grad.shape for grad in reference[0]]


def test_fsdp_is_the_same_in_both():
    for a, b in zip(threads(4, sharded_gradients, 2, 2), processes(4, sharded_gradients, 2, 2), strict=True):
        torch.testing.assert_close(a, b)


class OddError(Exception):
    def __init__(self, first, second):  # cannot be unpickled
        super().__init__(f"{first} and {second}")


def fails_on_one(rank, odd):
    if rank == 1:
        raise OddError("this", "that") if odd else KeyError("the culprit")
    dist.barrier()


@both
@pytest.mark.parametrize("odd", [False, True])
def test_an_exception_names_its_rank(run, odd):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised") as caught:
        run(4, fails_on_one, odd)
    assert time.monotonic() - start < 10
    assert caught.value.rank == 1
    assert "in fails_on_one" in str(caught.value)  # the traceback
    assert ("this and that" if odd else "the culprit") in str(caught.value)
    if not odd:
        assert isinstance(caught.value.__cause__, KeyError)


def warns(rank):
    warnings.warn("look out", stacklevel=1)


@both
def test_a_warning_is_an_error(run):
    with pytest.raises(RankError, match="UserWarning: look out"):
        run(2, warns)


@both
@pytest.mark.filterwarnings("ignore:look out")
def test_the_filters_of_the_test_hold_on_its_ranks(run):
    run(2, warns)


def sleeps(rank):
    if rank == 1:
        time.sleep(6)


@both
def test_a_hang_is_an_error_that_shows_where(run):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 did not end within 1 s") as caught:
        run(2, sleeps, timeout=1)
    assert time.monotonic() - start < 4
    assert " in sleeps" in str(caught.value)
    run(2, collectives, 1.0)  # and the next test is none the worse


def fails_beside_a_sleeper(rank):
    if rank == 0:
        time.sleep(6)
    raise KeyError("the culprit")


@both
def test_an_error_does_not_wait_for_a_sleeper(run):
    start = time.monotonic()
    with pytest.raises(RankError, match="the culprit"):
        run(2, fails_beside_a_sleeper)
    assert time.monotonic() - start < 4


def leaves_early(rank):
    if rank != 1:
        dist.barrier()


def calls_another(rank):
    if rank == 1:
        dist.broadcast(torch.zeros(2), src=0)
    else:
        dist.all_reduce(torch.zeros(2))


def calls_another_size(rank):
    dist.all_reduce(torch.zeros(2 + rank))


def crosses(rank):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if rank else reversed(groups):
        dist.all_reduce(torch.zeros(2), group=group)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (leaves_early, r"deadlock: waiting {0: .*AllReduce.*}, ended \[1\]"),
        (calls_another, "mismatch"),
        (calls_another_size, "mismatch"),
        (crosses, r"deadlock: waiting {.*}, ended \[\]"),
    ],
)
def test_threads_see_mismatches_at_once(fn, message):
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        threads(2, fn)
    assert time.monotonic() - start < 5
    threads(2, collectives, 1.0)


def test_processes_see_mismatches_after_the_time_out_of_the_group():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 raised .*[Tt]imed out"):
        processes(2, leaves_early, group_timeout=1)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("run", [threads, processes])
def test_a_group_that_not_all_make_fails(run):
    limit = {"timeout": 1} if run is threads else {"group_timeout": 1}
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0"):
        run(2, makes_a_group_alone, **limit)
    assert time.monotonic() - start < 8


def makes_a_group_alone(rank):
    if rank == 0:
        dist.new_group([0, 1], timeout=timedelta(seconds=1))


def dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        return "lost it"


def test_a_killed_rank_is_reported():
    with pytest.raises(RankError, match=r"rank 1 was gone \(killed by SIGKILL\)"):
        processes(2, dies)


def test_a_killed_rank_may_be_expected():
    assert processes(3, dies, expect_killed=[1]) == ["lost it", Exited(1, -signal.SIGKILL), "lost it"]
    with pytest.raises(RankError, match="rank 0 was expected to die"):
        processes(2, collectives, 1.0, expect_killed=[0])


def ends_the_process(rank):
    sys.exit(3) if rank else None


@both
def test_an_exit_is_an_error(run):
    with pytest.raises(RankError, match="rank 1 raised SystemExit: 3"):
        run(2, ends_the_process)


def test_processes_want_a_function_of_a_module():
    with pytest.raises(TypeError, match="function of a module"):
        processes(2, lambda rank: rank)


def test_nothing_stays_behind():
    """Neither a group, nor torch's excepthook once per rank, nor switched-off autograd threads."""
    hook = sys.excepthook
    world, autograd = dist.distributed_c10d._world, torch._C._is_multithreading_enabled()
    threads(2, collectives, 1.0)
    with pytest.raises(RankError):
        threads(2, fails_on_one, False)
    assert sys.excepthook is hook
    assert dist.distributed_c10d._world is world
    assert torch._C._is_multithreading_enabled() == autograd
    assert not dist.is_initialized()


def test_many_small_worlds():
    for _ in range(100):
        threads(3, lambda rank: [dist.all_reduce(torch.zeros(1)) for _ in range(5)])
