"""Lightning Fabric: the model, then the optimizer, with a strategy that leaves the model whole.

    torchrun --nproc-per-node 2 examples/integrations/fabric_setup.py

Fabric's DDP and FSDP strategies would average gradients in every step; with ``SingleDeviceStrategy`` it moves and casts,
and the replicas are edit's. Keep the optimizer itself for ``sync()``: what ``setup_optimizers`` returns imitates its class,
but is another object.
"""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import SingleDeviceStrategy
from torch import nn

import edit
from common import LR, SETTINGS, Model, batches, loss_of, run


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The model, and the losses of this replica."""
    fabric = Fabric(accelerator="cpu", strategy=SingleDeviceStrategy(torch.device("cpu")))
    model = Model()
    prepared = fabric.setup_module(model)  # moved and cast first, as before any optimizer
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.AdamW, lr=LR, **SETTINGS)
    stepping = fabric.setup_optimizers(optimizer)
    losses = []
    for tokens, targets in batches(rank):
        loss = loss_of(prepared(tokens), targets)
        fabric.backward(loss)
        stepping.step()
        stepping.zero_grad()
        losses.append(loss.item())
    optimizer.sync()
    return model, losses


if __name__ == "__main__":
    run(train)
