"""``torch.compile``, block by block, in place.

    torchrun --nproc-per-node 2 examples/integrations/compiled_blocks.py

While no round is due the hooks are one plain attribute that compiles away; the step of a round breaks the graph.
"""

from __future__ import annotations

import torch
from torch import nn

import edit
from common import LR, SETTINGS, Model, bare, run


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The model, and the losses of this replica."""
    model = Model()
    for layer in model.layers:
        layer.compile()
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.AdamW, lr=LR, **SETTINGS)
    return model, bare(model, optimizer, rank)


if __name__ == "__main__":
    run(train)
