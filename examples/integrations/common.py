"""What these examples share: a small language model, its data, the settings, and the loop without any integration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import edit

VOCABULARY, WIDTH, BATCH, LENGTH, STEPS = 32, 64, 8, 16, 40
SETTINGS: dict[str, Any] = {"schedule": edit.EverySteps(4, warmup_steps=4)}
LR = 1e-2


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens ``[B, T]`` to logits ``[B, T, V]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and their successors under a fixed rule, with some noise; other ones for every replica."""
    generator = torch.Generator().manual_seed(replica)
    for _ in range(STEPS):
        tokens = torch.empty(BATCH, LENGTH + 1, dtype=torch.int64)
        tokens[:, 0] = torch.randint(VOCABULARY, (BATCH,), generator=generator)
        for t in range(LENGTH):
            tokens[:, t + 1] = (5 * tokens[:, t] + 3) % VOCABULARY
        noise = torch.randint(VOCABULARY, tokens.shape, generator=generator)
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.05, noise, tokens)
        yield tokens[:, :-1], tokens[:, 1:]


def bare(model: nn.Module, optimizer: edit.LocalSGDOptimizer, replica: int) -> list[float]:
    """The loop that needs no integration. Losses of this replica."""
    losses = []
    for tokens, targets in batches(replica):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.sync()
    return losses


def run(train: Callable[[int, int], tuple[nn.Module, list[float]]]) -> None:
    """``train(rank, world)`` as a script of ``torchrun``; prints how the loss of rank 0 fell."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    _, losses = train(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        print(
            f"{os.path.basename(__import__('__main__').__file__)}: loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        )
    dist.destroy_process_group()
