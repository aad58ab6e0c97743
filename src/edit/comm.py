"""Ranks, groups and sharded tensors: the only file that knows ``torch.distributed`` and DTensor (but for checkpoint
files, which are torch's own).

Everybody else sees replicas, plain local tensors and sums. Four kinds of process group, all the package's
own, so that its traffic never queues behind the model's:

* *control*: host tensors, all ranks. Norms, flags, verdicts.
* *files*: the same for what ranks do together between rounds, while *control* may have a round's exchange under way.
* *sync*: the parameters' device, the ranks that hold the same shard of different replicas. Pseudo gradients.
* *inside*: the parameters' device, the ranks of one replica that hold one layer. Norms of clips.
  (And one on the host, for the clock of A-EDiT.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .background import Background, Stopped, stop_event
from .watch import Watch

REPLICATE = ("replicate", "dp_replicate")
PIPELINE = "pp"
Work = dist.Work
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


class SyncError(RuntimeError):
    """A round could not be completed. Anchor and outer state of each layer are either old or new."""


# ------------------------------------------------------------------------------------- DTensor and FSDP

_gradient_hooks: WeakKeyDictionary[nn.Module, Callable[[Tensor], None]] = WeakKeyDictionary()


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds: shares its storage, has no gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def sharded_like(param: Tensor, part: Tensor, device: str | None = None) -> Tensor:
    """A copy of ``part`` (this rank's, in ``param``'s local shape) placed like ``param``. No communication.

    On ``device``, or else ``part``'s: not ``DTensor.from_local``, which moves it to the mesh's.
    """
    placed = torch.empty_like(param.detach(), dtype=part.dtype, device=device or part.device)
    local(placed).copy_(part)
    return placed


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is distributed over ranks (a DTensor)."""
    return isinstance(tensor, DTensor)


def copies(param: Tensor, holders: int) -> int:
    """How many of the ``holders`` (the ranks of a replica that hold the layer) have the same elements.

    Every mesh dimension over which the tensor is split divides it. "Not replicated" is the test because
    ``_StridedShard`` (FSDP over tensor parallelism) does not call itself a shard.
    """
    if not isinstance(param, DTensor):
        return holders
    sizes = zip(param.device_mesh.shape, param.placements, strict=True)
    return holders // math.prod(size for size, placement in sizes if not placement.is_replicate())


def layout(param: Tensor) -> list[tuple[int, int | None]]:
    """By mesh dimension: its size, and which dimension of ``param`` it splits, if any."""
    if not isinstance(param, DTensor):
        return []
    sizes = zip(param.device_mesh.shape, param.placements, strict=True)
    return [(size, getattr(placement, "dim", None)) for size, placement in sizes]


def mesh_ranks(param: Tensor) -> set[int]:
    """Ranks over which ``param`` is distributed: empty for a plain tensor."""
    return set(param.device_mesh.mesh.flatten().tolist()) if isinstance(param, DTensor) else set()


def wrapper_of(model: nn.Module) -> str | None:
    """Name of a data-parallel wrapper that this package replaces, if ``model`` holds one."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            return type(module).__name__
    return None


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to ``module``."""
    return isinstance(module, FSDPModule)


def _fsdp_state(module: nn.Module) -> Any:
    # A private interface of torch (the only other one: `at_end_of_backward`). ``fully_shard([a, b])`` makes one unit of
    # two modules, ``ignored_params`` leaves parameters out, and ``set_modules_to_forward_prefetch`` gathers a unit
    # before its own forward; nothing public says which modules share a unit, what it holds or what it prefetches.
    try:
        return module._get_fsdp_state()  # type: ignore[operator]
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} no longer offers FSDPModule._get_fsdp_state, from which edit learns "
            "which modules one fully_shard call took together; use a torch version that the README names"
        ) from None


def managed(module: nn.Module) -> set[Tensor]:
    """The parameters that the unit shards and whose gradients it reduces: not those it was told to ignore."""
    state = _fsdp_state(module)
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return {fsdp.sharded_param for group in groups if group is not None for fsdp in group.fsdp_params}


def unit_key(module: nn.Module) -> int:
    """The same number for all modules that one ``fully_shard`` call made one unit of."""
    return id(_fsdp_state(module))


def prefetched(module: nn.Module) -> list[int]:
    """``unit_key`` of the units whose gathering the forward of ``module`` starts early."""
    return [id(state) for state in getattr(_fsdp_state(module), "_states_to_forward_prefetch", ())]


def reshard(module: nn.Module) -> None:
    """Free the unit's gathered parameters, so that what is written to its shards will be seen."""
    if isinstance(module, FSDPModule):
        module.reshard()


def gather_early(module: nn.Module) -> None:
    """Start the unit's all-gather on the *current* stream; FSDP's own pre-forward then waits for it.

    FSDP copies shards in on a stream that waits for the compute stream only when the root's forward
    starts. A shard written later than that, on the compute stream, would be read too early; an
    asynchronous ``unshard`` copies in on the stream that wrote.
    """
    if isinstance(module, FSDPModule):
        module.unshard(async_op=True)


def set_gradient_hook(module: nn.Module, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` with every gradient buffer of the unit after its reduce-scatter, in place of an earlier hook."""
    assert isinstance(module, FSDPModule)
    module.set_all_reduce_hook(hook)
    _gradient_hooks[module] = hook


def remove_gradient_hook(module: nn.Module, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` no more. One that has taken its place, another optimizer's, stays."""
    assert isinstance(module, FSDPModule)
    if _gradient_hooks.get(module) is hook:
        module.set_all_reduce_hook(None)  # type: ignore[arg-type]
        del _gradient_hooks[module]


def at_end_of_backward(call: Callable[[], None]) -> None:
    """In a hook of a backward: call ``call()`` when all its gradients are accumulated.

    No public interface tells that: hooks on leaves raise in ``torch.autograd.grad``. DDP and FSDP do the same.
    Streams: before the calls, the engine has made the caller's stream wait for those of all gradients.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


# -------------------------------------------------------------------------------------------- replicas


def _backend(device_type: str) -> str:
    """What serves ``device_type`` in the default group, or torch's default for it (a GPU job's CPU: gloo)."""
    served = dict(part.split(":", 1) for part in str(dist.get_backend_config()).split(",") if ":" in part)
    return served.get(device_type) or dist.get_default_backend_for_device(device_type)


def _splits() -> bool:
    """Whether torch makes a new group of the default group's communicator, for which all of its ranks must call."""
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    return bound is not None and _backend(bound.type) == "nccl"


class Replicas:
    """Who trains what: ``count`` replicas of ``members`` ranks each; this rank is one of them.

    Args:
        mesh: has a dimension named ``replicate`` (or ``dp_replicate``); the ranks that share its coordinate
            form a replica. If one is named ``pp``, ranks that differ in it hold different stages of the model.
            ``None``: every rank is a replica. Without a process group: one replica.
        timeout: of the package's own groups.
    """

    def __init__(self, mesh: DeviceMesh | None, timeout: timedelta) -> None:
        self.timeout = timeout
        wrong: Exception | None = None
        self.watch: Watch | None = None
        self.background = Background(torch.device("cpu"))  # until the parameters' device is known
        self.bytes_sent = 0  # by this rank to other replicas, all-reduce counted as a ring
        self._groups: dict[tuple[Any, ...], dist.ProcessGroup | None] = {}
        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise RuntimeError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but there is no process group: call "
                    "torch.distributed.init_process_group() before LocalSGDOptimizer(...), or every rank "
                    "would train alone"
                )
            if mesh is not None:
                raise RuntimeError("mesh needs a process group, and there is none: call init_process_group()")
            grid, me = torch.zeros(1, 1, dtype=torch.int64, device="cpu"), 0
        else:
            me, grid = dist.get_rank(), _grid(None)
            try:
                grid = _grid(mesh)
                _check_timeout(timeout)
            except Exception as error:  # raised when there is a group in which all can hear of it
                wrong, self.timeout = error, timedelta(seconds=60)
        where = (grid == me).nonzero()
        if len(where) != 1:
            raise ValueError(
                f"mesh must hold every rank once, but holds rank {me} {len(where)} times: {grid}"
            )
        self.grid: list[list[int]] = grid.tolist()
        self.count, self.members = grid.shape
        self.index, self.member = where[0].tolist()
        self.ranks = [rank for row in self.grid for rank in row]
        self.rank = me
        self.stage: int | None = None if wrong is not None else _stage(mesh)
        self.everyone = len(self.ranks) == 1 or len(self.ranks) == dist.get_world_size()
        if not self.everyone and _splits():
            raise RuntimeError(
                f"mesh must hold all {dist.get_world_size()} ranks, but holds {len(self.ranks)}, while "
                "init_process_group was given device_id, with which torch makes groups of NCCL by splitting that of all "
                "ranks, and waits for all: leave device_id away, or use a mesh of all ranks"
            )
        self.leader = self.ranks[0]  # decides for all: one verdict, not one per CPU model
        try:
            self.control = self._group("control", [self.ranks], "cpu")
            self.files = self._group("files", [self.ranks], "cpu")
            self._agree_on_mesh(wrong)
            self.watch = self._watch()
            self._replica_host = self._group("clock", self.grid, "cpu") if self.members > 1 else None
        except BaseException:
            self.close()
            raise

    def _agree_on_mesh(self, wrong: Exception | None) -> None:
        with self.agree("LocalSGDOptimizer(...)"):
            if wrong is not None:
                raise wrong
        said = self.gather_objects(self.grid)
        first = min(said)
        for rank, theirs in said.items():
            if theirs != said[first]:
                raise ValueError(
                    f"mesh must be the same on all ranks, but groups them as {said[first]} on rank {first} "
                    f"and as {theirs} on rank {rank}: build the same mesh on every rank"
                )

    def connect(self, device: torch.device, holders: dict[str, list[tuple[int, ...]]]) -> None:
        """Make the groups for the parameters' ``device``.

        ``holders``: for each layer, the ranks that hold it, replica by replica.
        """
        columns = [list(column) for column in zip(*self.grid, strict=True)]
        self.device = device
        if self.background.device != device:
            self.background = Background(device)
        self.sync = self._group("sync", columns, device.type)
        peers = [row[self.member] for row in self.grid]
        self._slots = [
            sorted(peers).index(rank) for rank in peers
        ]  # a group counts its ranks in ascending order
        self.slot = self._slots[self.index]  # which slice of a vector spread over the replicas is here
        parts = sorted({part for of_replicas in holders.values() for part in of_replicas if part})
        for part in parts:
            self._group("inside", [part], device.type)
        mine = {name: of_replicas[self.index] for name, of_replicas in holders.items()}
        self._inside = {name: self._groups.get(("inside", device.type, *part)) for name, part in mine.items()}

    def _group(
        self, purpose: str, parts: Sequence[Sequence[int]], device_type: str
    ) -> dist.ProcessGroup | None:
        """Make, once, the groups of all parts; return this rank's. All ranks call this alike.

        Not ``use_local_synchronization``, under which torch gives a group the name, and so the keys in the
        store, of a destroyed one of the same ranks; unless the mesh leaves out ranks, which do not call.
        """
        mine = None
        for part in map(sorted, parts):
            key = (purpose, device_type, *part)
            if len(part) > 1 and key not in self._groups:
                group = None
                if self.everyone or self.rank in part:
                    with self.naming(f"making the group {purpose} {part}, which all ranks must do together,"):
                        group = dist.new_group(
                            part,
                            timeout=self.timeout,
                            backend=_backend(device_type),
                            use_local_synchronization=not self.everyone,
                        )
                self._groups[key] = group if self.rank in part else None
            if self.rank in part:
                mine = self._groups.get(key)
        return mine

    def _watch(self) -> Watch | None:
        """Who is late, by notes in the store through which the control group's ranks have found each other."""
        if self.control is None or not hasattr(self.control, "get_group_store"):
            return None
        if (store := self.control.get_group_store()) is None:
            return None
        keys = {rank: f"edit/note/{rank}" for rank in sorted(self.ranks)}

        def read() -> dict[int, str]:
            return dict(zip(keys, (note.decode() for note in store.multi_get([*keys.values()])), strict=True))

        limit = min(60.0, self.timeout.total_seconds() / 4)
        mine = keys[self.rank]
        try:  # a file's store cannot; nor can one that somebody has made for himself
            store.set(mine, "")
            store.multi_get([mine])
        except RuntimeError:
            return None
        watch = Watch(
            self.rank, self.grid, limit, str(self.timeout), lambda note: store.set(mine, note), read
        )
        watch.start()
        return watch

    def note(self, round: int, stage: int) -> None:
        """Let others know, should they wait for it, how far this rank has come."""
        if self.watch is not None:
            self.watch.note(round, stage)

    def close(self) -> None:
        """End the threads; destroy the groups."""
        self.background.stop()
        if self.watch is not None:
            self.watch.close()
        for group in self._groups.values():
            if group is not None:
                with suppress(ValueError):  # all groups were destroyed before
                    dist.destroy_process_group(group)
        self._groups.clear()

    # Collectives. With one replica, or one rank, there is nobody to talk to and they do nothing.

    def gather_objects(self, value: Any, *, files: bool = False) -> dict[int, Any]:
        """``value`` of every rank, by rank. ``files``: on the group of checkpoint files."""
        group = self.files if files else self.control
        if group is None:
            return {self.ranks[0]: value}
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=group)
        return dict(zip(sorted(self.ranks), values, strict=True))

    def start_exchange(self, matrix: Tensor) -> Work | None:
        """Sum ``matrix`` (host) over all ranks, in the background."""
        return _start(dist.all_reduce, matrix, self.control)

    def start_from_leader(self, values: Tensor) -> Work | None:
        """``values`` (host) become the leader's, in the background."""
        return _start(dist.broadcast, values, self.control, src=self.leader)

    def start_sum(self, flat: Tensor) -> Work | None:
        """Sum ``flat`` over the replicas, in the background.

        Streams: the backend's stream waits for the current one before it reads ``flat``, and
        ``Work.wait`` makes the current stream wait for the backend's; the caller keeps ``flat`` alive
        until then.
        """
        if self.sync is None or flat.numel() == 0:  # empty on all ranks of the sync group alike
            return None
        self.bytes_sent += 2 * (self.count - 1) * flat.numel() * flat.element_size() // self.count
        return _start(dist.all_reduce, flat, self.sync)

    def start_exchange_slices(self, flat: Tensor) -> tuple[list[Tensor], Work | None]:
        """Of every replica's ``flat``, by replica, the slice that is this one's, and of this one's, theirs to them, in
        the background.

        Slices are of equal length: behind the end of ``flat`` there are zeros.
        """
        sent = nn.functional.pad(flat, (0, -flat.numel() % self.count))
        received, work = torch.empty_like(sent), None
        if sent.numel():
            self.bytes_sent += (self.count - 1) * sent.nbytes // self.count
            work = dist.all_to_all_single(received, sent, group=self.sync, async_op=True)
        if flat.is_cuda:  # another stream may own it, and free it before this one has read it
            flat.record_stream(torch.cuda.current_stream(flat.device))
        slices = received.tensor_split(self.count)
        return [slices[slot] for slot in self._slots], work

    def gather_slices(self, own: Tensor) -> Tensor:
        """The vector whose slices the replicas hold, ``own`` being this one's."""
        whole = own.new_empty(self.count * own.numel())
        if own.numel():
            self.bytes_sent += (self.count - 1) * own.nbytes
            _all_gather(whole, own, group=self.sync)
        return whole

    def average(self, flat: Tensor) -> None:
        """``flat`` becomes its mean over the replicas (a sum, scaled before: gloo knows no mean)."""
        if self.count > 1 and flat.numel():
            flat.div_(self.count)
            if (work := self.start_sum(flat)) is not None:
                work.wait()
            if flat.is_cuda:
                # FSDP hands in a buffer that another of its streams owns and may free before this one is done.
                flat.record_stream(torch.cuda.current_stream(flat.device))

    def start_sum_inside(self, value: Tensor, layer: str) -> Work | None:
        """Sum ``value`` over the ranks of this replica that hold ``layer``, in the background."""
        return _start(dist.all_reduce, value, self._inside[layer])

    def from_first_replica(self, flat: Tensor) -> None:
        """``flat`` becomes that of replica 0."""
        if self.sync is not None and flat.numel():
            dist.broadcast(flat, src=self.grid[0][self.member], group=self.sync)

    def start_from_first_member(self, value: Tensor) -> Work | None:
        """``value`` (host) becomes that of the first rank of this replica, in the background."""
        return _start(dist.broadcast, value, self._replica_host, src=self.grid[self.index][0])

    @contextmanager
    def agree(self, what: str, *, files: bool = False) -> Iterator[None]:
        """An exception inside, on any rank, is an exception on every rank.

        ``files``: on the group of checkpoint files.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        try:
            with self.naming(f"{what}, which all ranks must call,"):
                said = self.gather_objects(error and f"{type(error).__name__}: {error}", files=files)
        except SyncError as lost:
            if error is not None:  # what came first
                raise error from lost
            raise
        if error is not None:
            raise error
        for rank, text in said.items():
            if text is not None:
                raise RuntimeError(f"{what} failed on rank {rank}: {text}")

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Re-raise a failed collective as a :class:`SyncError` that says what was being done; while it waits long,
        say for whom."""
        try:
            with self.watch.waiting(what) if self.watch is not None else nullcontext():
                yield
        except SyncError:
            raise
        except RuntimeError as error:  # gloo's time-outs and lost connections, NCCL's DistBackendError
            raise SyncError(
                f"{what} failed on rank {self.rank} (replica {self.index} of "
                f"{self.count}): {error}. A rank died, stopped, or waits elsewhere for longer than timeout="
                f"{self.timeout}; see docs/faq.md. Restart from the last checkpoint"
            ) from error


def wait(work: Work | None, *, on_host: bool) -> None:
    """Wait for ``work``; on a device its stream does, not the host.

    Raises:
        Stopped: in a thread that was told to stop. There the host looks now and then, and never waits inside the
            backend, where nothing could tell it.
    """
    if work is None:
        return
    if on_host and (stop := stop_event()) is not None:
        while not work.is_completed():
            if stop.wait(0.003):
                raise Stopped
    work.wait()


def _start(
    collective: Callable[..., Work | None], value: Tensor, group: dist.ProcessGroup | None, **how: int
) -> Work | None:
    return None if group is None else collective(value, group=group, async_op=True, **how)


def _stage(mesh: DeviceMesh | None) -> int | None:
    """Which stage of a pipeline this rank holds; ``None``: the whole model."""
    if mesh is None or PIPELINE not in (mesh.mesh_dim_names or ()) or mesh[PIPELINE].size() == 1:
        return None
    return mesh.get_local_rank(PIPELINE)


def _check_timeout(timeout: timedelta) -> None:
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a timedelta or None, but is {timeout!r}: use timedelta(hours=1)")
    if timeout < timedelta(seconds=1):
        raise ValueError(f"timeout must be at least 1 s, but is {timeout}: use timedelta(hours=1)")


def _grid(mesh: DeviceMesh | None) -> Tensor:
    """Ranks as ``[replica, member]``."""
    if mesh is None:
        return torch.arange(dist.get_world_size(), device="cpu").unsqueeze(1)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, but is {mesh!r}: use init_device_mesh")
    names = mesh.mesh_dim_names or ()
    named = [dim for dim, name in enumerate(names) if name in REPLICATE]
    if len(named) != 1:
        raise ValueError(
            f"mesh must have one dimension named 'replicate' (or 'dp_replicate'), but has {names}: use "
            "init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
        )
    ranks = mesh.mesh.cpu().to(torch.int64)
    return ranks.movedim(named[0], 0).reshape(ranks.shape[named[0]], -1)
