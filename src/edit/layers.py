"""What synchronises together: the cut of a model into layers, and a layer's parameters as one flat vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from .comm import copies, is_unit, local, managed, unit_key

ROOT = "(root)"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Layer:
    """Parameters that are synchronised as one flat vector, just before their module's forward.

    Attributes:
        name: qualified name of its module, or names joined by ``+``; ``(root)`` for what no other layer has.
        modules: where the forward reaches it.
        units: ``fully_shard``ed modules that hold its parameters (empty if there are none).
        plain: those of its parameters whose gradients no unit reduces.
        names, params: its trainable parameters. What other files call *flat* holds this rank's part of
            all of them, one after the other.
        numel: elements of flat. May be 0: with uneven shards some ranks hold nothing.
        dtype: of anchor and outer arithmetic: float32, or float64 where a parameter is float64.
        held: ``(start, end, copies)``: ranges of flat, and how many ranks of the replica hold the same.
        column: the layer's column in matrices ``[R, L]``.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], params: dict[str, nn.Parameter]) -> None:
        self.name = name
        self.modules = list(modules)
        self.names = list(params)
        self.params = list(params.values())
        self.units: list[nn.Module] = []
        self.plain: list[nn.Parameter] = []
        self.column = -1
        with torch.no_grad():
            parts = [local(p) for p in self.params]
        devices = {part.device for part in parts}
        if len(devices) > 1:
            raise ValueError(
                f"model: a layer must be on one device, but {name} is on {sorted(map(str, devices))}: move "
                "the model first, or cut it differently with layers=[...]"
            )
        self.device = parts[0].device
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in parts) else torch.float32
        self.dtypes = [part.dtype for part in parts]
        self.shapes = [part.shape for part in parts]
        self.spans: list[tuple[int, int]] = []
        end = 0
        for part in parts:
            self.spans.append((end, end := end + part.numel()))
        self.numel = end
        self.held: list[tuple[int, int, int]] = []

    def set_holders(self, holders: int) -> None:
        """Derive :attr:`held` from how many ranks of the replica hold this layer."""
        self.held = []
        for param, (start, end) in zip(self.params, self.spans, strict=True):
            same = copies(param, holders)
            if self.held and self.held[-1][2] == same:
                start = self.held.pop()[0]
            self.held.append((start, end, same))

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, one per parameter in its local shape."""
        sizes = [end - start for start, end in self.spans]
        return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), self.shapes, strict=True)]

    def values(self) -> list[Tensor]:
        """This rank's part of each parameter: shares its storage."""
        return [local(param) for param in self.params]

    def empty(self) -> Tensor:
        """A new flat vector."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def read(self) -> Tensor:
        """θ, as a new flat vector."""
        return torch.cat([value.reshape(-1) for value in self.values()], out=self.empty())

    def write(self, flat: Tensor) -> None:
        """``θ <- flat``, rounded to the parameters' dtype."""
        for part, value in zip(self.parts(flat), self.values(), strict=True):
            value.copy_(part)

    def pseudo_gradient(self, anchor: Tensor, out: Tensor, start: Tensor | None = None) -> Tensor:
        """``out <- round(a) - θ``, θ being ``start`` or else the parameters: a replica that did not move has
        exactly 0, in bf16 too."""
        values = self.values() if start is None else self.parts(start)
        for a, part, value, dtype in zip(
            self.parts(anchor), self.parts(out), values, self.dtypes, strict=True
        ):
            # In the anchor's dtype again: the difference of two bf16 numbers is no bf16 number.
            torch.sub(a.to(dtype).to(a.dtype), value, out=part)
        return out

    def squares(self, flat: Tensor) -> Tensor:
        """This rank's share of ``‖flat‖²`` over the whole layer: float64, 0-dim, on the layer's device."""
        total = torch.zeros((), dtype=torch.float64, device=flat.device)
        for start, end, same in self.held:
            for rows in _rows(flat[start:end]):
                norms = torch.linalg.vector_norm(rows, dim=1).double()
                total.add_(norms.dot(norms), alpha=1 / same)
        return total


def _rows(flat: Tensor, width: int = 4096) -> Iterator[Tensor]:
    """``flat`` in rows. Short float32 sums lose nothing, float64 sums of the rows' results nothing more,
    and both cost a twentieth of one long float64 sum, for which torch converts every element."""
    whole = flat.numel() // width * width
    if whole:
        yield flat[:whole].view(-1, width)
    if whole < flat.numel():
        yield flat[whole:].view(1, -1)


def cut(model: nn.Module, chosen: Sequence[nn.Module] | None = None) -> list[Layer]:
    """Cut ``model`` into layers: the root first, then the others in module order.

    ``chosen`` modules if given; else the units of ``fully_shard``; else the blocks of an unsharded model:
    the elements of its outermost lists of modules. A parameter belongs to the innermost layer around it;
    tied across layers, or around no layer, to the root, which is synchronised first.
    """
    names = {module: name for name, module in model.named_modules()}
    units = [module for module in names if is_unit(module)]
    if chosen is not None:
        for module in chosen:
            if module not in names:
                raise ValueError(
                    f"layers must be modules of the model, but {type(module).__name__} is not in it: "
                    "take them from model.modules()"
                )
            if type(module).forward is nn.Module.forward:
                raise ValueError(
                    f"layers must be modules with a forward, before which they are synchronised, but "
                    f"{names[module]} is a {type(module).__name__}: give its elements"
                )
        groups = {module: number for number, module in enumerate(chosen)}
    elif units:
        groups = {module: unit_key(module) for module in units}
    else:
        groups = {module: number for number, module in enumerate(_blocks(model))}
    root = groups.setdefault(model, -1)

    members: dict[int, list[nn.Module]] = {root: []}
    for module in names:
        if module in groups:
            members.setdefault(groups[module], []).append(module)
    held = {unit: managed(unit) for unit in units}
    owner: dict[nn.Parameter, int] = {}
    unit_of: dict[nn.Parameter, nn.Module] = {}
    named: dict[nn.Parameter, str] = {}

    def walk(module: nn.Module, group: int, unit: nn.Module | None) -> None:
        group = groups.get(module, group)
        unit = module if is_unit(module) else unit
        for key, param in module._parameters.items():
            if param is None or not param.requires_grad:
                continue
            if owner.setdefault(param, group) != group:
                owner[param] = root
            named.setdefault(param, f"{names[module]}.{key}".lstrip("."))
            if unit is not None and param in held[unit]:
                unit_of[param] = unit
        for child in module.children():
            walk(child, group, unit)

    walk(model, root, None)
    layers = []
    for group, modules in members.items():
        params = {named[p]: p for p, of in owner.items() if of == group}
        if params:
            name = ROOT if group == root else "+".join(names[module] for module in modules)
            layer = Layer(name, modules, params)
            layer.units = list(dict.fromkeys(unit_of[p] for p in layer.params if p in unit_of))
            layer.plain = [p for p in layer.params if p not in unit_of]
            layers.append(layer)
    _check_units(layers)
    if len(places := {str(layer.device): layer.name for layer in layers}) > 1:
        raise ValueError(
            f"model: all layers must be on one device, but they are on several ({places}): move the model first"
        )
    return layers


def _check_units(layers: list[Layer]) -> None:
    """A unit is gathered at once, so it must be written at once."""
    seen: dict[int, str] = {}
    for layer in layers:
        for unit in layer.units:
            if seen.setdefault(unit_key(unit), layer.name) != layer.name:
                raise ValueError(
                    f"layers must not cut through a fully_shard unit, but {seen[unit_key(unit)]} and "
                    f"{layer.name} share one: give the modules that fully_shard was applied to"
                )


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Elements of the outermost lists of modules, as far as they have parameters and a forward."""
    inside = isinstance(module, _CONTAINERS)
    for child in module.children():
        callable_ = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if inside and callable_:
            if type(child).forward is not nn.Module.forward and any(True for _ in child.parameters()):
                yield child
        else:
            yield from _blocks(child)
