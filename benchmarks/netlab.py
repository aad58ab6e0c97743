"""A laboratory network on one machine: hosts as network namespaces on one bridge, the egress of each limited.

    python benchmarks/netlab.py --hosts 4 --mbit 200 -- python train.py --steps 100
    python benchmarks/netlab.py --hosts 2 --mbit 50 -- torchrun --nproc-per-node 2 train.py
    python benchmarks/netlab.py --check

Needs root on Linux, ``ip`` and ``tc`` (iproute2); without them it says so and skips, exit code 77.

The command runs once on each host, at the same time, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
and GLOO_SOCKET_IFNAME set as for one rank per host. The same is set under the names by which torchrun takes its
options (PET_NNODES, PET_NODE_RANK and so on), so it needs none about nodes. Output comes line by line, the host
in front. Ctrl-C and SIGTERM go on to the command on every host; the second time they kill. Where it fails on one
host, it is ended on the others; its exit code is that of the first that failed.

The limit is on what leaves a host: everything in frames of 1500 bytes, headers among it, so 95.6 % of the rate is
payload; 70 kB, or what 4 ms make, may go at once. There is no delay and no loss. What ranks of one host say to each other is on its loopback: not limited,
not counted. Everything is removed at the end; what a killed process left, at the next start.

``--check`` measures all-reduces of gloo over four hosts, at several rates: bytes that leave a host per second,
alone and while every host multiplies matrices on one core, and how fast those products go, compared with no
traffic.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINK = "edit0"  # the interface to the other hosts, in each of them
NAME = re.compile(
    r"edit-(\d+)-(\d+)-\d+-\w+"
)  # process, when it started, its how-manieth network, which host
PORT = 29500  # of the rendezvous; the same in every network, each has its own
CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
UNLIMITED = 100_000  # Mbit/s: more than the CPUs bring about
SKIPPED = 77  # exit code, as of automake's tests
GRACE = 10.0  # seconds from SIGTERM to SIGKILL, for hosts that are ended because another failed


# The token bucket. A packet larger than the bucket, and TCP hands on up to 64 kB at once (segmentation offload; 45
# headers are counted with it), would be cut into frames by the CPU: ten times the work, each with a header in the
# interface's counter. And what the bucket holds is what is not lost when the CPU comes late. It is sent at once,
# so small things see a faster network: a round of less than 70 kB none at all.
BURST_BYTES = 70_000
BURST_SECONDS = 0.004
QUEUE_BYTES = 16_000_000  # never full: a socket waits with the next packet until its last ones have left

_count = itertools.count()


@dataclass(frozen=True)
class Network:
    """Hosts to run commands on, numbered from 0.

    ``names`` are those of their network namespaces. There are none without the rights, then ``why_not`` is the
    reason, in one line, and commands run outside, on the loopback.
    """

    names: list[str] = field(default_factory=list)
    why_not: str = "no network was asked for"

    def limit(self, mbit: float | None) -> None:
        """Let at most ``mbit`` Mbit/s leave each host from now on; ``None``: as much as it can. Drops nothing."""
        if self.why_not:
            raise RuntimeError(f"limit({mbit}): there is no network to limit: {self.why_not}")
        rate = UNLIMITED if mbit is None else mbit
        burst = max(BURST_BYTES, int(rate * 125_000 * BURST_SECONDS))
        shaper = ("tbf", "rate", f"{rate}mbit", "burst", f"{burst}b", "limit", f"{QUEUE_BYTES}b")
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", LINK, "root", *shaper)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """``command``, to be run on ``host``."""
        return ["ip", "netns", "exec", self.names[host], *command] if self.names else list(command)

    def address(self, host: int) -> str:
        """Of ``host``, for the others."""
        return f"10.77.0.{host + 1}" if self.names else "127.0.0.1"

    def environment(self) -> dict[str, str]:
        """Variables that a command needs to talk over the network."""
        return {"GLOO_SOCKET_IFNAME": LINK if self.names else "lo"}


@contextlib.contextmanager
def network(hosts: int, mbit: float | None = None) -> Iterator[Network]:
    """A network of ``hosts`` hosts while it is entered; at most ``mbit`` Mbit/s leave each.

    On leaving, what still runs on its hosts is killed.
    """
    me = os.getpid()
    prefix = f"edit-{me}-{_stat(me)[1]}-{next(_count)}"
    switch, names = f"{prefix}-switch", [f"{prefix}-{host}" for host in range(hosts)]
    made: list[str] = []
    found = Network(names, why_not="")
    try:
        try:
            _clean()
            for name in [switch, *names]:
                _run("ip", "netns", "add", name)
                made.append(name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for host, name in enumerate(names):
                port = f"port{host}"
                pair = ("type", "veth", "peer", "name", LINK, "netns", name)
                _run("ip", "-n", switch, "link", "add", port, *pair)
                _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
                _run("ip", "-n", name, "address", "add", f"{found.address(host)}/24", "dev", LINK)
                _run("ip", "-n", name, "link", "set", LINK, "up")
                # Some machines have BBR, which measures the rate and is at times wrong by four. Nothing is lost
                # here, so Reno fills the link.
                _run("ip", "netns", "exec", name, "sh", "-c", f"echo reno > {CONTROL}")
            found.limit(mbit)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            found = Network(why_not=f"needs root on Linux, ip and tc: {said.strip().splitlines()[0]}")
        yield found
    finally:
        for name in made:
            _remove(name)


def bytes_out() -> int:
    """Bytes that this process's network has sent so far: over :data:`LINK`, or else over the loopback."""
    rows = (line.split(":", 1) for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line)
    sent = {name.strip(): int(numbers.split()[8]) for name, numbers in rows}
    return sent.get(LINK, sent["lo"])


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _stat(pid: int) -> tuple[str, str]:
    """State of a process, and when it started, in ticks since boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _kill(name: str) -> None:
    for pid in _run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _remove(name: str) -> None:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # another start may have removed it
        _kill(name)
        _run("ip", "netns", "delete", name)


def _clean() -> None:
    """Remove the networks whose process is gone."""
    for line in _run("ip", "netns", "list").splitlines():
        if match := NAME.fullmatch(line.split()[0]):
            try:
                state, born = _stat(int(match[1]))
            except OSError:
                state, born = "X", ""
            if state in "ZX" or born != match[2]:  # a zombie, or a later process with its number
                _remove(match[0])


# ------------------------------------------------------------------------------------------------ main


def run(lab: Network, command: Sequence[str]) -> int:
    """``command`` on every host of ``lab``, as the module's text says. Returns the exit code."""
    processes: list[subprocess.Popen[str]] = []
    told: list[int] = []

    def tell(number: int, _: Any = None) -> None:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL if told else number)
        told.append(number)

    def echo(host: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            sys.stdout.write(f"[{host}] {line.rstrip()}\n")
            sys.stdout.flush()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, tell) for number in signals]
    readers: list[threading.Thread] = []
    try:
        for host in range(len(lab.names)):
            processes.append(
                subprocess.Popen(
                    lab.command(host, command),
                    env=os.environ | lab.environment() | _rank(lab, host),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # the terminal's Ctrl-C reaches it through this process alone
                )
            )
            readers.append(threading.Thread(target=echo, args=(host, processes[-1])))
            readers[-1].start()
        failed, deadline = 0, math.inf
        while True:
            codes = [process.poll() for process in processes]
            failed = failed or next(filter(None, codes), 0)
            if None not in codes:
                return failed if failed >= 0 else 128 - failed  # as a shell says it
            if failed and not told:
                tell(signal.SIGTERM)
                deadline = time.monotonic() + GRACE
            if time.monotonic() > deadline:
                tell(signal.SIGKILL)
            time.sleep(0.02)
    finally:
        for name in lab.names:
            _kill(name)  # a worker that outlives its torchrun would keep the output open
        for process, reader in zip(processes, readers, strict=False):
            process.wait()
            reader.join()
            assert process.stdout
            process.stdout.close()
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _rank(lab: Network, host: int) -> dict[str, str]:
    hosts, own = len(lab.names), lab.address(host)
    shared = {"MASTER_ADDR": lab.address(0), "MASTER_PORT": str(PORT)}
    ordinary = {"RANK": str(host), "WORLD_SIZE": str(hosts), "LOCAL_RANK": "0"}
    torchrun = {"NNODES": str(hosts), "NODE_RANK": str(host), "LOCAL_ADDR": own} | shared
    return shared | ordinary | {f"PET_{name}": value for name, value in torchrun.items()}


def measure(seconds: float) -> dict[str, float]:
    """On one rank: the rate in Mbit/s without and with products, for about ``seconds`` each, and their speed."""
    import torch
    import torch.distributed as dist

    flat = torch.zeros(2_000_000)  # 8 MB
    square = torch.randn(256, 256)

    def reduce(foreground: bool) -> tuple[float, int]:
        """Seconds, and products meanwhile."""
        start, products = time.perf_counter(), 0
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        while foreground and not work.is_completed():
            torch.mm(square, square)
            products += 1
        work.wait()
        return time.perf_counter() - start, products

    def rate(count: int, foreground: bool) -> tuple[float, float]:
        """Mbit/s, and how fast products go meanwhile: in turns with as much time without traffic."""
        sent, took, speed = 0, 0.0, [0, 0]
        for _ in range(count):
            dist.barrier()
            start, before = time.perf_counter(), bytes_out()
            seconds, products = reduce(foreground)
            dist.barrier()  # what the others have not yet got from here
            took += time.perf_counter() - start
            sent += bytes_out() - before
            if foreground:
                until = time.perf_counter() + seconds
                speed[0] += products
                while time.perf_counter() < until:
                    torch.mm(square, square)
                    speed[1] += 1
        return sent * 8e-6 / took, speed[0] / max(speed[1], 1)

    reduce(False)
    count = torch.tensor(seconds / reduce(False)[0]).ceil()
    dist.all_reduce(count, dist.ReduceOp.MAX)
    alone, _ = rate(int(count), False)
    busy, products = rate(int(count), True)
    return {"alone": alone, "busy": busy, "products": products}


def check(hosts: int) -> int:
    """Print what comes of a limit, and what the traffic costs. Returns the exit code."""
    sys.modules["netlab"] = sys.modules[__name__]  # or else the import makes a second one
    from harness import be_rank, is_rank, run_ranks, table

    if is_rank():
        be_rank({"measure": measure})
        return 0
    rows = []
    with network(hosts) as lab:
        if not lab.names:
            return _skip(lab)
        for mbit in (50, 200, 1000, None):
            lab.limit(mbit)
            ranks = run_ranks("measure", hosts, network=lab, seconds=2.0)
            alone, busy, products = (
                sum(rank[key] for rank in ranks) / hosts for key in ("alone", "busy", "products")
            )
            rate = f"{mbit} Mbit/s" if mbit else "unlimited"
            part = f"{alone / mbit:.1%}" if mbit else ""
            rows.append([rate, f"{alone:.1f} Mbit/s", part, f"{busy:.1f} Mbit/s", f"{products:.1%}"])
    head = ["limit", "leaves a host", "of the limit", "with products", "products, of those without traffic"]
    table(f"All-reduce of 8 MB over {hosts} hosts, {os.cpu_count()} cores; mean of the hosts", head, rows)
    return 0


def _skip(lab: Network) -> int:
    print(f"skipped: {lab.why_not}", file=sys.stderr)
    return SKIPPED


def main() -> int:
    """The command line. Returns the exit code."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, help="limit of each host's egress in Mbit/s; default: none")
    parser.add_argument("--check", action="store_true", help="measure, instead of running a command")
    parser.add_argument("command", nargs="*", help="after --")
    found = parser.parse_args()
    if found.check == bool(found.command):
        parser.error("give either a command, after --, or --check")
    if found.hosts < 1 or (found.mbit is not None and found.mbit <= 0):
        parser.error("--hosts and --mbit must be positive")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through every "finally"
    if found.check:
        return check(found.hosts)
    with network(found.hosts, found.mbit) as lab:
        return run(lab, found.command) if lab.names else _skip(lab)


if __name__ == "__main__":
    sys.exit(main())
