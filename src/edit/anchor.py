"""Where anchor and outer optimizer state live: beside the parameters, or in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layers import Layer
from .outer import Outer


class Anchor:
    """Anchor and outer optimizer: one flat vector a layer, updated one layer at a time.

    Args:
        layers: the layers, or pieces of them; layer ``l``'s anchor is ``flats[l]``, in the layer's dtype.
        outer: makes the optimizer of the flat vectors. Must be elementwise: a vector holds one rank's part.
        offload: ``None``: on the parameters' device. ``"cpu"``: in host memory (pinned where there is a
            device), brought in layer by layer. On a CPU-only machine the same copies are made.
    """

    def __init__(self, layers: list[Layer], outer: Outer, offload: str | None) -> None:
        self.layers, self.offload = layers, offload
        self.flats = [nn.Parameter(self._home(layer), requires_grad=True) for layer in layers]
        self.outer = outer(self.flats)
        self.taken = False  # whether flats hold an anchor

    def take(self) -> None:
        """The parameters as they are become the anchor."""
        for layer, flat in zip(self.layers, self.flats, strict=True):
            flat.data.copy_(layer.read())  # the host waits, and so may write into it next
        self.taken = True

    def forget(self) -> None:
        """As if nothing had been taken, and no outer step made."""
        self.outer.state.clear()
        self.taken = False

    def group(self, index: int) -> dict[str, Any]:
        """The outer optimizer's parameter group of a layer."""
        flat = self.flats[index]
        return next(group for group in self.outer.param_groups if any(p is flat for p in group["params"]))

    def _home(self, layer: Layer) -> Tensor:
        if self.offload is None:
            return layer.empty()
        return self._host(layer.empty())

    def _host(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu")

    def _fetch(self, index: int, tensor: Tensor) -> Tensor:
        # From pinned memory the copy is asynchronous and ordered on the current stream, where it is used.
        return torch.empty_like(tensor, device=self.layers[index].device).copy_(tensor, non_blocking=True)

    def _store(self, tensor: Tensor, home: Tensor | None) -> Tensor:
        # The copy back is asynchronous too. The next reader is a fetch on the same stream, or on that of a round's
        # thread, which waited for this one at the launch; the host reads a home only through `synchronise`. The device
        # block is freed in the order of this stream.
        home = self._host(tensor) if home is None else home
        return home.copy_(tensor, non_blocking=True)

    def synchronise(self) -> None:
        """Wait until homes can be read by the host (for saving)."""
        device = self.layers[0].device
        if self.offload is not None and device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()

    def fetch(self, index: int) -> Tensor:
        """The anchor of a layer on the layer's device, to read."""
        flat = self.flats[index].data
        return flat if self.offload is None else self._fetch(index, flat)

    def step(self, index: int, gradient: Tensor) -> Tensor:
        """``a <- OuterOpt(a, gradient)``. Returns the new anchor on the layer's device, to read."""
        param = self.flats[index]
        home = param.data
        state: dict[str, Any] = self.outer.state.get(param, {})
        homes = {key: value for key, value in state.items() if _is_flat(value, home)}
        if self.offload is not None:
            param.data = self._fetch(index, home)
            state.update({key: self._fetch(index, value) for key, value in homes.items()})
        try:
            param.grad = gradient  # the only one that is set: the others do not move
            self.outer.step()
            result = param.data
            if self.offload is not None:
                self._store(result, home)
                for key, value in self.outer.state.get(param, {}).items():
                    if _is_flat(value, home):
                        homes[key] = self._store(value, homes.get(key))
        finally:
            param.grad = None
            param.data = home
            if self.offload is not None and param in self.outer.state:
                self.outer.state[param].update(homes)
        return result


def _is_flat(value: object, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == flat.shape
