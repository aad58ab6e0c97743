"""``torch.amp.GradScaler``: scales the loss, and skips a step whose gradients overflowed.

    torchrun --nproc-per-node 2 examples/integrations/grad_scaler.py

A replica may skip a step that others make: its round is then due a step later, and they wait for it that long.
"""

from __future__ import annotations

import torch
from torch import nn

import edit
from common import LR, SETTINGS, Model, batches, loss_of, run


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The model, and the losses of this replica."""
    model = Model()
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.AdamW, lr=LR, **SETTINGS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)
    losses = []
    for tokens, targets in batches(rank):
        loss = loss_of(model(tokens), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.sync()
    return model, losses


if __name__ == "__main__":
    run(train)
