"""The state: what is saved, that saving changes nothing, and that a resumed run is bitwise the uninterrupted one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_map

import edit
from edit.comm import local
from problems import IN, OUT, Net, loss_of, net, seeded
from ranks import RankError, mesh, processes, threads

STEPS, INTERVAL, WARMUP = 9, 3, 2  # rounds are due after steps 5 and 8
PENALTY = edit.PseudoGradientPenalty(anomaly=edit.EMAZTest(warmup_rounds=1, threshold=0.5), max_norm=0.05)


class Clock:
    """Seconds that pass with the steps of one rank."""

    def __init__(self, per_step: float = 1.0, now: float = 0.0) -> None:
        self.per_step, self.now = per_step, now

    def __call__(self) -> float:
        return self.now


METHODS: dict[str, Callable[[Clock], dict[str, Any]]] = {
    "edit": lambda clock: edit.methods.edit(INTERVAL, WARMUP),
    "edit-tight": lambda clock: {**edit.methods.edit(INTERVAL, WARMUP), "penalty": PENALTY},
    "edit-offload": lambda clock: {
        **edit.methods.edit(INTERVAL, WARMUP),
        "penalty": PENALTY,
        "offload": "cpu",
    },
    "a_edit": lambda clock: {
        **edit.methods.a_edit(INTERVAL, WARMUP),
        "schedule": edit.EverySeconds(INTERVAL, WARMUP, clock),
        "penalty": PENALTY,
    },
    "diloco": lambda clock: edit.methods.diloco(INTERVAL),
    "post_local_sgd": lambda clock: edit.methods.post_local_sgd(INTERVAL, WARMUP),
    "heavy-ball": lambda clock: {"schedule": edit.EverySteps(INTERVAL), "outer": edit.HeavyBall()},
    "edit-late": lambda clock: {**edit.methods.edit(INTERVAL, WARMUP), "penalty": PENALTY, "delay": 2},
    "a_edit-late": lambda clock: {
        **edit.methods.a_edit(INTERVAL, WARMUP),
        "schedule": edit.EverySeconds(INTERVAL, WARMUP, clock),
        "delay": 1,
    },
    "co2": lambda clock: edit.methods.co2(INTERVAL),
    "co2_star": lambda clock: edit.methods.co2_star(INTERVAL),
    "outer-adam": lambda clock: {
        "schedule": edit.EverySteps(INTERVAL),
        "outer": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    },
}


class WithBuffers(nn.Module):
    """Statistics that differ between replicas, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(IN, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.up(x))))


def equal(a: Any, b: Any) -> bool:
    """Bitwise, at any depth."""
    if isinstance(a, DTensor):
        return isinstance(b, DTensor) and a.placements == b.placements and equal(a.to_local(), b.to_local())
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def snapshot(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def values(model: nn.Module) -> list[Tensor]:
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def sharded(model: Net, grid: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, mesh=grid["shard"])
    return fully_shard(model, mesh=grid["shard"])


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Run:
    """One rank's run: its model, optimizer and clock."""

    def __init__(self, rank: int, method: str, shards: int = 1, seed: int = 0, **kwargs: Any) -> None:
        replicas = kwargs.pop("replicas", 2)
        self.replica, self.member = divmod(rank, shards)
        self.grid = mesh(replicas, shards)
        self.clock = kwargs.pop("clock", None) or Clock()
        make = kwargs.pop("model", net)
        self.model = make(seed)
        if shards > 1:
            sharded(self.model, self.grid)
        settings = METHODS[method](self.clock) | kwargs
        self.optimizer = edit.LocalSGDOptimizer(self.model, mesh=self.grid, **({"lr": 0.05} | settings))
        self.reports: list[edit.RoundReport] = []
        self.optimizer.register_round_hook(self.reports.append)

    def train(self, steps: Any) -> None:
        for step in steps:
            loss_of(self.model, step, self.replica, self.member).backward()
            self.clock.now += self.clock.per_step
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def counters(self) -> tuple[int, ...]:
        o = self.optimizer
        return o.local_steps, o.rounds, o.total_steps

    def end(self) -> Any:
        """All replicas meet. Everything that must be as in another run."""
        self.optimizer.sync()
        state = self.optimizer.state_dict()
        return snapshot((values(self.model), list(self.model.buffers()), state, self.counters()))


# ---------------------------------------------------------------------------------------- what is saved


@pytest.mark.parametrize("shards", [1, 2])
def test_fault_8_and_9_what_a_state_holds(shards: int) -> None:
    """Anchor and outer state by parameter, like the parameter; detector of all replicas; counters; pending."""

    def fn(rank: int) -> None:
        run = Run(rank, "edit", shards)
        run.train(range(WARMUP + 2 * INTERVAL))
        state = run.optimizer.state_dict()["state"]
        params = run.optimizer.param_groups[0]["params"]
        layers = 3
        for index, param in enumerate(params):
            entry = state[index]
            for key in ("edit_anchor", "edit_outer.momentum_buffer"):
                assert type(entry[key]) is (DTensor if shards > 1 else Tensor)
                assert entry[key].shape == param.shape
                if shards > 1:
                    assert entry[key].placements == param.placements
                    assert entry[key].device_mesh == param.device_mesh
        first = state[0]
        for key in ("mean", "var", "count", "streak"):
            assert first[f"edit_penalty.{key}"].shape == (2, layers)
        assert (first["edit_penalty.count"] == 1).all()  # one round is done, the second is due
        _, local, steps, since, rounds, total, due, anchored, seconds, *_ = first["edit_run"].tolist()
        assert (local, steps, since, rounds, total, due, anchored, seconds) == (
            8,
            INTERVAL,
            0,
            1,
            10,
            1,
            1,
            0,
        )

    threads(2 * shards, fn)


@pytest.mark.parametrize("method", METHODS)
def test_the_keys_are_the_same_before_and_after_the_first_round(method: str) -> None:
    def fn(rank: int) -> None:
        run = Run(rank, method)
        loss_of(run.model, 0, 0).backward()
        fresh = run.optimizer.state_dict()["state"]
        run.optimizer.zero_grad()
        run.train(range(STEPS))
        after = run.optimizer.state_dict()["state"]
        own = {key: {name for name in after[key] if name.startswith("edit_")} for key in after}
        assert {key: set(entry) for key, entry in fresh.items()} == own
        for key, entry in fresh.items():
            for name, value in entry.items():
                assert type(value) is type(after[key][name])
                assert getattr(value, "shape", None) == getattr(after[key][name], "shape", None)
                assert getattr(value, "dtype", None) == getattr(after[key][name], "dtype", None)

    threads(2, fn)


def plain_values(tree: Any) -> bool:
    if isinstance(tree, dict):
        return all(isinstance(key, str | int) and plain_values(value) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return all(map(plain_values, tree))
    return tree is None or isinstance(tree, Tensor | bool | int | float | str)


@pytest.mark.parametrize("method", METHODS)
def test_a_state_is_tensors_and_plain_values(method: str) -> None:
    def fn(rank: int) -> None:
        run = Run(rank, method)
        run.train(range(STEPS - 1))
        saved = run.save()
        assert plain_values(saved)
        assert equal(through_a_file(saved), saved)

    threads(2, fn)


# ------------------------------------------------------------------------------- saving changes nothing


@pytest.mark.parametrize(
    ("method", "shards"),
    [("edit-tight", 1), ("edit-offload", 1), ("a_edit", 1), ("edit-tight", 2), ("a_edit", 2)],
)
def test_fault_5_saving_changes_nothing(method: str, shards: int) -> None:
    """Bitwise, with a save after every step, in every forward-backward and of one replica only; and it
    needs no other rank: the other replica trains on meanwhile, which in threads would be a deadlock."""

    def fn(rank: int, saving: bool) -> Any:
        run = Run(rank, method, shards)
        seen = []
        for step in range(STEPS):
            run.train([step])
            if saving and run.replica == 0 and (run.member == 0 or step % 2):  # one rank alone, too
                random = torch.get_rng_state()
                before = values(run.model), snapshot(run.optimizer.state_dict()), run.counters()
                torch.save(run.save(), io.BytesIO())
                assert equal(before, (values(run.model), run.optimizer.state_dict(), run.counters()))
                assert torch.equal(random, torch.get_rng_state())
            seen.append((values(run.model), run.counters()))
        return seen, run.end(), [(r.norms, r.weights, r.clip) for r in run.reports]

    assert equal(threads(2 * shards, fn, True), threads(2 * shards, fn, False))


def alone(rank: int, shards: int) -> Any:
    run = Run(rank, "edit-tight", shards)
    run.train(range(WARMUP + INTERVAL))  # due
    counts = []
    if rank == 0:
        for call in (
            run.optimizer.state_dict,
            lambda: torch.save(run.save(), io.BytesIO()),
            consensus_of(run),
        ):
            with CommDebugMode() as mode:
                call()
            counts.append(mode.get_total_counts())
    with CommDebugMode() as mode:
        run.optimizer.sync()
    return counts, mode.get_total_counts()


def consensus_of(run: Run) -> Callable[[], None]:
    def enter() -> None:
        with run.optimizer.consensus():
            pass

    return enter


@pytest.mark.parametrize("shards", [1, 2])
def test_fault_5_no_collective_in_saving_nor_in_consensus(shards: int) -> None:
    """On gloo: one rank saves, the others are somewhere else."""
    (counts, trained), *_ = processes(2 * shards, alone, shards)
    assert counts == [0, 0, 0]
    assert trained > 0


# -------------------------------------------------------------------------------------------- resuming


def course(rank: int, method: str, shards: int, at: Any = range(STEPS + 1), **kwargs: Any) -> Any:
    """Train; after each step ``at``, a fresh model and optimizer take over from what was saved; all end alike.

    Returns the steps after which the course of the resumed run was another one, and how many rounds there were.
    """
    run = Run(rank, method, shards, **kwargs)
    saved = []
    for step in range(STEPS):
        saved.append(snapshot(run.save()))
        run.train([step])
    saved.append(snapshot(run.save()))
    expected = run.end()
    run.optimizer.close()
    failed = []
    for step, state in ((step, saved[step]) for step in at):
        again = Run(rank, method, shards, seed=step + 1, clock=Clock(now=1000.0), **kwargs)
        again.load(through_a_file(state))
        assert equal(snapshot(again.save()), state)  # saved again at once, it is the same
        again.train(range(step, STEPS))
        if not equal(again.end(), expected):
            failed.append(step)
        again.optimizer.close()
    return failed, run.counters()[1]


@pytest.mark.parametrize("method", METHODS)
def test_fault_8_resume_after_any_step(method: str) -> None:
    """In the warm-up, in mid-round, with a round pending (after steps 5 and 8): bitwise the same run."""
    for failed, rounds in threads(2, course, method, 1):
        assert failed == []
        assert rounds >= 3


SOME = (1, 4, 5, 6)  # in the warm-up, in a round, with a round due, in the next round


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("edit-tight", SOME),
        ("a_edit", SOME),
        ("edit-offload", [5]),
        ("diloco", [3, 4]),
        ("post_local_sgd", [5]),
    ],
)
def test_fault_8_resume_after_any_step_fsdp2(method: str, at: Any) -> None:
    for failed, rounds in threads(4, course, method, 2, at, timeout=60):
        assert failed == []
        assert rounds >= 2


def test_fault_8_resume_after_any_step_with_buffers() -> None:
    def model(seed: int) -> nn.Module:
        return seeded(WithBuffers(), seed)

    for failed, _ in threads(2, partial(course, model=model), "edit-tight", 1):
        assert failed == []


def test_resume_after_any_step_in_bfloat16() -> None:
    """The fp32 anchor is more than the rounded parameters say."""

    def model(seed: int) -> nn.Module:
        return net(seed, dtype=torch.bfloat16)

    for failed, _ in threads(2, partial(course, model=model), "edit-tight", 1):
        assert failed == []


def test_resume_of_replicas_at_different_steps() -> None:
    """A-EDiT, one replica slower; each resumes from its own save of the same round."""

    def fn(rank: int) -> None:
        pace = [1.0, 0.5][rank]  # 3 and 6 steps a round
        run = Run(
            rank,
            "a_edit",
            clock=Clock(pace),
            schedule=None or edit.EverySeconds(3.0, 0, clock := Clock(pace)),
        )
        run.clock = clock
        per_round = [3, 6][rank]
        run.train(range(per_round + 1))  # one round applied, one step into the next
        assert run.optimizer.rounds == 1
        state = snapshot(run.save())
        run.train(range(per_round + 1, 3 * per_round + 2))
        expected = run.end()
        assert [r.steps.tolist() for r in run.reports][:3] == [[3, 6]] * 3

        clock = Clock(pace, now=500.0)
        again = Run(rank, "a_edit", clock=clock, seed=5, schedule=edit.EverySeconds(3.0, 0, clock))
        again.load(state)
        again.train(range(per_round + 1, 3 * per_round + 2))
        assert equal(again.end(), expected)

    threads(2, fn)


def test_states_of_different_rounds_are_refused_by_name() -> None:
    """Replica 0's state has a round more than replica 1's: no mixture, no hang, and nothing changes."""

    def fn(rank: int) -> list[Tensor]:
        run = Run(rank, "diloco")
        run.train(range(INTERVAL))
        states = [snapshot(run.save())]
        run.train(range(INTERVAL, INTERVAL + 1))
        states.append(snapshot(run.save()))
        again = Run(rank, "diloco", seed=1)
        again.load(states[1 - rank])
        before = values(again.model)
        with pytest.raises(
            edit.SyncError, match=r"anchor of replica \[1\] differs.*load the same optimizer state"
        ):
            again.optimizer.sync()
        assert equal(before, values(again.model))
        return before

    threads(2, fn)


@pytest.mark.parametrize("offload", [None, "replicas"])
def test_a_round_half_applied_is_resumed(offload: str | None) -> None:
    """An exception in the forward of a round leaves some layers new and some old; saved and resumed so."""

    class Stop(Exception):
        pass

    def fn(rank: int) -> None:
        def stop(*_: Any) -> None:
            raise Stop

        run = Run(rank, "edit-tight", prefetch=0, offload=offload)
        run.train(range(WARMUP + INTERVAL))
        handle = run.model.blocks[0].register_forward_hook(stop)
        with pytest.raises(Stop):
            loss_of(run.model, 0, 0)
        handle.remove()
        assert run.optimizer.rounds == 0
        state = snapshot(run.save())
        assert state["optimizer"]["state"][0]["edit_penalty.count"][0].tolist() == [1, 1, 0]
        run.train(range(WARMUP + INTERVAL, STEPS))
        expected = run.end()
        again = Run(rank, "edit-tight", seed=3, prefetch=0, offload=offload)
        again.load(state)
        again.train(range(WARMUP + INTERVAL, STEPS))
        assert equal(again.end(), expected)

    threads(2, fn)


def test_loading_into_a_run_under_way() -> None:
    """Not while a round is under way, which other replicas may not have begun; after ``sync()``, yes."""

    def fn(rank: int) -> None:
        run = Run(rank, "edit-tight")
        run.train(range(4))
        state = snapshot(run.save())
        run.train(range(4, STEPS))
        expected = run.end()
        for at in (5, 6, 8):
            run.load(snapshot(state))  # torch's load_state_dict keeps the inner tensors that it is given
            run.train(range(4, at))
            if at != 6:
                with pytest.raises(RuntimeError, match="while a round is under way"):
                    run.optimizer.load_state_dict(state["optimizer"])
            run.optimizer.sync()
            run.load(snapshot(state))
            run.train(range(4, STEPS))
            assert equal(run.end(), expected)

    threads(2, fn)


def test_peers_outer_momentum_survives() -> None:
    """Without the momentum the next round goes elsewhere; with it, the resumed one goes the same way."""

    def fn(rank: int) -> None:
        run = Run(rank, "diloco")
        run.train(range(2 * INTERVAL + 1))
        state = snapshot(run.save())
        momentum = [entry["edit_outer.momentum_buffer"] for entry in state["optimizer"]["state"].values()]
        assert all(m.any() for m in momentum)
        again = Run(rank, "diloco", seed=1)
        again.load(snapshot(state))
        (group,) = again.optimizer.outer_param_groups
        kept = again.optimizer.state_dict()["state"]
        assert equal([entry["edit_outer.momentum_buffer"] for entry in kept.values()], momentum)
        assert (group["lr"], group["momentum"]) == (0.7, 0.9)
        for m in momentum:
            m.zero_()
        without = Run(rank, "diloco", seed=1)
        without.load(state)
        for other in (run, again, without):
            other.optimizer.sync()
        assert equal(values(run.model), values(again.model))
        assert not equal(values(run.model), values(without.model))

    threads(2, fn)


def test_a_scheduled_outer_lr_survives() -> None:
    """As ``Optimizer.load_state_dict`` restores the inner lr: a scheduler's own state relies on it."""

    def fn(rank: int) -> None:
        run = Run(rank, "diloco")
        run.train(range(4))
        run.optimizer.outer_param_groups[0]["lr"] = 0.25
        again = Run(rank, "diloco", seed=1)
        again.load(snapshot(run.save()))
        assert again.optimizer.outer_param_groups[0]["lr"] == 0.25

    threads(2, fn)


def test_a_scheduled_outer_setting_that_was_an_int_survives() -> None:
    def fn(rank: int) -> None:
        outer = partial(torch.optim.SGD, lr=1)
        run = Run(rank, "diloco", outer=outer)
        run.train(range(4))
        (group,) = run.optimizer.outer_param_groups
        group["lr"] = 0.5
        again = Run(rank, "diloco", seed=1, outer=outer)
        again.load(snapshot(run.save()))
        (group,) = again.optimizer.outer_param_groups
        assert (group["lr"], group["momentum"]) == (0.5, 0)
        assert type(group["momentum"]) is int

    threads(2, fn)


def test_every_group_of_the_outer_optimizer_survives() -> None:
    def outer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
        return torch.optim.SGD(groups, lr=0.7, momentum=0.9, nesterov=True)

    def fn(rank: int) -> None:
        run = Run(rank, "diloco", outer=outer)
        run.train(range(4))
        for group, (lr, momentum) in zip(
            run.optimizer.outer_param_groups, ((0.25, 0.8), (0.1, 0.6)), strict=True
        ):
            group.update(lr=lr, momentum=momentum)
        again = Run(rank, "diloco", seed=1, outer=outer)
        again.load(snapshot(run.save()))
        numbers = [(group["lr"], group["momentum"]) for group in again.optimizer.outer_param_groups]
        assert numbers == [(0.25, 0.8), (0.1, 0.6)]
        for other in (run, again):
            other.train(range(4, 12))
        assert equal(values(run.model), values(again.model))

    threads(2, fn)


def test_peers_the_last_detector_is_that_of_all_replicas() -> None:
    """A state of any rank holds the statistics of every replica: loaded everywhere, the verdicts stay."""

    def fn(rank: int) -> Any:
        run = Run(rank, "edit-tight")
        run.train(range(STEPS))
        state = run.optimizer.state_dict()["state"][0]
        return {key: state[key].clone() for key in state if key.startswith("edit_penalty")}

    first, second = threads(2, fn)
    assert equal(first, second)
    assert (first["edit_penalty.mean"] > 0).all()
    assert not equal(first["edit_penalty.mean"][0], first["edit_penalty.mean"][1])


# ------------------------------------------------------------------------ files, and processes of their own


def saves(rank: int, shards: int, folder: str) -> Any:
    run = Run(rank, "edit-tight", shards)
    for step in range(STEPS):
        if step in (4, 5):  # in mid-round; with a round pending
            torch.save(run.save(), Path(folder, f"{step}-{rank}"))
        run.train([step])
    ended = run.end()
    return tree_map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, ended)


def resumes(rank: int, shards: int, folder: str) -> Any:
    ends = []
    for step in (4, 5):
        run = Run(rank, "edit-tight", shards, seed=9)
        run.load(torch.load(Path(folder, f"{step}-{rank}"), weights_only=True))
        run.train(range(step, STEPS))
        ends.append(tree_map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, run.end()))
        run.optimizer.close()
    return ends


@pytest.mark.parametrize("shards", [1, 2])
def test_fault_8_resume_in_fresh_processes(shards: int, tmp_path: Path) -> None:
    ended = processes(2 * shards, saves, shards, str(tmp_path))
    for rank, ends in enumerate(processes(2 * shards, resumes, shards, str(tmp_path))):
        for end in ends:
            assert equal(end, ended[rank])


# ------------------------------------------------------------------------------------------- other states


@pytest.mark.parametrize("what", ["edit_anchor", "edit_outer.momentum_buffer", "missing anchor", "model"])
def test_a_state_that_does_not_fit_changes_nothing(what: str) -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "edit-tight")
        run.train(range(STEPS - 1))  # due
        good = snapshot(run.optimizer.state_dict())
        last = max(good["state"])
        bad = copy.deepcopy(good)
        for entry in bad["state"].values():  # what would be noticed
            entry["exp_avg"].add_(1)
        bad["param_groups"][0]["lr"] = 0.9
        if what.startswith("edit_"):
            bad["state"][last][what] = torch.zeros(3, 2, 1, dtype=torch.float64)
            word, shape = "head.bias", "(3, 2, 1)"
        elif what == "missing anchor":
            del bad["state"][last]["edit_anchor"]
            word, shape = "head.bias", "(3,)"
        else:
            other = edit.LocalSGDOptimizer(
                net(width=8), mesh=run.grid, lr=0.05, **METHODS["edit-tight"](Clock())
            )
            bad, word, shape = other.state_dict(), "up.weight", "(8, 5)"
        before = values(run.model), snapshot(run.optimizer.state_dict()), run.counters()
        with pytest.raises(ValueError, match="nothing was loaded") as error:
            run.optimizer.load_state_dict(bad)
        assert word in str(error.value)
        assert shape in str(error.value)
        assert equal(before, (values(run.model), run.optimizer.state_dict(), run.counters()))
        assert run.optimizer.param_groups[0]["lr"] == 0.05
        run.train(range(STEPS - 1, STEPS))  # the round that was due is applied
        assert run.optimizer.rounds == 2

    threads(2, fn)


def test_a_state_of_other_buffers_changes_nothing() -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "diloco", model=lambda seed: seeded(WithBuffers(), seed))
        run.train(range(4))
        bad = snapshot(run.optimizer.state_dict())
        bad["state"][0]["edit_buffer.norm.running_mean"] = torch.zeros(9)
        bad["state"][0]["exp_avg"].add_(1)
        before = snapshot(run.optimizer.state_dict()), run.counters()
        with pytest.raises(ValueError, match=r"norm\.running_mean.*\(9,\).*nothing was loaded"):
            run.optimizer.load_state_dict(bad)
        assert equal(before, (run.optimizer.state_dict(), run.counters()))

    threads(2, fn)


def test_a_state_of_other_parameters_is_refused() -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "diloco")
        run.train(range(4))
        before = values(run.model), snapshot(run.optimizer.state_dict()), run.counters()
        more = Run(rank, "diloco", model=lambda seed: net(seed, depth=3))
        with pytest.raises(ValueError, match=r"12 parameters, but has 16: .*nothing was loaded"):
            run.optimizer.load_state_dict(more.optimizer.state_dict())
        assert equal(before, (values(run.model), run.optimizer.state_dict(), run.counters()))

    threads(2, fn)


@pytest.mark.parametrize(
    ("old", "new"), [("post_local_sgd", "diloco"), ("diloco", "outer-adam"), ("diloco", "post_local_sgd")]
)
def test_a_state_of_another_outer_optimizer(old: str, new: str) -> None:
    """A run that goes on with another outer optimizer keeps anchor and counters, and its outer state is new;
    or it is refused with nothing changed. It is not half loaded."""

    def fn(rank: int) -> None:
        run = Run(rank, old)
        run.train(range(STEPS - 1))
        state = snapshot(run.save())
        again = Run(rank, new, seed=1)
        again.model.load_state_dict(state["model"])
        before = snapshot(again.optimizer.state_dict()), again.counters()
        try:
            again.optimizer.load_state_dict(state["optimizer"])
            refusal = None
        except ValueError as error:
            refusal = str(error)
        if refusal is not None:
            assert "nothing was loaded" in refusal
            assert equal(before, (again.optimizer.state_dict(), again.counters()))
            return
        anchors = [entry["edit_anchor"] for entry in state["optimizer"]["state"].values()]
        now = [entry["edit_anchor"] for entry in again.optimizer.state_dict()["state"].values()]
        assert equal(anchors, now)
        assert again.counters() == run.counters()
        again.train(range(STEPS - 1, STEPS))
        again.optimizer.sync()

    threads(2, fn)


def test_a_state_of_another_cut_keeps_anchor_and_momentum() -> None:
    """The cut into layers is no property of the state: only the detector, which is by layer, starts afresh."""

    def fn(rank: int) -> None:
        run = Run(rank, "edit-tight")
        run.train(range(STEPS - 1))
        saved = snapshot(run.save())
        for chosen in (["up", "head", "blocks.0", "blocks.1"], ["up"], ["blocks.0"], []):
            model = net(4)
            layers = [model.get_submodule(name) for name in chosen]
            settings = METHODS["edit-tight"](Clock()) | {"layers": layers}
            optimizer = edit.LocalSGDOptimizer(model, mesh=run.grid, lr=0.05, **settings)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            state = optimizer.state_dict()["state"]
            for key, entry in saved["optimizer"]["state"].items():
                for name in ("edit_anchor", "edit_outer.momentum_buffer", "exp_avg"):
                    assert equal(state[key][name], entry[name])
            assert (optimizer.local_steps, optimizer.rounds, optimizer.total_steps) == run.counters()
            optimizer.sync()
            assert optimizer.rounds > run.optimizer.rounds
            optimizer.close()

    threads(2, fn)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_state_of_the_inner_optimizer_loads(shards: int) -> None:
    """Training goes on where a plain AdamW stopped: its moments, and the model as it is for an anchor."""

    def fn(rank: int) -> Any:
        base = net(7)
        grid = mesh(2, shards)
        if shards > 1:
            sharded(base, grid)
        adam = torch.optim.AdamW(base.parameters(), lr=0.02, weight_decay=0.3)
        for step in range(3):
            loss_of(base, step, 0).backward()  # the same on all replicas, as DDP's
            adam.step()
            adam.zero_grad()
        run = Run(rank, "diloco", shards)
        run.load({"model": base.state_dict(), "optimizer": adam.state_dict()})
        group = run.optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.02, 0.3)
        assert run.counters() == (0, 0, 0)
        for a, b in zip(base.parameters(), run.model.parameters(), strict=True):
            assert equal(adam.state[a], run.optimizer.state[b])
        run.train(range(3, 3 + INTERVAL + 1))
        assert run.optimizer.rounds == 1
        first = run.reports[0]
        assert (first.norms > 0).all()
        run.optimizer.sync()
        return values(run.model)

    results = threads(2 * shards, fn)
    for member in range(shards):
        assert equal(results[member], results[shards + member])


def test_the_inner_optimizer_loads_our_state() -> None:
    """Back to plain AdamW: it ignores entries that it does not know."""
    model = net()
    optimizer = edit.LocalSGDOptimizer(model, lr=0.05, schedule=edit.EverySteps(10**6))
    adam_model = net()
    adam = torch.optim.AdamW(adam_model.parameters(), lr=0.05)
    for step in range(3):
        for m, o in ((model, optimizer), (adam_model, adam)):
            loss_of(m, step, 0).backward()
            o.step()
            o.zero_grad()
    fresh_model = net()
    fresh_model.load_state_dict(model.state_dict())
    fresh = torch.optim.AdamW(fresh_model.parameters())
    fresh.load_state_dict(optimizer.state_dict())
    for m, o in ((fresh_model, fresh), (adam_model, adam)):
        loss_of(m, 3, 0).backward()
        o.step()
    assert equal(values(fresh_model), values(adam_model))


# ------------------------------------------------------------------------------------------- consensus


def models(seed: int, buffers: bool) -> nn.Module:
    return seeded(WithBuffers(), seed) if buffers else net(seed)


@pytest.mark.parametrize(
    ("method", "shards", "buffers"),
    [("edit-tight", 1, False), ("edit-tight", 1, True), ("edit-offload", 1, True), ("edit-tight", 2, False)],
)
def test_consensus(method: str, shards: int, buffers: bool) -> None:
    """Equal on all replicas, the anchor's, alone on one rank's replica, and exactly undone."""

    def fn(rank: int) -> Any:
        run = Run(rank, method, shards, model=partial(models, buffers=buffers))
        run.train(range(WARMUP + INTERVAL + 2))  # in mid-round
        live = snapshot((values(run.model), list(run.model.buffers()), run.optimizer.state_dict()))
        with run.optimizer.consensus() as model:
            assert model is run.model
            inside = snapshot((values(model), list(model.buffers())))
            anchor = [entry["edit_anchor"] for entry in run.optimizer.state_dict()["state"].values()]
            anchor = [a.to_local() if isinstance(a, DTensor) else a for a in anchor]
            assert equal(inside[0], snapshot(anchor))
            model.eval()
            with torch.no_grad():
                result = loss_of(model, 100, 0)
            model.train()
            if not buffers:
                loss_of(model, 100, 0).backward()  # with gradients too
        run.optimizer.zero_grad()
        assert equal(live, (values(run.model), list(run.model.buffers()), run.optimizer.state_dict()))
        with pytest.raises(ZeroDivisionError), run.optimizer.consensus():
            raise ZeroDivisionError
        assert equal(live, (values(run.model), list(run.model.buffers()), run.optimizer.state_dict()))
        run.train(range(WARMUP + INTERVAL + 2, STEPS))
        return inside, result, run.end(), live[0]

    def without(rank: int) -> Any:
        run = Run(rank, method, shards, model=partial(models, buffers=buffers))
        run.train(range(STEPS))
        return run.end()

    results = threads(2 * shards, fn)
    for member in range(shards):
        (inside_0, result_0, _, live_0), (inside_1, result_1, _, live_1) = (
            results[member],
            results[shards + member],
        )
        assert equal(inside_0, inside_1)
        assert torch.equal(result_0, result_1)
        assert not equal(live_0, live_1)
    assert equal([end for _, _, end, _ in results], threads(2 * shards, without))


def test_consensus_right_after_a_due_step_is_the_previous_rounds() -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "diloco")
        start = values(run.model)
        run.train(range(INTERVAL))  # due
        with run.optimizer.consensus():
            assert equal(values(run.model), start)
        assert run.optimizer.rounds == 0
        run.optimizer.sync()
        met = values(run.model)
        assert not equal(met, start)
        with run.optimizer.consensus():
            assert equal(values(run.model), met)
        run.train(range(INTERVAL, 2 * INTERVAL))  # due again, momentum and all
        with run.optimizer.consensus():
            assert equal(values(run.model), met)

    threads(2, fn)


def test_consensus_in_the_warm_up_is_the_model() -> None:
    def fn(rank: int) -> Any:
        run = Run(rank, "edit")
        run.train(range(WARMUP - 1))
        live = values(run.model)
        with run.optimizer.consensus():
            assert equal(values(run.model), live)
        run.train([WARMUP - 1])
        with run.optimizer.consensus():  # the anchor is about to be taken
            return values(run.model)

    assert equal(*threads(2, fn))


@pytest.mark.parametrize("shards", [1, 2])
def test_trap_9_one_replica_evaluates_the_consensus_alone(shards: int) -> None:
    """With a round due, while the other replica is somewhere else: in threads a collective would deadlock."""

    def fn(rank: int) -> Any:
        run = Run(rank, "edit-tight", shards)
        run.train(range(WARMUP + INTERVAL))
        if run.replica == 0:
            with run.optimizer.consensus(), torch.no_grad():
                loss_of(run.model, 100, 0)
            with torch.no_grad():
                loss_of(run.model, 100, 0)
        assert run.optimizer.rounds == 0
        run.train(range(WARMUP + INTERVAL, STEPS))
        return run.end()

    def without(rank: int) -> Any:
        run = Run(rank, "edit-tight", shards)
        run.train(range(STEPS))
        return run.end()

    assert equal(threads(2 * shards, fn), threads(2 * shards, without))


# --------------------------------------------------------------------------------------------- refresh


def of(run: Run, name: str) -> dict[str, Any]:
    """The saved entries of one parameter."""
    names = {param: key for key, param in run.model.named_parameters()}
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    index = next(number for number, param in enumerate(params) if names[param] == name)
    return snapshot(run.optimizer.state_dict()["state"][index])


def kept(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(
        equal(before[key], after[key]) for key in before if key.startswith(("edit_anchor", "edit_outer."))
    )


@pytest.mark.parametrize(
    ("method", "shards"), [("diloco", 1), ("edit-offload", 1), ("outer-adam", 1), ("diloco", 2)]
)
def test_refresh_after_freezing(method: str, shards: int) -> None:
    """Frozen: a whole layer and part of another. What still trains keeps anchor and outer state."""
    frozen = [
        "blocks.0.lin.weight",
        "blocks.0.lin.bias",
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
        "up.bias",
    ]

    def fn(rank: int) -> Any:
        run = Run(rank, method, shards)
        run.train(range(2 * INTERVAL))
        run.optimizer.sync()
        before = {name: of(run, name) for name, _ in run.model.named_parameters()}
        rest = [name for name in before if name not in frozen]
        for name in frozen:
            run.model.get_parameter(name).requires_grad_(False)
        run.optimizer.refresh()
        assert all(kept(before[name], of(run, name)) for name in rest), [
            n for n in rest if not kept(before[n], of(run, n))
        ]
        still = {name: values(run.model)[number] for number, name in enumerate(before) if name in frozen}
        run.train(range(2 * INTERVAL, 3 * INTERVAL))
        run.optimizer.sync()
        assert run.reports[-1].layers == ["(root)", "blocks.1"]
        now = dict(zip(before, values(run.model), strict=True))
        assert all(torch.equal(now[name], still[name]) for name in frozen)
        return values(run.model)

    results = threads(2 * shards, fn)
    for member in range(shards):
        assert equal(results[member], results[shards + member])


@pytest.mark.parametrize(
    ("method", "shards"), [("diloco", 1), ("edit-offload", 1), ("outer-adam", 1), ("diloco", 2)]
)
@pytest.mark.parametrize("late", ["blocks.0", "up.bias"])  # a layer of its own; one among others of a layer
def test_refresh_after_unfreezing(late: str, method: str, shards: int) -> None:
    """What trained before keeps anchor and outer state; what begins to train starts from replica 0's values."""

    def is_late(name: str) -> bool:
        return name.startswith(late)

    def fn(rank: int) -> Any:
        def make(seed: int) -> Net:
            model = net(seed)
            for name, param in model.named_parameters():
                param.requires_grad_(not is_late(name))
            return model

        run = Run(rank, method, shards, model=make)
        run.train(range(2 * INTERVAL))
        run.optimizer.sync()
        names = [name for name, _ in run.model.named_parameters()]
        before = {name: of(run, name) for name in names if not is_late(name)}
        new = [param for name, param in run.model.named_parameters() if is_late(name)]
        with torch.no_grad():
            start = snapshot([p.to_local() if isinstance(p, DTensor) else p for p in new])
            for param in new:
                param.add_(run.replica)  # as somebody's initialisation per rank
        for param in new:
            param.requires_grad_(True)
        run.optimizer.add_param_group({"params": new, "lr": 0.01})
        lost = [name for name in before if not kept(before[name], of(run, name))]
        now = [p.to_local() if isinstance(p, DTensor) else p for p in new]
        moved = not equal(snapshot(now), start)
        run.train(range(2 * INTERVAL, 3 * INTERVAL))
        run.optimizer.sync()
        return lost, moved, values(run.model)

    results = threads(2 * shards, fn)
    for lost, moved, _ in results:
        assert not moved
        assert lost == []
    for member in range(shards):
        assert equal(results[member][2], results[shards + member][2])


def test_refresh_that_changes_nothing_changes_nothing() -> None:
    """Also before the first round, whose outer optimizer has made no step yet, and in the warm-up."""

    def fn(rank: int, method: str, at: tuple[int, ...]) -> Any:
        run = Run(rank, method)
        for step in range(STEPS):
            if step in (0, 1, 2, 6):
                run.optimizer.sync()
            if step in at:
                run.optimizer.refresh()
            run.train([step])
        return run.end()

    for method in ("edit-tight", "edit-offload", "outer-adam"):
        whole = threads(2, fn, method, ())
        for at in ((0,), (1,), (2, 6)):
            assert equal(threads(2, fn, method, at), whole), (method, at)


def test_refresh_keeps_the_detector_of_layers_that_stay() -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "edit-tight")
        run.train(range(STEPS))
        run.optimizer.sync()
        before = of(run, "up.weight")
        run.model.blocks[0].requires_grad_(False)
        run.optimizer.refresh()
        after = of(run, "up.weight")
        for key in ("mean", "var", "count", "streak"):
            was, now = before[f"edit_penalty.{key}"], after[f"edit_penalty.{key}"]
            assert equal(now, was[:, [0, 2]])

    threads(2, fn)


def test_refresh_keeps_a_scheduled_outer_lr() -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "diloco")
        run.train(range(INTERVAL))
        run.optimizer.sync()
        run.optimizer.outer_param_groups[0]["lr"] = 0.25
        run.optimizer.refresh()
        assert run.optimizer.outer_param_groups[0]["lr"] == 0.25

    threads(2, fn)


def test_refresh_that_ranks_do_not_mean_alike_changes_nothing() -> None:
    """All hear of it, and may train on, or call it again when they agree."""

    def fn(rank: int, wrong: bool, again: bool) -> Any:
        run = Run(rank, "edit-tight")
        run.train(range(INTERVAL))
        run.optimizer.sync()
        frozen = run.model.blocks[1].requires_grad_
        if wrong:
            frozen(rank == 1)
            with pytest.raises(ValueError, match="layers must be the same on all replicas"):
                run.optimizer.refresh()
            frozen(True)
        if again:
            frozen(False)
            run.optimizer.refresh()
        run.train(range(INTERVAL, 3 * INTERVAL))
        return run.end()

    for again in (False, True):
        assert equal(threads(2, fn, True, again), threads(2, fn, False, again))


def test_refresh_keeps_outer_groups_by_layer() -> None:
    """One group a layer; a layer goes, the others keep their settings and momentum."""

    def outer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [param]} for param in params], lr=0.7, momentum=0.9)

    def fn(rank: int) -> None:
        run = Run(rank, "diloco", outer=outer)
        run.train(range(INTERVAL))
        run.optimizer.sync()
        names = list(run.reports[-1].layers)
        for name, group in zip(names, run.optimizer.outer_param_groups, strict=True):
            group["lr"] = 0.1 * (1 + names.index(name))
        before = [of(run, key)["edit_outer.momentum_buffer"] for key in ("up.weight", "blocks.1.lin.weight")]
        run.model.blocks[0].requires_grad_(False)
        run.optimizer.refresh()
        after = [of(run, key)["edit_outer.momentum_buffer"] for key in ("up.weight", "blocks.1.lin.weight")]
        assert equal(before, after)
        left = [name for name in names if name != "blocks.0"]
        lrs = [group["lr"] for group in run.optimizer.outer_param_groups]
        assert lrs == [0.1 * (1 + names.index(name)) for name in left]

    threads(2, fn)


# ----------------------------------------------------------------------------------------------- close


def hooks_of(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        found += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if hasattr(module, "_get_fsdp_state"):
            group = module._get_fsdp_state()._fsdp_param_group
            found += [] if group is None or group._all_reduce_hook is None else [group._all_reduce_hook]
    for param in model.parameters():
        found += [
            *(param._post_accumulate_grad_hooks or {}).values(),
            *(param._backward_hooks or {}).values(),
        ]
    return found


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("steps", [1, 4, 5])  # in the warm-up; in a round; with one due
def test_close_removes_hooks_and_groups(steps: int, shards: int) -> None:
    def fn(rank: int) -> None:
        grid = mesh(2, shards)
        model = net() if shards == 1 else sharded(net(), grid)
        before, groups = hooks_of(model), group_count()
        optimizer = edit.LocalSGDOptimizer(model, mesh=grid, lr=0.05, schedule=edit.EverySteps(3, 2))
        assert len(hooks_of(model)) > len(before)
        assert group_count() > groups
        for step in range(steps):
            loss_of(model, step, rank // shards, rank % shards).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        assert hooks_of(model) == before
        assert group_count() == groups
        live = values(model)
        loss_of(model, 0, rank // shards, rank % shards).backward()  # with nothing of ours in between
        assert equal(live, values(model))

    threads(2 * shards, fn)


def group_count() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def one_after_another(rank: int, shards: int) -> int:
    grid = mesh(2, shards)
    for _ in range(4):
        model = net() if shards == 1 else sharded(net(), grid)
        optimizer = edit.LocalSGDOptimizer(model, mesh=grid, lr=0.05, timeout=timedelta(seconds=5))
        optimizer.close()
    return group_count()


@pytest.mark.parametrize("shards", [1, 2])
def test_after_close_comes_another_optimizer(shards: int) -> None:
    """On gloo: groups that take the names of destroyed ones would find their addresses, and hang."""
    results = processes(2 * shards, one_after_another, shards, timeout=30)
    assert results == [results[0]] * 2 * shards


def beside_a_group_of_the_users(rank: int) -> bool:
    dist.new_group([0, 1])  # ranks 0 and 1 have a group more than ranks 2 and 3
    model = net()
    optimizer = edit.LocalSGDOptimizer(
        model, lr=0.05, schedule=edit.EverySteps(1), timeout=timedelta(seconds=5)
    )
    for step in range(2):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.sync()
    return optimizer.rounds == 3


def test_groups_of_the_users_on_some_ranks_do_not_matter() -> None:
    assert processes(4, beside_a_group_of_the_users, timeout=30) == [True] * 4


def test_closing_one_optimizer_leaves_anothers_averages() -> None:
    """A unit of ``fully_shard`` has one hook."""

    def fn(rank: int) -> list[Any]:
        grid = mesh(2, 1)
        model = sharded(net(), grid)
        old = edit.LocalSGDOptimizer(model, mesh=grid, lr=0.05, schedule=edit.EverySteps(3, 5))
        new = edit.LocalSGDOptimizer(model, mesh=grid, lr=0.05, schedule=edit.EverySteps(3, 5))
        old.close()
        loss_of(model, 0, rank).backward()
        both = [local(param.grad).clone() for param in model.parameters()]
        new.close()
        model.zero_grad()
        loss_of(model, 0, rank).backward()
        return [both, [local(param.grad).clone() for param in model.parameters()]]

    (mine, alone), (theirs, other) = threads(2, fn)
    assert equal(mine, theirs)
    torch.testing.assert_close(mine, [(a + b) / 2 for a, b in zip(alone, other, strict=True)])


def test_what_is_refused_leaves_no_groups() -> None:
    def fn(rank: int) -> None:
        before = group_count()
        for wrong in ({"timeout": timedelta(seconds=0.5)}, {"prefetch": -1}, {"lr": -1.0}):
            with pytest.raises(ValueError):
                edit.LocalSGDOptimizer(net(), **({"lr": 0.05} | wrong))
            assert group_count() == before, wrong

    threads(2, fn)


def test_refresh_leaves_no_old_groups() -> None:
    def fn(rank: int) -> None:
        run = Run(rank, "diloco")
        run.optimizer.refresh()  # makes the group of files, once
        before = group_count()
        for _ in range(3):
            run.optimizer.refresh()
        assert group_count() == before

    threads(2, fn)


def test_a_hang_would_be_noticed() -> None:
    """What the tests above rely on: in threads, a collective that one rank calls alone is an error."""

    def fn(rank: int) -> None:
        run = Run(rank, "diloco")
        if rank == 0:
            run.optimizer.sync()

    with pytest.raises(RankError, match="deadlock"):
        threads(2, fn)
