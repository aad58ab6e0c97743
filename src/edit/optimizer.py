"""``LocalSGDOptimizer``: inner step -> due? -> round. The story first, then the details."""

from __future__ import annotations

import gc
import logging
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import state as saved
from .anchor import Anchor
from .buffers import Buffers
from .clock import ReplicaClock
from .comm import Replicas, gather_early, is_unit, local, prefetched, reshard, unit_key
from .events import Events
from .hooks import Gate, GradientAverage, served
from .layers import Layer, cut
from .outer import Nesterov, Outer
from .penalty import MEAN, Penalty, PseudoGradientPenalty
from .round import Round, RoundReport, Start
from .schedule import EverySteps, Progress, Schedule
from .setup import (
    build_inner,
    check_holders,
    check_model,
    check_settings,
    compare,
    describe_layer,
    tell_stages_apart,
)
from .spread import SpreadRound, pieces
from .wrapper import WrappedOptimizer

if TYPE_CHECKING:
    from .comm import DeviceMesh

log = logging.getLogger(__name__)
_NOT_GIVEN: Any = object()  # tells step() from step(closure=None)


def _setting(policy: object) -> str:
    """``repr`` without addresses, which differ between ranks."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(policy))


class LocalSGDOptimizer(WrappedOptimizer):
    """Replaces ``torch.optim.AdamW``: replicas train on their own and synchronise layer by layer.

    Wraps an *inner* optimizer, which steps this replica's parameters, and an *outer* one, which steps the
    *anchor*: the parameters as of the last sync, equal on all replicas. After the inner step at which the
    schedule says that a round is due, the round's exchange starts in the background; the next training
    forward applies it layer by layer, just before each layer is used. The method: docs/algorithm.md.

    A policy (outer, schedule, penalty) may also be given as a class, which stands for its defaults.

    Args:
        model: plain, or sharded by ``fully_shard`` over ``mesh["shard"]`` (also with tensor parallelism).
            Shard, cast, move and load it before. Replicas that differ are overwritten by replica 0's.
        inner: an optimizer class, built on the trainable parameters with ``inner_kwargs``; a callable
            ``(params, **inner_kwargs) -> Optimizer``; or an optimizer built on the model's parameters.
        outer: callable ``params -> Optimizer`` for the anchor; elementwise.
        mesh: has a dimension named ``replicate`` (or ``dp_replicate``). The ranks that share its coordinate
            form a replica. ``None``: every rank is a replica.
        schedule: when a round is due.
        penalty: how replicas are combined. ``None``: their mean (a non-finite one still has no part).
        offload: where anchor and outer state live. ``None``: beside the parameters; ``"cpu"``: host memory;
            ``"replicas"``: spread over the replicas, each of which holds an equal slice, at the bytes of
            ``None``. Then a round copies the parameters when it is launched; the training loop waits while a
            layer's new anchor is gathered, also with ``delay``; and nobody has the whole anchor:
            ``consensus()`` works right after ``sync()`` only, ``refresh()`` does not, and a state is loaded on
            the mesh that saved it.
        layers: modules, each of which is a layer, instead of the default cut. What is in none of them is the root's.
        prefetch: layers whose traffic is under way ahead of the one being computed. Of a round that a thread carries
            (``delay``, ``offload="replicas"``) all are.
        delay: inner steps by which a round is applied late. Its traffic runs in the background of these steps,
            and what was learned meanwhile is kept. At most the interval of ``EverySteps``. 0: in the next forward.
        timeout: of the package's process groups, at least a second. Default: an hour, plus four intervals of a clock.
        **inner_kwargs: for ``inner``, e.g. ``lr=3e-4``.

    Attributes:
        local_steps: inner steps of this replica, warm-up included.
        rounds: completed rounds.
        total_steps: inner steps of all replicas as of the last round (in the warm-up: of this step), equal on all
            ranks.
        inner: the inner optimizer. ``param_groups``, ``state`` and ``defaults`` are its own.

    Raises:
        TypeError, ValueError, RuntimeError: on every rank, naming argument, rule, value and remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Any = torch.optim.AdamW,
        outer: Outer | type = Nesterov(),  # noqa: B008 (immutable)
        *,
        mesh: DeviceMesh | None = None,
        schedule: Schedule | type = EverySteps(128),  # noqa: B008
        penalty: Penalty | type | None = PseudoGradientPenalty(),  # noqa: B008
        offload: str | None = None,
        layers: Sequence[nn.Module] | None = None,
        prefetch: int = 1,
        delay: int = 0,
        timeout: timedelta | None = None,
        **inner_kwargs: Any,
    ) -> None:
        self.schedule = cast(Schedule, schedule() if isinstance(schedule, type) else schedule)
        penalty = MEAN if penalty is None else penalty
        self.penalty = cast(Penalty, penalty() if isinstance(penalty, type) else penalty)
        is_policy = isinstance(outer, type) and not issubclass(outer, torch.optim.Optimizer)
        self._make_outer = cast(Outer, outer() if is_policy else outer)  # type: ignore[call-arg]
        self._time: Callable[[], float] = getattr(self.schedule, "clock", lambda: 0.0)
        if timeout is None:
            waits = getattr(self.schedule, "interval", 0) if hasattr(self.schedule, "clock") else 0
            timeout = timedelta(hours=1, seconds=4 * float(waits))
        self.model, self._offload, self._prefetch, self._chosen = model, offload, prefetch, layers
        self._delay = delay
        self._settings = {
            "schedule": _setting(self.schedule),
            "penalty": _setting(self.penalty),
            "outer": _setting(self._make_outer),
            "offload": offload,
            "prefetch": prefetch,
            "delay": delay,
        }
        self.local_steps = self.rounds = self.total_steps = 0
        self._steps = 0  # since the last launch
        self._due = False  # from launch (or loading) to completion of a round
        self._round: Round | None = None
        self._round_steps = 0  # those that the round under way is about
        self._start: Start | None = None  # of a round that a thread carries
        self._fresh: set[nn.Module] = set()  # units written in this forward and not gathered since
        self._in_forward = self._in_consensus = False
        self._failure: BaseException | None = None
        self._saving: Future[Path] | None = None  # a checkpoint being written in the background
        self._events = Events(log)
        self._round_hooks: OrderedDict[int, Callable[[RoundReport], None]] = OrderedDict()

        self.replicas = Replicas(mesh, timeout)
        self._spread = offload == "replicas" and self.replicas.count > 1
        try:
            with self.replicas.agree("LocalSGDOptimizer(...)"):
                check_settings(
                    self.schedule, self.penalty, self._make_outer, offload, prefetch, delay, layers
                )
                check_model(model, self.replicas)
                self._reshard()  # after a forward, the parameters would be the gathered ones
                built = build_inner(inner, model, inner_kwargs)
                self._outer_keys = saved.probe(self._make_outer)
            super().__init__(built)
            self._gate = Gate(self._reach)
            self._handles: list[RemovableHandle] = []
            self._average: GradientAverage | None = None
            if served(model):
                # By an optimizer before this one, which perhaps nobody uses any more. It would go on, and average
                # gradients, until the garbage is collected, which each rank does at a time of its own.
                gc.collect()
            self._setup(*self._agree_on_layers())
        except BaseException:
            self.replicas.close()
            raise
        self._last_round = self._time()

    # ------------------------------------------------------------------------------------------- story

    def step(self, closure: Callable[[], Any] | None = _NOT_GIVEN) -> Any:
        """One inner step; then, if the schedule says so, the launch of a round; with ``delay``, before that, the
        end of the last one.

        Layers of a round that no forward reached are done first. Returns what the inner step returns.
        """
        if closure is None and self._is_dry_run():
            return self.inner.step()
        self._check_usable()
        if self._delay and self._due and self._round is None:
            self._launch(called=False)  # again: it was under way when it was saved
        if closure is None or closure is _NOT_GIVEN:
            if not self._delay:
                self._finish_round()
            self._begin()
            result = self.inner.step()
        else:
            self._begin()
            result = self.inner.step(closure if self._delay else self._finishing(closure))
        self.local_steps += 1
        if self.local_steps > self.schedule.warmup_steps:
            self._steps += 1
            if self._due and self._steps >= self._delay:
                self._finish_round(asked=True)
            if not self._due and self._replica_clock.due(self._progress()):
                self._launch(called=False)
        else:
            self.total_steps += self.replicas.count
            if self.local_steps == self.schedule.warmup_steps:
                self._end_warmup()
        return result

    def sync(self) -> None:
        """Bring all replicas together, whatever their numbers of steps: at the end of training or of the
        data, before an evaluation or an elastic save.

        Collective over all ranks. This replica goes on taking part in the others' rounds until all have
        called; then all are equal and all return. In the warm-up parameters are equal, and it returns at once;
        buffers (BatchNorm statistics) are each replica's own until the warm-up ends, as without ``edit``.

        Raises:
            SyncError: a rank died, or did not call within the time-out.
        """
        self._check_usable()
        if self.local_steps < self.schedule.warmup_steps:
            return
        self._begin()
        self._finish_round(asked=True)
        everyone = False
        while not everyone:
            self._launch(called=True)
            everyone = self._decided().everyone_called
            self._finish_round(asked=True)

    def _launch(self, called: bool) -> None:
        """Start a round. From here on it is due until it is done. ``called``: by :meth:`sync`, to be done at once."""
        with self._failing():
            problem = self._problem()
            if not self._due:  # else it was due when the state was loaded
                self._due, self._round_steps, self._steps = True, self._steps, 0
                self._last_round = self._time()
            late = self._delay > 0 and (self._start is not None or not called)
            if self._start is None and (late or self._spread):
                # With a problem, the parameters are not what they were: zeros, as others wait for what is sent.
                flats = [layer.read() if problem is None else layer.empty().zero_() for layer in self._layers]
                self._start = Start(flats, self._buffers.clone())
            self._gate.open = not late
            self._replica_clock.restart()
            self._round = (SpreadRound if self._spread else Round)(
                self.replicas,
                self._layers,
                self._columns,
                self._anchor,
                self.penalty,
                self._memory,
                self._buffers,
                self.inner,
                start=self._start,
                late=late,
                elements=self._elements,
                prefetch=self._prefetch,
                number=self.rounds + 1,
                steps=self._round_steps,
                called=called,
                problem=problem,
            )

    def _decided(self) -> Round:
        if self._round is None:  # due when it was saved, and not launched since it was loaded
            self._begin()
            self._launch(called=False)
        assert self._round is not None
        with self._failing():
            self._round.decide()
        return self._round

    def _reach(self, index: int, module: nn.Module) -> None:
        """The forward of ``module``, of layer ``index`` (-1: of none), begins: the layer must be done, and those
        of the units that this forward has FSDP gather early."""
        # Re-entrant activation checkpointing runs the layers of a training forward without gradients, so
        # what counts is whether the root was reached with them, until the next step.
        if module is self.model:
            self._in_forward = torch.is_grad_enabled()
        if self._in_consensus or not (torch.is_grad_enabled() or self._in_forward):
            return
        self._check_usable()
        keys = [unit_key(module), *prefetched(module)] if is_unit(module) else []
        units = [self._units[key] for key in keys if key in self._units]
        if self._due:
            if self._round is None and self.replicas.stage is not None:
                raise RuntimeError(
                    "a round was under way when this state was saved, and must be launched by all ranks together; but "
                    "stages of a pipeline do not begin a forward together: call sync(), on all ranks, after loading"
                )
            self._advance(max([index, *(number for number, _ in units)]))
        for _, unit in units:
            if unit in self._fresh:
                self._fresh.discard(unit)
                gather_early(unit)

    def _advance(self, through: int) -> None:
        began = self._time()
        round = self._decided()
        before = round.done
        with self._failing():
            round.advance(through)
        for layer in self._layers[before : round.done]:
            self._fresh.update(self._units[unit_key(unit)][1] for unit in layer.units)
        if round.complete:
            # A late round's seconds count from its launch, but for those that the loop stood still: replicas that
            # launch too early wait here, and so fall into step.
            self._last_round = self._last_round + (self._time() - began) if round.late else self._time()
            self._round, self._due, self._start = None, False, None
            self.total_steps += int(round.steps.sum())
            self.rounds += 1
            self._warn(round)
            if self._round_hooks:  # a report reads the device
                report = round.report(self.total_steps)
                for hook in list(self._round_hooks.values()):
                    hook(report)

    def _warn(self, round: Round) -> None:
        """Of what went wrong in it: on the leader, and on the first rank of the replica concerned."""
        mine = self.replicas
        for kind, replica, line in round.events:
            if mine.rank == mine.leader or (replica == mine.index and mine.member == 0):
                self._events.warn(kind, line)

    def _finish_round(self, asked: bool = False) -> None:
        """Do what no forward has reached; nothing is gathered or hooked until the next launch."""
        if self._due:
            left = [] if asked else self._layers[self._decided().done :]
            stale = [
                layer.name
                for layer in left
                if any(p.grad is not None and local(p.grad).any() for p in layer.params)
            ]
            self._advance(len(self._layers) - 1)
            if stale:
                warnings.warn(
                    f"in round {self.rounds} no training forward reached {', '.join(stale[:5])}, so the gradients of "
                    "this step came from its parameters before the round: call the model that LocalSGDOptimizer was "
                    "given, and its modules rather than functions of their parameters, or give layers=[...]",
                    stacklevel=3,
                )
        self._fresh.clear()
        self._gate.open = self._in_forward = False

    def _begin(self) -> None:
        """The first local step begins: the model is the anchor."""
        if not self._anchor.taken and self.local_steps >= self.schedule.warmup_steps:
            self._anchor.take()

    @torch.no_grad()
    def _end_warmup(self) -> None:
        self._stop_averaging()
        self._buffers.agreed = self._buffers.clone()
        for tensor in self._buffers.agreed:
            self.replicas.from_first_replica(tensor)
        self._last_round = self._time()

    # ------------------------------------------------------------------------------- together and apart

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Context in which the model's parameters and buffers are the anchor's: equal on all replicas.

        For evaluation and export. No collective: one replica may do it alone. Not between a forward and its backward,
        whose parameters it would change (so not in a round hook, which runs in a forward). Afterwards everything is
        exactly as before. In the warm-up the model is the consensus already. Right after a due step it is
        still the previous round's anchor: call :meth:`sync` first where that matters.

        Raises:
            RuntimeError: with ``offload="replicas"``, steps were made since the last round.
        """
        self._check_itself()
        if not self._anchor.taken or self._in_consensus:
            yield self.model
            return
        if self._spread and (self._steps or self._due):
            raise RuntimeError(
                "consensus() needs the whole anchor, of which offload='replicas' holds slices, unless the model "
                f"is the anchor, but this replica made {self._steps} steps since the last round, or one is due: "
                "call sync() first, on all ranks"
            )
        with torch.no_grad():
            live = [[local(p).clone() for p in layer.params] for layer in self._layers]
            buffers = self._buffers.clone()
        self._in_consensus = True
        try:
            with torch.no_grad():
                self._reshard()
                for index, layer in enumerate([] if self._spread else self._layers):
                    layer.write(self._anchor.fetch(index))
                self._buffers.write(self._buffers.agreed)
            yield self.model
        finally:
            self._in_consensus = False
            with torch.no_grad():
                self._reshard()
                for layer, values in zip(self._layers, live, strict=True):
                    for param, value in zip(layer.params, values, strict=True):
                        local(param).copy_(value)
                self._buffers.write(buffers)

    def refresh(self) -> None:
        """Take the model's trainable parameters anew: after freezing some, or unfreezing some that had been frozen so.

        Collective over all ranks, at a round boundary (right after :meth:`sync`). Parameters that trained
        before keep anchor and outer state; new ones start from replica 0's values. Parameters that the inner
        optimizer does not hold, being new to the model or frozen when this one was built, must be given to
        :meth:`add_param_group`, which calls this.

        Raises:
            RuntimeError: steps were made since the last round, or ``offload="replicas"``.
            ValueError: the inner optimizer lacks a trainable parameter.
        """
        self._check_usable()
        self._agree_on_boundary("refresh()")
        with self.replicas.agree("refresh()"):
            build_inner(self.inner, self.model, {})
            kept = saved.export(self)
        memory = {name: {k: v[..., c].clone() for k, v in self._memory.items()} for c, name in
                  enumerate(self._columns)}  # fmt: skip
        before = self._anchor
        settings = {layer.name: before.group(index) for index, layer in enumerate(before.layers)}
        agreed = self._agree_on_layers()
        with self._failing():
            self._setup(*agreed)
            for index, layer in enumerate(self._anchor.layers):
                old = settings.get(layer.name, {})
                self._anchor.group(index).update(
                    {key: value for key, value in old.items() if key != "params"}
                )
            if before.taken:
                saved.restore(self, kept)
            for column, name in enumerate(self._columns):
                for key, value in memory.get(name, {}).items():
                    self._memory[key][..., column] = value

    def close(self) -> None:
        """Remove the hooks and destroy the package's process groups, after a checkpoint that is being written in
        the background. The model stays as it is.

        Call it, on all ranks, before the model trains on without this optimizer: one that is only dropped is gone, and
        averages no more gradients in the warm-up, when Python collects it, perhaps at another time on each rank.

        Raises:
            OSError, RuntimeError: that checkpoint could not be written. All else is done.
        """
        self._check_itself()
        saving, self._saving = self._saving, None
        if saving is not None:
            wait([saving])
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop_averaging()
        self._gate.open = False
        self._failure = self._failure or RuntimeError("close() was called")
        self._round = self._start = None
        self.replicas.close()
        if saving is not None:
            saving.result()

    def register_round_hook(self, hook: Callable[[RoundReport], None]) -> RemovableHandle:
        """Call ``hook(report)`` after each round, in whatever completes it: a forward, :meth:`step` or :meth:`sync`.

        It must not call collectives, nor ``step``, ``sync`` or ``consensus``. Returns a handle with ``remove()``.
        """
        handle = RemovableHandle(self._round_hooks)
        self._round_hooks[handle.id] = hook
        return handle

    @property
    def outer_param_groups(self) -> list[dict[str, Any]]:
        """Live groups of the outer optimizer, to schedule its lr."""
        return self._anchor.outer.param_groups

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other replicas, warm-up included (an all-reduce counted as a ring)."""
        return self.replicas.bytes_sent

    # ------------------------------------------------------------------------------------------- setup

    @torch.no_grad()
    def _agree_on_layers(self) -> tuple[list[Layer], Buffers, dict[str, list[tuple[int, ...]]]]:
        """Collective: cut the model, agree on it. Changes nothing. Returns the layers and buffers of this rank, and the
        ranks that hold each layer, replica by replica."""
        replicas = self.replicas
        self._reshard()
        with replicas.agree("the cut into layers"):
            layers = cut(self.model, self._chosen)
        buffers = Buffers(self.model)
        mine = {
            "settings": {**self._settings, "inner": type(self.inner).__name__},
            "layers": {layer.name: describe_layer(layer) for layer in layers},
            "parameters and buffers": {
                name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self._tensors(buffers)
            },
            "stage": replicas.stage,
        }
        names = tell_stages_apart(compare(replicas, mine))
        for layer in layers:
            layer.name = names[replicas.rank][layer.name]
        has = {rank: set(of_rank.values()) for rank, of_rank in names.items()}
        columns = list(dict.fromkeys(name for rank in replicas.ranks for name in names[rank].values()))
        everywhere = {
            name: [tuple(rank for rank in row if name in has[rank]) for row in replicas.grid]
            for name in columns
        }
        holders = {name: of_replicas[replicas.index] for name, of_replicas in everywhere.items()}
        with replicas.agree("LocalSGDOptimizer(...)"):
            check_holders(layers, holders)
        for layer in layers:
            layer.column = columns.index(layer.name)
            layer.set_holders(len(holders[layer.name]))
        return layers, buffers, everywhere

    @torch.no_grad()
    def _setup(
        self, layers: list[Layer], buffers: Buffers, holders: dict[str, list[tuple[int, ...]]]
    ) -> None:
        """Collective: start equal, hook the model."""
        replicas = self.replicas
        self._layers, self._buffers, self._columns = layers, buffers, list(holders)
        replicas.connect(self._layers[0].device, holders)
        shares = replicas.gather_objects(
            sum((end - start) / same for layer in self._layers for start, end, same in layer.held)
        )
        self._elements = max(1.0, sum(shares[rank] for rank in replicas.grid[0]))

        self._start_equal()
        held = pieces(self._layers, replicas) if self._spread else self._layers
        self._anchor = Anchor(held, self._make_outer, "cpu" if self._offload == "cpu" else None)
        with replicas.agree("penalty.init"):
            self._memory = self.penalty.init(replicas.count, len(self._columns))
        self._replica_clock = ReplicaClock(self.schedule, replicas)

        for handle in self._handles:
            handle.remove()
        self._handles = self._gate.register(self.model, self._layers)
        self._units = {
            unit_key(unit): (n, unit) for n, layer in enumerate(self._layers) for unit in layer.units
        }
        self._set_phase()

    def _start_equal(self) -> None:
        """Replicas that differ are overwritten by replica 0's, and the log says where."""
        if self.replicas.count == 1:
            return
        tensors, differed = self._tensors(self._buffers), []
        for name, tensor in tensors:
            first = tensor.clone(memory_format=torch.contiguous_format)
            self.replicas.from_first_replica(first)
            if not torch.equal(first, tensor):
                differed.append(name)
                tensor.copy_(first)
        self._buffers.agreed = self._buffers.clone()
        if differed:
            log.warning(
                "replica %d started from other values than replica 0 in %d of %d tensors (%s, ...) and was "
                "overwritten: load the same weights on every rank before LocalSGDOptimizer(...)",
                self.replicas.index, len(differed), len(tensors), ", ".join(differed[:3]),
            )  # fmt: skip

    def _tensors(self, buffers: Buffers) -> list[tuple[str, Tensor]]:
        """All parameters and persistent buffers: this rank's part."""
        parameters = [(name, local(param)) for name, param in self.model.named_parameters()]
        return parameters + list(zip(buffers.names, buffers.tensors(), strict=True))

    def _set_phase(self) -> None:
        """Gradients are averaged in the warm-up, and are the replica's own after it."""
        self._stop_averaging()
        if self.local_steps < self.schedule.warmup_steps and self.replicas.count > 1:
            self._average = GradientAverage(self._layers, self.replicas)

    def _stop_averaging(self) -> None:
        if self._average is not None:
            self._average.remove()
        self._average = None

    def _reshard(self) -> None:
        for module in self.model.modules():
            reshard(module)

    def _problem(self) -> str | None:
        """Why this rank cannot take part in a round."""
        self._reshard()
        now = {param: name for name, param in self.model.named_parameters()}
        known = {param for layer in self._layers for param in layer.params}
        for layer in self._layers:
            for name, param, shape, dtype in zip(
                layer.names, layer.params, layer.shapes, layer.dtypes, strict=True
            ):
                part = local(param)
                if param not in now or (part.shape, part.dtype, part.device) != (
                    shape, dtype, layer.device,
                ):  # fmt: skip
                    return (
                        f"{name} was replaced, sharded, cast or moved after LocalSGDOptimizer(...): prepare the "
                        "model first, then build the optimizer"
                    )
        if (changed := self._buffers.changed()) is not None:
            return (
                f"the buffer {changed} was resized, cast or moved after LocalSGDOptimizer(...): a buffer that grows "
                "must be registered with persistent=False"
            )
        for param, name in now.items():
            if param.requires_grad and param not in known:
                return (
                    f"{name} began to train after LocalSGDOptimizer(...): at a round boundary call refresh(), or "
                    "add_param_group() if the inner optimizer does not hold it"
                )
        return None

    def _progress(self) -> Progress:
        return Progress(
            self._steps, self.local_steps, self.rounds, self.total_steps, self._time() - self._last_round
        )

    def _finishing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, whose forward applies the round, and then what that forward did not reach."""

        def forward_and_finish() -> Any:
            loss = closure()
            self._finish_round()
            return loss

        return forward_and_finish

    def _is_dry_run(self) -> bool:
        """torch's checkpoint helpers initialise optimizers by ``step(closure=None)`` with every lr 0 while
        the state is empty and gradients 0 (``_init_optim_state``). Only all together say so: that is no
        step."""
        if self.inner.state or any(float(group.get("lr", 1)) != 0 for group in self.param_groups):
            return False
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return not any(bool(local(grad).any()) for grad in grads)

    def _check_itself(self) -> None:
        if "inner" not in vars(self):
            raise RuntimeError(
                f"{type(self).__name__} only looks like the LocalSGDOptimizer that it wraps (as Lightning Fabric's "
                "optimizers do), and what is called on it would change the wrapper's counters in place of the "
                "optimizer's: keep the optimizer itself, and call this on it"
            )

    def _check_usable(self) -> None:
        self._check_itself()
        if self._failure is not None:
            raise RuntimeError(
                f"this LocalSGDOptimizer can no longer be used: {self._failure or repr(self._failure)}"
            ) from self._failure
        if self._in_consensus:
            raise RuntimeError(
                "step(), sync() and refresh() must not be called inside consensus(): leave it first"
            )

    def _agree_on_boundary(self, what: str) -> None:
        """Collective. Not on the control group, which the thread of a round may be using: on that of files."""
        if self._saving is not None:
            wait([self._saving])
        with self.replicas.agree(what, files=True):
            if self._steps or self._due:
                raise RuntimeError(
                    f"{what} must be called at a round boundary, but this replica made {self._steps} steps since the "
                    f"last one{', which is under way' * self._due}: call sync() first, on all ranks"
                )
            if self._spread and self._anchor.taken:
                raise RuntimeError(
                    f"{what} needs the whole anchor, of which offload='replicas' holds slices: close() this "
                    "optimizer after sync(), and build a new one"
                )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A round that failed cannot be taken up again: its collectives are lost."""
        try:
            # sync() may begin an evaluation, in inference mode; but what a round makes lives on.
            with torch.inference_mode(False), torch.no_grad():
                yield
        except BaseException as error:
            self._failure = error
            raise

    # -------------------------------------------------------------- what torch.optim.Optimizer promises

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model to the inner optimizer and synchronise them from now on.

        Collective over all ranks, at a round boundary (right after :meth:`sync`).
        """
        if not self._ready:
            return
        self._check_usable()
        self._agree_on_boundary("add_param_group()")
        before = len(self.param_groups)
        try:
            with self.replicas.agree("add_param_group()"):
                super().add_param_group(param_group)
                build_inner(self.inner, self.model, {})
            self.refresh()
        except BaseException:
            del self.param_groups[before:]
            raise

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and with it, parameter by parameter, anchor and outer state; with the
        first parameter, detector, counters and whether a round is pending.

        Saving changes nothing and needs no other replica. Layout: docs/checkpointing.md.
        """
        return saved.pack(self, self.inner.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, on every rank its own. A pending round is launched again by the
        next forward or step. From another optimizer's state only the inner part is loaded, and the model as
        it is when the next step begins becomes the anchor.

        Raises:
            ValueError: an entry does not fit the parameter; nothing was changed.
            RuntimeError: a round is under way.
        """
        self._check_usable()
        with torch.inference_mode(False):  # what it makes lives on
            saved.unpack(self, state_dict)

    def __repr__(self) -> str:
        settings = "".join(f"  {key}: {value}\n" for key, value in self._settings.items())
        return f"LocalSGDOptimizer (\n{settings}  replicas: {self.replicas.count}\n  inner: {self.inner!r}\n)"
