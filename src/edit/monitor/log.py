"""What :class:`JsonLines` wrote, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Line = dict[str, Any]


@dataclass(frozen=True)
class Log:
    """The rounds of a run; K rounds, R replicas, L layers, N ranks that wrote. float64 unless said otherwise."""

    layers: list[str]
    """Names of the L layers."""
    ranks: list[int]
    """The N ranks."""
    rounds: list[int]
    """Numbers of the K rounds."""
    time: Tensor
    """``[K]``: when each was done, in seconds since 1970, on the first rank that wrote."""
    steps: Tensor
    """``[K, R]``: inner steps."""
    total_steps: Tensor
    """``[K]``."""
    norms: Tensor
    """``[K, R, L]``."""
    out: Tensor
    """``[K, R, L]``: 1 where a replica was out."""
    weights: Tensor
    """``[K, R, L]``."""
    effective_replicas: Tensor
    """``[K, L]``."""
    clip: Tensor
    """``[K, L]``: NaN for layers of ranks that did not write."""
    rolled_back: Tensor
    """``[K, L]``."""
    last_replica: Tensor
    """``[K]``."""
    bytes_sent: Tensor
    """``[K, N]``. NaN, here and below, where a rank did not write."""
    seconds_total: Tensor
    """``[K, N]``."""
    seconds_waited: Tensor
    """``[K, N]``."""
    events: list[str]
    """In order."""
    earlier: int
    """Rounds that were logged with other replicas or layers, and are not in here."""


def read(folder: str | Path) -> Log:
    """The log in ``folder``, or in a folder inside it if it has none. Of a round that was done again after a restart,
    the last time counts; of a run whose replicas or layers changed, what came after the change.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file holds something else.
    """
    lines, ranks, earlier = _lines(Path(folder))
    rounds = sorted(lines)
    first = [lines[number][min(lines[number])] for number in rounds]

    def table(key: str) -> Tensor:
        return torch.tensor([_numbers(line[key]) for line in first], dtype=torch.float64)

    def by_rank(key: str) -> Tensor:
        rows = [[_numbers(lines[k][r][key]) if r in lines[k] else torch.nan for r in ranks] for k in rounds]
        return torch.tensor(rows, dtype=torch.float64)

    clip = torch.stack(
        [
            torch.tensor(
                [_numbers(line["clip"]) for line in lines[number].values()], dtype=torch.float64
            ).nanmean(0)
            for number in rounds
        ]
    )
    tables = ("time", "steps", "total_steps", "norms", "out", "weights", "effective_replicas", "rolled_back",
              "last_replica")  # fmt: skip
    return Log(
        layers=first[0]["layers"],
        ranks=ranks,
        rounds=rounds,
        clip=clip,
        events=[event for line in first for event in line["events"]],
        earlier=earlier,
        **{key: table(key) for key in tables},
        **{key: by_rank(key) for key in ("bytes_sent", "seconds_total", "seconds_waited")},
    )


def _lines(folder: Path) -> tuple[dict[int, dict[int, Line]], list[int], int]:
    """``{round: {rank: line}}``, the ranks, and how many rounds there were before replicas or layers changed."""
    files = sorted(folder.glob("rounds.*.jsonl")) or sorted(folder.glob("*/rounds.*.jsonl"))
    if len({file.parent for file in files}) > 1:
        raise ValueError(
            f"{folder} must hold one run, but holds {sorted({file.parent.name for file in files})}: give one of them"
        )
    found: list[Line] = []
    for file in files:
        lines = file.read_text().splitlines()
        whole = [
            line for line in lines if line.startswith("{") and line.endswith("}")
        ]  # a killed run leaves a half
        if lines and not whole and len(lines) > 1:
            raise ValueError(f"{file} must hold lines of JSON, but begins with {lines[0][:50]!r}")
        found += map(json.loads, whole)
    if not found:
        raise FileNotFoundError(
            f"{folder} must hold rounds.{{rank}}.jsonl, but holds none: register edit.monitor.JsonLines({str(folder)!r}) "
            "as a round hook"
        )
    rounds: dict[int, dict[int, Line]] = {}
    shape, earlier = None, 0
    for entry in sorted(found, key=lambda entry: float(entry["time"])):
        if (entry["layers"], len(entry["steps"])) != shape:
            earlier += len([number for number in rounds if number < entry["round"]])
            rounds, shape = {}, (entry["layers"], len(entry["steps"]))
        number, rank = entry["round"], entry["rank"]
        if rank in rounds.get(number, {}):  # done again: the run went on from a checkpoint before it
            rounds = {n: lines for n, lines in rounds.items() if n <= number}
        rounds.setdefault(number, {})[rank] = entry
    return rounds, sorted({rank for of_round in rounds.values() for rank in of_round}), earlier


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value)  # also "nan" and "inf"
