"""Persistent buffers (BatchNorm statistics): what replicas agree on besides parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .comm import local


class Buffers:
    """The persistent buffers of a model, averaged once per round.

    Floating-point buffers become, tensor by tensor, the mean over the replicas that made a step and whose
    tensor is finite; if there is none, the value of the last round. Others are taken from replica 0.

    ``agreed`` holds the values of the last round, one tensor per buffer.
    """

    def __init__(self, model: nn.Module) -> None:
        # By identity: hooks of activation checkpointing rename what they wrap.
        kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        owners = dict(model.named_modules())
        # Looked up anew each time: a module may put another tensor under the name.
        self._places = [
            (name, owners[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name, buffer in model.named_buffers()
            if id(buffer) in kept
        ]
        self.names = [name for name, _, _ in self._places]
        self.agreed: list[Tensor] = self.clone()

    def tensors(self) -> list[Tensor]:
        """The local tensors as they are now."""
        return [local(getattr(owner, key)) for _, owner, key in self._places]

    def clone(self) -> list[Tensor]:
        """Copies of the tensors as they are now."""
        return [tensor.clone() for tensor in self.tensors()]

    def write(self, values: list[Tensor]) -> None:
        """Set the model's buffers."""
        for tensor, value in zip(self.tensors(), values, strict=True):
            tensor.copy_(value)

    def contribution(self, moved: bool, first: bool) -> Tensor:
        """What this replica adds to the sum: float64 ``[values of all buffers | 0 or 1 per buffer]``.

        ``moved``: whether this replica made a step since the last round; ``first``: whether it is replica 0.
        """
        tensors = self.tensors()
        counts = [
            moved and bool(tensor.isfinite().all()) if tensor.is_floating_point() else first
            for tensor in tensors
        ]
        values = [
            (tensor.double() if counted else torch.zeros_like(tensor, dtype=torch.float64)).flatten()
            for tensor, counted in zip(tensors, counts, strict=True)
        ]
        return torch.cat([*values, torch.tensor(counts, dtype=torch.float64, device=values[0].device)])

    def apply(self, total: Tensor) -> None:
        """Set buffers and ``agreed`` from the sum of all contributions."""
        counts = total[len(total) - len(self.agreed) :].tolist()
        start = 0
        for agreed, count in zip(self.agreed, counts, strict=True):
            end = start + agreed.numel()
            if count:
                agreed.copy_((total[start:end] / count).view_as(agreed))
            start = end
        self.write(self.agreed)
