"""Where a round meets the model: hooks before forwards, and the gradient averaging of the warm-up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .comm import Replicas, at_end_of_backward, is_unit, local, remove_gradient_hook, set_gradient_hook
from .layers import Layer

_WARMUP = "averaging gradients in the warm-up, in which all replicas make the same steps,"


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls the bound ``method`` as long as its object is there: a model must not keep alive, nor go on serving, an
    optimizer that nobody else uses."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


class Gate:
    """What every hook asks before a forward: one plain attribute, so that it costs next to nothing, and does
    not break a compiled graph, while no round is under way. In a copied or pickled model it stays shut.

    Args:
        reach: called with the layer's index (-1: none) and the module whose forward begins, while
            :attr:`open`; a bound method, held weakly.
    """

    def __init__(self, reach: Callable[[int, nn.Module], None] | None) -> None:
        self.open = False
        self._reach = None if reach is None else weakly(reach)
        self._places: dict[nn.Module, int] = {}

    def register(self, model: nn.Module, layers: list[Layer]) -> list[Any]:
        """Hook every layer's modules, every FSDP unit (one without a layer may prefetch others) and the model.

        Returns handles with a ``remove`` method. ``prepend``: FSDP's own pre-forward hook replaces the shards;
        ours must come before it.
        """
        self._places = {module: -1 for module in model.modules() if module is model or is_unit(module)}
        self._places |= {module: index for index, layer in enumerate(layers) for module in layer.modules}
        return [
            module.register_forward_pre_hook(self.before_forward, prepend=True) for module in self._places
        ]

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """The hook."""
        if self.open:
            self._begins(module)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begins(self, module: nn.Module) -> None:
        if self._reach is not None:
            self._reach(self._places[module], module)

    def __reduce__(self) -> tuple[Any, ...]:  # also what copy.deepcopy asks
        return Gate, (None,)


def served(model: nn.Module) -> bool:
    """Whether a :class:`Gate` hangs on ``model``."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any(isinstance(getattr(hook, "__self__", None), Gate) for hook in hooks)


class GradientAverage:
    """Averages gradients over the replicas, complete when ``backward()`` returns, as with DDP.

    Of ``fully_shard``ed parameters in FSDP's own hook behind its reduce-scatter, overlapped with the
    backward and in its order, which must be the same on all replicas. Of others at the end of a backward that
    accumulated into one of them (``torch.autograd.grad`` accumulates nothing): one flat vector per layer, in the
    order of layers, with one element per parameter that counts on how many replicas it has a gradient, so that
    replicas may skip different layers of these, and a parameter that none used keeps ``grad=None``.
    """

    def __init__(self, layers: list[Layer], replicas: Replicas) -> None:
        self.replicas = replicas
        self.layers = [(layer, layer.plain) for layer in layers if layer.plain]
        self._new = False  # gradients that were not averaged yet
        self._handles: list[Any] = []
        self._units = [(unit, weakly(self._average_unit)) for layer in layers for unit in layer.units]
        for unit, hook in self._units:
            set_gradient_hook(unit, hook)
        # (Re-entrant checkpointing nests backwards: each averages, which leaves what is equal already as it is.)
        self._handles += [
            param.register_post_accumulate_grad_hook(weakly(self._accumulated))  # type: ignore[no-untyped-call]
            for _, params in self.layers
            for param in params
        ]

    def _accumulated(self, param: Tensor) -> None:
        # Each time, as a backward that fails never comes to its end; the first call averages.
        self._new = True
        at_end_of_backward(self._end_of_backward)

    def _end_of_backward(self) -> None:
        if self._new:
            self._new = False
            with self.replicas.naming(_WARMUP), torch.no_grad():
                self._average()

    def _average_unit(self, gradients: Tensor) -> None:
        with self.replicas.naming(_WARMUP):
            self.replicas.average(gradients)

    def _average(self) -> None:
        flying = []
        for layer, params in self.layers:
            for name, param in zip(layer.names, layer.params, strict=True):
                if param.grad is not None and param.grad.is_sparse:
                    raise TypeError(f"the gradient of {name} must be dense, but is sparse: use sparse=False")
            # Made on the host and moved: made on a device, it would wait for all that the device has to do.
            counts = torch.tensor(
                [param.grad is not None for param in params], dtype=layer.dtype, device="cpu"
            )
            counts = counts.to(layer.device, non_blocking=True)
            parts = [
                (torch.zeros_like(local(p)) if p.grad is None else local(p.grad)).to(layer.dtype).flatten()
                for p in params
            ]
            flat = torch.cat([*parts, counts]).div_(self.replicas.count)
            flying.append((params, flat, self.replicas.start_sum(flat)))
        for params, flat, work in flying:
            if work is not None:
                work.wait()
            *parts, counts = torch.split(flat, [*(local(param).numel() for param in params), len(params)])
            for param, part, count in zip(params, parts, counts, strict=True):
                if param.grad is None and count:
                    param.grad = torch.zeros_like(param)
                if param.grad is not None:
                    local(param.grad).copy_(part.view_as(local(param.grad)))

    def remove(self) -> None:
        """Gradients are the replica's own from now on."""
        for unit, hook in self._units:
            remove_gradient_hook(unit, hook)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._units.clear()
