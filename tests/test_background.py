"""Threads beside the training loop: what they raise, and how they end."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch

import edit
from edit import background, watch
from edit.background import Background, Stopped
from problems import net

CPU = torch.device("cpu")


class Device:
    """What ``torch.get_device_module`` gives; each of its calls fails."""

    @staticmethod
    def Stream(device: torch.device) -> Any:
        return mock.Mock()

    @staticmethod
    def current_stream(device: torch.device) -> Any:
        return mock.Mock()

    @staticmethod
    def set_device(device: torch.device) -> None:
        raise RuntimeError("an earlier kernel failed")


def outcome(ended: Future[None]) -> BaseException | None:
    return ended.exception(timeout=5)  # seconds; a future that nobody resolves is an error here


def test_jobs_run_one_after_the_other_in_one_thread() -> None:
    jobs, seen = Background(CPU), []
    for number in range(3):
        jobs.wait(jobs.run(lambda number=number: seen.append((number, threading.current_thread()))))  # type: ignore[misc]
    assert [number for number, _ in seen] == [0, 1, 2]
    assert len({thread for _, thread in seen}) == 1
    thread = seen[0][1]
    jobs.stop()
    assert not thread.is_alive()


def test_a_job_that_fails_does_not_stop_the_next() -> None:
    jobs, done = Background(CPU), []

    def fails() -> None:
        raise KeyError("first")

    first, second = jobs.run(fails), jobs.run(lambda: done.append(1))
    assert isinstance(outcome(first), KeyError)
    assert outcome(second) is None
    assert done == [1]


def test_an_error_of_the_device_reaches_who_waits() -> None:
    with mock.patch.object(torch, "get_device_module", return_value=Device):
        jobs = Background(torch.device("meta"))  # any that is not the CPU
    for _ in range(2):
        assert str(outcome(jobs.run(lambda: None))) == "an earlier kernel failed"
    jobs.stop()


def test_no_job_after_the_end() -> None:
    jobs = Background(CPU)
    jobs.wait(jobs.run(lambda: None))
    jobs.stop()
    with pytest.raises(Stopped, match="was stopped"):
        jobs.run(lambda: None)


def test_the_thread_itself_may_end_its_owner() -> None:
    """The collector may run anywhere, also where the thread has locked the event that it waits for."""

    class Owner:
        pass

    owner: list[Owner] = [Owner()]
    ready, ended = threading.Event(), threading.Event()

    def work() -> None:
        stop = background.stop_event()
        assert stop is not None
        assert ready.wait(5)
        with stop._cond:  # type: ignore[attr-defined]  # as in Event.wait
            owner.clear()
        ended.set()

    woken: list[int] = []
    background.start("test", work, owner[0], lambda: woken.append(1))
    ready.set()
    assert ended.wait(5)
    assert woken == [1]


def test_a_watch_that_is_gone_is_not_looked_after() -> None:
    thing = watch.Watch(0, [[0], [1]], 0.01, "1 s", lambda note: None, lambda: {})
    thing.start()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "edit.watch")
    reference = weakref.ref(thing)
    with mock.patch.object(background, "_stop"):
        del thing
        gc.collect()
        assert reference() is None
    thread.join(5)
    assert not thread.is_alive()


def test_an_optimizer_that_nobody_uses_is_gone_when_another_one_is_built() -> None:
    """On all ranks, then: until it is gone it averages gradients in the warm-up."""
    model = net()
    old = edit.LocalSGDOptimizer(model, lr=0.1)
    old.myself = old  # type: ignore[attr-defined]  # a cycle, as a trainer and its callbacks make
    reference = weakref.ref(old)
    gc.disable()
    try:
        del old
        assert reference() is not None
        edit.LocalSGDOptimizer(model, lr=0.1)
        assert reference() is None
    finally:
        gc.enable()
