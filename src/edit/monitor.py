"""Rounds as TensorBoard scalars. Imported on demand: it needs the package ``tensorboard``.

``optimizer.register_round_hook(edit.monitor.TensorBoard("runs/1"))``, on the ranks that shall write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from .round import RoundReport


class TensorBoard:
    """A round hook that writes one point per round to each scalar.

    Tags, the point's step being the round: ``norm|weight|out/{layer}/replica_{i}``,
    ``clip|effective_replicas|rolled_back/{layer}``, ``round/steps/replica_{i}``, ``round/{the rest}``.

    Args:
        log_dir: a folder of this run's own; made if missing.
        per_layer: ``False`` writes, for models of many layers and replicas, the means over layers (tag
            ``.../mean``) in place of each layer.
    """

    def __init__(self, log_dir: str | Path, per_layer: bool = True) -> None:
        self._writer = SummaryWriter(str(log_dir))
        self._per_layer = per_layer

    def __call__(self, report: RoundReport) -> None:
        """Write ``report``."""
        for tag, value in self._scalars(report):
            self.scalar(tag, value, report.round)

    def scalar(self, name: str, value: float, step: int) -> None:
        """Write one value of your own, e.g. the loss."""
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _scalars(self, report: RoundReport) -> Iterator[tuple[str, float]]:
        tables = {"norm": report.norms, "weight": report.weights, "out": report.out}
        vectors = {
            "clip": report.clip,
            "effective_replicas": report.effective_replicas,
            "rolled_back": report.rolled_back,
        }
        layers = [re.sub(r"[^-/\w.]+", "_", layer).strip("_") for layer in report.layers]  # as tags allow
        if not self._per_layer:
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
