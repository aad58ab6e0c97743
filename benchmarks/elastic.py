"""Replicas come and go: held-out perplexity of EDiT and of data-parallel training with the same workers.

    python benchmarks/elastic.py            # 1 -> 2 -> 4 and 4 -> 2 -> 1 workers, three seeds; half an hour
    python benchmarks/elastic.py up --quick # the first alone, one seed, a tenth of the steps

A stage is a job of its own: it ends with sync() and edit.save, and the next one resumes with edit.load on another
number of ranks. The baseline is DDP with AdamW, stopped and resumed at the same places. All workers make the same
steps with the same batch, so both see as many tokens, in the same order; a stage of 4 workers sees 4 times those of
a stage of 1. The learning rate is the same for both, whatever the number of workers: warm-up in steps, then a cosine
in tokens. For "baseline, lr * sqrt(workers)" it grows with the batch.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import edit
from harness import arguments, be_rank, is_rank, run_ranks, table
from llama import SIZES, Llama
from train_llama import Windows, endless, evaluate, load_text, make_loader

SCHEDULES = {"up": (1, 2, 4), "down": (4, 2, 1)}
METHODS = ("baseline", "baseline, lr * sqrt(workers)", "edit")
SEEDS = (0, 1, 2)
STEPS, BATCH, LENGTH, INTERVAL, WARMUP = 448, 4, 64, 16, 32
LR = 3e-3
PICTURE = "elastic.png"


def stage(
    method: str, number: int, workers: list[int], steps: int, seed: int, folder: str, windows: int
) -> list[tuple[int, float]]:
    """One stage on this rank. Returns held-out perplexities, each with the tokens of all workers till then."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text, unseen = (Windows(part, LENGTH) for part in load_text(None))
    held_out = torch.stack([unseen[index * len(unseen) // windows] for index in range(windows)])
    torch.manual_seed(seed)
    model: nn.Module = Llama(SIZES["tiny"])
    before, after = Path(folder, f"{number - 1}"), Path(folder, f"{number}")
    inner = {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if method == "edit":
        optimizer: Any = edit.LocalSGDOptimizer(
            model,
            **inner,
            schedule=edit.EverySteps(INTERVAL, WARMUP),
            outer=edit.Nesterov(0.8, 0.7),
            penalty=edit.PseudoGradientPenalty(max_norm=1.2),
        )
        trained = model
        if number:
            edit.load(before, model, optimizer)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **inner)
        if number:
            saved = torch.load(before, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        trained = nn.parallel.DistributedDataParallel(model) if world > 1 else model

    per_step = BATCH * LENGTH
    done = steps * sum(workers[:number]) * per_step
    total = steps * sum(workers) * per_step
    scale = math.sqrt(world) if "sqrt" in method else 1.0
    curve = []
    batches = endless(make_loader(text, BATCH, rank, world, seed=100 * seed + number), torch.device("cpu"))
    for step, (tokens, targets) in enumerate(itertools.islice(batches, steps)):
        warm = min(1.0, (steps * number + step + 1) / WARMUP)
        lr = LR * scale * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done / total)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        trained(tokens, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += world * per_step
        last = step == steps - 1
        if last and method == "edit":
            optimizer.sync()
        if last or (step + 1) % max(1, steps // 7) == 0:
            curve.append((done, perplexity(model, optimizer, held_out)))
    if method == "edit":
        edit.save(after, model, optimizer)
        optimizer.close()
    elif rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, after)
    return curve


def perplexity(model: nn.Module, optimizer: Any, held_out: torch.Tensor) -> float:
    """Of the consensus. All ranks take part."""
    if not isinstance(optimizer, edit.LocalSGDOptimizer):
        return evaluate(model, held_out, BATCH, None)
    with optimizer.consensus():
        return evaluate(model, held_out, BATCH, None)


def run(method: str, workers: tuple[int, ...], seed: int, quick: bool) -> list[tuple[int, float]]:
    """All stages, one after the other."""
    curve: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = {"method": method, "workers": workers, "seed": seed, "folder": folder}
        settings |= {"steps": 48 if quick else STEPS, "windows": 64 if quick else 512}
        for number, world in enumerate(workers):
            curve += run_ranks("stage", world, number=number, **settings)[0]
    return curve


def show(name: str, quick: bool) -> tuple[dict[str, list[list[tuple[int, float]]]], dict[str, Any]]:
    """One schedule of workers: the table, the curves by method and seed, and the numbers."""
    workers, seeds = SCHEDULES[name], SEEDS[:1] if quick else SEEDS
    curves = {method: [run(method, workers, seed, quick) for seed in seeds] for method in METHODS}
    ends = {method: [curve[-1][1] for curve in curves[method]] for method in METHODS}
    base = ends["baseline"]
    rows = []
    for method in METHODS:
        ratios = [one / other for one, other in zip(ends[method], base, strict=True)]
        rows.append([method, *(f"{end:.4f}" for end in ends[method]), f"{statistics.mean(ratios):.4f}"])
    head = ["held-out perplexity", *(f"seed {seed}" for seed in seeds), "mean ratio"]
    path = " -> ".join(map(str, workers))
    table(f"{path} workers, {curves['edit'][0][-1][0]:,} tokens", head, rows)
    return curves, {f"{name}_{method}": ends[method] for method in METHODS}


def plot(found: dict[str, dict[str, list[list[tuple[int, float]]]]]) -> None:
    """Mean curves, with the range over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(found), 4), layout="constrained")
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (name, curves) in zip(axes, found.items(), strict=True):
        for method, runs in curves.items():
            tokens = [point[0] / 1e3 for point in runs[0]]
            values = [[point[1] for point in points] for points in zip(*runs, strict=True)]
            (line,) = axis.plot(tokens, [statistics.mean(v) for v in values], label=method)
            axis.fill_between(
                tokens, [*map(min, values)], [*map(max, values)], alpha=0.2, color=line.get_color()
            )
        workers = SCHEDULES[name]
        ends = itertools.accumulate(workers)
        for end in list(ends)[:-1]:
            axis.axvline(tokens[-1] * end / sum(workers), color="grey", linewidth=0.8, linestyle=":")
        axis.set(title=" → ".join(map(str, workers)) + " workers", xlabel="thousand tokens of all workers")
        axis.set(yscale="log", ylabel="held-out perplexity")
        axis.legend()
    figure.savefig(PICTURE, dpi=110)
    print(f"\nCurves: {PICTURE}")


def main() -> None:
    """Run the schedules that are asked for."""
    assert __doc__
    chosen = arguments(__doc__, list(SCHEDULES))
    curves, result = {}, {}
    for name in chosen.parts:
        curves[name], numbers = show(name, chosen.quick)
        result |= numbers
    plot(curves)
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    if is_rank():
        be_rank({"stage": stage})
    else:
        main()
