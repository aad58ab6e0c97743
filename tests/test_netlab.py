"""The laboratory network of the benchmarks: its limits hold, its counters count, nothing of it stays."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import processes

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import netlab  # noqa: E402
from netlab import Network, bytes_out, network  # noqa: E402

SCRIPT = str(BENCHMARKS / "netlab.py")

with network(1) as probe:
    WHY_NOT = "" if probe.names else probe.why_not
needs_network = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def exist(names: list[str]) -> bool:
    """Whether any of these namespaces does."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return bool(set(names) & {line.split()[0] for line in listed.splitlines()})


def wait_for(what: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


# ---------------------------------------------------------------------------------------------- limits

NUMEL = 1_000_000
RING = NUMEL * 4  # bytes out of a rank of two: as many as the tensor has


def all_reduces(rank: int, names: list[str], limits: list[float | None]) -> list[tuple[float, int]]:
    """The fastest all-reduce under each limit in seconds, and the most bytes that left this host in one."""
    lab = Network(names, why_not="")
    # The process goes to its host, not a new one into it: that would import torch anew, for seconds.
    with open(f"/var/run/netns/{names[rank]}") as host:
        assert ctypes.CDLL(None).setns(host.fileno(), 0) == 0
    os.environ |= lab.environment()
    group = dist.new_group()
    flat = torch.zeros(NUMEL)
    dist.all_reduce(flat, group=group)  # connects
    found = []
    for mbit in limits:
        times, sent = [], []
        for _ in range(3):
            dist.barrier(group)
            if rank == 0:
                lab.limit(mbit)
            dist.barrier(group)
            start, before = time.perf_counter(), bytes_out()
            dist.all_reduce(flat, group=group)
            dist.barrier(group)
            times.append(time.perf_counter() - start)
            sent.append(bytes_out() - before)
        found.append((min(times), max(sent)))
    return found


@needs_network
def test_limits_hold_and_change_under_way_and_the_counter_has_the_rings_bytes() -> None:
    limits = [100, 40, 200, None]
    with network(2, mbit=100) as lab:
        ranks = processes(2, all_reduces, lab.names, limits)
    for mbit, *found in zip(limits, *ranks, strict=True):
        for took, sent in found:
            assert sent == pytest.approx(RING, rel=0.03)
            ideal = RING * 8e-6 / (mbit or 250)
            at_once = max(netlab.BURST_BYTES * 8e-6 / (mbit or 250), netlab.BURST_SECONDS)
            assert took > ideal - at_once or mbit is None  # never faster
            assert took < 1.4 * ideal, mbit  # others may be at work here


# --------------------------------------------------------------------------------------------- removal


@needs_network
def test_networks_live_side_by_side_and_go_when_they_are_left() -> None:
    with network(2) as one, network(1) as other:
        assert len({*one.names, *other.names}) == 3
        sleeper = subprocess.Popen(one.command(1, ["sleep", "1000"]))
        wait_for(lambda: netlab._run("ip", "netns", "pids", one.names[1]))
        reached = subprocess.run(  # refused by a host that is there: nothing listens
            one.command(
                0, [sys.executable, "-c", f"import socket; socket.create_connection(({one.address(1)!r}, 9))"]
            ),
            capture_output=True,
            text=True,
        )
        assert "ConnectionRefusedError" in reached.stderr
    assert not exist([*one.names, *other.names])
    assert sleeper.wait(10) == -signal.SIGKILL


@needs_network
def test_it_goes_after_an_exception() -> None:
    with contextlib.suppress(KeyError), network(1) as lab:
        assert exist(lab.names)
        raise KeyError
    assert not exist(lab.names)


OWNER = f"""
import sys, time
sys.path.append({str(BENCHMARKS)!r})
from netlab import network
with network(1, 100) as lab:
    print(*lab.names, flush=True)
    time.sleep(1000)
"""


@needs_network
def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else() -> None:
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        killed, alive = (owner.stdout.readline().split() for owner in owners if owner.stdout)
        assert exist(killed)
        inside = subprocess.Popen(["ip", "netns", "exec", killed[0], "sleep", "1000"])
        wait_for(lambda: netlab._run("ip", "netns", "pids", killed[0]))
        owners[0].kill()
        # Not waited for: a zombie is gone, too.
        wait_for(lambda: netlab._stat(owners[0].pid)[0] == "Z")
        with network(1):
            assert not exist(killed)
            assert inside.wait(10) == -signal.SIGKILL
            assert exist(alive)
        assert exist(alive)
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
    with network(0):
        assert not exist(alive)


@needs_network
def test_a_later_process_with_the_same_number_does_not_count() -> None:
    name = f"edit-{os.getpid()}-1-0-0"  # nothing of us started in the first tick after boot
    subprocess.run(["ip", "netns", "add", name], check=True)
    with network(0):
        assert not exist([name])


# ------------------------------------------------------------------------------------------- no rights


def test_without_the_tools_there_is_a_reason_and_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with network(2, mbit=100) as lab:
        assert lab.names == []
        assert "root" in lab.why_not
        assert "'ip'" in lab.why_not
        assert "\n" not in lab.why_not
        assert lab.command(1, ["true"]) == ["true"]
        assert (lab.address(1), lab.environment()) == ("127.0.0.1", {"GLOO_SOCKET_IFNAME": "lo"})
        with pytest.raises(RuntimeError, match="no network"):
            lab.limit(50)


@needs_network
def test_without_rights_it_says_so_and_skips() -> None:
    """Root without any capability, as in most containers."""
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    done = subprocess.run(
        [*drop, sys.executable, SCRIPT, "--", "echo", "ran"], capture_output=True, text=True
    )
    assert done.returncode == netlab.SKIPPED
    assert done.stderr.startswith("skipped: needs root on Linux, ip and tc: ")
    assert (done.stderr.count("\n"), done.stdout) == (1, "")


def test_no_network_is_the_loopback() -> None:
    assert Network().command(0, ["true"]) == ["true"]
    assert bytes_out() >= 0


# ---------------------------------------------------------------------------------------- command line


def start(hosts: int, code: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        SCRIPT,
        "--hosts",
        str(hosts),
        "--mbit",
        "100",
        "--",
        sys.executable,
        "-uc",
        code,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@needs_network
def test_a_command_runs_on_every_host_and_its_exit_code_comes_back() -> None:
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "PET_NODE_RANK"]
    code = f"""
import os, socket, sys, time
host = int(os.environ["RANK"])
print(*(os.environ[name] for name in {names}))
if host == 0:
    server = socket.create_server(("", 29500))
    server.accept()[0].recv(1)  # the other one has ended
    time.sleep(1000)
for _ in range(500):
    try:
        link = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        break
    except OSError:
        time.sleep(0.02)
sys.exit(3)
"""
    process = start(2, code)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 3, out
    lines = sorted(out.splitlines())
    assert lines == [f"[{host}] {host} 2 10.77.0.1 29500 edit0 {host}" for host in range(2)]


@needs_network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_command(number: signal.Signals) -> None:
    code = f"""
import os, signal, sys, time
signal.signal({int(number)}, lambda *_: sys.exit(5 * int(os.environ["RANK"])))
print("ready", *os.listdir("/sys/class/net"))
time.sleep(1000)
"""
    process = start(2, code)
    assert process.stdout
    ready = list(itertools.islice(process.stdout, 2))
    assert all("ready" in line and "edit0" in line for line in ready)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 5
