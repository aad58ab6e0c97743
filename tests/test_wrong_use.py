"""Wrong use: one error on every rank that names argument, rule, value and remedy; in seconds, never a hang."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import edit
from edit import comm
from problems import IN, OUT, Net, loss_of, net, seeded
from ranks import mesh, processes, threads

LIMIT = timedelta(seconds=4)  # of the package's groups: a rank that waits for another shows at once
Error = tuple[type[BaseException], str] | None


def caught(fn: Callable[..., Any], *args: Any) -> Error:
    """Type and message of what ``fn`` raises."""
    try:
        fn(*args)
    except Exception as error:
        return type(error), str(error)
    return None


def on_every_rank(fn: Callable[[int], Any], ranks: int = 2, run: Callable[..., Any] = threads) -> list[str]:
    """``fn(rank)`` raises on all ranks, and nobody waits for anybody. The messages."""
    errors = run(ranks, partial(caught, fn), timeout=15)
    assert all(errors), errors
    return [error[1] for error in errors]


def says(message: str, *words: object) -> None:
    for word in words:
        assert str(word) in message, f"{word!r} is not in: {message}"


def equal(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], but: str = "") -> bool:
    """Two states, entry by entry, bitwise."""
    return all(
        torch.equal(torch.as_tensor(a[p][key]), torch.as_tensor(b[p][key]))
        for p in a
        for key in a[p]
        if key != but
    )


def build(model: Any = None, **kwargs: Any) -> edit.LocalSGDOptimizer:
    settings = {"lr": 0.05, "schedule": edit.EverySteps(1), "timeout": LIMIT}
    return edit.LocalSGDOptimizer(net() if model is None else model, **(settings | kwargs))


def train(model: nn.Module, optimizer: edit.LocalSGDOptimizer, step: int, rank: int) -> None:
    loss_of(model, step, rank).backward()
    optimizer.step()
    optimizer.zero_grad()


# ------------------------------------------------------------------------------------------- intervals

NO_INT = [(-1, ValueError), (0, ValueError), (2.5, TypeError), (True, TypeError), ("8", TypeError), (None, TypeError)]  # fmt: skip
NO_WARMUP = [(-1, ValueError), (1.0, TypeError), (False, TypeError), ("8", TypeError), (None, TypeError)]
NO_TIME = [(-1.0, ValueError), (0, ValueError), (math.nan, ValueError), (math.inf, ValueError), ("8", TypeError), (True, TypeError), (None, TypeError)]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "name", "value", "kind"),
    [(edit.EverySteps, "interval", *case) for case in NO_INT]
    + [(edit.EverySteps, "warmup_steps", *case) for case in NO_WARMUP]
    + [(edit.EverySeconds, "interval", *case) for case in NO_TIME]
    + [(edit.EverySeconds, "warmup_steps", *case) for case in NO_WARMUP]
    + [(edit.EverySeconds, "clock", 5, TypeError)],
)
def test_intervals(policy: type, name: str, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as error:
        policy(**{name: value})
    says(str(error.value), policy.__name__, f"{name} must be", f"is {value!r}: ")


# -------------------------------------------------------------------------------------------- settings

SETTINGS: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"prefetch": -1}, ValueError, ("prefetch must be an int >= 0", "-1", "the default is 1")),
    ({"prefetch": 1.5}, ValueError, ("prefetch must be an int >= 0", "1.5")),
    ({"prefetch": True}, ValueError, ("prefetch must be an int >= 0", "True")),
    ({"prefetch": None}, ValueError, ("prefetch must be an int >= 0", "None")),
    ({"offload": "cuda"}, ValueError, ("offload must be None, 'cpu' or 'replicas'", "'cuda'")),
    ({"offload": True}, ValueError, ("offload must be None, 'cpu' or 'replicas'", "True")),
    ({"offload": torch.device("cpu")}, ValueError, ("offload must be None, 'cpu' or 'replicas'", "device")),
    ({"delay": -1}, ValueError, ("delay must be", "-1")),
    ({"delay": 0.5}, ValueError, ("delay must be", "0.5")),
    ({"delay": True}, ValueError, ("delay must be", "True")),
    ({"delay": False}, ValueError, ("delay must be", "False")),
    ({"delay": 129}, ValueError, ("delay must be at most", "129")),
    ({"delay": None}, ValueError, ("delay must be", "None")),
    ({"delay": 200}, ValueError, ("delay must be", "200")),
    ({"schedule": 128}, TypeError, ("schedule must have due", "128", "EverySteps(128)")),
    ({"schedule": None}, TypeError, ("schedule must have due", "None", "EverySteps(128)")),
    (
        {"penalty": "mean"},
        TypeError,
        ("penalty must have init, weights and clip", "'mean'", "None for the plain"),
    ),
    ({"penalty": 0.5}, TypeError, ("penalty must have init, weights and clip", "0.5")),
    ({"outer": None}, TypeError, ("outer must be a callable", "None", "Nesterov()")),
    ({"outer": 0.7}, TypeError, ("outer must be a callable", "0.7", "Nesterov()")),
    ({"outer": lambda params: None}, TypeError, ("outer must return", "None", "Nesterov()")),
    ({"inner": None}, TypeError, ("inner must be an optimizer", "None")),
    ({"inner": "adamw"}, TypeError, ("inner must be an optimizer", "'adamw'")),
    ({"inner": lambda params, **kwargs: 3}, TypeError, ("inner must return a torch.optim.Optimizer", "3")),
    ({"intervall": 8}, TypeError, ("AdamW does not take", "'intervall'", "LocalSGDOptimizer does not know")),
    ({"tau": 8, "inner": torch.optim.SGD}, TypeError, ("SGD does not take", "'tau'")),
    ({"lr": -1.0}, ValueError, ("Invalid learning rate", "-1.0")),  # the inner optimizer's own words
    ({"layers": [nn.Linear(2, 2)]}, ValueError, ("layers must be modules of the model", "Linear")),
    ({"layers": ["blocks.0"]}, ValueError, ("layers must be modules of the model", "str", "model.modules()")),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    SETTINGS,
    ids=[f"{number}-{next(iter(case[0]))}" for number, case in enumerate(SETTINGS)],
)
def test_settings(bad: dict[str, Any], kind: type[Exception], words: tuple[str, ...], ranks: int) -> None:
    def fn(rank: int) -> None:
        with pytest.raises(kind) as error:
            build(**bad)
        raise error.value

    for message in on_every_rank(fn, ranks):
        says(message, *words)


@pytest.mark.parametrize(
    "bad",
    [{"timeout": 30}, {"timeout": "30"}, {"timeout": timedelta(0)}, {"layers": 5}, {"mesh": "replicate"}],
    ids=str,
)
def test_arguments_of_the_wrong_type(bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    for message in on_every_rank(lambda rank: build(**bad)):
        says(message, name, "must", value)


def test_an_unknown_keyword_names_itself_and_leaves_the_model_alone() -> None:
    model = net()
    with pytest.raises(TypeError, match="intervall"):
        edit.LocalSGDOptimizer(model, lr=0.1, intervall=8)
    assert not any(module._forward_pre_hooks for module in model.modules())


# ----------------------------------------------------------------------------------------------- world


def test_no_process_group_in_a_multi_rank_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError) as error:
        build()
    says(str(error.value), "WORLD_SIZE is 2", "no process group", "init_process_group()")
    for alone in ("1", None):
        monkeypatch.setenv("WORLD_SIZE", alone) if alone else monkeypatch.delenv("WORLD_SIZE")
        assert build().replicas.count == 1


def unnamed(names: tuple[str, ...] | None) -> DeviceMesh:
    return init_device_mesh(
        "cpu", (2, 1) if names is None else (2, *[1] * (len(names) - 1)), mesh_dim_names=names
    )


@pytest.mark.parametrize("names", [None, ("shard",), ("dp", "tp"), ("replicate", "dp_replicate")], ids=str)
def test_mesh_without_replicate_dimension(names: tuple[str, ...] | None) -> None:
    for message in on_every_rank(lambda rank: build(mesh=unnamed(names))):
        says(message, "mesh must have one dimension named 'replicate'", names or (), "init_device_mesh(")


def test_mesh_that_leaves_this_rank_out() -> None:
    errors = threads(4, lambda rank: rank > 1 and caught(lambda: build(mesh=mesh_of([[0], [1]]))), timeout=15)
    for rank in (2, 3):
        says(errors[rank][1], "mesh must hold every rank once", f"rank {rank} 0 times")


def test_mesh_that_leaves_ranks_out_and_a_wrong_setting() -> None:
    """The ranks that the mesh holds hear of it, and wait for no others."""
    wrong = {"timeout": timedelta(seconds=0.5)}
    errors = threads(3, lambda rank: rank < 2 and caught(lambda: build(mesh=mesh_of([[0], [1]]), **wrong)))
    for error in errors[:2]:
        says(error[1], "timeout must be at least 1 s", "use timedelta(hours=1)")


def test_mesh_that_leaves_ranks_out_where_torch_splits_communicators() -> None:
    def fn(rank: int) -> None:
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # init_process_group(device_id=...)
        if rank < 2:
            build(mesh=mesh_of([[0], [1]]))

    with mock.patch.object(comm, "_backend", return_value="nccl"):
        errors = threads(3, lambda rank: caught(fn, rank), timeout=15)
    assert errors[2] is None
    for error in errors[:2]:
        says(error[1], "mesh must hold all 3 ranks", "holds 2", "device_id", "leave device_id away")


def test_a_ranks_own_error_is_not_lost_with_the_others() -> None:
    optimizer = build()
    gone = mock.patch.object(
        optimizer.replicas, "gather_objects", side_effect=RuntimeError("connection closed")
    )
    with gone, pytest.raises(OSError, match="disk full"), optimizer.replicas.agree("it"):
        raise OSError("disk full")
    lost = pytest.raises(edit.SyncError, match=r"it, which all ranks must call, failed .*connection closed")
    with gone, lost, optimizer.replicas.agree("it"):
        pass


# ----------------------------------------------------------------------------------------------- model


def test_trap_1_model_sharded_over_the_replicas() -> None:
    def fn(rank: int) -> None:
        grid = mesh(2, 2)
        build(fully_shard(net(), mesh=grid), mesh=grid)  # HSDP

    for message in on_every_rank(fn, 4):
        says(message, "model must be sharded inside a replica only", "up.weight", "[0, 1, 2, 3]")
        says(message, 'fully_shard(module, mesh=mesh["shard"])')


def test_model_sharded_where_every_rank_is_a_replica() -> None:
    def fn(rank: int) -> None:
        build(fully_shard(net(), mesh=init_device_mesh("cpu", (2,))))  # mesh= forgotten

    for rank, message in enumerate(on_every_rank(fn)):
        says(message, "model must be sharded inside a replica only", f"ranks [{rank}]", "[0, 1]", "mesh[")


def test_model_not_sharded_though_replicas_have_several_ranks() -> None:
    for message in on_every_rank(lambda rank: build(mesh=mesh(1, 2))):
        says(message, "mesh gives each replica 2 ranks", "not distributed", "fully_shard", "(ranks, 1)")


def wrapped(kind: str, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 says that it is old
        model: nn.Module = net()
        if kind == "DistributedDataParallel":
            model = DistributedDataParallel(model)
        elif kind == "FullyShardedDataParallel":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:  # inside
            model = nn.Sequential(DistributedDataParallel(model))
    build(model)


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FullyShardedDataParallel", "inside"])
def test_wrapped_model(kind: str) -> None:
    name = "DistributedDataParallel" if kind == "inside" else kind
    for message in on_every_rank(partial(wrapped, kind), run=processes):
        says(message, f"model must not be wrapped by {name}", "bare module", "fully_shard(")


@pytest.mark.parametrize(
    "give", [Net.parameters, lambda m: list(m.parameters()), Net.state_dict, lambda m: None]
)
def test_parameters_instead_of_the_module(give: Callable[[Net], Any]) -> None:
    what = give(net())
    for message in on_every_rank(lambda rank: edit.LocalSGDOptimizer(what, lr=0.1, timeout=LIMIT)):
        says(
            message, "model must be the nn.Module itself", type(what).__name__, "LocalSGDOptimizer(model, lr="
        )


class Odd(nn.Module):
    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        for name, value in parameters.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Odd(z=nn.Parameter(torch.zeros(2, dtype=torch.cfloat))), ("real floating point", "z", "complex64", "view_as_real")),
        (lambda: Odd(emb=nn.Embedding(3, 2, sparse=True)), ("sparse gradients", "emb", "sparse=False")),
        (lambda: Odd(bag=nn.EmbeddingBag(3, 2, sparse=True, mode="sum")), ("sparse gradients", "bag", "sparse=False")),
        (lambda: Odd(late=nn.Linear(2, 2, device="meta")), ("late.weight", "meta device", "materialise")),
        (lambda: nn.ReLU(), ("model has no trainable parameters", "requires_grad")),
        (lambda: net().requires_grad_(False), ("model has no trainable parameters", "requires_grad")),
    ],
    ids=["complex", "sparse", "sparse-bag", "meta", "empty", "frozen"],
)  # fmt: skip
def test_parameters_that_cannot_be_synchronised(
    make: Callable[[], nn.Module], words: tuple[str, ...]
) -> None:
    for message in on_every_rank(lambda rank: build(make())):
        says(message, "model", *words)


def test_frozen_complex_parameters_are_allowed() -> None:
    z = nn.Parameter(torch.zeros(2, dtype=torch.cfloat), requires_grad=False)
    assert threads(2, lambda rank: build(Odd(z=z)).replicas.count) == [2, 2]


class Lookup(nn.Module):
    """Makes a sparse gradient that no module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, 2))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, self.table, sparse=True)


def test_sparse_gradient_of_a_function_in_the_warm_up() -> None:
    def fn(rank: int) -> None:
        model = Lookup()
        optimizer = build(model, inner=torch.optim.SGD, schedule=edit.EverySteps(1, warmup_steps=2))
        model(torch.tensor([rank])).sum().backward()
        del optimizer  # until here: gradients are averaged as long as it is there

    for message in on_every_rank(fn):
        says(message, "table", "sparse")


# ----------------------------------------------------------------------------------------------- inner


def test_inner_of_foreign_parameters() -> None:
    def fn(rank: int) -> None:
        edit.LocalSGDOptimizer(net(), torch.optim.AdamW(net().parameters()), timeout=LIMIT)

    for message in on_every_rank(fn):
        says(message, "inner must hold the model's parameters", "12 of its", "(3,)", "shard the model before")


def test_inner_built_before_sharding() -> None:
    def fn(rank: int) -> None:
        grid = mesh(1, 2)
        model = net()
        inner = torch.optim.AdamW(model.parameters())
        edit.LocalSGDOptimizer(fully_shard(model, mesh=grid["shard"]), inner, mesh=grid, timeout=LIMIT)

    for message in on_every_rank(fn):
        says(message, "inner must hold the model's parameters", "shard the model before building it")


def test_inner_of_some_parameters_only() -> None:
    def fn(rank: int) -> None:
        model = net()
        edit.LocalSGDOptimizer(model, torch.optim.AdamW(model.blocks.parameters()), timeout=LIMIT)

    for message in on_every_rank(fn):
        says(message, "inner must hold all trainable parameters", "up.weight", "requires_grad=False")


def test_keywords_for_an_inner_that_is_already_built() -> None:
    def fn(rank: int) -> None:
        model = net()
        edit.LocalSGDOptimizer(model, torch.optim.AdamW(model.parameters()), lr=0.1, timeout=LIMIT)

    for message in on_every_rank(fn):
        says(message, "['lr']", "already built", "where it is built")


# ------------------------------------------------------------------------------------ ranks that differ


def differing(what: str, rank: int) -> None:
    last = rank == 1
    if what == "schedule":
        build(schedule=edit.EverySteps(4 if last else 3))
    elif what == "warm-up":
        build(schedule=edit.EverySteps(3, warmup_steps=2 if last else 0))
    elif what == "kind of schedule":
        build(schedule=edit.EverySeconds(3) if last else edit.EverySteps(3))
    elif what == "penalty":
        build(penalty=edit.PseudoGradientPenalty(temperature=2.0 if last else 1.0))
    elif what == "outer":
        build(outer=edit.Nesterov(lr=0.7 if last else 0.8))
    elif what == "prefetch":
        build(prefetch=2 if last else 1)
    elif what == "offload":
        build(offload="cpu" if last else None)
    elif what == "layers":
        model = net()
        build(model, layers=[model.head] if last else None)
    elif what == "depth":
        build(net(depth=3 if last else 2))
    elif what == "shape":
        build(net(width=8 if last else 7))
    elif what == "dtype":
        build(net(dtype=torch.float32 if last else torch.float64))
    elif what == "frozen":
        model = net()
        model.blocks[1].requires_grad_(not last)
        build(model)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("schedule", ("settings", "schedule", "interval=3", "interval=4")),
        ("warm-up", ("settings", "schedule", "warmup_steps=0", "warmup_steps=2")),
        ("kind of schedule", ("settings", "schedule", "EverySteps", "EverySeconds")),
        ("penalty", ("settings", "penalty", "temperature=1.0", "temperature=2.0")),
        ("outer", ("settings", "outer", "lr=0.8", "lr=0.7")),
        ("prefetch", ("settings", "prefetch is 1 on", "2 on")),
        ("offload", ("settings", "offload is None on", "cpu on")),
        ("layers", ("layers", "blocks.0")),
        ("depth", ("layers", "blocks.2", "None on rank 0")),
        ("shape", ("layers", "up.weight", "(7, 5)", "(8, 5)")),
        ("dtype", ("layers", "up.weight", "float64", "float32")),
        ("frozen", ("layers", "blocks.1", "None on rank 1")),
    ],
)
def test_ranks_that_differ(what: str, words: tuple[str, ...]) -> None:
    messages = on_every_rank(partial(differing, what), 3)
    assert len(set(messages)) == 1
    says(messages[0], "must be the same", "on rank 0", "on rank 1", "build the same model", *words)
    assert "rank 2" not in messages[0]


def test_shards_that_differ() -> None:
    """Compared with the rank that holds the same shard in replica 0, not with rank 0."""

    def fn(rank: int) -> None:
        grid = mesh(2, 2)
        build(fully_shard(net(width=8 if rank >= 2 else 7), mesh=grid["shard"]), mesh=grid)

    for message in on_every_rank(fn, 4):
        says(message, "layers must be the same", "on rank 0", "on rank 2", "up.weight")


@pytest.mark.parametrize("other", ["None", "transposed"])
def test_meshes_that_differ(other: str) -> None:
    """Who makes which process group hangs on the mesh: it must be compared before any is made."""

    def fn(rank: int) -> None:
        grid = mesh(2, 2)
        model = fully_shard(net(), mesh=grid["shard"])
        if rank == 3:
            build(model, mesh=None if other == "None" else mesh_of([[0, 2], [1, 3]]))
        build(model, mesh=grid)

    messages = on_every_rank(fn, 4)
    for rank, message in enumerate(messages):
        says(message, "mesh", *["rank 3"] * (rank != 3))


def mesh_of(ranks: list[list[int]]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("replicate", "shard"), _init_backend=False)


class Mine:
    """A schedule, written as a user would: without a ``repr``."""

    warmup_steps = 0

    def due(self, progress: edit.Progress) -> bool:
        return progress.steps >= 2


def my_outer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def test_policies_of_the_users_own_do_not_differ_by_their_address() -> None:
    """``repr`` of an object or a function holds its address, which is another one on every rank."""

    def fn(rank: int) -> tuple[int, bool]:
        model = net()
        address = [Mine() for _ in range(rank + 1)]  # noqa: F841 (another address for sure)
        outer = eval("lambda params: make(params)", {"make": my_outer})
        optimizer = build(model, schedule=Mine(), outer=outer)
        for step in range(4):
            train(model, optimizer, step, rank)
        optimizer.sync()
        return optimizer.rounds, bool(model.head.bias.isfinite().all())

    assert threads(2, fn) == [(3, True)] * 2  # two, and one to meet


# --------------------------------------------------------------------------------------- one rank alone


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"prefetch": -1}, "prefetch"),
        ({"inner": "adamw"}, "inner"),
        ({"intervall": 8}, "intervall"),
        ({"model": [1]}, "nn.Module"),
        ({"outer": lambda params: None}, "outer"),
        ({"layers": [nn.Linear(2, 2)]}, "layers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_error_on_one_rank_is_one_on_all(bad: dict[str, Any], word: str) -> None:
    messages = on_every_rank(lambda rank: build(**bad) if rank == 1 else build(), 3)
    says(messages[1], word)
    for other in (0, 2):
        says(messages[other], "failed on rank 1", word)


def test_a_mesh_that_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    def fn(rank: int) -> None:
        good, bad = mesh(2, 1), unnamed(("dp", "tp"))
        build(mesh=bad if rank == 1 else good)

    messages = on_every_rank(fn)
    says(messages[1], "mesh must have one dimension named 'replicate'")
    says(messages[0], "rank 1", "mesh")


class Broken(edit.PseudoGradientPenalty):
    def init(self, replicas: int, layers: int) -> dict[str, torch.Tensor]:
        if dist.get_rank() == 1:
            raise OSError("no room on this rank")
        return super().init(replicas, layers)


def test_a_policy_that_fails_on_one_rank_at_construction() -> None:
    def fn(rank: int) -> None:
        model = net()
        optimizer = build(model, penalty=Broken())
        train(model, optimizer, 0, rank)
        train(model, optimizer, 1, rank)

    messages = on_every_rank(fn)
    says(messages[1], "no room on this rank")
    says(messages[0], "rank 1", "no room on this rank")


def test_a_failed_construction_leaves_no_hooks() -> None:
    def fn(rank: int) -> int:
        model = net()
        assert caught(lambda: build(model, prefetch=-1 if rank == 1 else 1))
        hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
        optimizer = build(model)  # and the next attempt succeeds
        for step in range(2):
            train(model, optimizer, step, rank)
        return hooks

    assert threads(2, fn) == [0, 0]


# ------------------------------------------------------------------------------- after the construction


def change(what: str, model: Net) -> None:
    if what == "sharded":
        fully_shard(model, mesh=mesh(2, 1)["shard"])
    elif what == "cast":
        model.float()
    elif what == "moved":
        model.to("meta")
    elif what == "replaced":
        model.up.weight = nn.Parameter(model.up.weight.detach().clone())
    elif what == "resized":
        model.up.weight.data = torch.zeros(9, 5, dtype=torch.float64)
    elif what == "replaced module":
        model.up = nn.Linear(5, 7, dtype=torch.float64)


CHANGES = ["cast", "moved", "replaced", "resized", "replaced module"]


@pytest.mark.parametrize(
    ("what", "who"),
    [("sharded", "all ranks")] + [(what, who) for what in CHANGES for who in ("all ranks", "one rank")],
)
def test_model_changed_after_construction(what: str, who: str) -> None:
    def fn(rank: int) -> None:
        model = net()
        optimizer = build(model)
        train(model, optimizer, 0, rank)
        model(torch.zeros(1, 5, dtype=torch.float64))  # the round of step 0
        if who == "all ranks" or rank == 1:
            change(what, model)
        optimizer.step()
        optimizer.sync()

    messages = on_every_rank(fn)
    says(messages[1], "up.weight was replaced, sharded, cast or moved after LocalSGDOptimizer(...)")
    says(messages[1], "prepare the model first")
    says(messages[0], "up.weight" if who == "all ranks" else "replica [1] cannot take part")


def test_after_a_refused_round_every_call_says_why() -> None:
    def fn(rank: int) -> list[Error]:
        model = net()
        optimizer = build(model)
        train(model, optimizer, 0, rank)
        optimizer.sync()
        before = copy.deepcopy(optimizer.state_dict()["state"])
        change("replaced", model)
        assert caught(optimizer.sync)
        after = optimizer.state_dict()["state"]
        assert equal(before, after, but="edit_run")
        return [caught(call) for call in (optimizer.step, optimizer.sync, optimizer.refresh)]

    for errors in threads(2, fn):
        for error in errors:
            assert error is not None
            says(error[1], "can no longer be used", "up.weight was replaced")


@pytest.mark.parametrize("who", ["all ranks", "one rank"])
def test_parameter_that_began_to_train_after_construction(who: str) -> None:
    def fn(rank: int) -> None:
        model = net()
        model.head.requires_grad_(False)
        optimizer = build(model)
        train(model, optimizer, 0, rank)
        if who == "all ranks" or rank == 1:
            model.head.requires_grad_(True)
        train(model, optimizer, 1, rank)
        optimizer.sync()

    messages = on_every_rank(fn)
    says(messages[1], "head.weight began to train after LocalSGDOptimizer(...)", "refresh()")
    says(messages[0], "refresh()" if who == "all ranks" else "replica [1] cannot take part")


@pytest.mark.parametrize("call", ["refresh", "add_param_group"])
def test_between_rounds_the_cut_cannot_change(call: str) -> None:
    def fn(rank: int) -> None:
        model = net()
        optimizer = build(model, schedule=edit.EverySteps(10))
        train(model, optimizer, 0, rank)
        optimizer.refresh() if call == "refresh" else optimizer.add_param_group({"params": []})

    for message in on_every_rank(fn):
        says(message, f"{call}()", "must be called at a round boundary", "1 steps", "call sync() first")


def test_refresh_between_rounds_of_one_replica_only() -> None:
    def fn(rank: int) -> None:
        model = net()
        optimizer = build(model, schedule=edit.EverySteps(10))
        if rank == 1:
            train(model, optimizer, 0, rank)
        optimizer.refresh()

    messages = on_every_rank(fn)
    says(messages[1], "refresh() must be called at a round boundary", "call sync() first")
    says(messages[0], "refresh()", "rank 1")


@pytest.mark.parametrize("foreign", [{0, 1}, {1}])
def test_add_param_group_of_foreign_parameters_changes_nothing(foreign: set[int]) -> None:
    """On no rank, whoever gave them."""

    def fn(rank: int) -> int:
        model = net()
        model.blocks[0].requires_grad_(False)
        optimizer = build(model)
        model.blocks[0].requires_grad_(True)
        given = nn.Linear(2, 2) if rank in foreign else model.blocks[0]
        error = caught(lambda: optimizer.add_param_group({"params": given.parameters()}))
        assert error is not None
        says(error[1], "inner must hold the model's parameters", "(2, 2)")
        model.blocks[0].requires_grad_(False)
        assert len(optimizer.param_groups) == 1
        train(model, optimizer, 0, rank)
        optimizer.sync()
        return optimizer.rounds

    assert all(rounds >= 1 for rounds in threads(2, fn))


# ------------------------------------------------------------------------------- models that are not the same


class Named(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(IN, OUT) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x) for part in self.parts.values())


def not_the_same(kind: str, rank: int) -> nn.Module:
    model = seeded(Named("ba" if kind == "order" and rank else "ab"))
    if kind == "frozen" and rank:
        model.teacher = nn.Linear(2, 2).requires_grad_(False)
    elif kind == "buffer" and rank:
        model.register_buffer("seen", torch.zeros(3))
    elif kind == "shape of a buffer":
        model.register_buffer("seen", torch.zeros(3 + rank))
    return model


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("order", ("layers must be in the same order on all replicas", "['parts.a', 'parts.b']", "['parts.b', 'parts.a']")),
        ("frozen", ("parameters and buffers must be the same on all replicas", "teacher.weight is None on rank 0")),
        ("buffer", ("parameters and buffers must be the same on all replicas", "seen is None on rank 0")),
        ("shape of a buffer", ("parameters and buffers must be the same on all replicas", "(3,)", "(4,)")),
    ],
)  # fmt: skip
def test_models_that_are_not_the_same(kind: str, words: tuple[str, ...]) -> None:
    for message in on_every_rank(lambda rank: build(not_the_same(kind, rank))):
        says(message, *words)


def test_a_buffer_that_grows() -> None:
    def fn(rank: int) -> None:
        model = seeded(Named("ab"))
        model.register_buffer("seen", torch.zeros(1))
        optimizer = build(model)
        model.seen = torch.cat([model.seen, torch.ones(1)])
        train(model, optimizer, 0, rank)
        optimizer.sync()

    for message in on_every_rank(fn):
        says(message, "round 1: the buffer seen was resized", "persistent=False")


# ---------------------------------------------------------------------------- at the wrong time or place


def test_step_inside_consensus() -> None:
    def fn(rank: int) -> list[bool]:
        model = net()
        optimizer = build(model, schedule=edit.EverySteps(10))
        train(model, optimizer, 0, rank)
        live = [p.detach().clone() for p in model.parameters()]
        state = copy.deepcopy(optimizer.state_dict()["state"])
        with optimizer.consensus():
            for call in (
                optimizer.step,
                lambda: optimizer.step(lambda: None),
                optimizer.sync,
                optimizer.refresh,
                lambda: optimizer.add_param_group({"params": []}),
                lambda: optimizer.load_state_dict({"state": state, "param_groups": []}),
            ):
                error = caught(call)
                assert error is not None
                says(error[1], "must not be called inside consensus()", "leave it first")
        after = optimizer.state_dict()["state"]
        assert equal(state, after)
        assert optimizer.local_steps == 1
        return [torch.equal(a, b) for a, b in zip(live, model.parameters(), strict=True)]

    for same in threads(2, fn):
        assert all(same)


def test_consensus_inside_consensus() -> None:
    model = net()
    optimizer = build(model, schedule=edit.EverySteps(10))
    train(model, optimizer, 0, 0)
    live = model.head.bias.detach().clone()
    with optimizer.consensus():
        with optimizer.consensus():
            pass
        with pytest.raises(RuntimeError, match="inside consensus"):
            optimizer.step()
    assert torch.equal(live, model.head.bias)
    optimizer.step()


def test_use_after_close() -> None:
    def fn(rank: int) -> None:
        model = net()
        optimizer = build(model)
        train(model, optimizer, 0, rank)
        state = optimizer.state_dict()
        optimizer.close()
        optimizer.close()
        for call in (
            optimizer.step,
            optimizer.sync,
            optimizer.refresh,
            lambda: optimizer.load_state_dict(state),
            lambda: optimizer.add_param_group({"params": []}),
        ):
            error = caught(call)
            assert error is not None
            says(error[1], "can no longer be used", "close() was called")
        model(torch.zeros(1, 5, dtype=torch.float64)).sum().backward()  # the model is as good as ever

    threads(2, fn)


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_peers_post_local_sgd_pickling_says_why_not(make: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError) as error:
        make(build())
    says(str(error.value), "LocalSGDOptimizer", "cannot be pickled or copied", "state_dict()", "load it")
