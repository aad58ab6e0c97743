"""Checkpoint files: what all replicas hold, in one folder, on ``torch.distributed.checkpoint`` (DCP).

A folder holds, by full parameter names and placed as the parameters are, so that any other mesh can read it:

* ``edit_anchor.NAME``, ``edit_outer.KEY.NAME``: anchor and outer state, once for all replicas (not their slices, with
  ``offload="replicas"``);
* ``frozen.NAME``: what does not train, once if replicas have it alike;
* ``replica.I.model.NAME``: live parameters of replica ``I``;
* ``replica.I.inner.KEY.NAME``: the inner optimizer's state of it, and with ``delay`` its parameters at the launch;
* ``replica.I.rank.M``: all the rest, of its rank ``M``: buffers, which may differ between its ranks, counters, the
  penalty's memory, parameter groups, scalars of both optimizers, random state, and the user's ``extra``.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import random
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from . import state
from .comm import Replicas, is_sharded, local, sharded_like

if TYPE_CHECKING:
    from .optimizer import LocalSGDOptimizer

log = logging.getLogger(__name__)
PARTIAL = ".partial"  # behind the name of a folder that is not complete
MARK = ".edit"  # a file in every folder of ours; with its number, the newest has the highest
Contents = tuple[dict[str, nn.Parameter], dict[str, nn.Parameter], dict[str, Tensor]]
_RANK = re.compile(r"replica\.(\d+)\.rank\.(\d+)")


# --------------------------------------------------------------------------------------------- folders


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in ``directory`` that was saved last; ``None`` if there is none."""
    return next((path for _, path in _folders(Path(directory)) if not _is_partial(path)), None)


def _folders(directory: Path) -> list[tuple[int, Path]]:
    """Numbers and paths of what :func:`save` wrote there, complete or not, the newest first.

    By numbers, not by times: clocks of nodes and file servers differ, and copies have times of their own.
    """
    found = []
    for mark in directory.glob(f"*/{MARK}"):
        if not mark.parent.is_symlink():
            with suppress(FileNotFoundError):  # it is being removed
                found.append((int(mark.read_text()), mark.parent))
    return sorted(found, reverse=True)


def _is_partial(path: Path) -> bool:
    return path.name.endswith(PARTIAL)


def _begin(path: Path, partial: Path) -> None:
    """Make ``partial`` an empty folder to write into."""
    if path.exists():
        raise ValueError(f"path must not exist yet, but {path} does: give each checkpoint its own")
    if partial.exists():
        shutil.rmtree(partial)
    number = 1 + max((number for number, _ in _folders(path.parent)), default=0)
    partial.mkdir(parents=True)
    with open(partial / MARK, "w") as mark:
        mark.write(f"{number}")
        mark.flush()
        os.fsync(mark.fileno())


def _publish(partial: Path, path: Path, metadata: Metadata, keep: int | None) -> None:
    """Give a complete folder its name, in one step; then remove all but the newest ``keep``, and what earlier
    saves left unfinished."""
    files = {info.relative_path for info in (metadata.storage_data or {}).values()}
    if missing := sorted(name for name in files if not (partial / name).is_file()):
        raise OSError(
            f"the first rank does not see {missing}: path must be on a file system that all ranks see"
        )
    partial.rename(path)
    if os.name == "posix":  # the name, too, shall survive a loss of power; not all file systems can
        handle = os.open(path.parent, os.O_RDONLY)
        with suppress(OSError):
            os.fsync(handle)
        os.close(handle)
    if keep is not None:
        try:
            complete = [old for _, old in _folders(path.parent) if not _is_partial(old)]
            for old in complete[keep:]:
                old.rename(old.with_name(old.name + PARTIAL))  # first: what is half removed is not complete
            for old in [old for _, old in _folders(path.parent) if _is_partial(old)]:
                shutil.rmtree(old)
        except OSError as error:  # the new one is complete all the same
            log.warning("old checkpoints beside %s could not be removed: %s", path, error)


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
    ``path`` + ``.partial``, which the next one to the same path, or with ``keep``, removes.

    Args:
        path: a folder that does not exist yet, on a file system that all ranks see. One run at a time saves
            beside it.
        model: the optimizer's.
        optimizer: its state, replica by replica; and anchor and outer state, once.
        extra: anything that pickles, each rank its own: state dicts of a scheduler, of a data loader.
        keep: remove all but the ``keep`` newest complete checkpoints beside ``path``, this one included, when
            it is complete. ``None``: remove nothing.
        background: return when everything is copied to host memory, and write while training goes on. The
            next ``save``, ``load`` or ``close()`` waits for this one, and raises if it failed.

    Returns:
        A future of ``path``; without ``background``, one that is done. It ends alike on all ranks.

    Raises:
        ValueError, TypeError, RuntimeError: arguments, or the moment; on every rank.
        OSError: files could not be written. Another rank may say so with a RuntimeError.
    """
    path = Path(path)
    what = f"edit.save({path})"
    replicas = optimizer.replicas
    leads = replicas.rank == replicas.leader
    _wait_for(optimizer)
    # All that is said here goes through a group of its own: on `control`, a replica that is a step ahead may
    # have an exchange of its next round under way. The thread uses it too: whoever comes here waited for it.
    where = _ranks(replicas)
    contents = _contents(optimizer)
    apart = _compare(replicas, what, path, _sums(contents[1]))
    partial = path.with_name(path.name + PARTIAL)
    try:
        with replicas.agree(what, files=True):
            _check(model, optimizer)
            if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
                raise ValueError(f"keep must be an int >= 1 or None, but is {keep!r}: None removes nothing")
            entries = _entries(optimizer, contents, extra, apart)
            if leads:
                _begin(path, partial)
    except BaseException:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise

    def write() -> Path:
        device = replicas.device
        if device.type != "cpu":  # a thread begins with the first one
            torch.get_device_module(device).set_device(device)
        with replicas.agree(what, files=True):
            try:
                with _failing("written", path):
                    metadata = dcp_save(entries, checkpoint_id=partial, **where)
                    if leads:
                        _publish(partial, path, metadata, keep)
            except BaseException as error:
                if background:  # else whoever called is told at once
                    log.error("%s", error)
                if leads:
                    shutil.rmtree(partial, ignore_errors=True)
                raise
        return path

    if background:
        thread = ThreadPoolExecutor(1, "edit.save")
        optimizer._saving = thread.submit(write)
        thread.shutdown(wait=False)  # ends when it has written; so does the interpreter
        return optimizer._saving
    saved: Future[Path] = Future()
    saved.set_result(write())
    return saved


def _wait_for(optimizer: LocalSGDOptimizer) -> None:
    """Wait for a save in the background, and raise if it failed: on all ranks alike."""
    saving, optimizer._saving = optimizer._saving, None
    if saving is not None:
        saving.result()


def _sums(frozen: dict[str, nn.Parameter]) -> list[int]:
    """What does not train, in few numbers: a checksum of each of this rank's tensors."""
    # A copy: a shard may be a view of a larger storage, all of which would be written.
    return [zlib.crc32(_pickled(local(param).to("cpu", copy=True))) for param in frozen.values()]


def _pickled(value: Any) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def _compare(replicas: Replicas, what: str, path: Path, sums: list[int]) -> bool:
    """Collective. Raise if ranks name different paths. Returns whether replicas differ in ``sums``."""
    with replicas.naming(f"{what}, which all ranks must call,"):
        said = replicas.gather_objects((str(path), sums), files=True)
    paths = {rank: each for rank, (each, _) in said.items()}
    if len({*paths.values()}) > 1:
        raise ValueError(
            f"path must be the same on all ranks, but is {paths}: "
            "ask edit.latest on one rank, and tell the others"
        )
    columns = zip(*replicas.grid, strict=True)  # the ranks that hold the same shard
    return any(said[rank][1] != said[column[0]][1] for column in columns for rank in column)


def _entries(optimizer: LocalSGDOptimizer, contents: Contents, extra: Any, apart: bool) -> dict[str, Any]:
    """What this rank gives to DCP: copies in host memory. ``apart``: replicas differ in what does not train."""
    replicas = optimizer.replicas
    mine = f"replica.{replicas.index}"
    packed = optimizer.state_dict()
    params, frozen, buffers = contents
    ids = state.keys_of(optimizer.inner.param_groups, packed["param_groups"])
    of_frozen = f"{mine}.model" if apart else "frozen"
    entries = {f"{of_frozen}.{name}": param for name, param in frozen.items()}
    entries |= {f"{mine}.model.{name}": param for name, param in params.items()}
    run: dict[str, Any] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, param in {**params, **frozen}.items():
        for key, value in packed["state"].get(ids.get(param), {}).items():
            if key.startswith(state.OF_RUN):
                run[key] = value
            elif key != state.BEGAN and _is_like(value, param):
                prefix = state.OUTER if key.startswith(state.OUTER) else ""
                word = prefix + _word(key.removeprefix(prefix))
                entries[
                    f"{word}.{name}" if prefix or key == state.ANCHOR else f"{mine}.inner.{word}.{name}"
                ] = value
            else:
                scalars.setdefault(name, {})[key] = value
    rest = {
        "run": run,
        "scalars": scalars,
        "buffers": buffers,
        "objects": {k: v for k, v in optimizer.model.state_dict().items() if k.endswith("_extra_state")},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in packed["param_groups"]],
        "named": _names(optimizer),
        "layers": _columns(optimizer),
        "random": {key: get() for key, (get, _) in _generators(replicas.device).items()},
        "extra": extra,
    }
    # Copies that later steps do not touch.
    held: dict[str, Any] = {key: sharded_like(value, local(value), "cpu") for key, value in entries.items()}
    return {**held, f"{mine}.rank.{replicas.member}": _pickled(rest)}


# ------------------------------------------------------------------------------------------------ load


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: LocalSGDOptimizer) -> Any:
    """Load what :func:`save` wrote. Returns ``extra``, its tensors in host memory. Collective over all ranks.

    With as many replicas, of as many ranks each, as were saved, the run goes on bit for bit as if it had never
    stopped; random states (Python's, NumPy's, torch's) included. With others (but not with ``offload="replicas"``,
    whose slices load on the mesh that saved them only), every replica starts from the anchor; replica ``i`` takes the
    inner state, and its rank ``m`` the buffers and ``extra``, of replica ``i`` and rank ``m`` modulo the old numbers;
    the penalty's memory of known replicas is kept; random states are left as they are. Steps since the last round are
    dropped then: call ``sync()`` before the save to keep them.

    Everything is read and checked before anything is changed. Files are unpickled: load only what you trust.

    Raises:
        ValueError, RuntimeError, OSError: the folder cannot be read, is of another model, or the moment is
            wrong; on every rank, and nothing was changed.
    """
    path = Path(path)
    what = f"edit.load({path})"
    replicas = optimizer.replicas
    _wait_for(optimizer)
    where = _ranks(replicas)
    _compare(replicas, what, path, [])
    with replicas.agree(what, files=True):
        _check(model, optimizer)
        state.check_no_round(optimizer)
        source = _Source(path, optimizer)
    with _failing("read, and nothing was changed", path):
        dcp_load(source.entries, checkpoint_id=path, **where)
    with replicas.agree(what, files=True):
        rest, packed = source.packed()
        state.check(optimizer, packed)
    with replicas.agree(what, files=True):
        optimizer.load_state_dict(packed)
        source.write(rest)
        if source.same_mesh:
            for key, (_, put) in _generators(replicas.device).items():
                if key in rest["random"]:
                    put(rest["random"][key])
    if optimizer._due and replicas.stage is not None:
        optimizer._launch(called=False)  # here, as stages of a pipeline do not begin a forward together
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
        self._of_model: dict[str, nn.Parameter] = {}
        self._of_state: dict[str, tuple[str, str]] = {}
        self._params, frozen, self._buffers = _contents(optimizer)
        ids = {param for group in optimizer.param_groups for param in group["params"]}
        self._named = {name: param for name, param in {**self._params, **frozen}.items() if param in ids}
        for name, param in self._params.items():
            live = f"{self._mine}.model.{name}"
            anchor = self._want(param, name, f"{state.ANCHOR}.{name}", f"frozen.{name}", live)
            self._of_state[anchor] = name, state.ANCHOR
            # On another mesh replicas start from the anchor; so does what was frozen.
            first = (live, anchor) if self.same_mesh else (anchor,)
            self._of_model[self._want(param, name, *first)] = param
        for name, param in frozen.items():
            keys = f"frozen.{name}", f"{state.ANCHOR}.{name}", f"{self._mine}.model.{name}"
            self._of_model[self._want(param, name, *keys)] = param
        inner = f"{self._mine}.inner."
        for key in self._known:
            for prefix, kept in ((inner, ""), (state.OUTER, state.OUTER)):
                kind, _, name = key.removeprefix(prefix).partition(".")
                if key.startswith(prefix) and name in (self._named if prefix == inner else self._params):
                    self._of_state[self._want(self._named[name], name, key)] = name, kept + unquote(kind)

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
                like, torch.empty(local(like).shape, dtype=saved.properties.dtype, device="cpu")
            )
        return key

    def packed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """After ``entries`` were read: what was saved for this rank besides, and the optimizer's state dict."""
        optimizer = self._optimizer
        files = [io.BytesIO(self.entries[f"{self._mine}.rank.{m}"]) for m in range(self._members)]
        # Not to the devices they were on: those are other ranks', or not there.
        ranks = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
        rest = ranks[self._member]
        packed = optimizer.inner.state_dict()
        ids = state.keys_of(optimizer.inner.param_groups, packed["param_groups"])
        states: dict[str, dict[str, Any]] = {name: {} for name in self._named}
        for name in self._params:
            states[name][state.BEGAN] = torch.tensor(False, device="cpu")
        # Ranks of a replica may hold different layers, so all are asked; this one's own word is the last. A
        # tensor that is not shaped like its parameter belongs to a shard of the old mesh.
        for rank in [*ranks, rest]:
            for name, values in rank["scalars"].items():
                if name in states:
                    states[name] |= {k: v for k, v in values.items() if self.same_mesh or not state.dim(v)}
        for key, (name, kind) in self._of_state.items():
            states[name][kind] = self.entries[key]
        states[next(iter(self._params))] |= self._run(rest["run"], rest["layers"])
        packed["state"] = {ids[self._named[name]]: values for name, values in states.items() if values}
        for group, mine in zip(packed["param_groups"], _names(optimizer), strict=True):
            # By what is in it: groups may have been built in another order.
            pairs = zip(rest["named"], rest["groups"], strict=True)
            theirs, options = max(pairs, key=lambda pair: len({*mine} & {*pair[0]}))
            if {*mine} & {*theirs}:
                for key, value in options.items():
                    old = group.get(key)
                    moved = isinstance(value, Tensor) and isinstance(old, Tensor)  # a learning rate, maybe
                    group[key] = value.to(old.device) if moved else value
            else:
                log.warning(
                    "the checkpoint has no group with %s: it keeps the options it was built with", mine[:3]
                )
        for name, value in self._buffers.items():
            saved = rest["buffers"].get(name)
            if saved is None or saved.shape != value.shape:
                raise ValueError(
                    f"path must be a checkpoint of this model, but buffer {name} in {self._path} has shape "
                    f"{saved if saved is None else tuple(saved.shape)}, and {tuple(value.shape)} in the model: build "
                    "the model that was saved"
                )
        return rest, packed

    def _run(self, run: dict[str, Any], layers: list[str]) -> dict[str, Any]:
        """``run`` with the penalty's memory of known layers and replicas; at the anchor on another mesh."""
        optimizer = self._optimizer
        columns = _columns(optimizer)
        fresh = optimizer.penalty.init(optimizer.replicas.count, len(columns))
        for key, new in fresh.items():
            if (old := run.get(state.MEMORY + key)) is None or old.dim() != new.dim():
                continue
            for column, layer in enumerate(columns):
                if layer in layers:
                    there, here = old[..., layers.index(layer)], new[..., column]
                    if here.dim():  # known replicas
                        known = min(len(there), len(here))
                        there, here = there[:known], here[:known]
                    if here.shape == there.shape:
                        here.copy_(there)
        run = {**run, **{state.MEMORY + key: value for key, value in fresh.items()}}
        return run if self.same_mesh else {**run, state.RUN: state.run_at_anchor(run[state.RUN])}

    @torch.no_grad()
    def write(self, rest: dict[str, Any]) -> None:
        """The model's values. (All names and shapes were checked.)"""
        optimizer = self._optimizer
        for key, param in self._of_model.items():
            local(param).copy_(local(self.entries[key]))
        for name, buffer in self._buffers.items():
            buffer.copy_(rest["buffers"][name])
        if rest["objects"]:
            optimizer.model.load_state_dict(rest["objects"], strict=False)
        if not self.same_mesh and optimizer._anchor.taken:
            optimizer._buffers.write(optimizer._buffers.agreed)


# ----------------------------------------------------------------------------------------------- parts


def _contents(optimizer: LocalSGDOptimizer) -> Contents:
    """By name: parameters that train, parameters that don't, and persistent buffers (this rank's part).

    A tied parameter is listed once, under its first name.
    """
    optimizer._reshard()
    names = state.names_of(optimizer.model)
    trained = {param for layer in optimizer._layers for param in layer.params}
    params = {name: param for param, name in names.items() if param in trained}
    frozen = {name: param for param, name in names.items() if param not in trained}
    buffers = optimizer._buffers
    return params, frozen, dict(zip(map(state.clean, buffers.names), buffers.tensors(), strict=True))


def _names(optimizer: LocalSGDOptimizer) -> list[list[str]]:
    """Of the parameters of each group."""
    names = state.names_of(optimizer.model)
    return [[names[p] for p in group["params"] if p in names] for group in optimizer.inner.param_groups]


def _columns(optimizer: LocalSGDOptimizer) -> list[str]:
    return [state.clean(name) for name in optimizer._columns]


def _word(key: str) -> str:
    """``key`` without dots, the first of which ends it where a parameter's name follows. ``unquote`` undoes it."""
    return quote(key, safe="").replace(".", "%2E")


def _is_like(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and is_sharded(value) == is_sharded(param)


def _generators(device: torch.device) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """How the state of each source of random numbers is read and set."""
    found: dict[str, Any] = {
        "python": (random.getstate, random.setstate),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state, sys.modules["numpy"].random.set_state
    if device.type != "cpu":
        module = torch.get_device_module(device)
        found["device"] = (
            functools.partial(module.get_rng_state, device),
            functools.partial(module.set_rng_state, device=device),
        )
    return found


def _check(model: nn.Module, optimizer: LocalSGDOptimizer) -> None:
    optimizer._check_usable()
    if {*model.parameters()} != {*optimizer.model.parameters()}:
        raise ValueError("model must be the one that LocalSGDOptimizer was given, but has other parameters")


def _alone() -> None:
    """DCP warns, also from a thread of its own, that a single process is one: not a warning of use."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def _ranks(replicas: Replicas) -> dict[str, Any]:
    """Who writes or reads together, as DCP's arguments."""
    if replicas.files is None:
        _alone()
    return {"process_group": replicas.files, "no_dist": replicas.files is None}


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

    Needs the package ``safetensors`` and torch 2.9.

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
