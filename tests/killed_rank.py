"""Run by torchrun: trains replicas of two ranks each, saves, and resumes.

On request one rank kills itself in the middle of a round, or the torchrun of its node too.

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


def main(folder: Path, kill: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = edit.LocalSGDOptimizer(model, lr=0.05, mesh=mesh, schedule=edit.EverySteps(INTERVAL, 2), prefetch=0,
                                       timeout=timedelta(seconds=20))  # fmt: skip
    replica, member = (mesh[name].get_local_rank() for name in ("replicate", "shard"))
    first = 0
    newest: list[Any] = [edit.latest(folder)]
    dist.broadcast_object_list(newest)
    if newest[0] is not None:
        first = edit.load(newest[0], model, optimizer)

    def die(*_: Any) -> None:
        # Rounds 1, 2, ... run in the forwards after 5, 8, ... steps. Here, in the fourth, the layers before this
        # one have their new anchors and the later ones do not.
        if optimizer.local_steps == 14:
            if kill == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    # The second torchrun of two, or the third rank under a single one.
    victim = os.environ["LOCAL_RANK"] == "0" and "VICTIM" in os.environ if kill == "node" else dist.get_rank() == 2
    if kill != "undisturbed" and victim and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        model.blocks[1].register_forward_pre_hook(die, prepend=True)
    for step in range(first, STEPS):
        loss_of(model, step, replica, member).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            edit.save(folder / f"step-{step + 1}", model, optimizer, step + 1)
    optimizer.sync()
    whole = [param.full_tensor() for param in model.parameters()]
    if dist.get_rank() == 0:
        restarts, replicas = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), mesh["replicate"].size()
        torch.save({"model": whole, "restarts": restarts, "replicas": replicas, "first": first}, folder / "result.pt")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
