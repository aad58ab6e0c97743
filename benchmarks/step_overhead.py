"""What ``LocalSGDOptimizer`` costs between rounds, against the bare inner optimizer on the same model.

    python benchmarks/step_overhead.py [--quick] [counts] [clock] [time]

Starts its own ranks (gloo, one thread each). Prints a table per question and, last, one line of JSON.

* *Counts*: operators, collectives and host reads of three training steps between two rounds, minus those of
  the same model with AdamW alone. Plain R = 2 and FSDP2 2x2.
* *Clock*: A-EDiT on FSDP2 2x2. How many broadcasts a round takes, against how many steps it has, and how
  long they are waited for.
* *Time*: of a whole step (forward, backward, step, zero_grad) on models of 4, 32 and 128 tiny layers and on
  the Llama of examples/ with 1M parameters. One model is stepped in turns by its AdamW alone, with no hooks,
  and as ``edit`` trains it; what is given is the median of the differences of pairs (of the ratios for the
  Llama) and its standard error. (With a copy of the model for each, where they lie in memory makes 2 %.)
  Bounds apply to the CPU time of the thread that trains: between rounds nothing waits, as the counts show, and
  other work on the machine disturbs it less than wall time, which stands beside it. Of what ``edit``
  adds per layer, torch's own call of a forward pre-hook is most: "idle hooks" are AdamW alone with hooks that
  do nothing. The control is AdamW alone against itself.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import edit
from harness import (
    Census,
    arguments,
    be_rank,
    group_names,
    is_rank,
    llama,
    llama_loss,
    median,
    mesh,
    paired,
    run_ranks,
    shard,
    table,
)

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
    """Of a constant batch: data is not the question."""
    return model(torch.ones(4, 8)).square().mean()


# ------------------------------------------------------------------------------------------------ jobs


def count(replicas: int, shards: int) -> dict[str, Any]:
    """Of three steps after the first round: what ``edit`` adds."""
    world, found = mesh(replicas, shards), {}
    for name in ("bare", "edit"):
        model = llama(4, 128)
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
        what: {
            "bare": sum(bare.values()),
            "more": sum((ours - bare).values()),
            "less": sum((bare - ours).values()),
        }
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
    asked, blocking = 0, 0
    waits: list[float] = []
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
    with mock.patch.object(dist, "broadcast", noted):
        for until in (1, rounds + 1):  # what came before the first round does not count
            asked = blocking = steps = busy = 0
            waits.clear()
            while len(reports) < until:
                before = asked, len(waits)
                step()
                steps += 1
                busy += (asked, len(waits)) != before
    optimizer.sync()
    made = [int(report.steps[optimizer.replicas.index]) for report in reports[1 : rounds + 1]]
    return {
        "interval_s": interval,
        "steps_per_round": sum(made) / len(made),
        "broadcasts_per_round": asked / rounds,
        "log2_steps": math.log2(sum(made) / len(made)),
        "blocking": blocking,
        "steps_without_any": 1 - busy / steps,
        "waited_us": [1e6 * median(waits)[0], 1e6 * max(waits)],
    }


def _idle(module: nn.Module, args: Any) -> None:
    """A forward pre-hook that does nothing."""


def times(tiny_pairs: list[tuple[int, int]], llama_pairs: int) -> dict[str, Any]:
    """Rank 0 of two replicas measures, the other one sleeps in a barrier."""

    def pair(model: nn.Module, loss: Any, pairs: int) -> dict[str, Any]:
        optimizer = edit.LocalSGDOptimizer(model, lr=1e-4, schedule=NEVER)
        bare, ours = training(model, optimizer.inner, loss), training(model, optimizer, loss)
        ours_on = {module: module._forward_pre_hooks for module in model.modules()}
        idle_on = {module: OrderedDict.fromkeys(hooks, _idle) for module, hooks in ours_on.items()}
        none_on: dict[nn.Module, Any] = {module: OrderedDict() for module in ours_on}

        def switched(on: dict[nn.Module, Any]) -> Callable[[bool], None]:
            def switch(is_b: bool) -> None:
                for module, hooks in (on if is_b else none_on).items():
                    module._forward_pre_hooks = hooks

            return switch

        found: dict[str, Any] = {}
        if dist.get_rank() == 0:
            series = {"edit": (ours, ours_on), "idle": (bare, idle_on), "control": (bare, none_on)}
            for name, (call, on) in series.items():
                cpu, wall = paired(bare, call, pairs, switched(on))
                found[name] = {
                    "base": median(cpu[0])[0],
                    "extra": median(cpu[1] - cpu[0]),
                    "extra_wall": median(wall[1] - wall[0]),
                    "ratio": median(cpu[1] / cpu[0]),
                    "ratio_wall": median(wall[1] / wall[0]),
                }
        dist.barrier()
        return found

    tiny = {depth: pair(Tiny(depth), tiny_loss, pairs) for depth, pairs in tiny_pairs}
    large = pair(llama(5, 384), lambda model: llama_loss(model, 8, 64), llama_pairs)
    return {"tiny": tiny, "llama": large}


# ------------------------------------------------------------------------------------------------ main


def show_counts(quick: bool) -> tuple[bool, dict[str, Any]]:
    """Operators, collectives, host reads."""
    rows, result = [], {}
    for label, (replicas, shards) in {"plain R=2": (2, 1), "FSDP2 2x2": (2, 2)}.items():
        found = run_ranks("count", replicas * shards, replicas=replicas, shards=shards)
        for what in found[0]:
            extra = max(rank[what]["more"] + rank[what]["less"] for rank in found)
            rows.append([f"{label}: {what}", found[0][what]["bare"], extra, 0])
            result[f"{label}: {what}"] = extra
    table("Three steps between rounds", ["", "AdamW alone", "edit adds", "bound"], rows)
    return not any(result.values()), result


def show_clock(quick: bool) -> tuple[bool, dict[str, Any]]:
    """A-EDiT's broadcasts."""
    clocks = [
        run_ranks("clock", 4, interval=s, rounds=4)[0] for s in ((0.25, 1.0) if quick else (0.25, 1.0, 4.0))
    ]
    rows = [
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
    ]
    head = [
        "interval",
        "steps a round",
        "log2 of it",
        "broadcasts a round",
        "blocking ones",
        "steps without any",
    ]
    table("A-EDiT, FSDP2 2x2: broadcasts of its clock", [*head, "waited: median", "at most"], rows)
    return all(c["blocking"] == 0 for c in clocks), {"clock": clocks}


def show_times(quick: bool) -> tuple[bool, dict[str, Any]]:
    """Time per step."""
    less = 10 if quick else 1
    pairs = [(4, 4000 // less), (32, 1500 // less), (128, 500 // less)]
    found = run_ranks("times", 2, tiny_pairs=pairs, llama_pairs=400 // less, timeout=1800)[0]
    rows, result, within = [], {}, []
    extras, errors, design = [], [], []
    for depth, pair in found["tiny"].items():
        ours, idle, control = pair["edit"], pair["idle"], pair["control"]
        extra, error = ours["extra"]
        bound = CONSTANT + SLOPE * int(depth)
        rows.append(
            [
                f"{depth} layers",
                f"{ours['base'] * 1e3:.2f} ms",
                *map(_us, (ours["extra"], ours["extra_wall"])),
            ]
        )
        rows[-1] += [_us(idle["extra"]), _us(control["extra"]), f"{bound * 1e6:.0f} µs"]
        result[f"extra_us_{depth}"] = extra * 1e6
        within.append(extra <= bound)
        result[f"idle_hooks_us_{depth}"] = idle["extra"][0] * 1e6
        extras.append(extra)
        errors.append(max(error, 1e-9))
        design.append([1.0, float(depth)])
    weights = 1 / torch.tensor(errors, dtype=torch.float64).unsqueeze(1)
    left = torch.tensor(design, dtype=torch.float64) * weights
    right = torch.tensor(extras, dtype=torch.float64).unsqueeze(1) * weights
    constant, slope = (1e6 * torch.linalg.lstsq(left, right).solution.flatten()).tolist()
    rows.append(["fit", "", f"{constant:.1f} µs + {slope:.2f} µs·L", "", "", "", "30 µs + 3 µs·L"])

    ours, idle, control = (found["llama"][name] for name in ("edit", "idle", "control"))
    rows.append(["Llama, 1.0M parameters", f"{ours['base'] * 1e3:.2f} ms"])
    rows[-1] += [
        f"x {value:.4f} ± {error:.4f}"
        for value, error in (ours["ratio"], ours["ratio_wall"], idle["ratio"], control["ratio"])
    ]
    rows[-1] += [f"x {RATIO}"]
    within.append(ours["ratio"][0] <= RATIO)
    head = ["", "AdamW alone", "edit adds (CPU)", "edit adds (wall)", "idle hooks add", "control", "bound"]
    table("Time of a step", head, rows)
    result |= {"constant_us": constant, "us_per_layer": slope, "llama_ratio": ours["ratio"][0]}
    result |= {"llama_ratio_wall": ours["ratio_wall"][0], "llama_ratio_control": control["ratio"][0]}
    return all(within), result


def _us(value: tuple[float, float]) -> str:
    return f"{value[0] * 1e6:.1f} ± {value[1] * 1e6:.1f} µs"


def main() -> None:
    """Run the parts."""
    assert __doc__
    parts = {"counts": show_counts, "clock": show_clock, "time": show_times}
    chosen = arguments(__doc__, list(parts))
    result: dict[str, Any] = {}
    within = []
    for part in chosen.parts:
        fits, found = parts[part](chosen.quick)
        within.append(fits)
        result |= found
    print("\n" + json.dumps({**result, "within_bounds": all(within)}))


if __name__ == "__main__":
    if is_rank():
        be_rank({"count": count, "clock": clock, "times": times})
    else:
        main()
