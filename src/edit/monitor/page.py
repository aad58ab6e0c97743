"""A run at a glance: as text, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .log import Log

_EVENTS = 10  # shown of the last


def summary(log: Log, name: str = "run") -> str:
    """Lines for a terminal."""
    return "\n".join(f"{left:<20}{right}".rstrip() for left, right in _facts(log, name)) + "\n"


def _facts(log: Log, name: str) -> Iterator[tuple[str, str]]:
    count, replicas, layers = log.norms.shape
    seconds = log.time[-1] - log.time[0]
    yield name, f"{count} rounds ({log.rounds[0]}-{log.rounds[-1]}), {replicas} replicas, {layers} layers"
    made = log.steps.sum(-1) > 0  # sync() may end with a round to which nobody has anything to say
    if not made.all():
        yield "", f"of these, {int((~made).sum())} without a step, as sync() may end with"
    if log.earlier:
        yield "", f"{log.earlier} rounds before them, with other replicas or layers, are not counted here"
    missing = log.rounds[-1] - log.rounds[0] + 1 - count
    if missing:
        yield "", f"{missing} rounds between them are not in the log"
    yield "written by", f"rank {', '.join(map(str, log.ranks))}"
    yield "time", f"{_span(seconds)} from the first round to the last"
    yield (
        "inner steps",
        f"{log.total_steps[-1]:,.0f} of all replicas, warm-up included; per round and replica {_range(log.steps[made])}",
    )
    slowest = int(log.steps.sum(0).argmin())
    if bool((log.steps == log.steps[:, :1]).all()) and replicas > 1:
        last = log.last_replica.long().bincount(minlength=replicas)
        most = int(last.argmax())
        yield "slowest", f"replica {most}: the last to come in {last[most]} of {count} rounds"
    elif replicas > 1:
        share = log.steps.sum(0)[slowest] / log.steps.sum(0).mean()
        yield "slowest", f"replica {slowest}: {share:.2f} of the mean number of steps"
    effective = torch.where(made.unsqueeze(-1), log.effective_replicas, float(replicas))
    least = int(effective.argmin())
    where = f"{log.layers[least % layers]}, round {log.rounds[least // layers]}"
    yield (
        "effective replicas",
        f"mean {log.effective_replicas[made].mean():.2f}, least {effective.min():.2f} ({where})",
    )
    yield (
        "sent in rounds",
        f"{_bytes(_mean(log.bytes_sent.nansum(0)))} per rank, {_bytes(_mean(log.bytes_sent))} per round",
    )
    for column, rank in enumerate(log.ranks):
        waited, total = log.seconds_waited[1:, column].nansum(), log.seconds_waited[:, column].nansum()
        of = f", {waited / seconds:.1%} of the time" if seconds > 0 else ""
        yield f"waited, rank {rank}", f"{total:.2f} s{of}"
    clipped = (log.clip < 1).sum() / log.clip.isfinite().sum().clamp(min=1)
    yield "clipped", f"{clipped:.1%} of combined pseudo gradients"
    quiet = True
    moved = log.out * (log.steps > 0).unsqueeze(-1)  # who made no step is out, and nobody minds
    for replica in range(replicas):
        if moved[:, replica].any():
            quiet = False
            in_rounds = [log.rounds[k] for k in moved[:, replica].any(-1).nonzero().flatten().tolist()]
            yield (
                f"out, replica {replica}",
                f"{moved[:, replica].mean():.1%} of its layers and rounds; in {len(in_rounds)} rounds: {_list(in_rounds)}",
            )
    back = log.rolled_back.any(-1) & made
    if back.any():
        quiet = False
        in_rounds = [log.rounds[k] for k in back.nonzero().flatten().tolist()]
        yield "rolled back", f"layers in {len(in_rounds)} rounds: {_list(in_rounds)}"
    if quiet:
        yield "out, rolled back", "nobody, nothing"
    for number, event in enumerate(log.events[-_EVENTS:]):
        yield "events" * (not number), event
    if len(log.events) > _EVENTS:
        yield "", f"({len(log.events) - _EVENTS} before these)"


def draw(log: Log, path: str | Path, name: str = "run") -> None:
    """A page of six panels as PNG. Needs the package ``matplotlib``."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    replicas = log.norms.shape[1]
    figure, panels = plt.subplots(3, 2, figsize=(13, 11), layout="constrained", sharex=True)
    figure.suptitle(f"{name}: {len(log.rounds)} rounds, {replicas} replicas, {len(log.layers)} layers")
    rounds = log.rounds

    panel = panels[0, 0]
    finite = torch.where(log.norms.isfinite(), log.norms, torch.nan).nanmean(-1)
    for replica in range(replicas):
        panel.plot(rounds, finite[:, replica], label=f"replica {replica}", linewidth=1)
    panel.set_yscale("log")
    panel.set_title("Norm of the pseudo gradient, mean over layers")
    panel.legend(fontsize="small", ncols=2)

    panel = panels[0, 1]
    panel.plot(rounds, log.effective_replicas.mean(-1), label="mean over layers")
    panel.plot(rounds, log.effective_replicas.amin(-1), label="least", linewidth=1)
    panel.set_ylim(0, replicas * 1.05)
    panel.set_title("Effective replicas")
    panel.legend(fontsize="small")

    names = [f"replica {replica}" for replica in range(replicas)]
    _heat(figure, panels[1, 0], log, log.out.mean(-1).T, names, "Share of layers left out", 0.0, 1.0)
    labels = log.layers if len(log.layers) <= 24 else None
    _heat(
        figure,
        panels[1, 1],
        log,
        log.effective_replicas.T,
        labels,
        "Effective replicas by layer",
        0.0,
        replicas,
    )

    panel = panels[2, 0]
    for column, rank in enumerate(log.ranks):
        panel.plot(rounds, log.seconds_waited[:, column], label=f"rank {rank}", linewidth=1)
    panel.set_title("Seconds waited for others")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small", ncols=2)

    panel = panels[2, 1]
    for replica in range(replicas):
        panel.plot(rounds, log.steps[:, replica], label=f"replica {replica}", linewidth=1)
    panel.set_title("Inner steps")
    panel.set_ylim(bottom=0)
    for panel in panels[2]:
        panel.set_xlabel("round")
    for panel in panels.flatten():
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _heat(
    figure: Any,
    panel: Any,
    log: Log,
    table: Tensor,
    labels: list[str] | None,
    title: str,
    low: float,
    high: float,
) -> None:
    """Rows by round."""
    extent = (log.rounds[0] - 0.5, log.rounds[-1] + 0.5, len(table) - 0.5, -0.5)
    image = panel.imshow(table, aspect="auto", extent=extent, vmin=low, vmax=high, interpolation="nearest")
    figure.colorbar(image, ax=panel)
    if labels is not None:
        panel.set_yticks(range(len(labels)), labels, fontsize="small")
    panel.set_title(title)


def _mean(values: Tensor) -> float:
    return values.nanmean().item()


def _span(seconds: float | Tensor) -> str:
    minutes, rest = divmod(float(seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    return (
        f"{hours} h {minutes} min" if hours else f"{minutes} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
    )


def _range(values: Tensor) -> str:
    low, high = (values.min().item(), values.max().item()) if values.numel() else (0.0, 0.0)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def _list(rounds: list[int]) -> str:
    shown = ", ".join(map(str, rounds[:_EVENTS]))
    return shown + f", {len(rounds) - _EVENTS} more" * (len(rounds) > _EVENTS)
