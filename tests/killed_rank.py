"""Run by torchrun: trains replicas of two ranks each, saves, and resumes from the newest checkpoint.

On request one rank kills itself in the middle of a round, or also the torchrun of its node.

torchrun --nproc-per-node 4 --max-restarts 1 tests/killed_rank.py FOLDER undisturbed|rank|node
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import edit
from problems import loss_of, net

STEPS, INTERVAL = 20, 3


def is_victim(kill: str) -> bool:
    """The third rank under a single torchrun, or the first rank of the second torchrun of two; only once."""
    if kill == "undisturbed" or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return False
    return (
        "VICTIM" in os.environ and os.environ["LOCAL_RANK"] == "0" if kill == "node" else dist.get_rank() == 2
    )


def train(rank: int, folder: Path, kill: str, shards: int, timeout: float = 20.0) -> Any:
    """The step it began at, the number of replicas and the parameters at the end; or the error of a round."""
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard")
    )
    model = net()
    if shards > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    optimizer = edit.LocalSGDOptimizer(model, lr=0.05, mesh=mesh, schedule=edit.EverySteps(INTERVAL, 2), prefetch=0,
                                       timeout=timedelta(seconds=timeout))  # fmt: skip
    replica, member = (mesh[name].get_local_rank() for name in ("replicate", "shard"))
    newest: list[Any] = [edit.latest(folder)]
    dist.broadcast_object_list(newest)
    first = edit.load(newest[0], model, optimizer) if newest[0] else 0

    def die(*_: Any) -> None:
        # Rounds 1, 2, ... run in the forwards after 5, 8, ... steps. Here, in the fourth, the layers before this
        # one have their new anchors and the later ones do not.
        if optimizer.local_steps == 14:
            if kill == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    if is_victim(kill):
        model.blocks[1].register_forward_pre_hook(die, prepend=True)
    for step in range(first, STEPS):
        try:
            loss_of(model, step, replica, member).backward()
        except edit.SyncError as error:
            if "TORCHELASTIC_RESTART_COUNT" in os.environ:
                raise
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            edit.save(folder / f"step-{step + 1}", model, optimizer, step + 1)
    optimizer.sync()
    optimizer.close()
    whole = [p.full_tensor() if shards > 1 else p.detach() for p in model.parameters()]
    return {"first": first, "replicas": mesh["replicate"].size(), "model": whole}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    directory = Path(sys.argv[1])
    result = train(dist.get_rank(), directory, sys.argv[2], 2)
    if dist.get_rank() == 0:
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        torch.save(result | {"restarts": restarts}, directory / "result.pt")
    dist.destroy_process_group()
