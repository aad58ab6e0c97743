"""torchao's ``AdamW8bit`` as the inner optimizer: its moments take a byte per parameter.

torchrun --nproc-per-node 2 examples/integrations/adamw_8bit.py
"""

from __future__ import annotations

import torch
from torch import nn
from torchao.optim import AdamW8bit

import edit
from common import LR, SETTINGS, Model, bare, run


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The model, and the losses of this replica."""
    model = Model()
    # Tensors of fewer than 4,096 elements stay as they are.
    inner = AdamW8bit(model.parameters(), lr=LR, block_size=64)
    optimizer = edit.LocalSGDOptimizer(model, inner, **SETTINGS)
    losses = bare(model, optimizer, rank)
    moment = inner.state[model.layers[0].up.weight]["exp_avg"]
    assert moment.codes.dtype == torch.uint8
    return model, losses


if __name__ == "__main__":
    run(train)
