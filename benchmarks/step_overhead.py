"""What ``LocalSGDOptimizer`` costs between rounds, against the bare inner optimizer on the same model.

    python benchmarks/step_overhead.py [--quick]

Starts its own ranks (gloo, one thread each). Prints a table per question and, last, one line of JSON.

* *Counts*: operators, collectives and host reads of three training steps between two rounds, minus those of
  the same model with AdamW alone. Plain R = 2 and FSDP2 2x2.
* *Clock*: A-EDiT on FSDP2 2x2. How many broadcasts a round takes, against how many steps it has, and how
  long they are waited for.
* *Time*: of a whole step (forward, backward, step, zero_grad) on models of 4, 32 and 128 tiny layers and on
  a Llama of 1M parameters. Two copies of a model, one with AdamW alone, are stepped in turns in one process;
  what is given is the median of the differences of pairs (of the ratios for the Llama). The row beside it is
  the same for two models that both have AdamW alone: what the measurement itself cannot tell from zero.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import (
    Census,
    Llama,
    be_rank,
    group_names,
    is_rank,
    llama_loss,
    median,
    mesh,
    numel,
    paired,
    run_ranks,
    shard,
    table,
)
from torch import Tensor, nn

import edit

NEVER = edit.EverySteps(10**9)
CONSTANT, SLOPE, RATIO = 30e-6, 3e-6, 1.02  # bounds: seconds, seconds per layer, ratio


class Tiny(nn.Module):
    """Layers of 72 parameters: what a layer costs, and little else."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, 8]``."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def training(model: nn.Module, optimizer: Any, loss: Callable[[nn.Module], Tensor]) -> Callable[[], None]:
    """One step of an ordinary training loop."""

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tiny_loss(model: nn.Module) -> Tensor:
    return model(torch.ones(4, 8)).square().mean()  # noqa: D103


# ------------------------------------------------------------------------------------------------ jobs


def count(replicas: int, shards: int) -> dict[str, Any]:
    """Of three steps after the first round: what ``edit`` adds."""
    world, found = mesh(replicas, shards), {}
    for name in ("bare", "edit"):
        model = Llama(64, 4)
        if shards > 1:
            shard(model, list(model.layers), world)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        groups = {}
        if name == "edit":
            optimizer = edit.LocalSGDOptimizer(model, optimizer, mesh=world, schedule=edit.EverySteps(8))
            groups = group_names(optimizer)
        step = training(model, optimizer, lambda model: llama_loss(model, 2, 16))
        for _ in range(9):  # the ninth applies the first round
            step()
        with Census(groups) as census:
            for _ in range(3):
                step()
        assert name == "bare" or (optimizer.rounds, optimizer._steps) == (1, 4)
        found[name] = census.operators, census.collectives, census.host_reads
    return {
        what: {"bare": sum(bare.values()), "more": sum((ours - bare).values()), "less": sum((bare - ours).values())}
        for what, ours, bare in zip(
            ("operators", "collectives", "host reads"), found["edit"], found["bare"], strict=True
        )
    }


class Waited:
    """A ``Work`` whose waits are timed."""

    def __init__(self, work: Any, into: list[float]) -> None:
        self.work, self.into = work, into

    def wait(self) -> None:
        """Wait, and note for how long."""
        start = time.perf_counter()
        self.work.wait()
        self.into.append(time.perf_counter() - start)


def clock(interval: float, rounds: int) -> dict[str, Any]:
    """A-EDiT with two ranks a replica: the broadcasts of its clock."""
    world = mesh(2, 2)
    model = Tiny(2)
    shard(model, list(model.layers), world)
    schedule = edit.EverySeconds(interval)
    optimizer = edit.LocalSGDOptimizer(model, lr=1e-3, mesh=world, schedule=schedule)
    step = training(model, optimizer, tiny_loss)
    asked, blocking, waits = 0, 0, []
    groups, broadcast = group_names(optimizer), dist.broadcast

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal asked, blocking
        work = broadcast(tensor, *args, **kwargs)
        if groups.get(kwargs["group"].group_name) != "clock":
            return work
        asked += 1
        blocking += work is None
        return Waited(work, waits)

    reports: list[edit.RoundReport] = []
    optimizer.register_round_hook(reports.append)
    quiet = steps = 0  # steps in which nothing was dispatched besides the inner step, of all
    with mock.patch.object(dist, "broadcast", noted):
        while len(reports) < rounds + 1:
            if len(reports) == 0:
                asked, blocking = 0, 0
                waits.clear()
            elif not optimizer._due:
                before = asked
                answered = optimizer._replica_clock._answer is not None
                step()
                steps += 1
                quiet += asked == before and not answered
                continue
            step()
    optimizer.sync()
    made = [int(report.steps[optimizer.replicas.index]) for report in reports[1:]]
    return {
        "interval_s": interval,
        "steps_per_round": sum(made) / len(made),
        "broadcasts_per_round": asked / rounds,
        "log2_steps": math.log2(sum(made) / len(made)),
        "blocking": blocking,
        "steps_without_any": quiet / steps,
        "waited_us": [1e6 * median(waits)[0], 1e6 * max(waits)],
    }


def times(tiny_pairs: list[tuple[int, int]], llama_pairs: int) -> dict[str, Any] | None:
    """Rank 0 of two replicas measures, the other one sleeps in a barrier."""
    result: dict[str, Any] = {"tiny": {}}

    def pair(make: Callable[[], nn.Module], loss: Any, pairs: int) -> tuple[tuple[Tensor, Tensor], ...]:
        models = [make() for _ in range(3)]
        for model in models:
            model.load_state_dict(models[0].state_dict())
        bare, control = (training(m, torch.optim.AdamW(m.parameters(), lr=1e-4), loss) for m in models[:2])
        ours = training(models[2], edit.LocalSGDOptimizer(models[2], lr=1e-4, schedule=NEVER), loss)
        found = ()
        if dist.get_rank() == 0:
            found = paired(bare, ours, pairs), paired(bare, control, pairs)
        dist.barrier()
        return found

    for depth, pairs in tiny_pairs:
        if found := pair(lambda depth=depth: Tiny(depth), tiny_loss, pairs):
            (a, b), (c, d) = found
            result["tiny"][depth] = [median(a)[0], *median(b - a), *median(d - c)]
    make = lambda: Llama(128, 5)  # noqa: E731
    if found := pair(make, lambda model: llama_loss(model, 8, 64), llama_pairs):
        (a, b), (c, d) = found
        result["llama"] = [numel(make()), median(a)[0], *median(b / a), *median(d / c)]
    return result


# ------------------------------------------------------------------------------------------------ main


def main() -> None:
    """Everything."""
    quick = 10 if "--quick" in sys.argv else 1
    result: dict[str, Any] = {}

    rows = []
    for label, shape in {"plain R=2": (2, 1), "FSDP2 2x2": (2, 2)}.items():
        found = run_ranks("count", shape[0] * shape[1], replicas=shape[0], shards=shape[1])
        for what in found[0]:
            extra = max(rank[what]["more"] + rank[what]["less"] for rank in found)
            rows.append([f"{label}: {what}", found[0][what]["bare"], extra, 0])
            result[f"{label}: {what}"] = extra
    table("Three steps between rounds", ["", "AdamW alone", "edit adds", "bound"], rows)

    clocks = [run_ranks("clock", 4, interval=s, rounds=4)[0] for s in ((0.25, 1.0) if quick > 1 else (0.25, 2.0))]
    table(
        "A-EDiT, FSDP2 2x2: the clock's broadcasts",
        ["interval", "steps a round", "log2", "broadcasts a round", "blocking", "steps without", "waited: median", "most"],
        [
            [
                f"{c['interval_s']} s",
                f"{c['steps_per_round']:.0f}",
                f"{c['log2_steps']:.1f}",
                f"{c['broadcasts_per_round']:.1f}",
                c["blocking"],
                f"{c['steps_without_any']:.0%}",
                *(f"{us:.0f} µs" for us in c["waited_us"]),
            ]
            for c in clocks
        ],
    )
    result["clock"] = clocks

    pairs = [(4, 4000 // quick), (32, 1500 // quick), (128, 500 // quick)]
    found = run_ranks("times", 2, tiny_pairs=pairs, llama_pairs=400 // quick, timeout=1200)[0]
    rows = []
    for depth, (base, extra, error, same, same_error) in found["tiny"].items():
        bound = CONSTANT + SLOPE * int(depth)
        rows.append(
            [f"{depth} layers", f"{base * 1e3:.2f} ms"]
            + [f"{extra * 1e6:.1f} ± {error * 1e6:.1f} µs", f"{same * 1e6:.1f} ± {same_error * 1e6:.1f} µs"]
            + [f"{bound * 1e6:.0f} µs"]
        )
        result[f"extra_us_{depth}"] = extra * 1e6
    depths = torch.tensor([[1.0, float(depth)] for depth in found["tiny"]], dtype=torch.float64)
    errors = torch.tensor([v[2] for v in found["tiny"].values()], dtype=torch.float64).clamp_min(1e-9)
    extras = torch.tensor([v[1] for v in found["tiny"].values()], dtype=torch.float64)
    fit = torch.linalg.lstsq(depths / errors[:, None], (extras / errors)[:, None]).solution.flatten()
    constant, slope = (1e6 * fit).tolist()
    rows.append(["fit", "", f"{constant:.1f} µs + {slope:.2f} µs·L", "", "30 µs + 3 µs·L"])
    size, base, ratio, error, same, same_error = found["llama"]
    rows.append(
        [f"Llama, {size / 1e6:.2f}M", f"{base * 1e3:.2f} ms"]
        + [f"x {ratio:.4f} ± {error:.4f}", f"x {same:.4f} ± {same_error:.4f}", RATIO]
    )
    table("Time of a step", ["", "AdamW alone", "edit adds", "control: AdamW again", "bound"], rows)
    result |= {"constant_us": constant, "us_per_layer": slope, "llama_ratio": ratio, "llama_control": same}

    within = [
        all(result[f"{label}: {what}"] == 0 for label in ("plain R=2", "FSDP2 2x2")
            for what in ("operators", "collectives", "host reads")),
        all(v[1] <= CONSTANT + SLOPE * int(depth) for depth, v in found["tiny"].items()),
        ratio <= RATIO,
        all(c["blocking"] == 0 for c in clocks),
    ]  # fmt: skip
    result["within_bounds"] = all(within)
    print()
    print(json.dumps(result))


if __name__ == "__main__":
    if is_rank():
        be_rank({"count": count, "clock": clock, "times": times})
    else:
        main()
