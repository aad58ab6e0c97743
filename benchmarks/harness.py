"""What the benchmarks share: ranks, counting what runs, timing in pairs, the model."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from llama import Config, Llama
from netlab import Network

# ----------------------------------------------------------------------------------------------- ranks

_JOB = "EDIT_BENCHMARK_JOB"


def is_rank() -> bool:
    """Whether this process was started by :func:`run_ranks`."""
    return _JOB in os.environ


def be_rank(jobs: dict[str, Callable[..., Any]]) -> None:
    """What a started process does: its part of the job; the result (plain values) goes to the starter."""
    spec = json.loads(os.environ[_JOB])
    torch.set_num_threads(1)
    # A file, not a TCP store: nothing but the groups' own traffic is on the network.
    dist.init_process_group(
        "gloo", init_method=f"file://{spec['folder']}/store", rank=spec["rank"], world_size=spec["world"]
    )
    result = jobs[spec["job"]](**spec["settings"])
    Path(spec["folder"], f"result{spec['rank']}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(
    job: str, world: int, *, network: Network | None = None, timeout: float = 600, **settings: Any
) -> list[Any]:
    """``[jobs[job](**settings) for each rank]``: this script, started once per rank.

    Args:
        network: consecutive ranks share one of its hosts. None, or without hosts: all on the loopback.
    """
    network = network or Network()
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                spec = {"job": job, "settings": settings, "folder": folder, "rank": rank, "world": world}
                env = os.environ | {
                    _JOB: json.dumps(spec),
                    "OMP_NUM_THREADS": "1",
                    **network.environment(),
                }
                host = rank * len(network.names) // world
                command = network.command(host, [sys.executable, *sys.argv])
                with open(f"{folder}/log{rank}", "wb") as log:
                    processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            deadline = time.monotonic() + timeout
            while any(process.poll() is None for process in processes):
                failed = [r for r, process in enumerate(processes) if process.poll()]
                if failed or time.monotonic() > deadline:
                    rank = failed[0] if failed else 0
                    what = "failed" if failed else f"did not end within {timeout} s"
                    raise RuntimeError(
                        f"{job}: rank {rank} {what}\n" + Path(folder, f"log{rank}").read_text()
                    )
                time.sleep(0.02)
            return [json.loads(Path(folder, f"result{rank}").read_text()) for rank in range(world)]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


# ---------------------------------------------------------------------------------------------- census


class Census(TorchDispatchMode):
    """Counts what this thread dispatches while it is entered.

    ``operators``: by name, collectives and host reads not among them. ``collectives``: ``(kind, group)``,
    with the group's name from ``groups`` (by ``group_name``), else "model". ``host_reads``: by name
    (``item``, ``bool`` and the like arrive as ``_local_scalar_dense``; ``tolist``, ``cpu`` and ``numpy``
    read without the dispatcher and are caught at the tensor's method).
    """

    def __init__(self, groups: dict[str, str] | None = None) -> None:
        super().__init__()
        self.groups = groups or {}
        self.operators: Counter[str] = Counter()
        self.collectives: Counter[tuple[str, str]] = Counter()
        self.host_reads: Counter[str] = Counter()

    def __enter__(self) -> Census:
        self._methods = ExitStack()
        for name in ("tolist", "cpu", "numpy"):
            self._methods.enter_context(mock.patch.object(Tensor, name, self._noted(name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.close()

    def _noted(self, name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.host_reads[name] += 1
            return method(*args, **kwargs)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one call."""
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            group = next(filter(None, map(_group_name, args)), "")
            self.collectives[name.strip("_"), self.groups.get(group, "model")] += 1
        elif func.namespace == "_c10d_functional":
            self.collectives[name, "model"] += name != "wait_tensor"
        elif name in ("_local_scalar_dense", "is_nonzero", "equal"):
            self.host_reads[name] += 1
        else:
            self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _group_name(argument: Any) -> str | None:
    try:
        return dist.ProcessGroup.unbox(argument).group_name
    except (RuntimeError, TypeError):
        return None


def group_names(optimizer: Any) -> dict[str, str]:
    """What the groups of a ``LocalSGDOptimizer`` are for."""
    replicas = optimizer.replicas
    groups = {"control": replicas.control, "sync": replicas.sync, "clock": replicas._replica_host}
    names = {group.group_name: what for what, group in groups.items() if group is not None}
    return names | {group.group_name: "inside" for group in replicas._inside.values() if group is not None}


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that came to life inside and are alive: ``now`` and, at most, ``peak``.

    A storage counts from the operator that returned it, if no operator was given it before, until its
    memory is freed, by whichever thread: gloo's may be the one that lets go of a buffer last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what one call returns and was not there before."""
        self._note((args, kwargs), count=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, count=True)
        return result

    def _note(self, tree: Any, count: bool) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, Tensor) or is_traceable_wrapper_subclass(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                size = storage.nbytes() if count else 0
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


# ---------------------------------------------------------------------------------------------- timing


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def paired(a: Callable[[], Any], b: Callable[[], Any], pairs: int, prepare: Callable[[bool], None]) -> Tensor:
    """Seconds of ``a`` and ``b``: ``[2 (CPU time of this thread, wall time), 2 (a, b), pairs]``.

    They are called in turns ``a b b a a b b a``, so that each follows each equally often; before each, outside
    of the time, ``prepare(whether it is b)``.
    """
    times = torch.zeros(2, 2, pairs + 2, dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        for i in range(pairs + 2):
            for is_b in (i % 2 == 0, i % 2 == 1):
                prepare(is_b)
                call = b if is_b else a
                cpu, wall = time.thread_time(), time.perf_counter()
                call()
                times[1, int(is_b), i] = time.perf_counter() - wall
                times[0, int(is_b), i] = time.thread_time() - cpu
    finally:
        gc.enable()
    return times[:, :, 2:]


def median(values: Sequence[float] | Tensor) -> tuple[float, float]:
    """The median and its standard error, from the interquartile range."""
    listed = sorted(values.tolist() if isinstance(values, Tensor) else values)
    quarters = statistics.quantiles(listed, n=4)
    return statistics.median(listed), 1.253 * (quarters[2] - quarters[0]) / 1.349 / math.sqrt(len(listed))


# ---------------------------------------------------------------------------------------------- models


def mesh(replicas: int, shards: int) -> DeviceMesh:
    """The mesh of the README, on the CPU."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, blocks: Sequence[nn.Module], over: DeviceMesh) -> None:
    """FSDP2 over the replica's ranks, one unit a block."""
    for block in blocks:
        fully_shard(block, mesh=over["shard"])
    fully_shard(model, mesh=over["shard"])


def llama(depth: int, hidden: int) -> Llama:
    """That of ``examples/``, 128 wide, over bytes."""
    return Llama(Config(dim=128, depth=depth, heads=4, kv_heads=2, hidden=hidden))


def llama_loss(model: nn.Module, batch: int, length: int) -> Tensor:
    """Cross entropy of the next byte, on random ones."""
    tokens = torch.randint(256, (batch, length + 1))
    return model(tokens[:, :-1], tokens[:, 1:])


def numel(model: nn.Module) -> int:
    """Elements of all parameters."""
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------------------------------------- output


def arguments(text: str, parts: Sequence[str]) -> argparse.Namespace:
    """The command line of a benchmark: which parts, and whether quick."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    found = parser.parse_args()
    if unknown := set(found.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    found.parts = found.parts or list(parts)
    return found


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print an aligned table."""
    texts = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    print(f"\n{title}")
    for row in texts:
        cells = zip(row, widths, strict=True)
        print("  " + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(cells)))
    sys.stdout.flush()
