"""Models and data of the tests: small, float64, and the same numbers for every rank that asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IN, OUT, BATCH = 5, 3, 4


class Block(nn.Module):
    """A residual layer with an uneven width, so that its shards are uneven too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(self.norm(x)))


class Net(nn.Module):
    """Root parameters (``up``, ``head``) around a list of blocks."""

    def __init__(self, width: int = 7, depth: int = 2) -> None:
        super().__init__()
        self.up = nn.Linear(IN, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(model: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """``model`` with parameters that depend on ``seed`` alone (not on torch's global random state)."""
    generator = torch.Generator().manual_seed(seed)
    model.to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def net(seed: int = 0, *, width: int = 7, depth: int = 2, dtype: torch.dtype = torch.float64) -> Net:
    return seeded(Net(width, depth), seed, dtype)


def batch(
    step: int, replica: int, member: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """The data that one rank trains on in one of its steps."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * replica + member)
    x = torch.randn(BATCH, IN, generator=generator, dtype=torch.float64)
    y = torch.randn(BATCH, OUT, generator=generator, dtype=torch.float64) + replica
    return x.to(dtype), y.to(dtype)


def loss_of(model: nn.Module, step: int, replica: int, member: int = 0) -> Tensor:
    dtype = next(model.parameters()).dtype
    x, y = batch(step, replica, member, dtype)
    return F.mse_loss(model(x), y)


def random_steps(optimizer: Any, steps: int, seed: int) -> None:
    """Steps with gradients out of nothing, for models that are never called; each ends a round that it is due for."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in optimizer.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
        optimizer._finish_round(asked=True)


def layers_of(depth: int = 2) -> list[list[str]]:
    """The cut of :class:`Net` that ``edit`` makes by default: root, then blocks."""
    root = ["up.weight", "up.bias", "head.weight", "head.bias"]
    parts = ("lin.weight", "lin.bias", "norm.weight", "norm.bias")
    return [root, *([f"blocks.{i}.{part}" for part in parts] for i in range(depth))]


class Winding(Net):
    """Goes through its blocks along ``route``: any of them, in any order, again, or none at all."""

    route: tuple[int, ...] = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for index in self.route:
            x = self.blocks[index](x)
        return self.head(x)
