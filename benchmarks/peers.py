"""The peers that compare.py measures: one small interface, and each in its fastest setting that is correct.

    python benchmarks/peers.py [NAME...]    # all, if none is named; two packages: the extra "benchmarks"

Run as a script, it trains each with 4 replicas (gloo processes; as root, each in a network namespace, else on
the loopback) and checks every parameter after every step against a computation by hand: plain replicas in one
process, whose gradients or parameters are averaged, or whose mean takes an outer step of Nesterov. It prints
one line each: the largest difference, and what an interval took more than the same steps without traffic.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import DTensor

from harness import be_rank, is_rank, median, mesh, run_ranks
from netlab import network

# ---------------------------------------------------------------------------------------------- trainers


class Trainer:
    """Plain AdamW on this rank, with no communication; the peers derive from it.

    The loop is ``model(...)``, ``loss.backward()``, ``step()``, ``zero_grad()``; ``step`` is the inner step
    and whatever the method does after it. The default group must be there, one rank per replica; construct
    and close on all ranks together.

    Args:
        model: is started with rank 0's values. Its blocks are the members of its ``nn.ModuleList``.
        interval: inner steps between syncs, where the method has syncs: they come after steps ``interval``,
            ``2 * interval`` and so on.
        lr: of AdamW; ``inner`` is more for AdamW.
        address: of this host, as the other ranks reach it. Only torchft asks.
        master: that of rank 0's host.
        timeout: seconds that torchft may wait for other ranks; the rest has that of the default group.
    """

    needs = ""  # the package, other than torch
    averages = "nothing"  # what the computation by hand has to do

    def __init__(
        self,
        model: nn.Module,
        interval: int,
        lr: float,
        *,
        address: str = "127.0.0.1",
        master: str = "127.0.0.1",
        timeout: float = 60,
        **inner: Any,
    ) -> None:
        self.interval, self.address, self.master, self.timeout = interval, address, master, timeout
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, 0)
        self.model = self.wrap(model)
        inner = {"fused": True} | inner  # the fastest, above all for DTensors: one call, not many each
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=lr, **inner)
        self.begin()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model to call."""
        return model

    def begin(self) -> None:
        """Add to ``self.optimizer`` what the method needs."""

    def step(self) -> None:
        """The inner step and, where one is due, the sync."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def synced(self, steps: int) -> list[nn.Parameter]:
        """Those that are equal on all replicas now, after so many steps, by a sync in the last one."""
        every = 1 if self.averages == "gradients" else self.interval
        return [] if steps % every else list(self.model.parameters())

    def close(self) -> None:
        """End threads, servers and groups: another trainer may come after this one."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the module's lists."""
    return [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]


def ddp(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    """DDP as it costs least: buffers are constants here, and gradients live where they are reduced."""
    return nn.parallel.DistributedDataParallel(
        model,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=1,  # a small model in one bucket of 25 MB would not overlap with the backward
    )


class DDP(Trainer):
    """DistributedDataParallel."""

    averages = "gradients"

    def wrap(self, model: nn.Module) -> nn.Module:
        """In DDP."""
        return ddp(model)


class HybridFSDP(Trainer):
    """FSDP2, replicated over all ranks and sharded over one."""

    averages = "gradients"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Sharded, one unit a block."""
        self.mesh = mesh(dist.get_world_size(), 1)
        for unit in [*blocks(model), model]:
            # To reshard a shard that is the whole frees nothing, and gathers once more in the backward pass.
            fully_shard(unit, mesh=self.mesh, reshard_after_forward=False)
        return model

    def close(self) -> None:
        """End the mesh's groups."""
        for group in self.mesh.get_all_groups():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


class PostLocalSGD(Trainer):
    """torch's PostLocalSGDOptimizer, local from the start: averages of the parameters."""

    averages = "parameters"

    def wrap(self, model: nn.Module) -> nn.Module:
        """In DDP, which leaves the gradients as they are."""
        model = ddp(model)
        state = PostLocalSGDState(
            process_group=None, subgroup=None, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        model.register_comm_hook(state, post_localSGD_hook)
        return model

    def begin(self) -> None:
        """Average every ``interval`` steps."""
        averager = PeriodicModelAverager(period=self.interval, warmup_steps=0)
        # It averages when its count, before the step, is a multiple of the interval: from 0 on that would be
        # after steps 1, interval + 1 and so on.
        averager.step = 1
        self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)


class Torchft(Trainer):
    """What torchft's methods share: a lighthouse on rank 0; on each rank a store, a manager, a gloo group.

    After an error torchft drops the sync and goes on: here that raises. The first sync builds the group.
    """

    needs = "torchft"

    def begin(self) -> None:
        """Start the servers, on ports of their own choice."""
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer

        rank, world, limit = dist.get_rank(), dist.get_world_size(), timedelta(seconds=self.timeout)
        milliseconds = int(1000 * self.timeout)
        self.lighthouse = None
        port = [""]
        if rank == 0:
            self.lighthouse = LighthouseServer(
                bind="[::]:0",
                min_replicas=world,
                join_timeout_ms=milliseconds,
                # A busy machine sends its heartbeats late; to be thought dead would cost a new group.
                heartbeat_timeout_ms=milliseconds,
            )
            port = [self.lighthouse.address().rpartition(":")[2]]
        dist.broadcast_object_list(port, 0)
        self.store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.group = ProcessGroupGloo(timeout=limit)
        self.manager = Manager(
            pg=self.group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=world,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            connect_timeout=limit,
            rank=0,  # in its replica, as the only one
            world_size=1,
            store_addr=self.address,
            store_port=self.store.port,
            # The address that the lighthouse gives has the host's name in it, which may not resolve.
            lighthouse_addr=f"http://{self.master}:{port[0]}",
            replica_id=f"replica_{rank}",
            hostname=self.address,
            # All start equal. A sync "at the start" is one at the first quorum, after ``interval`` steps, and
            # replaces what all but one replica learnt in these.
            init_sync=False,
            max_retries=0,
        )
        self.method = self.make()
        self.method.__enter__()

    def make(self) -> Any:
        """The method's context manager."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the method and end the servers, the lighthouse last."""
        self.method.__exit__(None, None, None)
        self.manager.shutdown()
        self.group.abort(errored=False)
        with suppress(RuntimeError):  # another rank failed: do not hide why
            dist.barrier()
        if self.lighthouse is not None:
            self.lighthouse.shutdown()


class TorchftLocalSGD(Torchft):
    """torchft's LocalSGD: averages of the parameters, which travel one by one."""

    averages = "parameters"

    def make(self) -> Any:
        """The only setting there is."""
        from torchft.local_sgd import LocalSGD

        return LocalSGD(self.manager, self.model, self.optimizer, sync_every=self.interval)


OUTER_LR, MOMENTUM = 0.7, 0.9


class TorchftDiLoCo(Torchft):
    """torchft's DiLoCo: Nesterov on the averaged pseudo-gradients of the whole model at once.

    Bucketed, which takes a third of the processor time of a sync tensor by tensor. That is correct as long as
    all is of one dtype and fits one bucket, 1 GiB by default. Of several buckets only the last comes back,
    and a tensor that is larger than a bucket, with all after it, is never sent.
    """

    averages = "outer"
    fragments, delay, bucketed = 1, 0, True

    def make(self) -> Any:
        """Each fragment travels as one tensor."""
        from torchft.local_sgd import DiLoCo

        self.parts = fragments(self.model, self.fragments, self.interval)
        # One outer optimizer each: a common one would also step the others, with the inner gradients.
        outer = [
            torch.optim.SGD(part.parameters(), lr=OUTER_LR, momentum=MOMENTUM, nesterov=True)
            for part in self.parts
        ]
        return DiLoCo(
            self.manager,
            self.parts,
            self.optimizer,
            outer,
            sync_every=self.interval,
            use_bucketization=self.bucketed,
            fragment_sync_delay=self.delay,
        )

    def synced(self, steps: int) -> list[nn.Parameter]:
        """One fragment in turn."""
        number, rest = divmod(steps * len(self.parts), self.interval)
        return [] if rest else list(self.parts[(number - 1) % len(self.parts)].parameters())


def fragments(model: nn.Module, at_most: int, interval: int) -> list[nn.Module]:
    """Parts of the model, as many as divide the interval, and that share no parameter.

    What is in no list comes as one: it may be tied to each other, and a parameter of two fragments would be
    synced twice.
    """
    if at_most == 1:
        return [model]
    units = [nn.ModuleList(m for m in model.children() if not isinstance(m, nn.ModuleList)), *blocks(model)]
    count = max(n for n in range(1, min(at_most, len(units)) + 1) if interval % n == 0)
    cuts = [len(units) * i // count for i in range(count + 1)]
    parts = [nn.ModuleList(units[start:end]) for start, end in itertools.pairwise(cuts)]
    if sum(len(list(part.parameters())) for part in parts) != len(list(model.parameters())):
        raise ValueError("a parameter is in no fragment or in two")
    return parts


class TorchftStreaming(TorchftDiLoCo):
    """torchft's streaming DiLoCo: fragments by turns, whose traffic runs during the next ``delay`` steps.

    A subclass may set ``fragments`` and ``delay < interval / fragments`` to what its network needs. The steps
    that a fragment makes meanwhile are lost to it (torchft's default, ``fragment_update_alpha=0``; with more,
    replicas keep a part of their own and are never equal).
    """

    fragments, delay = 2, 1


class AccelerateLocalSGD(Trainer):
    """Hugging Face Accelerate's LocalSGD: averages of the parameters, one after the other."""

    needs = "accelerate"
    averages = "parameters"

    def begin(self) -> None:
        """Prepared and entered as documented."""
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.local_sgd import LocalSGD

        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        # It asks the environment alone. Without these, it takes itself for the only rank and never syncs.
        env = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        threads = torch.get_num_threads()
        with mock.patch.dict(os.environ, env | {"MASTER_ADDR": self.master}):
            setting = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
            accelerator = Accelerator(cpu=True, kwargs_handlers=[setting])
        torch.set_num_threads(threads)
        assert accelerator.num_processes == dist.get_world_size()
        self.model, self.optimizer = accelerator.prepare(self.model, self.optimizer)
        self.method = LocalSGD(accelerator=accelerator, model=self.model, local_sgd_steps=self.interval)
        self.method.__enter__()

    def step(self) -> None:
        """The inner step, then the count of steps."""
        self.optimizer.step()
        self.method.step()

    def close(self) -> None:
        """Leave, which averages once more, and forget the ranks."""
        from accelerate.state import AcceleratorState, GradientState

        try:
            self.method.__exit__(None, None, None)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


PEERS: dict[str, type[Trainer]] = {
    "DDP": DDP,
    "FSDP2 hybrid": HybridFSDP,
    "PostLocalSGD": PostLocalSGD,
    "torchft LocalSGD": TorchftLocalSGD,
    "torchft DiLoCo": TorchftDiLoCo,
    "torchft streaming": TorchftStreaming,
    "Accelerate LocalSGD": AccelerateLocalSGD,
}


def installed(name: str) -> bool:
    """Whether the package is there that this peer needs. (Not imported: torchft's threads outlive it.)"""
    return not PEERS[name].needs or importlib.util.find_spec(PEERS[name].needs) is not None


# ---------------------------------------------------------------------------------------------- the check


class Tiny(nn.Module):
    """Three blocks and parameters outside of them, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x).square().mean()


def tiny() -> Tiny:
    """The same one on all ranks."""
    torch.manual_seed(0)
    return Tiny()


def data(rank: int, step: int) -> Tensor:
    """What this rank sees at this step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 8, generator=generator, dtype=torch.float64)


class ByHand:
    """All replicas in one process, by the definition of the trainer's method."""

    def __init__(self, trainer: Trainer, world: int, lr: float) -> None:
        self.averages, self.interval = trainer.averages, trainer.interval
        self.models = [tiny() for _ in range(world)]
        self.inner = [torch.optim.AdamW(model.parameters(), lr=lr) for model in self.models]
        self.each = [list(params) for params in zip(*(m.parameters() for m in self.models), strict=True)]
        self.anchors = [params[0].detach().clone() for params in self.each]
        self.momenta = [torch.zeros_like(anchor) for anchor in self.anchors]
        self.gradients = [torch.zeros_like(anchor) for anchor in self.anchors]
        self.steps = 0
        numbers = {id(p): i for i, p in enumerate(trainer.model.parameters())}
        parts = getattr(trainer, "parts", [trainer.model])
        self.parts = [[numbers[id(p)] for p in part.parameters()] for part in parts]
        self.delay = getattr(trainer, "delay", 0)

    def step(self) -> None:
        """One step of all replicas."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.inner, strict=True)):
            optimizer.zero_grad()
            model(data(rank, self.steps)).backward()
        if self.averages == "gradients":
            for replicas in self.each:
                set_all([p.grad for p in replicas if p.grad is not None])
        for optimizer in self.inner:
            optimizer.step()
        self.steps += 1
        if self.averages == "parameters" and self.steps % self.interval == 0:
            for replicas in self.each:
                set_all(replicas)
        if self.averages == "outer":
            every = self.interval // len(self.parts)
            part = self.parts[(self.steps - 1) // every % len(self.parts)]
            if (self.steps + self.delay) % every == 0:
                for i in part:
                    self.gradients[i] = self.anchors[i] - torch.stack(self.each[i]).detach().mean(0)
            if self.steps % every == 0:
                for i in part:
                    self.momenta[i] = MOMENTUM * self.momenta[i] + self.gradients[i]
                    self.anchors[i] -= OUTER_LR * (self.gradients[i] + MOMENTUM * self.momenta[i])
                    set_all(self.each[i], self.anchors[i])


@torch.no_grad()
def set_all(tensors: Sequence[Tensor], value: Tensor | None = None) -> None:
    """Give all of them the value, or else their mean."""
    value = torch.stack(list(tensors)).mean(0) if value is None else value
    for tensor in tensors:
        tensor.copy_(value)


def full(parameter: Tensor) -> Tensor:
    """The whole parameter, plain."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def check(names: list[str], addresses: list[str], interval: int, intervals: int) -> list[list[Any]]:
    """On one rank, one peer after the other in the same processes."""
    rows: list[list[Any]] = []
    for name in names:
        print(name, flush=True)  # in the log of the rank, should this one fail
        rows.append(check_one(name, addresses, interval, intervals))
    return rows


def check_one(name: str, addresses: list[str], interval: int, intervals: int) -> list[Any]:
    """The largest difference; whether replicas are bitwise equal after syncs; seconds more, +-."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # a start of its own on every rank but 0, which has the one that counts
    trainer = PEERS[name](
        Tiny() if rank else tiny(), interval, 1e-2, address=addresses[rank], master=addresses[0]
    )
    hand = ByHand(trainer, world, 1e-2)
    difference, equal = 0.0, True
    try:
        for step in range(interval * intervals):
            trainer.model(data(rank, step)).backward()
            trainer.step()
            trainer.zero_grad()
            hand.step()
            for mine, wanted in zip(trainer.model.parameters(), hand.models[rank].parameters(), strict=True):
                difference = max(difference, float((full(mine) - wanted).detach().abs().max()))
            if synced := trainer.synced(step + 1):
                mine = torch.cat([full(p).flatten() for p in synced])
                others = [torch.empty_like(mine) for _ in range(world)]
                dist.all_gather(others, mine)
                equal &= all(torch.equal(other, mine) for other in others)
        plain = Trainer(tiny(), interval, 1e-2)
        times = [timed(trainer) - timed(plain) for _ in range(20)]
    finally:
        trainer.close()
    return [difference, equal, *median(times)]


def timed(trainer: Trainer) -> float:
    """Seconds of an interval of steps, which all ranks start together."""
    batch = data(0, 0)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(trainer.interval):
        trainer.model(batch).backward()
        trainer.step()
        trainer.zero_grad()
    return time.perf_counter() - start


def unusable(package: str) -> str:
    """Why the package cannot be had, or nothing."""
    try:
        if package:
            importlib.import_module(f"{package}.local_sgd")
    except ImportError as error:
        return str(error)
    return ""


def main(names: list[str], world: int = 4, interval: int = 6, intervals: int = 3) -> None:
    """Check the named peers, or all."""
    if unknown := set(names) - set(PEERS):
        sys.exit(f"there is no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    reasons = {name: unusable(PEERS[name].needs) for name in names or PEERS}
    missing = {name: reason for name, reason in reasons.items() if reason}
    names = [name for name in names or PEERS if name not in missing]
    with network(world) as lab:
        addresses = [lab.address(host) for host in range(world)]
        where = "a network namespace each" if lab.names else "the loopback"
        print(f"{world} replicas, {where}; {intervals} intervals of {interval} steps", flush=True)
        settings = {"names": names, "addresses": addresses, "interval": interval, "intervals": intervals}
        results = run_ranks("check", world, network=lab, timeout=400, **settings) if names else []
    failed = False
    for name, *rows in zip(names, *results, strict=True):
        difference, equal = max(row[0] for row in rows), all(row[1] for row in rows)
        took, error = sorted(row[2:] for row in rows)[len(rows) // 2]
        correct = difference < 1e-9 and equal
        failed |= not correct
        print(
            f"{name:24} {'correct' if correct else 'WRONG':8} off by {difference:.0e}, replicas "
            f"{'equal' if equal else 'NOT equal'} after a sync, "
            f"{1000 * took:.1f} +- {1000 * error:.1f} ms more per interval"
        )
    for name, reason in missing.items():
        print(f"{name:24} SKIPPED: {reason}")
    sys.exit(failed)


if __name__ == "__main__":
    if is_rank():
        be_rank({"check": check})
    else:
        main(sys.argv[1:])
