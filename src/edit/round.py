"""One sync round: exchange -> verdicts -> per layer: combine, clip, outer step, restart; now or late.

Symbols as in docs/algorithm.md: ``a`` anchor, ``θ`` live parameters, ``Δ = a - θ``, ``G`` norms ``[R, L]``,
``w`` weights ``[R, L]``, ``s`` inner steps ``[R]``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import events
from .anchor import Anchor
from .buffers import Buffers
from .comm import Replicas, SyncError, Work, reshard, wait
from .layers import Layer
from .penalty import Penalty
from .watch import APPLYING, LAUNCHED

State = dict[str, Tensor]

# Behind the L columns of squared norms, one row a replica:
_STEPS, _STEPS_SQUARED, _FLAGS, _SQUARES, _TIME, _EXTRA = range(6)
_PROBLEM = 2.0**20  # a rank that cannot take part adds this to the flags, so that all ranks raise


@dataclass(frozen=True)
class Start:
    """What a replica had at the launch of a round that a thread carries; copies."""

    flats: list[Tensor]
    """Parameters: one flat vector a layer, in its dtype."""
    buffers: list[Tensor]
    """Persistent buffers."""


@dataclass(frozen=True)
class RoundReport:
    """What one round did. Tensors are on the host, float64 unless said otherwise; R replicas, L layers."""

    rank: int
    """Whose report this is."""
    round: int
    """Number of the round, from 1."""
    layers: list[str]
    """Names of the L layers."""
    steps: Tensor
    """``[R]`` int64: inner steps since the replica's last round."""
    total_steps: int
    """Inner steps of all replicas so far."""
    norms: Tensor
    """``[R, L]``: G, the norm of each pseudo gradient."""
    expected: dict[str, Tensor]
    """``[R, L]`` each: what the penalty judged the norms by, as it names it (EMAZTest: ``mean``, ``sigma``, NaN
    before the first norm). May be empty."""
    out: Tensor
    """``[R, L]`` bool: who had no part: left out, without steps, or of a weight so small that it is 0. (A layer
    that a replica did not move has weight 0, too, but is not called out.)"""
    weights: Tensor
    """``[R, L]``: w. Each column sums to 1, or is 0 where the layer rolled back."""
    effective_replicas: Tensor
    """``[L]``: ``1/Σw²``, 0 where the layer rolled back."""
    clip: Tensor
    """``[L]``: factor of the clip, 1 where nothing was clipped. NaN for layers that other ranks hold."""
    rolled_back: Tensor
    """``[L]`` bool: nobody was left, so every replica went back to the anchor."""
    events: list[str]
    """One line for every replica that was left out, and for the layers that rolled back. The log has them, too."""
    bytes_sent: int
    """By this rank to other replicas in this round."""
    seconds_total: float
    """From launch to done, on this rank."""
    seconds_waited: float
    """Of those, how long this rank's training loop stood still for others (on CUDA: its host thread)."""
    last_replica: int
    """The replica that launched last, by the hosts' wall clocks."""


class Round:
    """One round under way. Nothing that lasts changes before the layer in question is done.

    In every group, every rank issues the same collectives in the same order, whatever its forward does: the
    exchange, the verdicts, buffers, then per layer, in the order of ``layers``, a sum over the replicas and a
    scalar inside the replica (a spread round: others, also in a fixed order). *When* a rank goes on is its own
    affair; what it does next never is.

    Without ``start``, a layer's traffic begins when the forward comes near it. With it, a thread carries all of it
    from the launch on, from these copies, and :meth:`advance` waits for the thread; until it has ended, nothing else
    uses the package's groups but that of files.

    Args:
        start: for the thread.
        late: steps are made until the round is applied; what was learned in them is kept.
        elements: of one replica.
        number: of this round, from 1.
        steps: inner steps of this replica since its last round.
        called: whether this replica has called ``sync()``.
        problem: why this rank cannot take part; then every rank raises.
        columns: L, over the layers of all ranks.
        memory: the penalty's state, replaced column by column as layers are done.
        inner: its state of a layer whose replica was not finite is dropped.
    """

    def __init__(
        self,
        replicas: Replicas,
        layers: list[Layer],
        columns: list[str],
        anchor: Anchor,
        penalty: Penalty,
        memory: State,
        buffers: Buffers,
        inner: torch.optim.Optimizer,
        *,
        start: Start | None,
        late: bool,
        elements: float,
        prefetch: int,
        number: int,
        steps: int,
        called: bool,
        problem: str | None,
    ) -> None:
        self.replicas, self.layers, self.columns = replicas, layers, columns
        self.anchor, self.penalty, self.memory = anchor, penalty, memory
        self.buffers, self.inner, self.prefetch, self.number = buffers, inner, prefetch, number
        self.start, self.late, self.elements = start, late, elements
        self.moved, self.problem = steps > 0, problem
        self.decided = False
        self.done = 0  # layers, counted in order
        self._sent = 0
        self._flying: dict[int, tuple[Tensor, Work | None]] = {}
        self._combined: dict[int, tuple[Tensor, Tensor]] = {}
        self._factors: dict[int, Tensor] = {}
        self._on_host = all(layer.device.type == "cpu" for layer in layers)
        self._waited = 0.0
        self._bytes = replicas.bytes_sent
        self._launched = time.perf_counter()

        self._matrix = torch.zeros(replicas.count, len(columns) + _EXTRA, dtype=torch.float64, device="cpu")
        extra = self._matrix[replicas.index, len(columns) :]
        extra[_STEPS], extra[_STEPS_SQUARED] = steps, steps**2
        extra[_FLAGS] = float(called) + (_PROBLEM if problem else 0.0)
        extra[_TIME] = time.time() if replicas.member == 0 else 0.0
        self.weights = torch.zeros(replicas.count, len(columns), dtype=torch.float64, device="cpu")
        # From the leader: whether all is well, the weights, the penalty's new state.
        sizes = [1, self.weights.numel(), *(value.numel() for value in memory.values())]
        self._told = torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
        self._leads = replicas.rank == replicas.leader
        self._measured = self._matrix[replicas.index :][:1]  # the rows of replicas that this rank measures
        self._carried: Future[None] | None = None  # by a thread
        replicas.note(number, LAUNCHED)
        self._launch()

    def _launch(self) -> None:
        if self.start is not None:
            self._carried = self.replicas.background.run(self._carry)
        else:
            self._announce(self._measure())

    def _carry(self) -> None:
        """All but the outer step, in a thread. It reads the anchor, which nobody writes meanwhile."""
        self._announce(self._measure())
        self._judge()
        self._combine_buffers()
        self._combine()

    def _combine(self) -> None:
        for index in range(len(self.layers)):
            self._send(index)
        for index in range(len(self.layers)):
            self._receive(index)

    # ---------------------------------------------------------------------------------------- exchange

    def _measure(self) -> Tensor:
        """``[2, layers]``: this rank's share of the squared norms of Δ and of a. Nothing waits for the device."""
        if self.problem is not None:
            return torch.zeros(2, 0, dtype=torch.float64, device="cpu")
        squares, anchors = [], []
        for index, layer in enumerate(self.layers):
            a = self.anchor.fetch(index)
            squares.append(layer.squares(self._pseudo_gradient(index, a)))
            anchors.append(layer.squares(a))
            del a
        return torch.stack([*squares, *anchors]).view(2, -1)

    def _pseudo_gradient(self, index: int, anchor: Tensor) -> Tensor:
        start = None if self.start is None else self.start.flats[index]
        return self.layers[index].pseudo_gradient(anchor, torch.empty_like(anchor), start)

    def _announce(self, measured: Tensor) -> None:
        """This rank's numbers into the matrix; sum over all ranks."""
        rows, width = self._measured, len(self.columns)
        if measured.numel():
            measured = measured.cpu()  # the one host read of a round (a spread one has another)
            rows[:, [layer.column for layer in self.layers]] = measured[:-1]
            rows[:, width + _SQUARES] += measured[-1].sum()
        with self._traffic("exchange of norms"):
            self._exchange = self.replicas.start_exchange(self._matrix)
            # Not first where the verdicts are needed: the leader's broadcast may wait for whoever receives it, and a
            # later stage of a pipeline reaches its forward only when the leader has left its own.
            if not self._leads:
                self._telling = self.replicas.start_from_leader(self._told)

    def decide(self) -> None:
        """Wait for the verdicts; late, for all traffic."""
        if self._carried is None and self.decided:
            return
        self.replicas.note(self.number, APPLYING)
        if self._carried is None:
            self._judge()
        else:
            with self._waiting():
                self.replicas.background.wait(self._carried)
            self._carried = None

    def _judge(self) -> None:
        """Wait for the exchange; get the leader's verdicts."""
        replicas, width = self.replicas, len(self.columns)
        with self._traffic("exchange of norms"):
            self._wait(self._exchange, on_host=True)
        extra = self._matrix[:, width:]
        self.norms = self._matrix[:, :width].sqrt()
        self.steps = (extra[:, _STEPS] / replicas.members).long()
        self.everyone_called = bool((extra[:, _FLAGS] == replicas.members).all())
        self.last_replica = int(extra[:, _TIME].argmax())
        self._before = {key: value.clone() for key, value in self.memory.items()}
        self._new = {key: value.clone() for key, value in self.memory.items()}
        fault: Exception | None = None
        if self._leads:
            try:
                self._check(extra)
                self.weights.copy_(_checked(self.penalty.weights(self.norms.clone(), self.steps, self._new)))
                parts = [torch.ones(1, device="cpu"), self.weights, *(self._new[key] for key in self.memory)]
                self._told.copy_(torch.cat([part.flatten().double() for part in parts]))
            except Exception as error:  # all the others are waiting to be told
                fault = error
            with self._traffic("broadcast of verdicts"):
                self._telling = replicas.start_from_leader(self._told)
        with self._traffic("broadcast of verdicts"):
            self._wait(self._telling, on_host=True)
        if fault is not None:
            raise fault
        self._check(extra)
        if not self._told[0]:
            raise SyncError(
                f"round {self.number}: the penalty raised an error on rank {replicas.leader}; see its log"
            )
        start = 1
        for value in (self.weights, *(self._new[key] for key in self.memory)):
            value.copy_(self._told[start : (start := start + value.numel())].view_as(value))
        stood = (self.norms == 0) & (self.steps > 0).unsqueeze(1)
        self.out = (self.weights == 0) & ~stood
        # As plain numbers and views, once: to index tensors would be most of the work on a small layer.
        self._mine = self.weights[replicas.index].tolist()
        self._gone = self.out[replicas.index].tolist()
        self._left = self.weights.any(0).tolist()
        self._finite = self.norms[replicas.index].isfinite().tolist()
        if self.late and not all(self._finite):
            # What came since was learned with this NaN in the forward. Layers that were still finite at the launch
            # must start afresh, too, or with delay = interval each half would infect the other for ever.
            self._gone, self._finite = [True] * width, [False] * width
        self._verdicts = [(self.memory[key].unbind(-1), new.unbind(-1)) for key, new in self._new.items()]
        self.decided = True

    def _check(self, extra: Tensor) -> None:
        """What all ranks see alike and none may go on with."""
        replicas = self.replicas
        stopped = [i for i in range(replicas.count) if extra[i, _FLAGS] >= _PROBLEM]
        if stopped:
            raise SyncError(
                f"round {self.number}: "
                + (self.problem or f"replica {stopped} cannot take part; see its log")
            )
        # S numbers are equal where S times the sum of their squares is the square of their sum.
        split = [
            i
            for i in range(replicas.count)
            if extra[i, _STEPS_SQUARED] * replicas.members != extra[i, _STEPS] ** 2
        ]
        if split:
            raise SyncError(
                f"round {self.number}: the ranks of replica {split} disagree on their number of steps: call "
                "step() and sync() on all ranks of a replica alike"
            )
        # Equal anchors may differ in their last bits where machines differ (a clip's norm summed in
        # another order); by so much and no more. One number per replica finds any real drift.
        squares = extra[:, _SQUARES]
        drifted = [
            i
            for i in range(replicas.count)
            if not abs(squares[i] - squares[0]) <= 1e-5 * squares[0] / self.elements**0.5
        ]
        if drifted:
            raise SyncError(
                f"round {self.number}: the anchor of replica {drifted} differs from replica 0's, or is not "
                f"finite (checksums {squares.tolist()}): load the same optimizer state on all "
                "replicas; nothing was changed"
            )

    # ------------------------------------------------------------------------------------------ layers

    def advance(self, through: int) -> None:
        """Do all layers up to index ``through``; at once, have the traffic of the next ones under way."""
        if self.done > through:
            return
        if not self.done:
            if self.start is None:
                self._combine_buffers()
            kept = self.start.buffers if self.start and self.late and self._takes_part else None
            self.buffers.apply(self._buffer_sum, kept)
        while self.done <= through:
            if self.start is None:
                for index in range(self._sent, min(self.done + self.prefetch, len(self.layers) - 1) + 1):
                    self._send(index)
                self._receive(self.done)
            self._apply(self.done)
            self.done += 1
        if self.complete:  # columns of layers that only other ranks hold: the leader judges all
            for key, value in self._new.items():
                self.memory[key].copy_(value)

    def _combine_buffers(self) -> None:
        index = self.replicas.index
        self._takes_part = self.moved and not bool(self.out[index].all())
        values = self.buffers.tensors() if self.start is None else self.start.buffers
        self._buffer_sum = self.buffers.contribution(values, self._takes_part, index == 0)
        with self._traffic("averaging buffers"):
            self._wait(self.replicas.start_sum(self._buffer_sum))

    def _send(self, index: int) -> None:
        """``w_i Δ_i``, exactly 0 where this replica is out (0·NaN is not); its sum over the replicas."""
        layer = self.layers[index]
        weight = self._mine[layer.column]
        if weight:
            flat = self._pseudo_gradient(index, self.anchor.fetch(index)).mul_(weight)
        else:
            flat = layer.empty().zero_()
        with self._traffic("sum of pseudo gradients", layer):
            self._flying[index] = flat, self.replicas.start_sum(flat)
        self._sent = index + 1

    def _receive(self, index: int) -> None:
        """``Δ̄``, and its squared norm over the whole layer."""
        layer = self.layers[index]
        flat, work = self._flying.pop(index)
        with self._traffic("sum of pseudo gradients", layer):
            self._wait(work)
        squares = layer.squares(flat)
        with self._traffic("norm of the clip", layer):
            self._wait(self.replicas.start_sum_inside(squares, layer.name))
        self._combined[index] = flat, squares

    def _apply(self, index: int) -> None:
        """Outer step, restart."""
        layer = self.layers[index]
        a = self._outer_step(index)
        # Units that stayed gathered (the root, after an evaluation) would not see what is written.
        for unit in layer.units:
            reshard(unit)
        if self.start is None or not self.late or self._gone[layer.column]:
            layer.write(a)
        else:  # a + (θ - θ at the launch)
            layer.write(layer.read().sub_(self.start.flats[index]).add_(a))
        if not self._finite[layer.column]:
            for param in layer.params:
                self.inner.state.pop(param, None)
        for old, new in self._verdicts:
            old[layer.column].copy_(new[layer.column])

    def _outer_step(self, index: int) -> Tensor:
        """Clip and step. Returns the new anchor of the layer."""
        layer = self.layers[index]
        flat, squares = self._combined.pop(index)
        if not self._left[layer.column]:
            return self.anchor.fetch(index)
        factor = self.penalty.clip(squares.sqrt())
        flat.mul_(factor)
        self._factors[layer.column] = factor
        return self.anchor.step(index, flat)

    @property
    def complete(self) -> bool:
        """Whether every layer is done."""
        return self.decided and self.done == len(self.layers)

    # ------------------------------------------------------------------------------------------ report

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        """What the penalty judged by, if it says so. Asked after the round, when an error in it stops nobody else."""
        if not hasattr(self.penalty, "expected"):
            return {}
        tables: dict[str, Tensor] = self.penalty.expected(self.steps, self._before)
        if wrong := [name for name, table in tables.items() if table.shape != self.norms.shape]:
            raise ValueError(
                f"penalty.expected must return tables of shape {tuple(self.norms.shape)} (replicas, layers), but "
                f"{wrong} are not: leave the method out, or give one number for each"
            )
        return tables

    @cached_property
    def events(self) -> list[tuple[str, int | None, str]]:
        """Who was left out, and which layers went back: kind, replica, line."""
        if not bool(self.out.any()):
            return []
        return events.of_round(
            self.number, self.columns, self.steps, self.norms, self.out, self.weights, self.expected
        )

    def report(self, total_steps: int) -> RoundReport:
        """The report of a completed round; ``total_steps`` including this round's."""
        clip = torch.full((len(self.columns),), torch.nan, dtype=torch.float64, device="cpu")
        clip[[layer.column for layer in self.layers]] = 1.0
        if self._factors:
            clip[list(self._factors)] = torch.stack(list(self._factors.values())).double().cpu()
        squares = self.weights.square().sum(0)
        return RoundReport(
            rank=self.replicas.rank,
            round=self.number,
            layers=self.columns,
            steps=self.steps,
            total_steps=total_steps,
            norms=self.norms,
            expected=self.expected,
            out=self.out,
            weights=self.weights,
            effective_replicas=torch.where(squares > 0, 1 / squares, 0.0),
            clip=clip,
            rolled_back=squares == 0,
            events=[line for _, _, line in self.events],
            bytes_sent=self.replicas.bytes_sent - self._bytes,
            seconds_total=time.perf_counter() - self._launched,
            seconds_waited=self._waited,
            last_replica=self.last_replica,
        )

    def _wait(self, work: Work | None, on_host: bool | None = None) -> None:
        on_host = self._on_host if on_host is None else on_host
        wait(work, on_host=on_host)

    @contextmanager
    def _traffic(self, what: str, layer: Layer | None = None) -> Iterator[None]:
        """Name what fails inside, and, outside of the thread, count the time as waited."""
        where = f", layer {layer.name}" if layer is not None else ""
        with (
            self._waiting() if self.start is None else nullcontext(),
            self.replicas.naming(f"round {self.number}{where}: {what}"),
        ):
            yield

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - start


def _checked(weights: Tensor) -> Tensor:
    sums = weights.sum(0)
    if not bool((weights >= 0).all() & (((sums - 1).abs() < 1e-9) | (sums == 0)).all()):
        raise ValueError(
            "penalty.weights must return weights >= 0 that sum to 1 over the replicas, or are all 0 to roll a "
            f"layer back, but returned {weights.tolist()}: normalise them over the replicas that are not out"
        )
    return weights
