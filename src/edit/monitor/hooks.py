"""Round hooks: TensorBoard and JSON lines."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..round import RoundReport

_PIXELS = 16  # of a heat map's cell
_COLD, _MIDDLE, _HOT = (0.13, 0.31, 0.62), (0.96, 0.96, 0.92), (0.75, 0.15, 0.12)  # RGB


class TensorBoard:
    """A round hook that writes what a round did for TensorBoard, the point's step being the round.

    Scalars: ``norm|weight|out/{layer}/replica_{i}``, ``clip|effective_replicas|rolled_back/{layer}``,
    ``round/steps/replica_{i}``, ``round/{the rest}``. Images, rows being replicas and columns layers:
    ``heat/norm`` (blue to red: 1/4 to 4 times the layer's mean over the replicas), ``heat/weight`` (white to red: 0
    to 1), ``heat/out`` (red: left out). Text: ``events``. Needs the package ``tensorboard``.

    Args:
        log_dir: a folder of this run's own; made if missing.
        per_layer: ``False`` writes, for models of many layers and replicas, the means over layers (tag
            ``.../mean``) in place of each layer's scalars.
        heat_every: rounds from one heat map to the next; 0: none.
    """

    def __init__(self, log_dir: str | Path, per_layer: bool = True, heat_every: int = 10) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(log_dir))
        self._per_layer, self._heat_every = per_layer, heat_every

    def __call__(self, report: RoundReport) -> None:
        """Write ``report``."""
        for tag, value in _scalars(report, self._per_layer):
            self.scalar(tag, value, report.round)
        if self._heat_every and (report.round - 1) % self._heat_every == 0:
            for tag, image in _heat_maps(report):
                self._writer.add_image(tag, image, report.round, dataformats="HWC")
        if report.events:
            self._writer.add_text("events", "\n\n".join(report.events), report.round)

    def scalar(self, name: str, value: float, step: int) -> None:
        """Write one value of your own, e.g. the loss."""
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _scalars(report: RoundReport, per_layer: bool) -> Iterator[tuple[str, float]]:
    tables = {"norm": report.norms, "weight": report.weights, "out": report.out}
    vectors = {
        "clip": report.clip,
        "effective_replicas": report.effective_replicas,
        "rolled_back": report.rolled_back,
    }
    layers = [re.sub(r"[^-/\w.]+", "_", layer).strip("_") for layer in report.layers]  # as tags allow
    if not per_layer:
        layers = ["mean"]
        tables = {tag: table.double().mean(1, keepdim=True) for tag, table in tables.items()}
        vectors = {tag: vector.double().nanmean(0, keepdim=True) for tag, vector in vectors.items()}
    for column, layer in enumerate(layers):
        for tag, table in tables.items():
            for replica, value in enumerate(table[:, column].tolist()):
                yield f"{tag}/{layer}/replica_{replica}", value
        for tag, vector in vectors.items():
            yield f"{tag}/{layer}", vector[column].item()
    for replica, steps in enumerate(report.steps.tolist()):
        yield f"round/steps/replica_{replica}", steps
    for name in ("total_steps", "bytes_sent", "seconds_total", "seconds_waited", "last_replica"):
        yield f"round/{name}", getattr(report, name)


def _heat_maps(report: RoundReport) -> Iterator[tuple[str, Tensor]]:
    """Tag and ``[height, width, 3]`` float, 0 to 1."""
    finite = torch.where(report.norms.isfinite(), report.norms, torch.nan)
    yield (
        "heat/norm",
        _image((report.norms / finite.nanmean(0).clamp(min=1e-30)).log2().nan_to_num(nan=2.0) / 2),
    )
    yield "heat/weight", _image(report.weights)
    yield "heat/out", _image(report.out.double())


def _image(table: Tensor) -> Tensor:
    """Cells of colour: -1 blue, 0 white, 1 red."""
    share = table.float().clamp(-1, 1).unsqueeze(-1)
    middle = torch.tensor(_MIDDLE)
    colour = torch.where(share < 0, torch.tensor(_COLD), torch.tensor(_HOT))
    cells = middle + share.abs() * (colour - middle)
    return cells.repeat_interleave(_PIXELS, 0).repeat_interleave(_PIXELS, 1)


class JsonLines:
    """A round hook that appends one line of JSON per round to ``rounds.{rank}.jsonl`` in a folder.

    A line has every field of :class:`edit.RoundReport` (tables as lists, a row being a replica; numbers that are not
    finite as ``"nan"``, ``"inf"``) and ``time``, seconds since 1970. Each line is flushed, so a run that is killed
    leaves what it did. Register it on every rank, or on those that shall write; a run that goes on appends.
    ``python -m edit.monitor`` reads it.

    Args:
        log_dir: the run's folder; made if missing.
        time: seconds since 1970.
    """

    def __init__(self, log_dir: str | Path, time: Callable[[], float] = time.time) -> None:
        self._folder, self._time, self._mended = Path(log_dir), time, False
        self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, report: RoundReport) -> None:
        """Append ``report``."""
        line = {"time": self._time(), **{f.name: _plain(getattr(report, f.name)) for f in fields(report)}}
        # Opened anew: nothing to close, nothing that a fork or an exit would write twice.
        path = self._folder / f"rounds.{report.rank}.jsonl"
        text = json.dumps(line, allow_nan=False) + "\n"
        if not self._mended:  # the last line of a run that was killed may be half
            self._mended = True
            if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
                text = "\n" + text
        with open(path, "a") as file:
            file.write(text)


def _plain(value: Any) -> Any:
    """As JSON has it; floats with 6 digits."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else str(value)
    return value
