"""Persistent buffers (BatchNorm statistics): what replicas agree on besides parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .comm import local


class Buffers:
    """The persistent buffers of a model, averaged once per round.

    Floating-point buffers become, tensor by tensor, the mean over the replicas that made a step, are not out
    in every layer, and whose tensor is finite; if there is none, the value of the last round. Others are
    taken from replica 0.

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
        """Contiguous copies of the tensors as they are now."""
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in self.tensors()]

    def changed(self) -> str | None:
        """The name of a buffer that has another shape, dtype or device than at first."""
        for name, now, then in zip(self.names, self.tensors(), self.agreed, strict=True):
            if (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device):
                return name
        return None

    def write(self, values: list[Tensor]) -> None:
        """Set the model's buffers."""
        for tensor, value in zip(self.tensors(), values, strict=True):
            tensor.copy_(value)

    def contribution(self, tensors: list[Tensor], counted: bool, first: bool) -> Tensor:
        """What this replica adds to the sum: float64 ``[values of all buffers | 0 or 1 per buffer]``.

        ``tensors``: the buffers, as they are or were at the launch; ``counted``: whether this replica has a part in
        the round; ``first``: whether it is replica 0.
        """
        if not tensors:
            return torch.empty(0, device="cpu")  # which nobody sends
        values, counts = [], []
        for tensor in tensors:
            floating = tensor.is_floating_point()
            numbers = (tensor.flatten() if floating else _as_bytes(tensor)).double()
            # On the device: nothing is read on the host.
            count = numbers.isfinite().all() & (counted if floating else first)
            values.append(torch.where(count, numbers, 0.0))
            counts.append(count)
        return torch.cat([*values, torch.stack(counts).double()])

    def apply(self, total: Tensor, start: list[Tensor] | None) -> None:
        """Set ``agreed`` from the sum of all contributions, and the model's buffers to that.

        ``start``: the buffers at the launch of a round that is applied late: what has changed since, and is
        finite, stays this replica's own. (Statistics forget: to add what changed since, as to parameters, could
        make a variance negative.)
        """
        counts = total[len(total) - len(self.agreed) :]
        begin = 0
        for agreed, count in zip(self.agreed, counts, strict=True):
            flat = agreed.view(-1) if agreed.is_floating_point() else _as_bytes(agreed)
            end = begin + flat.numel()
            flat.copy_(torch.where(count > 0, total[begin:end] / count, flat))
            begin = end
        for index, (tensor, agreed) in enumerate(zip(self.tensors(), self.agreed, strict=True)):
            own = tensor.new_zeros((), dtype=torch.bool)
            if start is not None:  # on the device: nothing is read on the host
                own = (tensor != start[index]).any() & tensor.isfinite().all()
            tensor.copy_(torch.where(own, tensor, agreed))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Of any dtype, each as a number that float64 holds exactly; a view where ``tensor`` is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
