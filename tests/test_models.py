"""Every kind of model takes the same course: one plain run says what is right, the others must agree."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import edit
from problems import IN, OUT, Net, batch, loss_of, net, seeded
from ranks import mesh, processes, threads

STEPS, INTERVAL, WARMUP = 11, 3, 2
Trajectory = list[list[Tensor]]
PENALTY = edit.PseudoGradientPenalty(anomaly=edit.EMAZTest(warmup_rounds=1), max_norm=0.5)


def full(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def optimizer_of(model: nn.Module, grid: Any, **kwargs: Any) -> edit.LocalSGDOptimizer:
    settings = {
        "inner": torch.optim.AdamW,
        "lr": 0.05,
        "schedule": edit.EverySteps(INTERVAL, WARMUP),
        "penalty": PENALTY,
    }
    return edit.LocalSGDOptimizer(model, mesh=grid, **(settings | kwargs))


def shard(model: Net, grid: Any, **kwargs: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, mesh=grid["shard"], **kwargs)
    return fully_shard(model, mesh=grid["shard"])


def course(
    rank: int, shape: tuple[int, int], build: Callable, during: Callable | None = None, **kw: Any
) -> Any:
    """Train; return the full parameters after every step, and the course of norms and weights."""
    replicas, shards = shape
    grid = mesh(replicas, shards)
    model = build(net(), grid)
    optimizer = optimizer_of(model, grid, **kw)
    reports: list[edit.RoundReport] = []
    optimizer.register_round_hook(reports.append)
    seen = []
    for step in range(STEPS):
        if during is None:
            loss_of(model, step, rank // shards, rank % shards).backward()
        else:
            during(model, optimizer, step, rank // shards, rank % shards)
        optimizer.step()
        optimizer.zero_grad()
        seen.append([full(p) for p in model.parameters()])
    optimizer.sync()
    seen.append([full(p) for p in model.parameters()])
    optimizer.close()
    assert [r.round for r in reports] == [1, 2, 3, 4]
    return seen, [r.norms for r in reports], [r.weights for r in reports]


def same(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def plain(model: Net, grid: Any) -> Net:
    return model


EXPECTED: dict[Any, Any] = {}


def expected(shape: tuple[int, int]) -> Any:
    """The course of FSDP2 in its simplest form, itself checked against the reference elsewhere."""
    if shape not in EXPECTED:
        EXPECTED[shape] = threads(shape[0] * shape[1], course, shape, plain if shape[1] == 1 else shard)
    return EXPECTED[shape]


def agrees(shape: tuple[int, int], build: Callable, during: Callable | None = None, **kw: Any) -> None:
    run = kw.pop("run", threads)
    same(run(shape[0] * shape[1], partial(course, **kw), shape, build, during), expected(shape))


# ------------------------------------------------------------------------------------------ FSDP2 units


def group_of_two(model: Net, grid: Any) -> Net:
    fully_shard([model.up, model.head], mesh=grid["shard"])
    return shard(model, grid)


def test_trap_7_unit_of_two_modules() -> None:
    """``fully_shard([up, head])`` gathers both when the first is reached. The layers are other ones than
    in the simple cut, so this compares with the same cut of a plain model."""
    got = threads(4, course, (2, 2), group_of_two)
    assert got[0][1][0].shape == (2, 3)  # up+head, two blocks; the root has nothing left
    same(got[0][0][-1], got[3][0][-1])
    simple = threads(4, partial(course, prefetch=0), (2, 2), group_of_two)
    same(got, simple)
    # up and head are the root's parameters in the simple cut: the same sets of parameters.
    same(got[0][0], expected((2, 2))[0][0])


def kept_gathered(model: Net, grid: Any) -> Net:
    return shard(model, grid, reshard_after_forward=False)


def test_trap_6_units_that_stay_gathered() -> None:
    agrees((2, 2), kept_gathered)


def with_prefetch(model: Net, grid: Any) -> Net:
    shard(model, grid)
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    return model


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_trap_5_forward_prefetch(prefetch: int) -> None:
    for run in threads, processes:
        same(run(4, partial(course, prefetch=prefetch), (2, 2), with_prefetch), expected((2, 2)))


def blocks_first_in_module_order_last(model: Net, grid: Any) -> Net:
    model.register_module("blocks", nn.ModuleList(reversed(list(model.blocks))))
    forward = type(model).forward

    class Backwards(type(model)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return forward(_View(self), x)

    class _View:
        def __init__(self, of: nn.Module) -> None:
            self.up, self.head, self.blocks = of.up, of.head, list(reversed(list(of.blocks)))

    model.__class__ = Backwards
    return shard(model, grid)


def test_trap_8_forward_order_is_not_module_order() -> None:
    got = threads(4, course, (2, 2), blocks_first_in_module_order_last)
    order = [0, 1, 6, 7, 8, 9, 2, 3, 4, 5, 10, 11]

    def sort(seen: Any) -> Any:
        return [[step[i] for i in (0, 1, *range(6, 10), *range(2, 6), 10, 11)] for step in seen]

    assert sorted(order) == list(range(12))
    same([sort(g[0]) for g in got], [e[0] for e in expected((2, 2))])


def test_unevenly_sharded_and_empty_shards() -> None:
    """Width 7 over 2 and 4 shards; LayerNorms of 7 and outputs of 3 leave empty shards on 4 ranks."""
    one = threads(4, course, (1, 4), shard)
    two = threads(2, course, (1, 2), shard, pairs)
    same(one[0], two[0])


def pairs(model: nn.Module, optimizer: Any, step: int, replica: int, member: int) -> None:
    """What two of four members train on."""
    loss = loss_of(model, step, replica, 2 * member) + loss_of(model, step, replica, 2 * member + 1)
    (loss / 2).backward()


# --------------------------------------------------------------------- checkpointing, compile, reuse, skip


def outside(model: Net, grid: Any) -> Net:
    shard(model, grid)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


def inside(model: Net, grid: Any) -> Net:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return shard(model, grid)


class Checkpointed(Net):
    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def reentrant(model: Net, grid: Any) -> Net:
    model.__class__ = Checkpointed
    return model if grid["shard"].size() == 1 else shard(model, grid)


@pytest.mark.parametrize("build", [outside, inside])
def test_trap_8_activation_checkpointing(build: Callable) -> None:
    agrees((2, 2), build)


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_trap_8_reentrant_checkpointing_runs_layers_without_gradients(shape: tuple[int, int]) -> None:
    agrees(shape, reentrant)


def compiled_blocks(model: Net, grid: Any) -> Net:
    # torch warns of its own look at .grad while it traces a backward graph.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    if grid["shard"].size() > 1:
        shard(model, grid)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def compiled_whole(model: Net, grid: Any) -> Net:
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize(("shape", "build"), [((2, 1), compiled_blocks), ((2, 2), compiled_blocks),
                                              ((2, 1), compiled_whole)])  # fmt: skip
def test_trap_16_compiled(shape: tuple[int, int], build: Callable) -> None:
    agrees(shape, build, run=processes)


def test_layers_reused_and_skipped() -> None:
    """Conditional and repeated layers: collectives do not follow the forward. Each replica its own way."""

    class Winding(Net):
        step = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            for i in [(), (0,), (1,), (0, 1), (1, 0, 0)][self.step % 5]:
                x = self.blocks[i](x)
            return self.head(x)

    def run(rank: int, lazily: bool) -> Any:
        model = net()
        model.__class__ = Winding
        optimizer = optimizer_of(model, mesh(3, 1), schedule=edit.EverySteps(2), prefetch=0)
        for step in range(9):
            if lazily:  # nothing is left to the forward: the round is done at once
                optimizer._finish_round(asked=True)
            model.step = step + rank
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.sync()
        return [full(p) for p in model.parameters()]

    same(threads(3, run, False)[0], threads(3, run, False)[2])
    # Layers that the first forward of a round skips are done in step(), and have no gradient from it.
    same(threads(3, run, False), threads(3, run, True))


# -------------------------------------------------------------------------- evaluation, accumulation, errors


def evaluating(model: nn.Module, optimizer: Any, step: int, replica: int, member: int) -> None:
    """Evaluation without gradients at every place of a step, on one replica only where it has no company."""
    here = replica == 0

    def evaluate() -> None:
        if here:
            with torch.no_grad():
                model(batch(99, 0)[0])

    evaluate()
    model.eval() if step % 2 else model.train()
    loss = loss_of(model, step, replica, member)
    evaluate()
    loss.backward()
    # Behind a step that launches no round, FSDP2 itself would train on: its root stays gathered, and stale.
    if not hasattr(model, "reshard") or (step + 1 > WARMUP and (step + 1 - WARMUP) % INTERVAL == 0):
        evaluate()


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_trap_9_evaluation_never_syncs_and_trap_6_leaves_no_stale_tensors(shape: tuple[int, int]) -> None:
    agrees(shape, plain if shape[1] == 1 else shard, evaluating)


def accumulating(model: nn.Module, optimizer: Any, step: int, replica: int, member: int) -> None:
    x, y = batch(step, replica, member)
    sync = getattr(model, "set_requires_gradient_sync", lambda _: None)
    for half in range(2):
        sync(half == 1)
        part = slice(2 * half, 2 * half + 2)
        (nn.functional.mse_loss(model(x[part]), y[part]) / 2).backward()


def accumulating_every_time(model: nn.Module, optimizer: Any, step: int, replica: int, member: int) -> None:
    x, y = batch(step, replica, member)
    for half in range(2):
        part = slice(2 * half, 2 * half + 2)
        (nn.functional.mse_loss(model(x[part]), y[part]) / 2).backward()


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
@pytest.mark.parametrize("during", [accumulating, accumulating_every_time])
def test_gradient_accumulation(shape: tuple[int, int], during: Callable) -> None:
    same(
        threads(shape[0] * shape[1], course, shape, plain if shape[1] == 1 else shard, during),
        expected(shape),
        1e-9,
    )


class Stumbles(Exception):
    pass


def stumbling(model: nn.Module, optimizer: Any, step: int, replica: int, member: int) -> None:
    """The forward fails behind the first block in every step of every rank, and is tried again."""
    handle = model.blocks[0].register_forward_hook(_stumble)
    with pytest.raises(Stumbles):
        loss_of(model, step, replica, member)
    handle.remove()
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    loss_of(model, step, replica, member).backward()


def _stumble(*_: Any) -> None:
    raise Stumbles


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_exception_in_the_forward_of_a_round_and_a_retry(shape: tuple[int, int]) -> None:
    agrees(shape, plain if shape[1] == 1 else shard, stumbling)


# --------------------------------------------------------------------------------------- parameters' kinds


def train(rank: int, model: nn.Module, steps: int = 8, **kwargs: Any) -> Iterator[nn.Module]:
    optimizer = optimizer_of(model, mesh(2, 1), **kwargs)
    for step in range(steps):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model
    optimizer.sync()
    yield model


def test_frozen_parameters_stay() -> None:
    def run(rank: int) -> Any:
        model = net()
        model.blocks[0].requires_grad_(False)
        model.up.weight.requires_grad_(False)
        before = copy.deepcopy(model.state_dict())
        *_, last = train(rank, model)
        return [(k, v) for k, v in last.state_dict().items() if torch.equal(v, before[k])]

    for kept in threads(2, run):
        assert [k for k, _ in kept] == ["up.weight", *(k for k in net().state_dict() if "blocks.0" in k)]


def test_tied_parameters_are_one_and_belong_to_the_root() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__(depth=3)
            self.blocks[2].lin.weight = self.blocks[0].lin.weight

    def run(rank: int) -> Any:
        from problems import seeded

        model = seeded(Tied())
        optimizer = optimizer_of(model, mesh(2, 1))
        owner = next(layer.name for layer in optimizer._layers if "blocks.0.lin.weight" in layer.names)
        assert sum(len(layer.params) for layer in optimizer._layers) == len(list(model.parameters()))
        for step in range(8):
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.sync()
        assert model.blocks[2].lin.weight is model.blocks[0].lin.weight
        return owner, [full(p) for p in model.parameters()]

    a, b = threads(2, run)
    assert a[0] == b[0] == "(root)"
    same(a[1], b[1], 0)


def test_trap_14_bf16_has_a_fp32_anchor_and_no_movement_is_exactly_zero() -> None:
    def run(rank: int) -> Any:
        model = net(dtype=torch.bfloat16)
        norms: list[Tensor] = []
        optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(1), inner=torch.optim.SGD, lr=0.1,
                                 penalty=None)  # fmt: skip
        optimizer.register_round_hook(lambda report: norms.append(report.norms))
        for step in range(6):
            loss_of(model, step, rank).backward()
            if step == 3:
                optimizer.zero_grad()  # a step that moves nothing
            optimizer.step()
            optimizer.zero_grad()
        optimizer.sync()
        anchor = [flat.data for flat in optimizer._anchor.flats]
        return norms, anchor, [p.detach() for p in model.parameters()], optimizer._layers

    (norms, anchor, params, layers), other = threads(2, run)
    assert all(flat.dtype == torch.float32 for flat in anchor)
    assert (norms[2] > 0).all()
    assert (norms[3] == 0).all()  # although the anchor is not representable in bf16:
    assert any((flat != flat.bfloat16().float()).any() for flat in anchor)
    same(params, other[2], 0)
    for layer, flat in zip(layers, anchor, strict=True):
        same([p.detach() for p in layer.params], [part.bfloat16() for part in layer.parts(flat)], 0)


def test_trap_12_copies_of_the_model_are_inert() -> None:
    def run(rank: int) -> Any:
        model = net()
        optimizer = optimizer_of(model, mesh(2, 1), schedule=edit.EverySteps(1))
        twin = copy.deepcopy(model)
        loss_of(model, 0, rank).backward()
        optimizer.step()  # a round is due
        loss_of(twin, 0, rank)  # only rank 0's forward of a copy would hang, if it synchronised
        assert optimizer._round.done == 0
        loss_of(model, 1, rank)
        assert optimizer._round is None
        assert optimizer.rounds == 1

    threads(2, run)


def test_trap_13_groups_follow_the_parameters_device_and_own_no_traffic_of_the_model() -> None:
    def run(rank: int) -> Any:
        import torch.distributed as dist

        grid = mesh(2, 2)
        optimizer = optimizer_of(shard(net(), grid), grid)
        mine = {id(group) for group in optimizer.replicas._groups.values() if group}
        theirs = {id(dist.group.WORLD), id(grid["shard"].get_group()), id(grid["replicate"].get_group())}
        assert not mine & theirs
        return [dist.get_process_group_ranks(group) for group in optimizer.replicas._groups.values() if group]

    got = processes(4, run_groups)
    assert got[1] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 1],
        [1, 3],
        [0, 1],
    ]  # control, files, clock, sync, inside
    threads(4, run)


def run_groups(rank: int) -> Any:
    import torch.distributed as dist

    grid = mesh(2, 2)
    optimizer = optimizer_of(shard(net(), grid), grid)
    return [dist.get_process_group_ranks(group) for group in optimizer.replicas._groups.values() if group]


@pytest.mark.parametrize("frozen", ["up", "root"])
def test_trap_5_prefetch_from_a_unit_without_trainable_parameters(frozen: str) -> None:
    """Such a unit is no layer, but its forward has FSDP gather the next ones."""

    def build(model: Net, grid: Any, prefetch: bool) -> Net:
        fully_shard(model.up, mesh=grid["shard"])
        fully_shard(model.head, mesh=grid["shard"])
        shard(model, grid)  # the root is left without parameters
        (model.up if frozen == "up" else nn.Module()).requires_grad_(False)
        if prefetch:
            model.set_modules_to_forward_prefetch([model.up, model.blocks[0]])
            model.up.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
        return model

    with_it, without = (
        threads(4, course, (2, 2), partial(build, prefetch=prefetch)) for prefetch in (True, False)
    )
    same(with_it, without, 0)


def test_coarse_layers_over_fsdp_units() -> None:
    """One layer of all units: written at once, gathered one by one."""

    def run(rank: int, coarse: bool) -> Any:
        grid = mesh(2, 2)
        model = shard(net(), grid)
        layers = [model] if coarse else None
        optimizer = optimizer_of(model, grid, penalty=None, layers=layers)
        for step in range(7):
            loss_of(model, step, rank // 2, rank % 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.sync()
        return len(optimizer._layers), [full(p) for p in model.parameters()]

    one, many = threads(4, run, True), threads(4, run, False)
    assert (one[0][0], many[0][0]) == (1, 3)
    same([p for _, p in one], [p for _, p in many])


def test_layers_that_the_forward_does_not_call_are_named() -> None:
    class Functional(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](self.up(x))
            return self.head(x + nn.functional.linear(x, self.blocks[1].lin.weight))

    def run(rank: int) -> None:
        model = net()
        model.__class__ = Functional
        optimizer = optimizer_of(model, mesh(1, 1), schedule=edit.EverySteps(1))
        loss_of(model, 0, rank).backward()
        optimizer.step()
        loss_of(model, 1, rank).backward()
        with pytest.warns(UserWarning, match=r"round 1 no training forward reached blocks\.1, "):
            optimizer.step()

    threads(1, run)
    model = net()
    with pytest.raises(ValueError, match="blocks is a ModuleList: give its elements"):
        edit.LocalSGDOptimizer(model, lr=0.1, layers=[model.blocks])


def test_parameters_that_fully_shard_ignores_are_averaged_in_the_warm_up() -> None:
    def run(rank: int) -> Any:
        grid = mesh(2, 2)
        model = net()
        scale = model.blocks[0].norm.weight
        fully_shard(model.blocks[0], mesh=grid["shard"], ignored_params={scale})
        fully_shard(model, mesh=grid["shard"], ignored_params={scale})
        optimizer = optimizer_of(model, grid)
        loss_of(model, 0, rank // 2).backward()  # members alike: nobody else averages what is ignored
        optimizer.close()
        return scale.grad

    one, *others = threads(4, run)
    for other in others:
        same(one, other, 0)


def test_stages_of_a_pipeline_launch_a_loaded_round_in_sync_and_not_in_a_forward() -> None:
    """In which later stages wait for earlier ones. What torch's pipelines do is in tests/integrations."""

    def fn(rank: int) -> None:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pp"))
        replica, stage = divmod(rank, 2)

        def build() -> tuple[nn.Module, edit.LocalSGDOptimizer]:
            model = seeded(nn.Linear(IN, OUT), stage)
            return model, optimizer_of(model, grid, schedule=edit.EverySteps(2))

        model, optimizer = build()
        for step in range(2):
            loss_of(model, step, replica).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.sync()
        wanted = [p.detach().clone() for p in model.parameters()]
        optimizer.close()
        model, optimizer = build()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        with pytest.raises(RuntimeError, match=r"a round was under way .* call sync\(\), on all ranks"):
            loss_of(model, 2, replica)
        optimizer.sync()
        same([p.detach() for p in model.parameters()], wanted, 0)
        optimizer.close()

    threads(4, fn)
