"""Work beside the training loop: threads that end with the program, and on an accelerator a stream of their own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from threading import Event, Thread
from typing import Any

import torch

_here = threading.local()


class Stopped(Exception):
    """What is waited for in a thread is no longer of use: the program ends, or ``close()`` was called."""


def stop_event() -> Event | None:
    """In a thread of :func:`start`, what tells it to stop; ``None`` elsewhere."""
    return getattr(_here, "stop", None)


def start(name: str, work: Callable[[], None], owner: object) -> Callable[[], None]:
    """Call ``work()`` in a thread. Returns what stops it, as do the end of the program and that of ``owner``.

    A daemon: a program that ends, or is interrupted, does not wait for replicas that may never come. But the
    interpreter ends such a thread as it returns to it from C++, which aborts the process; so the thread must look
    at :func:`stop_event` where it may wait for long, and is given 5 s to do so.
    """
    stop = Event()

    def run() -> None:
        _here.stop = stop
        work()

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    return weakref.finalize(owner, _stop, stop, thread)  # also at exit


def _stop(stop: Event, thread: Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(5)


def side_stream(device: torch.device) -> Any:
    """A new stream of ``device``; ``None`` on the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).Stream(device)


class Background:
    """Calls ``work`` in a thread of its own, at once.

    Streams: ``work`` runs on ``stream``, which first waits for the current one, on which its inputs were written;
    :meth:`wait` makes the current stream wait for it. Whoever keeps the inputs alive until then need not record
    streams: their memory is freed in the order of the stream that allocated it, after that wait. What ``work``
    allocates belongs to ``stream`` and is freed after that wait, too; the next work on it waits in its turn.

    Args:
        stream: :func:`side_stream` of ``device``, one for all works of an optimizer: torch has a pool of 32, whose
            memory is not shared, and which comes round to the streams of NCCL.

    Attributes:
        stop: tells ``work`` to stop, and waits a while until it does.
    """

    def __init__(self, work: Callable[[], None], device: torch.device, stream: Any) -> None:
        self._work, self._device, self._stream = work, device, stream
        self._ended: Future[None] = Future()
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        if self._module is not None:
            self._stream.wait_stream(self._module.current_stream(device))
        self.stop = start("edit.round", self._run, self)

    def _run(self) -> None:
        try:
            if self._module is not None:  # a thread begins with the first device
                self._module.set_device(self._device)
            stream = nullcontext() if self._module is None else self._module.stream(self._stream)
            with torch.no_grad(), stream:
                self._work()
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def wait(self) -> None:
        """Wait for the end of ``work``; raise what it raised."""
        self._ended.result()
        if self._module is not None:
            self._module.current_stream(self._device).wait_stream(self._stream)
