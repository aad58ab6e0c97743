"""Hugging Face Accelerate: ``prepare`` the optimizer and the data, not the model.

    torchrun --nproc-per-node 2 examples/integrations/accelerate_prepare.py

``accelerator.prepare(model)`` would wrap it in DDP, which averages gradients in every step; a prepared scheduler would be
stepped once for every process in each step.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

import edit
from common import LR, SETTINGS, Model, batches, loss_of, run


def every_batch(world: int) -> list[tuple[Tensor, Tensor]]:
    """The data of all replicas: Accelerate gives batch ``n`` to replica ``n % world``."""
    return [one for turn in zip(*(batches(replica) for replica in range(world)), strict=True) for one in turn]


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The model, and the losses of this replica."""
    accelerator = Accelerator(cpu=True)
    model = Model().to(accelerator.device)
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.AdamW, lr=LR, **SETTINGS)
    loader = DataLoader(every_batch(world), batch_size=1, collate_fn=lambda one: one[0])
    prepared, loader = accelerator.prepare(optimizer, loader)
    losses = []
    for tokens, targets in loader:
        loss = loss_of(model(tokens), targets)
        accelerator.backward(loss)
        prepared.step()
        prepared.zero_grad()
        losses.append(loss.item())
    optimizer.sync()
    return model, losses


if __name__ == "__main__":
    run(train)
