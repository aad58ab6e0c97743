"""Checkpoint files: what all replicas hold, in one folder, on ``torch.distributed.checkpoint`` (DCP).

A folder holds, by full parameter names and placed as the parameters are, so that any other mesh can read it:

* ``edit_anchor.NAME``, ``edit_outer.KEY.NAME``: anchor and outer state, once for all replicas;
* ``frozen.NAME``: what does not train, once;
* ``replica.I.model.NAME``: live parameters and buffers of replica ``I``;
* ``replica.I.inner.KEY.NAME``: the inner optimizer's state of it;
* ``replica.I.rank.M``: all the rest, of its rank ``M``: counters, the penalty's memory, parameter groups, scalars
  of both optimizers, random state, and the user's ``extra``.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from . import state
from .comm import Replicas, is_sharded, local, sharded_like
from .setup import agree

if TYPE_CHECKING:
    from .optimizer import LocalSGDOptimizer

log = logging.getLogger(__name__)
PARTIAL = ".partial"  # behind the name of a folder that is not complete
_METADATA = ".metadata"  # DCP writes it last
_RANK = re.compile(r"replica\.(\d+)\.rank\.(\d+)")


# --------------------------------------------------------------------------------------------- folders


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in ``directory`` that was saved last; ``None`` if there is none."""
    return next(iter(_complete(Path(directory))), None)


def _complete(directory: Path) -> list[Path]:
    """Complete checkpoints, the newest first."""
    found = []
    for metadata in directory.glob(f"*/{_METADATA}"):
        if not metadata.parent.name.endswith(PARTIAL):
            with suppress(FileNotFoundError):  # another rank is pruning
                found.append((metadata.stat().st_mtime_ns, metadata.parent))
    return [path for _, path in sorted(found, reverse=True)]


def _publish(partial: Path, path: Path, keep: int | None) -> None:
    """Give a complete folder its name, in one step; then remove all but the newest ``keep``."""
    partial.rename(path)
    if os.name == "posix":  # the name, too, shall survive a loss of power
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    if keep is not None:
        for old in _complete(path.parent)[keep:]:
            (old / _METADATA).unlink()  # first: what is half removed is not complete
            shutil.rmtree(old, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ save


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: LocalSGDOptimizer,
    extra: Any = None,
    *,
    keep: int | None = None,
    background: bool = False,
) -> Future[Path]:
    """Save a run into the new folder ``path``, so that :func:`load` resumes it. Changes nothing in it.

    Collective over all ranks: call it at the same place of the same round on all of them, right after
    ``step()`` or ``sync()``. A folder is complete or does not have its name: a save that is interrupted leaves
    ``path`` + ``.partial``, which the next one removes.

    Args:
        path: a folder that does not exist yet, on a file system that all ranks see.
        model: the optimizer's.
        optimizer: its state, replica by replica; and anchor and outer state, once.
        extra: anything that pickles, each rank its own: state dicts of a scheduler, of a data loader.
        keep: remove all but the ``keep`` newest complete checkpoints beside ``path``, this one included, when
            it is complete. ``None``: remove nothing.
        background: copy to host memory, then write while training goes on. The next ``save`` waits for this
            one, and raises if it failed.

    Returns:
        A future of ``path``; without ``background``, one that is done.

    Raises:
        ValueError, TypeError, RuntimeError: arguments, or the moment; on every rank.
        OSError: files could not be written; on every rank.
    """
    path = Path(path)
    partial = path.with_name(path.name + PARTIAL)
    replicas = optimizer.replicas
    leads = replicas.rank == replicas.leader
    wait_for(optimizer)
    _same_path(replicas, path)
    with agree(replicas, f"edit.save({path})"):
        _check(model, optimizer)
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep must be an int >= 1 or None, but is {keep!r}: None removes nothing")
        if leads:
            if path.exists():
                raise ValueError(f"path must not exist yet, but {path} does: give each checkpoint its own")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        entries = _entries(optimizer, extra)
    where = {"checkpoint_id": partial, **_ranks(replicas)}

    def publish(write: Callable[[], Any]) -> None:
        try:
            with _failing("written", path):
                write()
            if leads:
                _publish(partial, path, keep)
        except BaseException:
            if leads:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    saved: Future[Path] = Future()
    if not background:
        with agree(replicas, f"edit.save({path})"):
            publish(lambda: dcp_save(entries, **where))
        saved.set_result(path)
        return saved

    def finish(written: Future[Any]) -> None:
        try:
            publish(written.result)
            saved.set_result(path)
        except BaseException as error:
            log.error("%s", error)
            saved.set_exception(error)

    # It has copied everything to the host when it returns. Its thread has a group of its own, so that what it
    # says to other ranks never meets what training says.
    dcp_async_save(entries, **where).add_done_callback(finish)  # type: ignore[union-attr]
    optimizer._saving = saved
    return saved


def wait_for(optimizer: LocalSGDOptimizer) -> None:
    """Wait for a save in the background, and raise if it failed."""
    saving, optimizer._saving = optimizer._saving, None
    if saving is not None:
        saving.result()


def _entries(optimizer: LocalSGDOptimizer, extra: Any) -> dict[str, Any]:
    """What this rank gives to DCP."""
    replicas = optimizer.replicas
    mine = f"replica.{replicas.index}"
    packed = optimizer.state_dict()
    params, frozen, others, objects = _contents(optimizer)
    ids = state.keys_of(optimizer.inner.param_groups, packed["param_groups"])
    entries: dict[str, Any] = {f"frozen.{name}": value for name, value in frozen.items()}
    entries |= {f"{mine}.model.{name}": value for name, value in {**params, **others}.items()}
    run: dict[str, Any] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, param in params.items():
        for key, value in packed["state"].get(ids[param], {}).items():
            if key.startswith(state.OF_RUN):
                run[key] = value
            elif key != state.BEGAN and _is_like(value, param):
                entries[f"{key}.{name}" if key.startswith(state.PREFIX) else f"{mine}.inner.{key}.{name}"] = (
                    value
                )
            else:
                scalars.setdefault(name, {})[key] = value
    rest = {
        "run": run,
        "scalars": scalars,
        "objects": objects,
        "groups": [_options(group) for group in packed["param_groups"]],
        "layers": optimizer._columns,
        "random": _random_state(optimizer),
        "extra": extra,
    }
    entries[f"{mine}.rank.{replicas.member}"] = _pickled(rest)
    return entries


# ------------------------------------------------------------------------------------------------ load


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: LocalSGDOptimizer) -> Any:
    """Load what :func:`save` wrote. Returns ``extra``. Collective over all ranks.

    With as many replicas, of as many ranks each, as were saved, the run goes on bit for bit as if it had never
    stopped; random states (Python's, NumPy's, torch's) included. With others, every replica starts from the
    anchor; replica ``i`` takes the inner state, and its rank ``m`` the ``extra``, of replica ``i`` and rank ``m``
    modulo the old numbers; the penalty's memory of known replicas is kept; random states are left as they are.
    Steps since the last round are dropped then: call ``sync()`` before the save to keep them.

    Everything is read and checked before anything is changed. Files are unpickled: load only what you trust.

    Raises:
        ValueError, RuntimeError: the folder cannot be read, is of another model, or the moment is wrong; on
            every rank, and nothing was changed.
    """
    path = Path(path)
    replicas = optimizer.replicas
    wait_for(optimizer)
    _same_path(replicas, path)
    with agree(replicas, f"edit.load({path})"):
        _check(model, optimizer)
        state.check_no_round(optimizer)
        source = _Source(path, optimizer)
    with _failing("read, and nothing was changed", path):
        dcp_load(source.entries, checkpoint_id=path, **_ranks(replicas))
    with agree(replicas, f"edit.load({path})"):
        rest, packed = source.packed()
        optimizer.load_state_dict(packed)
    source.write(rest)
    if source.same_mesh:
        _set_random_state(optimizer, rest["random"])
    return rest["extra"]


class _Source:
    """A checkpoint, and those of its parts that this rank takes.

    ``entries``: what to read, by key, into the host's memory. ``_of_model``, ``_of_state``: whose value, by name,
    and whose state, by name and the state's key, an entry is.
    """

    def __init__(self, path: Path, optimizer: LocalSGDOptimizer) -> None:
        self._path, self._optimizer, replicas = path, optimizer, optimizer.replicas
        try:
            self._known: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:
            raise ValueError(
                f"path must be a complete checkpoint, but {path} is not ({type(error).__name__}: {error}): "
                "edit.latest(directory) finds the newest complete one"
            ) from error
        saved = [tuple(map(int, found.groups())) for found in map(_RANK.fullmatch, self._known) if found]
        if not saved:
            raise ValueError(
                f"path must be a checkpoint of edit.save, but {path} is not: load one of plain training with "
                "torch.distributed.checkpoint into the model and optimizer.inner (docs/checkpointing.md)"
            )
        self._count, self._members = (1 + max(numbers) for numbers in zip(*saved, strict=True))
        self.same_mesh = (self._count, self._members) == (replicas.count, replicas.members)
        self._member = replicas.member % self._members
        self._mine = f"replica.{replicas.index % self._count}"

        self.entries: dict[str, Any] = {f"{self._mine}.rank.{m}": b"" for m in range(self._members)}
        self._of_model: dict[str, str] = {}
        self._of_state: dict[str, tuple[str, str]] = {}
        self._params, frozen, others, _ = _contents(optimizer)
        for name, param in self._params.items():
            anchor = self._want(param, name, f"{state.ANCHOR}.{name}", f"frozen.{name}")
            self._of_state[anchor] = name, state.ANCHOR
            # On another mesh replicas start from the anchor; so does what was frozen.
            live = f"{self._mine}.model.{name}" if self.same_mesh else anchor
            self._of_model[self._want(param, name, live, anchor)] = name
        for name, value in others.items():
            self._of_model[self._want(value, name, f"{self._mine}.model.{name}")] = name
        for name, param in frozen.items():
            self._of_model[self._want(param, name, f"frozen.{name}", f"{state.ANCHOR}.{name}")] = name
        inner = f"{self._mine}.inner."
        for key in self._known:
            for prefix, kept in ((inner, ""), (state.OUTER, state.OUTER)):
                kind, _, name = key.removeprefix(prefix).partition(".")
                if key.startswith(prefix) and name in self._params:
                    self._of_state[self._want(self._params[name], name, key)] = name, kept + kind

    def _want(self, like: Tensor, name: str, *keys: str) -> str:
        """Put the first of ``keys`` that was saved among ``entries``; ``like`` is the model's tensor of it."""
        key = next((key for key in keys if key in self._known), None)
        if key is None:
            raise ValueError(
                f"path must be a checkpoint of this model, but {self._path} has no {name}: build the model that "
                "was saved"
            )
        saved = self._known[key]
        if not isinstance(saved, TensorStorageMetadata) or saved.size != like.shape:
            raise ValueError(
                f"path must be a checkpoint of this model, but {key} in {self._path} has shape "
                f"{tuple(getattr(saved, 'size', ()))}, and {tuple(like.shape)} in the model: build the model that "
                "was saved"
            )
        if key not in self.entries:
            self.entries[key] = sharded_like(
                like, torch.empty(local(like).shape, dtype=saved.properties.dtype)
            )
        return key

    def packed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """After ``entries`` were read: what was saved for this rank besides, and the optimizer's state dict."""
        optimizer = self._optimizer
        ranks = [_unpickled(self.entries[f"{self._mine}.rank.{m}"]) for m in range(self._members)]
        rest = ranks[self._member]
        packed = optimizer.inner.state_dict()
        ids = state.keys_of(optimizer.inner.param_groups, packed["param_groups"])
        states: dict[str, dict[str, Any]] = {
            name: {state.BEGAN: torch.tensor(False)} for name in self._params
        }
        # Ranks of a replica may hold different layers, so all are asked; this one's own word is the last. A
        # tensor that is not shaped like its parameter belongs to a shard of the old mesh.
        for rank in [*ranks, rest]:
            for name, values in rank["scalars"].items():
                if name in states:
                    states[name] |= {k: v for k, v in values.items() if self.same_mesh or _is_scalar(v)}
        for key, (name, kind) in self._of_state.items():
            states[name][kind] = self.entries[key]
        run = rest["run"] if self.same_mesh else self._from_anchor(rest["run"], rest["layers"])
        states[next(iter(states))] |= run
        packed["state"] = {ids[self._params[name]]: values for name, values in states.items()}
        if len(rest["groups"]) == len(packed["param_groups"]):
            for group, options in zip(packed["param_groups"], rest["groups"], strict=True):
                group |= options
        else:
            log.warning(
                "the checkpoint has other parameter groups: they keep the options they were built with"
            )
        return rest, packed

    def _from_anchor(self, run: dict[str, Any], layers: list[str]) -> dict[str, Any]:
        """``run`` for a start from the anchor on another mesh."""
        optimizer = self._optimizer
        fresh = optimizer.penalty.init(optimizer.replicas.count, len(optimizer._columns))
        for key, new in fresh.items():
            if (old := run.get(state.MEMORY + key)) is None or old.dim() != new.dim():
                continue
            for column, layer in enumerate(optimizer._columns):
                if layer in layers:
                    there, here = old[..., layers.index(layer)], new[..., column]
                    if here.dim():  # known replicas
                        known = min(len(there), len(here))
                        there, here = there[:known], here[:known]
                    if here.shape == there.shape:
                        here.copy_(there)
        return {
            **run,
            **{state.MEMORY + key: value for key, value in fresh.items()},
            state.RUN: state.run_at_anchor(run[state.RUN]),
        }

    @torch.no_grad()
    def write(self, rest: dict[str, Any]) -> None:
        """The model's values. (Cannot fail: all shapes were checked.)"""
        optimizer = self._optimizer
        optimizer._reshard()
        params, frozen, others, objects = _contents(optimizer)
        values = {**params, **frozen, **others}
        for key, name in self._of_model.items():
            local(values[name]).copy_(local(self.entries[key]))
        if objects:
            optimizer.model.load_state_dict(rest["objects"], strict=False)
        if not self.same_mesh and optimizer._anchor.taken:
            optimizer._buffers.write(optimizer._buffers.agreed)


# ----------------------------------------------------------------------------------------------- parts


def _contents(
    optimizer: LocalSGDOptimizer,
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter], dict[str, Tensor], dict[str, Any]]:
    """By name: parameters that train, parameters that don't, persistent buffers, and what is no tensor.

    A tied parameter is listed once, under its first name.
    """
    optimizer._reshard()
    names = state.names_of(optimizer.model)
    trained = {param for layer in optimizer._layers for param in layer.params}
    params = {name: param for param, name in names.items() if param in trained}
    frozen = {name: param for param, name in names.items() if param not in trained}
    tied = {state.clean(name) for name, _ in optimizer.model.named_parameters(remove_duplicate=False)}
    others, objects = {}, {}
    for key, value in optimizer.model.state_dict().items():
        if isinstance(value, Tensor):
            if (name := state.clean(key)) not in tied:
                others[name] = value
        else:
            objects[key] = value
    return params, frozen, others, objects


def _is_like(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and is_sharded(value) == is_sharded(param)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _random_state(optimizer: LocalSGDOptimizer) -> dict[str, Any]:
    found = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    device = optimizer._layers[0].device if optimizer._layers else torch.device("cpu")
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    return found


def _set_random_state(optimizer: LocalSGDOptimizer, saved: dict[str, Any]) -> None:
    random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if "numpy" in saved and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(saved["numpy"])
    device = optimizer._layers[0].device if optimizer._layers else torch.device("cpu")
    if "device" in saved and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(saved["device"], device)


def _check(model: nn.Module, optimizer: LocalSGDOptimizer) -> None:
    optimizer._check_usable()
    if {*model.parameters()} != {*optimizer.model.parameters()}:
        raise ValueError("model must be the one that LocalSGDOptimizer was given, but has other parameters")


def _alone() -> None:
    """DCP warns, also from a thread of its own, that a single process is one: not a warning of use."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def _ranks(replicas: Replicas) -> dict[str, Any]:
    """Who writes or reads together, as DCP's arguments. Collective at its first use."""
    group = replicas.files_group()
    if group is None:
        _alone()
    return {"process_group": group, "no_dist": group is None}


def _same_path(replicas: Replicas, path: Path) -> None:
    """Collective."""
    said = replicas.gather_objects(str(path))
    if len({*said.values()}) > 1:
        raise ValueError(
            f"path must be the same on all ranks, but is {said}: ask edit.latest on one rank, and tell the others"
        )


@contextmanager
def _failing(what: str, path: Path) -> Iterator[None]:
    """One clear error on every rank for what DCP raises."""
    try:
        yield
    except CheckpointException as error:
        said = "; ".join(
            f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()
        )
        raise OSError(f"{path} could not be {what}: {said}") from None


# ---------------------------------------------------------------------------------------------- export


def export_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write the model's parameters and buffers, as they are, as Hugging Face safetensors into the folder ``path``.

    For the consensus call it inside ``optimizer.consensus()``, or after ``sync()``. All ranks of the replica
    of rank 0 must call it (others may); rank 0 gathers the whole model in host memory and writes. Tied
    parameters are written under their first name.

    Args:
        path: a folder; made if missing. Gets ``model-0000I-of-0000N.safetensors`` and
            ``model.safetensors.index.json``.
        model: plain or sharded.
        max_shard_bytes: begin a new file before one becomes larger. A single larger tensor has one of its own.

    Raises:
        OSError: on rank 0, files could not be written.
    """
    # Not before it is needed: it needs safetensors, and torch 2.9.
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    first = {*state.names_of(model).values()}
    tied = {state.clean(name) for name, _ in model.named_parameters(remove_duplicate=False)} - first
    tensors = {name: value for name, value in whole.items() if isinstance(value, Tensor) and name not in tied}
    if not tensors:  # not rank 0
        return
    files: dict[str, int] = {}
    number, size = 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > max_shard_bytes:
            number, size = number + 1, 0
        files[name], size = number, size + tensor.nbytes
    writer = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=files)
    _alone()
    with _failing("written", Path(path)):
        dcp_save(tensors, storage_writer=writer, no_dist=True)
