"""``torch.optim.swa_utils``: an exponential average of the anchors, one per round, equal on all replicas.

torchrun --nproc-per-node 2 examples/integrations/weight_average.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import edit
from common import LR, SETTINGS, Model, batches, loss_of, run

DECAY = 0.5


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The average, and the losses of this replica."""
    model = Model()
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.AdamW, lr=LR, **SETTINGS)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses = []
    rounds = 0
    for tokens, targets in batches(rank):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if optimizer.rounds > rounds:  # a round was done in this forward
            rounds = optimizer.rounds
            with optimizer.consensus():
                average.update_parameters(model)
    optimizer.sync()
    return average.module, losses


if __name__ == "__main__":
    run(train)
