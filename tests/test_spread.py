"""``offload="replicas"``: the same run with 1/R of the anchor, at the same bytes; and what it cannot do, said clearly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import edit
from problems import loss_of, net, random_steps
from ranks import RankError, mesh, processes, threads
from test_against_reference import check, ours
from test_models import optimizer_of
from test_state import INTERVAL, STEPS, Run, course, equal, sharded, snapshot, through_a_file, values

MEAN = edit.PseudoGradientPenalty(anomaly=None, temperature=None, max_norm=None)
FULL = edit.PseudoGradientPenalty(anomaly=edit.EMAZTest(warmup_rounds=2), max_norm=0.4)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12, equal_nan=True)

# ------------------------------------------------------------------------------------------ the same run


CASES = [(MEAN, "nothing"), (MEAN, "nan"), (FULL, "spike"), (FULL, "nan"), (FULL, "all_out")]


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize(
    ("shape", "penalty", "edits"),
    [((3, 1, 1), *case) for case in CASES] + [((2, 2, 1), *case) for case in (CASES[1], CASES[4])],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_as_with_the_whole_anchor(shape: Any, penalty: Any, edits: str, delay: int) -> None:
    """Layers of 66 and 70 elements, spread over 3 replicas; and over two, of shards that are uneven themselves."""
    outer = "adam" if edits == "spike" else "nesterov"
    args = shape, "net", "sgd", outer, penalty, edits, [23] * shape[0]
    spread = threads(shape[0] * shape[1], ours, *args, "replicas", delay, timeout=60)
    whole = threads(shape[0] * shape[1], ours, *args, None, delay, timeout=60)
    close(spread, whole)


@pytest.mark.parametrize("delay", [0, 3])
def test_tensor_parallelism(delay: int) -> None:
    check(processes, (2, 1, 2), model="wide", edits="spike", offload="replicas", delay=delay)


@pytest.mark.parametrize("delay", [0, 1])
def test_uneven_counts_and_sync(delay: int) -> None:
    check(processes, (4, 1, 1), counts=[5, 2, 9, 2], offload="replicas", delay=delay)


@pytest.mark.parametrize("delay", [0, 2])
def test_empty_shards_and_buffers(delay: int) -> None:
    check(threads, (2, 3, 1), model="uneven", edits="spike", offload="replicas", delay=delay)
    check(threads, (3, 1, 1), model="batchnorm", edits="nan", offload="replicas", delay=delay)


def on_a_mesh(rank: int, offload: str | None, kind: str) -> Any:
    """Meshes that are not a plain grid: replicas in another order than ranks; stages with layers of their own."""
    model: nn.Module = net()
    if kind == "stages":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pp"))
        model = nn.ModuleDict({str(rank % 2): model.blocks[rank % 2]})
    else:
        grid = DeviceMesh("cpu", torch.tensor([[3], [1], [0], [2]]), mesh_dim_names=("replicate", "shard"))
    optimizer = optimizer_of(model, grid, schedule=edit.EverySteps(2), penalty=FULL, offload=offload)
    norms: list[Tensor] = []
    optimizer.register_round_hook(lambda report: norms.extend([report.norms, report.weights, report.clip]))
    random_steps(optimizer, 6, rank)
    return norms, values(model)


@pytest.mark.parametrize("kind", ["stages", "order"])
def test_other_meshes(kind: str) -> None:
    close(threads(4, on_a_mesh, "replicas", kind), threads(4, on_a_mesh, None, kind))


class Mixed(nn.Module):
    """Parameters of two dtypes in one layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(7, generator=generator).bfloat16())
        self.b = nn.Parameter(torch.randn(4, generator=generator))


def test_a_replica_that_stands_has_a_norm_of_exactly_zero_in_any_dtype() -> None:
    """The fp32 anchor is not what the bf16 parameters say; each slice is rounded as the parameters were."""

    def fn(rank: int, offload: str | None) -> Any:
        model = Mixed()
        optimizer = edit.LocalSGDOptimizer(
            model, torch.optim.SGD, lr=0.1, schedule=edit.EverySteps(1), penalty=None, offload=offload
        )
        norms: list[Tensor] = []
        optimizer.register_round_hook(lambda report: norms.append(report.norms))
        for step in range(4):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.37 * (rank > 0) * (step + 1))
            optimizer.step()
            optimizer._finish_round(asked=True)
        return norms, model.a.detach().float(), model.b.detach()

    spread, whole = threads(3, fn, "replicas"), threads(3, fn, None)
    torch.testing.assert_close(spread, whole, rtol=1e-2, atol=1e-2)
    assert equal(spread[0][1:], spread[2][1:])
    for norms in spread[0][0]:
        assert norms[0] == 0
        assert (norms[1:] > 0).all()


def test_one_replica_is_as_without() -> None:
    def fn(rank: int) -> Any:
        runs = [Run(rank, "edit-tight", 1, replicas=1, offload=offload) for offload in ("replicas", None)]
        for run in runs:
            run.train(range(STEPS))
        with runs[0].optimizer.consensus():
            pass
        return [run.save() for run in runs]

    ((spread, whole),) = threads(1, fn)
    assert equal(spread, whole)


# ------------------------------------------------------------------------------------- memory and bytes


@pytest.mark.parametrize(("replicas", "shards"), [(3, 1), (2, 2)])
def test_memory_and_bytes(replicas: int, shards: int) -> None:
    """1/R of anchor and momentum, and an all-reduce's bytes, but for the padding of each layer."""

    def fn(rank: int, offload: str | None) -> Any:
        model = net()
        if shards > 1:
            sharded(model, mesh(replicas, shards))
        optimizer = optimizer_of(model, mesh(replicas, shards), schedule=edit.EverySteps(2), offload=offload)
        reports: list[edit.RoundReport] = []
        optimizer.register_round_hook(reports.append)
        for step in range(5):
            loss_of(model, step, rank // shards).backward()
            optimizer.step()
        anchor = sum(flat.numel() for flat in optimizer._anchor.flats)
        momentum = sum(s["momentum_buffer"].numel() for s in optimizer._anchor.outer.state.values())
        assert momentum == anchor
        assert len(reports) == 2
        return anchor, reports[-1].bytes_sent, len(optimizer._layers)

    spread, whole = threads(replicas * shards, fn, "replicas"), threads(replicas * shards, fn, None)
    for (anchor, sent, layers), (all_of_it, reduced, _) in zip(spread, whole, strict=True):
        assert 0 <= anchor * replicas - all_of_it <= layers * (replicas - 1)
        padding = layers * (replicas - 1) * torch.float64.itemsize
        # Without padding the bytes of each layer are rounded down.
        assert -layers <= sent - reduced <= 2 * padding


# -------------------------------------------------------------------------------------------------- state


def test_what_a_state_holds() -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "co2_star", replicas=3)
        run.train(range(STEPS))
        state = run.optimizer.state_dict()["state"]
        assert not any("edit_anchor" in entry for entry in state.values())
        sizes = {"(root)": 66, "blocks.0": 70, "blocks.1": 70}
        for kept in ("anchor", "outer.momentum_buffer"):
            for layer, size in sizes.items():
                assert state[0][f"edit_part.{kept}.{layer}"].shape == (-(-size // 3),)
        assert state[0]["edit_part"][:4].tolist() == [rank, 3, 0, 1]
        assert not any(key.startswith("edit_part") for index in state if index for key in state[index])

    threads(3, fn)


@pytest.mark.parametrize(
    ("shards", "delay", "at"), [(1, 0, range(STEPS + 1)), (1, 2, (4, 5, 6)), (2, 0, (5, 6))]
)
def test_resume_is_exact(shards: int, delay: int, at: Any) -> None:
    """In the warm-up, in mid-round, with a round pending."""
    run = partial(course, offload="replicas", delay=delay)
    for failed, rounds in threads(2 * shards, run, "edit-tight", shards, at, timeout=60):
        assert failed == []
        assert rounds >= 3


def test_the_consensus_right_after_a_sync() -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "edit-tight", offload="replicas")
        with run.optimizer.consensus():  # in the warm-up the model is it
            pass
        for steps in (range(3), range(3, 5)):  # in a round; with one due
            run.train(steps)
            with pytest.raises(
                RuntimeError, match=r"consensus\(\) needs the whole anchor.*call sync\(\) first"
            ):
                run.optimizer.consensus().__enter__()
        run.optimizer.sync()
        before = values(run.model)
        with run.optimizer.consensus() as model:
            assert equal(values(model), before)

    threads(2, fn)


# ------------------------------------------------------------------------------------------------- errors


def test_states_that_do_not_fit_change_nothing() -> None:
    def fn(rank: int) -> None:
        run, whole = Run(rank, "co2_star"), Run(rank, "co2")
        for one in (run, whole):
            one.train(range(STEPS))
        for one in (run, whole):
            one.optimizer.sync()
        good = snapshot(run.optimizer.state_dict())
        other = snapshot(good)
        other["state"][0]["edit_part"][0] = 1 - rank
        cut = snapshot(good)
        cut["state"][0]["edit_part.anchor.blocks.1"] = torch.zeros(3)
        lacks = snapshot(good)
        del lacks["state"][0]["edit_part.anchor.blocks.1"]
        bad = [
            (
                run,
                whole.optimizer.state_dict(),
                f"slice {rank} of 2 of rank 0 of 1.*has: none; load it with the offload",
            ),
            (whole, good, "None.*|: none, but has: slice"),
            (run, other, f"slice {rank} of 2.*has: slice {1 - rank} of 2"),
            (run, cut, r"edit_part.anchor.blocks.1 of shape \(35,\), but has \(3,\)"),
            (run, lacks, r"edit_part.anchor.blocks.1 of shape \(35,\), but has \(\)"),
        ]
        for one, state, words in bad:
            before = values(one.model), snapshot(one.optimizer.state_dict())
            with pytest.raises(ValueError, match=words) as error:
                one.optimizer.load_state_dict(snapshot(state))
            assert "nothing was loaded" in str(error.value)
            assert equal(before, (values(one.model), one.optimizer.state_dict()))
        run.optimizer.load_state_dict(through_a_file(good))

    threads(2, fn)


def test_refresh_and_new_parameters() -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "edit-tight", offload="replicas")
        run.model.head.bias.requires_grad_(False)
        run.optimizer.refresh()  # in the warm-up nothing is spread yet
        run.train(range(STEPS))
        run.optimizer.sync()
        groups = len(run.optimizer.param_groups)
        with pytest.raises(RuntimeError, match=r"refresh\(\) needs the whole anchor.*build a new one"):
            run.optimizer.refresh()
        with pytest.raises(RuntimeError, match=r"add_param_group\(\) needs the whole anchor"):
            run.optimizer.add_param_group({"params": [run.model.head.bias]})
        assert len(run.optimizer.param_groups) == groups
        run.train(range(STEPS))

    threads(2, fn)


def test_states_of_different_rounds_and_anchors_that_are_not_finite() -> None:
    def fn(rank: int, what: str) -> None:
        run = Run(rank, "diloco", offload="replicas")
        run.train(range(INTERVAL + rank))
        if what == "rounds" or rank == 0:
            run.train(range(INTERVAL + rank, INTERVAL + 1))
        states = [snapshot(run.save())]
        run.optimizer.sync()
        states.append(snapshot(run.save()))
        run.load(states[rank] if what == "rounds" else states[1])
        if what == "finite" and rank == 1:
            run.optimizer._anchor.flats[2].data[0] = torch.nan
        run.optimizer.sync()

    with pytest.raises(RankError, match=r"anchor of replica \[1\] differs .*load the same optimizer state"):
        threads(2, fn, "rounds")
    with pytest.raises(RankError, match=r"anchor of replica \[0, 1\] differs .*or is not finite"):
        threads(2, fn, "finite")


def test_a_replica_that_cannot_take_part() -> None:
    def fn(rank: int) -> str:
        run = Run(rank, "co2_star", replicas=3)
        run.train(range(2))
        if rank == 1:
            run.model.head.weight = nn.Parameter(run.model.head.weight.detach().clone())
        with pytest.raises(edit.SyncError) as error:
            run.optimizer.sync()
        return str(error.value)

    said = threads(3, fn)
    assert "head.weight was replaced" in said[1]
    assert "replica [1] cannot take part" in said[0]


def on_another_mesh(rank: int, folder: Path, saves: bool, replicas: int, shards: int) -> None:
    run = Run(rank, "co2_star", shards, replicas=replicas, seed=int(saves))
    if saves:
        run.train(range(STEPS))
        run.optimizer.sync()
        edit.save(folder / "it", run.model, run.optimizer)
        edit.load(folder / "it", run.model, run.optimizer)
    else:
        before = values(run.model), snapshot(run.optimizer.state_dict())
        with pytest.raises(ValueError, match=r"rank \d of \d.*the offload, model and mesh that saved it"):
            edit.load(folder / "it", run.model, run.optimizer)
        assert equal(before, (values(run.model), run.optimizer.state_dict()))


def test_a_checkpoint_of_another_mesh_changes_nothing(tmp_path: Path) -> None:
    processes(4, on_another_mesh, tmp_path, True, 2, 2)
    processes(4, on_another_mesh, tmp_path, False, 4, 1)
