"""Run a function on several ranks: as threads of this process (milliseconds) or as real gloo processes.

    results = threads(4, fn, arg)      # fn(rank, arg) on 4 ranks; results[rank]
    results = processes(4, fn, arg)    # the same; fn is a function of a module, not a lambda or closure

The only file of the tests that knows torch's internals. In both worlds every rank has a default group with a
time-out, one torch thread and the warning filters of the test; an exception on one rank stops all and arrives
as a `RankError` that names the rank (the first by time); a hang becomes one that shows where each rank was.
Threads that call different collectives, or would wait for each other for ever, fail at once.

What threads cannot show (use `processes` for it):

* Work is complete when a collective returns, `async_op=True` or not: a rank waits *in the call* (but for
  `broadcast`). Two ranks that use two groups in different orders are a deadlock here, although gloo would finish.
* The random state is one for all ranks, and their order is not fixed: draw from a `torch.Generator` of your
  own, or before the ranks start. Default dtype, warnings and `os.environ` are shared too.
* The default group serves "cpu" and "cuda"; `get_backend_config()` says `cpu:threaded,cuda:threaded`.
* Arguments and results are not copied: a tensor among `args` is the same one for all ranks.
* No point-to-point, no time-out within a collective. `backend="gloo"` in `new_group` is real gloo.
* Hypothesis' `draw`, `assume` and `note` belong to the thread of the test: call them outside of the ranks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import faulthandler
import functools
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

# Modules that the fork server imports once, so that a rank starts in milliseconds.
PRELOAD = [
    "torch",
    "torch._dynamo",  # 1.5 s, which the first fully_shard, or the first optimizer, would spend in every rank
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing._internal.distributed.multi_threaded_pg",
    "hypothesis",
    "pytest",
]

# torch reports every collective that raises to this logger of its own, at DEBUG, which pytest then repeats.
logging.getLogger("c10d-NullHandler-default").propagate = False


class RankError(AssertionError):
    """A rank failed: its number is `rank`, its exception (if it left one) `__cause__`."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


@dataclass(frozen=True)
class Exited:
    """Stands among the results for a rank that died as expected, by this signal or with this code."""

    rank: int
    code: int  # as in `Process.exitcode`: -9 is SIGKILL

    def __str__(self) -> str:
        how = f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with {self.code}"
        return f"was gone ({how}) before it answered"


def mesh(replicas: int, shards: int) -> DeviceMesh:
    """The mesh of the user's ten lines, on the CPU. Call it on all `replicas * shards` ranks."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def _raised(error: BaseException) -> str:
    trace = "".join(traceback.format_exception(error))
    return f"raised {type(error).__name__}: {error}\n\n{trace}"


# --------------------------------------------------------------------------------------------- threads


def threads(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 30) -> list[Any]:
    """`[fn(rank, *args) for each rank]`, the ranks being threads that share all memory.

    Raises:
        RankError: a rank raised, or did not end within `timeout` seconds. A thread cannot be killed: one
            that hangs outside of a collective is left behind, asleep.
    """
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []  # in the order of time
    watch = _Watch(world_size)

    def rank_main(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            dist.init_process_group(
                "threaded", rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=timeout)
            )
            results[rank] = fn(rank, *args)
            for ends in watch.started.get(threading.current_thread(), []):
                ends(5)  # it must not go on in the next world
            watch.ends(rank)
        except BaseException as error:
            if not watch.stopped:  # else: the SystemExit of a stopped collective, or nobody listens any more
                errors.append((rank, error))
                watch.stop()
        if not watch.left:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    with _threaded_world(watch) as store:
        ranks = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]
        for thread in ranks:
            thread.start()
        deadline = time.monotonic() + timeout
        while (alive := [thread for thread in ranks if thread.is_alive()]) and time.monotonic() < deadline:
            alive[0].join(0.05)
            if errors:  # the others leave their collectives, but not a `new_group` or a sleep
                deadline = min(deadline, time.monotonic() + 1)
        hung = {rank: _stack(thread) for rank, thread in enumerate(ranks) if thread.is_alive()}
        if hung:
            watch.stop()
            for thread in ranks:
                thread.join(1)
    if errors:
        rank, error = errors[0]
        raise RankError(rank, _raised(error)) from error
    if hung:
        raise RankError(next(iter(hung)), _hangs(hung, timeout))
    return results


@contextlib.contextmanager
def _threaded_world(watch: _Watch) -> Iterator[dist.Store]:
    """As `MultiThreadedTestCase` does it: a world of groups and a registry of their names per thread."""
    excepthook = sys.excepthook
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        with (
            watch.installed(),
            _named_groups(),
            _broadcasts_beside(watch),
            _threads_of_ranks(watch),
        ):
            yield dist.HashStore()
    finally:
        watch.stopped = watch.left = True  # a thread that hung must not touch the next world when it wakes up
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = excepthook  # init_process_group wraps it, once per rank, and never unwraps it


@contextlib.contextmanager
def _threads_of_ranks(watch: _Watch) -> Iterator[None]:
    """Of the package and of copies of it under other names."""
    modules = [
        m for name, m in sys.modules.items() if name.endswith(".background") and hasattr(m, "Background")
    ]
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "Thread", _Thread))
            run = functools.partialmethod(_run_counted, watch, module.Background.run)
            stack.enter_context(mock.patch.object(module.Background, "run", run))
        yield


class _Thread(threading.Thread):
    """A thread of a rank: it lives in the rank's world of groups."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.world = threaded.ThreadLocalWorld()._get_world()
        here = threading.current_thread()
        self.rank = here.rank if isinstance(here, _Thread) else here

    def run(self) -> None:
        threaded.ThreadLocalWorld._world.world = self.world
        super().run()


def _run_counted(
    background: Any, watch: _Watch, run: Callable[..., Future[None]], work: Callable[[], None]
) -> Future[None]:
    """A job of a package's thread, which waits for the next one when it has ended."""
    ended = run(background, watch.counted(work))
    watch.started.setdefault(threading.current_thread(), []).append(
        lambda timeout: concurrent.futures.wait([ended], timeout)
    )
    return ended


@contextlib.contextmanager
def _named_groups() -> Iterator[None]:
    # destroy_process_group(group) strikes a group off the world and then asks for its name, which a threaded
    # group looks up in the world: let it keep its name.
    group = threaded.ProcessLocalGroup
    with (
        mock.patch.object(group, "_set_group_name", lambda self, name: setattr(self, "_name", name)),
        mock.patch.object(group, "pg_name", property(lambda self: self._name)),
    ):
        yield


@contextlib.contextmanager
def _broadcasts_beside(watch: _Watch) -> Iterator[None]:
    """A rank says that it will receive long before it needs what is sent, and goes on."""
    broadcast = threaded.ProcessLocalGroup.broadcast

    def beside(group: dist.ProcessGroup, tensors: Any, opts: Any) -> dist.Work:
        begin = functools.partial(broadcast, group, tensors, opts)
        return _Beside(begin, watch) if opts.asyncOp else begin()

    with mock.patch.object(threaded.ProcessLocalGroup, "broadcast", beside):
        yield


class _Beside(dist.Work):
    """A collective in a thread."""

    def __init__(self, begin: Callable[[], dist.Work], watch: _Watch) -> None:
        super().__init__()
        self.work: Future[dist.Work] = Future()
        self.thread = _Thread(target=watch.counted(functools.partial(self.run, begin)), daemon=True)
        watch.started.setdefault(self.thread.rank, []).append(self.thread.join)
        self.thread.start()

    def run(self, begin: Callable[[], dist.Work]) -> None:
        try:
            self.work.set_result(begin())
        except BaseException as error:
            self.work.set_exception(error)

    def is_completed(self) -> bool:
        return self.work.done()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self.work.result().wait(timeout)


class _Watch:
    """Sees what the threaded backend does not: mismatched collectives and ranks that wait for ever.

    Every group has one collective under way, which its ranks join; a rank that joined an incomplete one
    cannot go on. When that is so for all ranks that have not ended, nothing will happen any more.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.stopped = self.left = False
        self.jobs = 0  # under way in threads of the ranks: whoever waits may wait for one of these
        self.started: dict[
            threading.Thread, list[Callable[[float], Any]]
        ] = {}  # by rank: what waits for their ends
        self.lock = threading.Lock()
        self.ended: set[int] = set()
        self.waiting: dict[threaded.Collective, dict[int, str]] = {}  # incomplete: {rank: what it called}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        start, join = threaded.ProcessLocalGroup._start_coll, threaded.Collective.join

        def checked_start(wanted: Any, group: dist.ProcessGroup) -> threaded.Collective:
            current = start(wanted, group)
            here, elsewhere = _call(wanted), _call(current._collective)
            if here != elsewhere:
                raise RuntimeError(f"mismatch in group {group.pg_name}: {here} here, {elsewhere} elsewhere")
            return current

        def checked_join(current: threaded.Collective, rank: int, data: Any) -> dist.Work:
            self.joins(current, dist.get_rank(), _call(current._collective, data))
            return join(current, rank, data)

        with (
            mock.patch.object(threaded.ProcessLocalGroup, "_start_coll", staticmethod(checked_start)),
            mock.patch.object(threaded.Collective, "join", checked_join),
        ):
            yield

    def counted(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work``, which is one of the jobs from now on until it has ended."""
        with self.lock:
            self.jobs += 1

        def counted() -> None:
            try:
                work()
            finally:
                with self.lock:
                    self.jobs -= 1

        return counted

    def stop(self) -> None:
        """Wake all ranks that wait in a collective; they raise SystemExit."""
        # ProcessLocalGroup.exception_handle without its race: it walks a dictionary that others change.
        self.stopped = True
        group = threaded.ProcessLocalGroup
        group._terminate.set()
        with group._coll_lock:
            collectives = list(group._cur_coll_on_pgs.values())
        for collective in collectives:
            for condition in (collective._start_cond, collective._done_cond):
                with condition:
                    condition.notify_all()

    def joins(self, current: threaded.Collective, rank: int, call: str) -> None:
        with self.lock:
            calls = self.waiting.setdefault(current, {})
            calls[rank] = call
            if len(set(calls.values())) > 1:
                raise RuntimeError(f"mismatch of what the ranks call: {calls}")
            if len(calls) == current._world_size:
                del self.waiting[current]
            self._check()

    def ends(self, rank: int) -> None:
        with self.lock:
            self.ended.add(rank)
            self._check()

    def _check(self) -> None:
        waiting = {rank: call for calls in self.waiting.values() for rank, call in calls.items()}
        if waiting and not self.jobs and len(waiting) + len(self.ended) == self.world_size:
            raise RuntimeError(f"deadlock: waiting {waiting}, ended {sorted(self.ended)}")


def _call(collective: Any, data: Any = None) -> str:
    """The collective with its settings and, where all ranks must agree on them, shapes and dtypes."""
    settings = ", ".join(f"{key}={getattr(value, 'op', value)}" for key, value in vars(collective).items())
    call = f"{type(collective).__name__}({settings})"
    if data is not None and isinstance(collective, threaded.AllReduce | threaded.Broadcast):
        call += f" of {[(tuple(tensor.shape), tensor.dtype) for tensor in threaded.flatten_list(data)]}"
    return call


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""


def _hangs(stacks: dict[int, str], timeout: float) -> str:
    where = "\n".join(f"--- rank {rank} is at\n{stack}" for rank, stack in stacks.items())
    return f"did not end within {timeout} s (nor did others, if listed)\n{where}"


# ------------------------------------------------------------------------------------------- processes


def processes(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    group_timeout: float = 20,
    expect_killed: Collection[int] = (),
) -> list[Any]:
    """`[fn(rank, *args) for each rank]`, the ranks being gloo processes of a fork server.

    Arguments and results travel as bytes of `torch.save`: plain tensors and values, no DTensors. What a rank
    prints is lost.

    Args:
        timeout: seconds for everything.
        group_timeout: seconds that a collective of the default group, or a meeting of ranks, may take.
        expect_killed: ranks that die before they answer; an `Exited` is their result.

    Raises:
        RankError: a rank raised, died, did not die though expected, or did not end within `timeout`.
    """
    try:
        call = _to_bytes((fn, args, warnings.filters))
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(f"fn must be a function of a module, args plain values; got {fn}: {error}") from error
    context = _fork_server()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # here: it outlives ranks
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_process_main,
                    args=(rank, world_size, store.port, group_timeout, call, there, f"{folder}/{rank}"),
                    daemon=True,
                )
                process.start()
                there.close()
                ranks.append(_Rank(rank, process, here, Path(folder, str(rank))))
            return _collect(ranks, timeout, expect_killed)
        finally:
            for one in ranks:
                one.pipe.close()  # lets those go that wait for the others
                if one.answer is None:
                    one.process.kill()
            for one in ranks:
                one.process.join()


@dataclass
class _Rank:
    rank: int
    process: Any
    pipe: multiprocessing.connection.Connection
    stack: Path
    answer: tuple[str, Any, Any] | None = None

    def read(self) -> None:
        """What the rank sent, or how it ended."""
        try:
            self.answer = _from_bytes(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join()
            self.answer = "exited", Exited(self.rank, self.process.exitcode), None


def _collect(ranks: list[_Rank], timeout: float, expect_killed: Collection[int]) -> list[Any]:
    deadline = time.monotonic() + timeout
    while True:
        open_ranks = {one.pipe: one for one in ranks if one.answer is None}
        if not open_ranks:
            break
        ready = multiprocessing.connection.wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = _stacks(open_ranks.values())
            raise RankError(next(iter(stacks)), _hangs(stacks, timeout))
        for pipe in ready:
            open_ranks[pipe].read()
        if any(_failure(one, expect_killed) for one in ranks):
            # A rank's death shows in other ranks as a lost connection, perhaps sooner than here: wait a
            # little for the cause before the first failure is reported.
            late = {one.pipe: one for one in ranks if one.answer is None}
            for pipe in multiprocessing.connection.wait(list(late), 0.2) if late else ():
                late[pipe].read()
            break
    failures = [(one, failure) for one in ranks if (failure := _failure(one, expect_killed))]
    if failures:
        one, (what, cause) = min(failures, key=lambda item: item[0].answer[0] != "exited")
        raise RankError(one.rank, what) from cause
    return [one.answer[1] for one in ranks]


def _failure(one: _Rank, expect_killed: Collection[int]) -> tuple[str, BaseException | None] | None:
    kind, value, cause = one.answer or ("open", None, None)
    if kind == "raised":
        return value, cause
    if kind == "exited" and one.rank not in expect_killed:
        return str(value), None
    if kind == "returned" and one.rank in expect_killed:
        return f"was expected to die but returned {value!r}", None
    return None


def _stacks(ranks: Collection[_Rank]) -> dict[int, str]:
    for one in ranks:
        if one.stack.exists():  # the handler is installed
            os.kill(one.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    return {one.rank: one.stack.read_text() if one.stack.exists() else "its start\n" for one in ranks}


@functools.cache
def _fork_server() -> Any:
    """The one fork server of the session, started with the first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _process_main(
    rank: int,
    world_size: int,
    port: int,
    group_timeout: float,
    call: bytes,
    pipe: multiprocessing.connection.Connection,
    stack: str,
) -> None:
    faulthandler.register(signal.SIGUSR1, file=open(stack, "w"), all_threads=True)  # noqa: SIM115
    torch.set_num_threads(1)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine's name resolves to
    limit = timedelta(seconds=group_timeout)
    try:
        fn, args, filters = _from_bytes(call)
        warnings.resetwarnings()
        warnings.filters[:] = filters
        store = dist.TCPStore("localhost", port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=limit)
        answer = _to_bytes(("returned", fn(rank, *args), None))
    except BaseException as error:
        try:
            answer = _to_bytes(("raised", _raised(error), error))
            _from_bytes(answer)  # an exception may be saved and still not load
        except Exception:
            answer = _to_bytes(("raised", _raised(error), None))
    pipe.send_bytes(answer)
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv_bytes()  # until all are done: to leave early would break the others' connections
    os._exit(0)


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
