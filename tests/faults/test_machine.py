"""Random lives of a training run: 2-4 ranks through whatever users, data and machines may do to them.

A state machine makes up the life, one operation after the other, and knows which are allowed; then ranks live it,
each at its own pace. What must hold holds after every operation and every round; a hang is a failure.
``HYPOTHESIS_PROFILE=thorough`` lives a thousand lives.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import edit
import edit.optimizer
from edit.comm import local
from problems import OUT, Net, loss_of, seeded
from ranks import mesh, threads
from test_equivalence import lawful

STEPS = 25  # operations of a life
Values = list[Tensor]


class Adapted(Net):
    """With a parameter that begins to train later, and statistics that no gradient moves."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(OUT), requires_grad=False)
        self.norm = nn.BatchNorm1d(OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x) * self.gain)


@dataclass(frozen=True)
class Setting:
    """Of a life."""

    shape: tuple[int, int]
    interval: int
    warmup: int
    delay: int
    offload: str | None
    prefetch: int
    inner: str
    penalty: bool

    @property
    def spread(self) -> bool:
        return self.offload == "replicas"


@st.composite
def a_setting(draw: st.DrawFn) -> Setting:
    interval = draw(st.integers(1, 4))
    return Setting(
        shape=draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)])),
        interval=interval,
        warmup=draw(st.sampled_from([0, 0, 2])),
        delay=draw(st.one_of(st.just(0), st.integers(0, interval))),
        offload=draw(st.sampled_from([None, "cpu", "replicas"])),
        prefetch=draw(st.integers(0, 4)),
        inner=draw(st.sampled_from(["SGD", "AdamW"])),
        penalty=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Op:
    """One operation; replicas in sets do something of their own in it."""

    name: str
    step: int = 0
    skip: frozenset[int] = frozenset()  # as GradScaler does
    nan: frozenset[int] = frozenset()
    spike: frozenset[int] = frozenset()
    fails: frozenset[int] = frozenset()  # an exception in the forward, caught, and once more
    evaluates: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    block: int = 0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every life has its warnings."""
    logging.getLogger("edit").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("edit").setLevel(logging.NOTSET)


class Fails(Exception):
    pass


def fail(*_: Any) -> None:
    raise Fails


@dataclass
class Seen:
    """What all ranks saw, by what and rank; filled by threads, compared at the end."""

    values: dict[Any, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))

    def agree(self) -> None:
        for what, by_rank in self.values.items():
            first, *others = by_rank.values()
            for other in others:
                torch.testing.assert_close(
                    other, first, rtol=0, atol=0, msg=lambda m, what=what: f"{what}: {m}"
                )


class Life:
    """One rank's."""

    def __init__(self, rank: int, setting: Setting, seen: Seen) -> None:
        self.setting, self.seen, self.rank = setting, seen, rank
        self.replica, self.member = divmod(rank, setting.shape[1])
        self.grid = mesh(*setting.shape)
        self.frozen: set[int] = set()
        self.adapted = False
        self.steps = self.syncs = 0
        self.optimizer = self.build()

    def build(self) -> edit.LocalSGDOptimizer:
        setting = self.setting
        self.model = seeded(Adapted(), 3)
        self.model.gain.requires_grad_(self.adapted)
        if setting.shape[1] > 1:
            for block in self.model.blocks:
                fully_shard(block, mesh=self.grid["shard"])
            fully_shard(self.model, mesh=self.grid["shard"])
        gain = self.model.gain
        groups = [[p for p in self.model.parameters() if p is not gain], [gain]][: 1 + self.adapted]
        inner = getattr(torch.optim, setting.inner)([{"params": group} for group in groups], lr=0.02)
        for block in self.frozen:
            self.model.blocks[block].requires_grad_(False)
        test = edit.EMAZTest(alpha=0.3, threshold=2.0, warmup_rounds=2, patience=2)
        optimizer = edit.LocalSGDOptimizer(
            self.model,
            inner,
            mesh=self.grid,
            schedule=edit.EverySteps(setting.interval, setting.warmup),
            penalty=edit.PseudoGradientPenalty(test) if setting.penalty else None,
            offload=setting.offload,
            prefetch=setting.prefetch,
            delay=setting.delay,
        )
        optimizer.register_round_hook(self.after_round)
        return optimizer

    def trainable(self) -> Values:
        return [local(p).clone() for p in self.model.parameters() if p.requires_grad]

    def everything(self) -> Values:
        return [local(p).clone() for p in self.model.parameters()] + [b.clone() for b in self.model.buffers()]

    def after_round(self, report: edit.RoundReport) -> None:
        lawful(report)
        optimizer = self.optimizer
        assert report.round == optimizer.rounds
        common = [report.steps, report.total_steps, report.weights, report.out]
        self.seen.values["report", report.round][self.rank] = common
        flats = [flat.detach().clone() for flat in optimizer._anchor.flats]
        assert all(flat.isfinite().all() for flat in flats)
        if not self.setting.spread:
            self.seen.values["anchor", report.round, self.member][self.rank] = flats
        if not self.setting.delay:
            params = [local(p).clone() for layer in optimizer._layers for p in layer.params]
            self.seen.values["model", report.round, self.member][self.rank] = params

    # ------------------------------------------------------------------------------------------ operations

    def iterate(self, op: Op) -> None:
        model, me = self.model, self.replica
        if me in op.slow:
            time.sleep(0.003)
        if me in op.evaluates:
            model.eval()
            with torch.no_grad():
                loss_of(model, op.step, me, self.member)
            model.train()
        if me in op.fails:
            handle = model.blocks[op.block].register_forward_hook(fail)
            with pytest.raises(Fails):
                loss_of(model, op.step, me, self.member)
            handle.remove()
            if hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
        loss_of(model, op.step, me, self.member).backward()
        grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
        if me in op.nan and grads and grads[0].numel():
            grads[0].view(-1)[0] = float("nan")
        if me in op.spike:
            for grad in grads:
                grad.mul_(1e4)
        if me not in op.skip:
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad()
        assert self.optimizer.local_steps == self.steps

    def sync(self, op: Op) -> None:
        self.optimizer.sync()
        self.syncs += 1
        assert self.optimizer._round is None
        assert not self.optimizer._due
        if self.optimizer.local_steps >= self.setting.warmup:
            buffers = [b.clone() for b in self.model.buffers()]
            self.seen.values["sync", self.syncs, self.member][self.rank] = self.trainable() + buffers

    def save(self, op: Op) -> None:
        before = self.everything()
        saved = copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self.model.state_dict())
        torch.testing.assert_close(self.everything(), before, rtol=0, atol=0, equal_nan=True)
        assert saved[0].keys() == {"state", "param_groups"}

    def restart(self, op: Op) -> None:
        saved = copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self.model.state_dict())
        counters = self.optimizer.rounds, self.optimizer.total_steps
        before = self.everything()
        if self.optimizer._round is not None:
            self.optimizer._round.decide()  # else it leaves a collective of threads, which nothing can stop
        self.optimizer.close()
        self.optimizer = self.build()
        self.model.load_state_dict(saved[1])
        self.optimizer.load_state_dict(saved[0])
        assert (self.optimizer.rounds, self.optimizer.total_steps) == counters
        torch.testing.assert_close(self.everything(), before, rtol=0, atol=0, equal_nan=True)

    def consensus(self, op: Op) -> None:
        if self.replica not in op.evaluates:
            return
        before = self.everything()
        with self.optimizer.consensus():
            inside = self.trainable()
            if self.optimizer._anchor.taken and not self.setting.spread:
                anchors = [
                    part.clone()
                    for index, layer in enumerate(self.optimizer._layers)
                    for part in layer.parts(self.optimizer._anchor.fetch(index))
                ]
                key = [local(p).shape for layer in self.optimizer._layers for p in layer.params]
                assert [a.shape for a in anchors] == key
            assert all(value.isfinite().all() for value in inside)
        torch.testing.assert_close(self.everything(), before, rtol=0, atol=0, equal_nan=True)

    def copied(self, op: Op) -> None:
        """An average of the weights, as many keep one: its forward is nobody's round."""
        rounds, done = self.optimizer.rounds, getattr(self.optimizer._round, "done", None)
        twin = copy.deepcopy(self.model)
        if self.replica in op.evaluates:
            loss_of(twin, op.step, self.replica).backward()
        assert (self.optimizer.rounds, getattr(self.optimizer._round, "done", None)) == (rounds, done)

    def freeze(self, op: Op) -> None:
        self.sync(op)
        block = self.model.blocks[op.block]
        self.frozen ^= {op.block}
        block.requires_grad_(op.block not in self.frozen)
        self.optimizer.refresh()

    def adapt(self, op: Op) -> None:
        self.sync(op)
        self.adapted = True
        self.model.gain.requires_grad_(True)
        self.optimizer.add_param_group({"params": [self.model.gain]})


def live(rank: int, setting: Setting, ops: list[Op], seen: Seen) -> tuple[int, int, int]:
    life = Life(rank, setting, seen)
    for op in ops:
        getattr(life, op.name)(op)
    life.sync(Op("sync"))
    optimizer = life.optimizer
    assert optimizer._start is None
    assert not optimizer._gate.open
    counters = life.steps, optimizer.rounds, optimizer.total_steps
    optimizer.close()
    assert not any(module._forward_pre_hooks for module in life.model.modules() if setting.shape[1] == 1)
    return counters


@contextmanager
def rounds_counted() -> Iterator[weakref.WeakSet[Any]]:
    """All rounds that still exist."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def counted(kind: type) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            made = kind(*args, **kwargs)
            alive.add(made)
            return made

        return make

    with (
        mock.patch.object(edit.optimizer, "Round", counted(edit.optimizer.Round)),
        mock.patch.object(edit.optimizer, "SpreadRound", counted(edit.optimizer.SpreadRound)),
    ):
        yield alive


def lived(setting: Setting, ops: list[Op]) -> None:
    """Live it on ranks, and compare what they saw."""
    seen = Seen()
    replicas, members = setting.shape
    groups_before = threading.active_count()
    with rounds_counted() as alive:
        counters = threads(replicas * members, live, setting, ops, seen, timeout=20)
        gc.collect()  # tracebacks of exceptions
        assert len(alive) == 0, "rounds that somebody still holds"
    assert threading.active_count() <= groups_before
    seen.agree()
    steps = [counters[replica * members][0] for replica in range(replicas)]
    for rank, (own, rounds, total) in enumerate(counters):
        assert own == steps[rank // members]
        assert rounds == counters[0][1]
        assert total == sum(steps)


class Machine(RuleBasedStateMachine):
    """Makes up a life, and knows what is allowed in it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.step = 0
        self.setting: Setting | None = None
        self.since = [0]  # steps of each replica since they last met
        self.at_forward = [0]  # and as of their last forward
        self.adapted = False

    @initialize(setting=a_setting())
    def begin(self, setting: Setting) -> None:
        self.setting = setting
        self.since = self.at_forward = [0] * setting.shape[0]
        self.replicas = st.frozensets(st.integers(0, setting.shape[0] - 1))

    @property
    def warm(self) -> bool:
        return self.step < self.setting.warmup

    @property
    def in_step(self) -> bool:
        """All replicas have launched the same rounds, and their last forwards applied the same: else one that had skipped
        no step waits in its forward for what the others send in their next one (docs/faq.md: sync() first)."""
        return len(set(self.since)) == len(set(self.at_forward)) == 1

    def does(self, name: str, **kwargs: Any) -> None:
        self.ops.append(Op(name, self.step, **kwargs))

    @rule(data=st.data())
    def plain_step(self, data: st.DataObject) -> None:
        self.does("iterate", slow=data.draw(self.replicas))
        self.made_step()

    def made_step(self, skip: frozenset[int] = frozenset()) -> None:
        self.step += 1
        self.at_forward = self.since
        self.since = [n + (replica not in skip) for replica, n in enumerate(self.since)]

    @rule(data=st.data(), block=st.integers(0, 1))
    def strange_step(self, data: st.DataObject, block: int) -> None:
        strange: dict[str, Any] = {"evaluates": data.draw(self.replicas)}
        if not self.warm:  # in which all make the same steps with the same gradients
            strange |= {
                name: data.draw(st.one_of(st.just(frozenset()), self.replicas))
                for name in ("skip", "nan", "spike", "fails")
            }
        self.does("iterate", block=block, slow=data.draw(self.replicas), **strange)
        self.made_step(strange.get("skip", frozenset()))

    @rule()
    def sync(self) -> None:
        self.does("sync")
        self.met()

    def met(self) -> None:
        if not self.warm:
            self.since = self.at_forward = [0] * len(self.since)

    @rule()
    def save(self) -> None:
        self.does("save")

    @precondition(lambda self: self.in_step)
    @rule()
    def restart(self) -> None:
        self.does("restart")

    @precondition(lambda self: not self.setting.spread)
    @rule(data=st.data())
    def consensus(self, data: st.DataObject) -> None:
        self.does("consensus", evaluates=data.draw(self.replicas))

    @precondition(lambda self: self.setting.shape[1] == 1)
    @rule(data=st.data())
    def copied(self, data: st.DataObject) -> None:
        self.does("copied", evaluates=data.draw(self.replicas))

    @precondition(lambda self: self.setting.shape[1] == 1 and not self.setting.spread and not self.warm)
    @rule(block=st.integers(0, 1))
    def freeze(self, block: int) -> None:
        self.does("freeze", block=block)
        self.met()

    @precondition(
        lambda self: (
            self.setting.shape[1] == 1
            and not (self.setting.spread or self.adapted or self.warm or self.step < 1)
        )
    )
    @rule()
    def adapt(self) -> None:
        self.adapted = True
        self.does("adapt")
        self.met()

    def teardown(self) -> None:
        if self.setting is not None and self.step:
            lived(self.setting, self.ops)


@pytest.mark.timeout(7200)
def test_random_lives() -> None:
    run_state_machine_as_test(Machine, settings=hypothesis_settings(stateful_step_count=STEPS))
