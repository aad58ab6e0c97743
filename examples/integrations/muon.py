"""Muon for the matrices and AdamW for the rest, as one inner optimizer.

torchrun --nproc-per-node 2 examples/integrations/muon.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import edit
from common import LR, SETTINGS, Model, bare, run


class MuonAndAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` on the groups with ``muon=True``, ``torch.optim.AdamW`` on the others.

    The two share this optimizer's groups and state, so schedulers and checkpoints see one.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        matrices = [group for group in groups if group["muon"]]
        rest = [group for group in groups if not group["muon"]]
        self.both = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
        super().__init__([group for one in self.both for group in one.param_groups], {})

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        """Of both."""
        result = None if closure is None else torch.enable_grad()(closure)()
        for one, muon in zip(self.both, (True, False), strict=True):
            one.param_groups = [group for group in self.param_groups if group["muon"] is muon]
            one.state = self.state
            one.step()
        return result


def build(model: nn.Module) -> MuonAndAdamW:
    """Matrices of blocks to Muon."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return MuonAndAdamW(
        [{"params": matrices, "lr": 0.02, "muon": True}, {"params": rest, "lr": LR, "muon": False}]
    )


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The model, and the losses of this replica."""
    model = Model()
    optimizer = edit.LocalSGDOptimizer(model, build(model), **SETTINGS)
    return model, bare(model, optimizer, rank)


if __name__ == "__main__":
    run(train)
