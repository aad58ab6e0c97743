"""What is checked at construction, on every rank alike, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .comm import Replicas, mesh_ranks, wrapper_of
from .layers import Layer
from .schedule import EverySteps


def compare(replicas: Replicas, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Collective. Raise if ranks differ in what must be equal. Returns what each rank said.

    ``mine["settings"]`` must be equal everywhere, all else on all ranks that hold the same shard, order included.
    """
    said = replicas.gather_objects(mine)
    for row in replicas.grid:
        for member, rank in enumerate(row):
            first = replicas.grid[0][member]
            _same("settings", replicas.leader, said[replicas.leader], rank, said[rank])
            _same("layers", first, said[first], rank, said[rank])
            _same("parameters and buffers", first, said[first], rank, said[rank])
    return said


def _same(what: str, a: int, of_a: dict[str, Any], b: int, of_b: dict[str, Any]) -> None:
    ours, theirs = of_a[what], of_b[what]
    for key in list(dict.fromkeys([*ours, *theirs])):
        if ours.get(key) != theirs.get(key):
            raise ValueError(
                f"{what} must be the same on all replicas, but {key} is {ours.get(key)} on rank {a} and "
                f"{theirs.get(key)} on rank {b}: build the same model and optimizer on every rank"
            )
    if [*ours] != [*theirs]:
        raise ValueError(
            f"{what} must be in the same order on all replicas, but are {[*ours]} on rank {a} and {[*theirs]} on rank "
            f"{b}: build the model in an order that does not depend on the process (sets of strings do)"
        )


def tell_stages_apart(said: dict[int, dict[str, Any]]) -> dict[int, dict[str, str]]:
    """By rank, what each layer is called everywhere: its name, and the stage where several stages of a pipeline have
    one of that name, as they all have a root."""
    stages: dict[str, set[int | None]] = {}
    for told in said.values():
        for name in told["layers"]:
            stages.setdefault(name, set()).add(told["stage"])

    def called(name: str, stage: int | None) -> str:
        return f"{name} (stage {stage})" if len(stages[name]) > 1 else name

    return {
        rank: {name: called(name, told["stage"]) for name in told["layers"]} for rank, told in said.items()
    }


def check_model(model: Any, replicas: Replicas) -> None:
    """Raise for what cannot be trained with local SGD."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be the nn.Module itself, not {type(model).__name__}: LocalSGDOptimizer(model, lr=...) "
            "takes the parameters from it, and hooks its forward"
        )
    if (wrapper := wrapper_of(model)) is not None:
        raise TypeError(
            f"model must not be wrapped by {wrapper}, which averages gradients in every step: pass the bare "
            'module, or one sharded by fully_shard(module, mesh=mesh["shard"])'
        )
    mine = set(replicas.grid[replicas.index])
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ValueError(f"model: {name} is on the meta device: materialise and initialise it first")
        if param.requires_grad and not param.is_floating_point():
            raise TypeError(
                f"model: parameters must be real floating point, but {name} is {param.dtype}: store complex "
                "numbers as pairs of real ones (torch.view_as_real)"
            )
        ranks = mesh_ranks(param)
        if ranks - mine:
            raise ValueError(
                f"model must be sharded inside a replica only (ranks {sorted(mine)}), but {name} is "
                f"distributed over ranks {sorted(ranks)}: give the optimizer the mesh, mesh=mesh, and use "
                'fully_shard(module, mesh=mesh["shard"]), without the replicate dimension'
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TypeError(
                f"model: {name} makes sparse gradients, which cannot be averaged: use sparse=False"
            )


def check_settings(
    schedule: Any, penalty: Any, outer: Any, offload: Any, prefetch: Any, delay: Any, layers: Any
) -> None:
    """Raise for settings that mean nothing."""
    if not (hasattr(schedule, "due") and hasattr(schedule, "warmup_steps")):
        raise TypeError(
            f"schedule must have due(progress) and warmup_steps, but is {schedule!r}: use EverySteps(128), "
            "EverySeconds(600.0) or your own (docs/custom-policies.md)"
        )
    if not all(hasattr(penalty, name) for name in ("init", "weights", "clip")):
        raise TypeError(
            f"penalty must have init, weights and clip, but is {penalty!r}: use PseudoGradientPenalty(), "
            "None for the plain mean, or your own (docs/custom-policies.md)"
        )
    if not callable(outer):
        raise TypeError(
            f"outer must be a callable params -> Optimizer, but is {outer!r}: use Nesterov(), Average(), "
            "HeavyBall() or functools.partial(torch.optim.SGD, lr=...)"
        )
    if offload not in (None, "cpu", "replicas"):
        raise ValueError(
            f"offload must be None, 'cpu' or 'replicas', but is {offload!r}: use 'cpu' for host memory"
        )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch must be an int >= 0 (layers), but is {prefetch!r}: the default is 1")
    if layers is not None and (isinstance(layers, str) or not isinstance(layers, Sequence | nn.ModuleList)):
        raise TypeError(f"layers must be a list of modules or None, but is {layers!r}: use [*model.blocks]")
    if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
        raise ValueError(f"delay must be an int >= 0 (inner steps), but is {delay!r}: the default is 0")
    if isinstance(schedule, EverySteps) and delay > schedule.interval:
        raise ValueError(
            f"delay must be at most the schedule's interval, {schedule.interval} inner steps, but is {delay}: a "
            "round must be applied before the next one is launched"
        )


def check_holders(layers: list[Layer], holders: dict[str, tuple[int, ...]]) -> None:
    """Raise if several ranks of a replica hold the same layer, and it is not distributed over them."""
    if any(len(mesh_ranks(param)) > 1 for layer in layers for param in layer.params):
        return  # what fully_shard was told to ignore may be whole on every rank
    for layer in layers:
        if len(ranks := holders[layer.name]) > 1:
            raise ValueError(
                f"mesh gives each replica {len(ranks)} ranks that hold {layer.name}, but the model is not "
                'distributed over them: apply fully_shard(module, mesh=mesh["shard"]) first, or use a mesh of '
                "shape (ranks, 1)"
            )


def describe_layer(layer: Layer) -> list[tuple[str, tuple[int, ...], str]]:
    """What must be equal on all ranks that hold the same shard of a layer."""
    return [
        (name, tuple(shape), str(dtype))
        for name, shape, dtype in zip(layer.names, layer.shapes, layer.dtypes, strict=True)
    ]


def build_inner(inner: Any, model: nn.Module, kwargs: dict[str, Any]) -> torch.optim.Optimizer:
    """The inner optimizer, on exactly the model's trainable parameters."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    if not trainable:
        raise ValueError("model has no trainable parameters: set requires_grad before the optimizer")
    if isinstance(inner, torch.optim.Optimizer):
        if kwargs:
            raise TypeError(
                f"{sorted(kwargs)} cannot be given with an inner optimizer that is already built: set them "
                "where it is built"
            )
        optimizer = inner
    elif callable(inner):
        try:
            optimizer = inner(trainable, **kwargs)
        except TypeError as error:
            taken = inspect.signature(inner).parameters
            unknown = sorted(kwargs.keys() - taken.keys()) or sorted(kwargs)
            remedy = "keywords that LocalSGDOptimizer does not know are passed on to it"
            if of_schedule := {"warmup_steps", "interval"}.intersection(unknown):
                remedy = f"{sorted(of_schedule)} are the schedule's: schedule=edit.EverySteps(interval, warmup_steps)"
            raise TypeError(
                f"inner: {getattr(inner, '__name__', inner)} does not take {unknown} ({error}): {remedy}"
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"inner must return a torch.optim.Optimizer, but returned {optimizer!r}")
    else:
        raise TypeError(f"inner must be an optimizer, its class or a callable, but is {inner!r}")
    held = {param for group in optimizer.param_groups for param in group["params"]}
    names = {param: name for name, param in model.named_parameters()}
    strange = held - names.keys()
    if strange:
        raise ValueError(
            f"inner must hold the model's parameters, but {len(strange)} of its parameters are not the model's "
            f"(shapes {sorted(tuple(p.shape) for p in strange)[:3]}): shard the model before building it"
        )
    missing = [names[param] for param in trainable if param not in held]
    if missing:
        raise ValueError(
            f"inner must hold all trainable parameters, but lacks {missing[:5]}: add them, or set "
            "requires_grad=False before building the optimizer"
        )
    return optimizer
