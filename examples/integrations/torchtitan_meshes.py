"""torchtitan's way: a mesh of ``dp_replicate``, ``dp_shard`` and ``tp``; tensor parallelism, then ``fully_shard``.

    torchrun --nproc-per-node 8 examples/integrations/torchtitan_meshes.py

torchtitan's ``dp_replicate`` is edit's: give the optimizer the whole mesh, and ``fully_shard`` only ``dp_shard``.
Its container of optimizers has one per model part; so has this.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import edit
from common import BATCH, LR, SETTINGS, Model, batches, loss_of, run

SHARDS, PARALLEL = 2, 2


class Optimizers:
    """One optimizer for each part of a model, as torchtitan holds them."""

    def __init__(self, parts: list[nn.Module], mesh: torch.distributed.DeviceMesh) -> None:
        self.parts = parts
        self.optimizers = [
            edit.LocalSGDOptimizer(part, torch.optim.AdamW, lr=LR, mesh=mesh, **SETTINGS) for part in parts
        ]

    def step(self) -> None:
        """Of all."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Of all."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def sync(self) -> None:
        """At the end."""
        for optimizer in self.optimizers:
            optimizer.sync()

    def state_dict(self) -> dict[str, object]:
        """By names, flattened, as torchtitan saves it."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        found: dict[str, object] = {}
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            found |= get_optimizer_state_dict(part, optimizer, options=options)
        return found


def parallelize(model: nn.Module, mesh: torch.distributed.DeviceMesh) -> nn.Module:
    """Split the blocks' matrices, then shard everything."""
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp_shard"])
    return fully_shard(model, mesh=mesh["dp_shard"])


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The model, and the losses of this rank."""
    shape = (world // SHARDS // PARALLEL, SHARDS, PARALLEL)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    replica, member, _ = mesh.get_coordinate()
    model = parallelize(Model(), mesh)
    optimizers = Optimizers([model], mesh)
    losses = []
    half = BATCH // SHARDS
    for tokens, targets in batches(replica):
        mine = slice(half * member, half * (member + 1))
        loss = loss_of(model(tokens[mine]), targets[mine])
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    optimizers.sync()
    assert any(name.startswith("state.layers.0.up.weight.") for name in optimizers.state_dict())
    return model, losses


if __name__ == "__main__":
    run(train)
