"""Work beside the training loop: threads that end with the program, and on an accelerator a stream of their own."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch

_here = threading.local()
Job = tuple[Callable[[], None], "Future[None]"]


class Stopped(Exception):
    """What is waited for in a thread is no longer of use: the program ends, or ``close()`` was called."""


def stop_event() -> Event | None:
    """In a thread of :func:`start`, what tells it to stop; ``None`` elsewhere."""
    return getattr(_here, "stop", None)


def start(
    name: str, work: Callable[[], None], owner: object, wake: Callable[[], None] = lambda: None
) -> weakref.finalize[..., Any]:
    """Call ``work()`` in a thread. Returns what stops it, as do the end of the program and that of ``owner``; where the
    thread itself ends ``owner``, whose garbage it may collect, it must see that, or be woken.

    A daemon: a program that ends, or is interrupted, does not wait for replicas that may never come. But the
    interpreter ends such a thread as it returns to it from C++, which aborts the process; so the thread must look
    at :func:`stop_event` where it may wait for long, or be woken by ``wake``, and is given 5 s to do so.
    """
    stop = Event()

    def run() -> None:
        _here.stop = stop
        work()

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    return weakref.finalize(owner, _stop, stop, wake, thread)  # also at exit


def _stop(stop: Event, wake: Callable[[], None], thread: Thread) -> None:
    wake()
    # In the thread itself the collector may have come here in the middle of a wait for `stop`, which is locked then.
    if thread is not threading.current_thread():
        stop.set()
        thread.join(5)


class Background:
    """Does jobs in a thread, one after the other.

    One thread for all rounds of an optimizer, begun with the first of them: torch 2.13 keeps about 130 bytes for ever
    for each thread that has called a collective of gloo.

    Streams: a job runs on a stream of this object, which first waits for the one that is current where :meth:`run` is
    called, on which its inputs were written; :meth:`wait` makes the current stream wait for it. Whoever keeps the inputs
    alive until then need not record streams: their memory is freed in the order of the stream that allocated it, after
    that wait. What a job allocates belongs to this object's stream and is freed after that wait, too; the next job on it
    waits in its turn. One stream for all jobs, because torch has a pool of 32, whose memory is not shared, and which
    comes round to the streams of NCCL.

    Args:
        device: of the stream; the CPU has none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._stop: weakref.finalize[..., Any] | None = None

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Call ``work()`` in the thread. The future is for :meth:`wait`.

        Raises:
            Stopped: the thread was stopped.
        """
        if self._stop is not None and not self._stop.alive:
            raise Stopped(
                "the thread of this optimizer's rounds was stopped: close() was called, or the program ends"
            )
        if self._module is not None:
            self._stream.wait_stream(self._module.current_stream(self.device))
        if self._stop is None:  # neither thread nor queue knows this object, whose end is theirs
            serve = functools.partial(_serve, self._jobs, self._module, self.device, self._stream)
            self._stop = start("edit.round", serve, self, functools.partial(self._jobs.put, None))
        ended: Future[None] = Future()
        self._jobs.put((work, ended))
        return ended

    def wait(self, ended: Future[None]) -> None:
        """Wait for the end of a job; raise what it raised."""
        ended.result()
        if self._module is not None:
            self._module.current_stream(self.device).wait_stream(self._stream)

    def stop(self) -> None:
        """Tell a job under way to stop, wait a while until it does, and end the thread."""
        if self._stop is not None:
            self._stop()


def _serve(jobs: SimpleQueue[Job | None], module: Any, device: torch.device, stream: Any) -> None:
    while (job := jobs.get()) is not None:
        work, ended = job
        error: BaseException | None = None
        try:
            # Each time: a thread begins with the first device, and whoever waits must hear of an error in this, too.
            if module is not None:
                module.set_device(device)
            with torch.no_grad(), nullcontext() if module is None else module.stream(stream):
                work()
        except BaseException as raised:
            error = raised
        del job, work  # a thread that waits for the next one must not keep the last one's tensors
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)
        del ended, error
