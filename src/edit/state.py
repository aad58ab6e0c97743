"""What is saved: the state of a LocalSGDOptimizer as entries of an ordinary optimizer state dict.

Anchor and outer state stand beside the inner state of each parameter, placed like the parameter, so that
torch's checkpoint tools name and reshard them as they do ``exp_avg``. Detector, counters and the agreed
buffers stand, as a few tensors, with the first parameter. The keys are always the same, also before the first
round: what a fresh optimizer does not list, a checkpoint is not asked for.

With ``offload="replicas"`` a rank's slices of anchor and outer state stand with the first parameter, too.
"""

from __future__ import annotations

import logging
import zlib
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .anchor import Anchor
from .comm import layout, local, sharded_like
from .layers import Layer
from .outer import Outer
from .round import Start
from .setup import describe_layer

if TYPE_CHECKING:
    from .optimizer import LocalSGDOptimizer

log = logging.getLogger(__name__)
PREFIX = "edit_"
ANCHOR, START, RUN, BEGAN = (PREFIX + name for name in ("anchor", "start", "run", "outer_began"))
PART = PREFIX + "part"
OUTER, OPTION, MEMORY, BUFFER = (PREFIX + name for name in ("outer.", "outer_group.", "penalty.", "buffer."))
START_BUFFER = PREFIX + "buffer_start."
OF_RUN = (RUN, OPTION, MEMORY, BUFFER, START_BUFFER, PART)  # with the first parameter alone
_VERSION = 2
Entries = dict[nn.Parameter, dict[str, Any]]


def clean(name: str) -> str:
    """The name that a parameter or buffer has without compilation and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The full name of every parameter; of a tied one the first."""
    return {param: clean(name) for name, param in model.named_parameters()}


def probe(outer: Outer) -> dict[str, Any]:
    """What ``outer`` keeps for a vector of one element after one step with gradient 0: names and values."""
    param = nn.Parameter(torch.zeros(1, device="cpu"))
    optimizer = outer([param])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"outer must return a torch.optim.Optimizer, but returned {optimizer!r}: give Nesterov(), Average() "
            "or functools.partial(torch.optim.SGD, lr=...)"
        )
    param.grad = torch.zeros(1, device="cpu")
    optimizer.step()
    kept = optimizer.state.get(param, {})
    return {key: value for key, value in kept.items() if isinstance(value, Tensor | int | float)}


def _name(opt: LocalSGDOptimizer, layer: Layer, key: str, value: Any) -> str:
    """Under which key a layer's ``value`` is saved; a slice, with the first parameter, under the layer's own."""
    if opt._spread and key != START and dim(value):
        return f"{PART}.{key.removeprefix(PREFIX)}.{clean(layer.name)}"
    return key


def _part(opt: LocalSGDOptimizer) -> Tensor:
    """Which slices a rank holds: which of how many, of which of how many ranks; and a checksum of the cut."""
    replicas = opt.replicas
    how = [
        (clean(name), *described, layout(param))
        for layer in opt._layers
        for param, (name, *described) in zip(layer.params, describe_layer(layer), strict=True)
    ]
    where = [replicas.slot, replicas.count, replicas.member, replicas.members]
    return torch.tensor([*where, zlib.crc32(repr(how).encode())], device="cpu")


@torch.no_grad()
def export(opt: LocalSGDOptimizer) -> Entries:
    """Anchor and outer state by parameter, placed like the parameter: copies.

    Not views into the flat vectors: torch 2.13's ``Tensor.__reduce_ex__`` takes a sharded one whose local part has a
    storage offset for an ordinary tensor, and cannot save it.
    """
    entries: Entries = {}
    if not opt._anchor.taken:
        opt._anchor.take()  # of no meaning, but of the right shape; taken again when it has one
        opt._anchor.taken = False
    opt._anchor.synchronise()
    for index, layer in enumerate(opt._layers):
        flat, kept = opt._anchor.flats[index].data, opt._anchor.outer.state.get(opt._anchor.flats[index], {})
        columns = {ANCHOR: flat}
        if opt._delay:
            columns[START] = layer.read() if opt._start is None else opt._start.flats[index]
        for key, example in opt._outer_keys.items():
            value = kept.get(key, example)
            if isinstance(value, Tensor) and value.dim() == 1:
                value = value if key in kept else torch.zeros_like(flat)
            columns[OUTER + key] = value
        for param in layer.params:
            entries[param] = {BEGAN: torch.tensor(bool(kept), device="cpu")}
        if opt._spread and not index:
            first = entries[layer.params[0]]
            first[PART] = _part(opt)
        for key, value in columns.items():
            if (name := _name(opt, layer, key, value)) != key:
                first[name] = _plain(value)
            elif dim(value) == 1:
                for param, part in zip(layer.params, layer.parts(value), strict=True):
                    entries[param][key] = sharded_like(param, part)
            else:
                for param in layer.params:
                    entries[param][key] = _plain(value)
    return entries


@torch.no_grad()
def restore(opt: LocalSGDOptimizer, entries: Entries) -> None:
    """Copy what :func:`export` gave into anchor and outer state. New parameters start with an outer state of 0
    in a layer where others have one."""
    opt._anchor.take()
    first = next((entry for entry in entries.values() if PART in entry), {})
    for index, layer in enumerate(opt._layers):
        flat = opt._anchor.flats[index]
        _copy(opt, layer, ANCHOR, flat.data, entries, first)
        began = [entries[param] for param in layer.params if param in entries and entries[param][BEGAN]]
        if not began:
            continue
        known = {*began[0], *first}
        named = {key: _name(opt, layer, OUTER + key, example) for key, example in opt._outer_keys.items()}
        if missing := [key for key, name in named.items() if name not in known]:
            log.warning("the outer optimizer of the saved state kept no %s: its state starts afresh", missing)
            continue
        kept = opt._anchor.outer.state[flat]
        for key, example in opt._outer_keys.items():
            if isinstance(example, Tensor) and example.dim() == 1:
                kept[key] = torch.zeros_like(flat.data, pin_memory=flat.data.is_pinned())
                _copy(opt, layer, OUTER + key, kept[key], entries, first)
            else:
                kept[key] = _plain(began[0][OUTER + key])
                group = opt._anchor.group(index)
                if isinstance(kept[key], Tensor) and (group.get("fused") or group.get("capturable")):
                    kept[key] = kept[key].to(layer.device)  # as these keep their steps


def _copy(
    opt: LocalSGDOptimizer, layer: Layer, key: str, flat: Tensor, entries: Entries, first: dict[str, Any]
) -> None:
    """Copy what was saved of ``flat`` into it."""
    if (name := _name(opt, layer, key, flat)) != key:
        flat.copy_(first[name])
        return
    for param, part in zip(layer.params, layer.parts(flat), strict=True):
        if key in entries.get(param, {}):
            part.copy_(local(entries[param][key]))


def _options(anchor: Anchor) -> list[tuple[str, dict[str, Any], str]]:
    """The numbers among the outer optimizer's settings, which a schedule may have changed: under which name they are
    saved, group, key."""
    return [
        (f"{number}." * bool(number) + key, group, key)
        for number, group in enumerate(anchor.outer.param_groups)
        for key, value in group.items()
        if type(value) in (int, float)
    ]


def _plain(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def pack(opt: LocalSGDOptimizer, inner: dict[str, Any]) -> dict[str, Any]:
    """The state dict: ``inner``'s with this package's entries added."""
    ids = keys_of(opt.inner.param_groups, inner["param_groups"])
    states = inner["state"] = dict(inner["state"])
    for param, entry in export(opt).items():
        states[ids[param]] = {**states.get(ids[param], {}), **entry}
    if opt._layers:
        run: list[float] = [
            _VERSION,
            opt.local_steps,
            opt._round_steps,
            opt._steps,
            opt.rounds,
            opt.total_steps,
        ]
        run += [opt._due, opt._anchor.taken, opt._time() - opt._last_round, *opt._replica_clock.save()]
        at_start = opt._buffers.clone() if opt._start is None else opt._start.buffers
        states[ids[opt._layers[0].params[0]]] |= {
            RUN: torch.tensor(run, dtype=torch.float64, device="cpu"),
            **{
                OPTION + name: torch.tensor(float(group[key]), dtype=torch.float64, device="cpu")
                for name, group, key in _options(opt._anchor)
            },
            **{MEMORY + key: value.clone() for key, value in opt._memory.items()},
            **{
                BUFFER + clean(name): value.clone()
                for name, value in zip(opt._buffers.names, opt._buffers.agreed, strict=True)
            },
            **{
                START_BUFFER + clean(name): value.clone()
                for name, value in zip(opt._buffers.names, at_start, strict=True)
                if opt._delay
            },
        }
    return inner


def check(
    opt: LocalSGDOptimizer, state_dict: dict[str, Any]
) -> tuple[dict[Any, Any], Entries, dict[str, Any]]:
    """Raise if ``state_dict`` does not fit. Returns the inner optimizer's part, this package's by parameter, and
    what stands with the first parameter."""
    groups, states = state_dict["param_groups"], state_dict["state"]
    ids = keys_of(opt.inner.param_groups, groups)
    known = set(ids.values())
    theirs: dict[Any, dict[str, Any]] = {}
    entries: Entries = {}
    for param, key in ids.items():
        state = states.get(key, {})
        if rest := {name: value for name, value in state.items() if not str(name).startswith(PREFIX)}:
            theirs[key] = rest
        if mine := {name: value for name, value in state.items() if str(name).startswith(PREFIX)}:
            entries[param] = mine
    theirs |= {key: value for key, value in states.items() if key not in known}
    first: dict[str, Any] = next((entry for entry in entries.values() if RUN in entry), {})
    if RUN in first:
        if (version := int(first[RUN][0])) != _VERSION:
            raise ValueError(
                f"state_dict must be of version {_VERSION}, but is of {version}: load it with the version of this "
                "package that saved it; nothing was loaded"
            )
        _check_part(opt, first)
        _check(opt, entries)
        for name, agreed in zip(opt._buffers.names, opt._buffers.agreed, strict=True):
            for key in (BUFFER + clean(name), START_BUFFER + clean(name)):
                if (value := first.get(key)) is not None and value.shape != agreed.shape:
                    raise ValueError(
                        f"state_dict must have a buffer {name} of shape {tuple(agreed.shape)}, but has "
                        f"{tuple(value.shape)}: it is of another model; nothing was loaded"
                    )
    return theirs, entries, first


def unpack(opt: LocalSGDOptimizer, state_dict: dict[str, Any]) -> None:
    """Load what :func:`pack` made. Everything is checked before anything is changed."""
    theirs, entries, first = check(opt, state_dict)
    check_no_round(opt)
    opt.inner.load_state_dict({**state_dict, "state": theirs})
    opt._due, opt._steps, opt._start = False, 0, None
    opt._fresh.clear()
    opt._replica_clock.restart()
    opt._anchor.forget()
    if RUN not in first:
        log.warning("the state dict has no anchor: the model becomes the anchor when the next step begins")
        opt._gate.open = False
        return
    _, local_steps, round_steps, steps, rounds, total_steps, due, has_anchor, seconds, *clock = first[
        RUN
    ].tolist()
    opt.local_steps, opt._round_steps, opt._steps = int(local_steps), int(round_steps), int(steps)
    opt.rounds, opt.total_steps, opt._due = int(rounds), int(total_steps), bool(due)
    opt._gate.open = opt._due and not opt._delay
    opt._last_round = opt._time() - seconds
    opt._replica_clock.load(clock)
    for name, group, key in _options(opt._anchor):
        if OPTION + name in first:
            value = first[OPTION + name].item()  # a float; an int remains one as long as it is whole
            group[key] = int(value) if type(group[key]) is int and value.is_integer() else value
    opt._set_phase()
    fresh = opt.penalty.init(opt.replicas.count, len(opt._columns))
    for key, value in opt._memory.items():
        saved = first.get(MEMORY + key)
        if saved is not None and saved.shape == value.shape:
            value.copy_(saved)
        else:
            value.copy_(fresh[key])
            log.warning("the penalty's %s is of other replicas or layers and starts afresh", key)
    for name, agreed in zip(opt._buffers.names, opt._buffers.agreed, strict=True):
        if BUFFER + clean(name) in first:
            agreed.copy_(first[BUFFER + clean(name)])
    if has_anchor:
        restore(opt, entries)
    if opt._due:
        _restore_start(opt, entries, first)


def _restore_start(opt: LocalSGDOptimizer, entries: Entries, first: dict[str, Any]) -> None:
    """What the replica had when the pending round was launched. Without ``delay``, here or where it was saved, the
    round is launched from what it has now."""
    if opt._delay and all(START in entries.get(param, {}) for layer in opt._layers for param in layer.params):
        flats = [layer.read() for layer in opt._layers]
        for layer, flat in zip(opt._layers, flats, strict=True):
            _copy(opt, layer, START, flat, entries, first)
        buffers = opt._buffers.clone()
        for name, buffer in zip(opt._buffers.names, buffers, strict=True):
            if (value := first.get(START_BUFFER + clean(name))) is not None:
                buffer.copy_(value)
        opt._start = Start(flats, buffers)
    else:
        opt._round_steps, opt._steps = opt._round_steps + opt._steps, 0


def check_no_round(opt: LocalSGDOptimizer) -> None:
    """Raise if a round is under way."""
    if opt._round is not None:
        raise RuntimeError(
            "a state must not be loaded while a round is under way, which other replicas take part in: call "
            "sync() on all ranks first, or load into a new LocalSGDOptimizer; nothing was loaded"
        )


def run_at_anchor(run: Tensor) -> Tensor:
    """``run`` (the entry :data:`RUN`) of a replica that starts from the anchor."""
    version, local_steps, _, _, rounds, total_steps, _, taken, *_ = run.tolist()
    return run.new_tensor([version, local_steps, 0, 0, rounds, total_steps, 0, taken, 0, 0, -1, -1])


def _check_part(opt: LocalSGDOptimizer, first: dict[str, Any]) -> None:
    """Raise unless ``first`` has the slices that this rank holds; where it holds none, none."""
    mine, theirs = (
        "none" if part is None else "slice {} of {} of rank {} of {}, checksum {}".format(*part.tolist())
        for part in (_part(opt) if opt._spread else None, first.get(PART))
    )
    if mine != theirs:
        raise ValueError(
            f"state_dict must have as slices of the anchor (offload='replicas'): {mine}, but has: {theirs}; load "
            "it with the offload, model and mesh that saved it, each rank its own, as edit.load does, or begin "
            "anew from a model saved after sync(); nothing was loaded"
        )
    for layer, flat in zip(opt._layers if opt._spread else (), opt._anchor.flats, strict=False):
        for key in (ANCHOR, *(OUTER + key for key in opt._outer_keys)):
            name = _name(opt, layer, key, flat)
            shape = getattr(first.get(name, None if key == ANCHOR else flat), "shape", ())
            if shape != flat.shape:
                raise ValueError(
                    f"state_dict must have {name} of shape {tuple(flat.shape)}, but has {tuple(shape)}: it "
                    "was changed; nothing was loaded"
                )


def _check(opt: LocalSGDOptimizer, entries: Entries) -> None:
    for layer in opt._layers:
        for name, param in zip(layer.names, layer.params, strict=True):
            entry = entries.get(param, {})
            flats = {} if opt._spread else {ANCHOR: entry.get(ANCHOR)}
            flats |= {
                key: value for key, value in entry.items() if key.startswith((OUTER, START)) and dim(value)
            }
            for key, value in flats.items():
                if value is None or value.shape != param.shape or local(value).shape != local(param).shape:
                    raise ValueError(
                        f"state_dict must have {key} of shape {tuple(param.shape)} for {name}, but has "
                        f"{'none' if value is None else tuple(value.shape)}: it is of another model; nothing was loaded"
                    )


def dim(value: Any) -> int:
    """Dimensions; 0 of what is no tensor."""
    return value.dim() if isinstance(value, Tensor) else 0


def keys_of(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> dict[nn.Parameter, Any]:
    """The key under which each parameter is saved: by order, as in ``Optimizer.load_state_dict``."""
    params = list(chain.from_iterable(group["params"] for group in groups))
    keys = list(chain.from_iterable(group["params"] for group in saved))
    if len(params) != len(keys):
        raise ValueError(
            f"state_dict must have the optimizer's {len(params)} parameters, but has {len(keys)}: it is of "
            "another model or of other parameter groups; nothing was loaded"
        )
    return dict(zip(params, keys, strict=True))
