"""What one round costs: traffic, collectives, time, memory.

    python benchmarks/round_cost.py [--quick] [bytes] [collectives] [time] [memory]

Starts its own ranks (gloo, one thread each). Prints a table per question and, last, one line of JSON. The
model is the Llama of examples/ with 8 blocks and 1.7M parameters: nine layers, the root among them.

* *Bytes*: as root on Linux, every replica gets a network namespace of its own, and its interface's counter of
  bytes out is read before and after some rounds. It has everything in it that leaves the replica, headers,
  acknowledgements and control messages too (with segmentation offload, as on real cards: one header per
  64 kB), and nothing that stays inside. Without the rights for that, the loopback's counter, which has all
  ranks' traffic in it: then only plain models are compared with the bound.
  Ring bound of a rank: 2(R-1)/R * elements it holds * 4 bytes.
* *Collectives*: of one round, as dispatched, by kind and process group.
* *Time*: R = 2, loopback. After a barrier, (a) ``sync()`` right after a step: a round and nothing else; (b) a
  step that is due and the forward that applies its round, minus such a step and forward with the round left
  out; (c) one all-reduce of as many fp32 bytes in one flat tensor. In turns; the slower rank of each
  turn; medians.
* *Memory*: ``offload="cpu"``. Bytes of tensors that come to life in a round and are alive, at most: every
  storage that an operator returns, until it is freed. Anchor and momentum at home in host memory are part of
  the steady state (on a CPU they are in the same memory); what is brought in to work on counts. Unit: the
  fp32 part of the largest layer that the rank holds. The bound is for such parts: norms, verdicts and clips,
  a few kB, come on top. (torch's profiler, which sees what kernels allocate for themselves too, gives the
  same to 0.001; but not what other threads free.)
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import edit
from harness import (
    Census,
    LiveBytes,
    arguments,
    be_rank,
    group_names,
    is_rank,
    llama,
    llama_loss,
    mesh,
    numel,
    run_ranks,
    seconds,
    shard,
    table,
)
from netlab import bytes_out, network

DEPTH, HIDDEN, PREFETCH = 8, 416, 1
BYTES, TIME, MEMORY = 1.02, 3.0, PREFETCH + 4  # bounds


class Setup:
    """A model, its optimizer and one training step; some rounds have been made."""

    def __init__(
        self, replicas: int, shards: int, interval: int = 1, buffers: bool = False, **more: Any
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = llama(DEPTH, HIDDEN)
        if buffers:
            self.model.register_buffer("seen", torch.zeros(16))
        self.world = mesh(replicas, shards)
        if shards > 1:
            shard(self.model, list(self.model.layers), self.world)  # type: ignore[arg-type]
        self.optimizer = edit.LocalSGDOptimizer(
            self.model,
            lr=1e-3,
            mesh=self.world,
            schedule=edit.EverySteps(interval),
            prefetch=PREFETCH,
            **more,
        )
        self.reports: list[edit.RoundReport] = []
        self.optimizer.register_round_hook(self.reports.append)
        torch.manual_seed(1 + dist.get_rank())

    def backward(self) -> None:
        """Gradients for one step; applies a round that is pending."""
        self.optimizer.zero_grad()
        llama_loss(self.model, 1, 8).backward()

    def forward(self) -> None:
        """A forward as in training."""
        llama_loss(self.model, 1, 8)

    def step(self) -> None:
        """Gradients and a step."""
        self.backward()
        self.optimizer.step()

    @property
    def held(self) -> list[int]:
        """Elements of each layer that this rank holds."""
        return [layer.numel for layer in self.optimizer._layers]


# ------------------------------------------------------------------------------------------------ jobs


def traffic(replicas: int, shards: int, rounds: int) -> dict[str, Any]:
    """Bytes out of this rank's network in ``rounds`` rounds, and what they took."""
    setup = Setup(replicas, shards)
    for _ in range(3):
        setup.step()
    dist.barrier()
    before, count = bytes_out(), len(setup.reports)
    for _ in range(rounds):
        setup.step()
    setup.forward()  # applies the last one; the first was pending already
    dist.barrier()
    after, made = bytes_out(), len(setup.reports) - count
    setup.optimizer.sync()
    return {
        "bytes": (after - before) / made,
        "bound": 2 * (replicas - 1) / replicas * sum(setup.held) * 4,
        "reported": setup.reports[count].bytes_sent,
        "waited_s": statistics.median(report.seconds_waited for report in setup.reports[count:]),
        "total_s": statistics.median(report.seconds_total for report in setup.reports[count:]),
    }


def collectives(replicas: int, shards: int) -> list[dict[str, int]]:
    """What one round issues, a step that is due and a forward: without buffers, and with some."""
    rounds = []
    for buffers in (False, True):
        setup = Setup(replicas, shards, interval=2, buffers=buffers)
        for _ in range(3):
            setup.step()
        setup.backward()
        with Census(group_names(setup.optimizer)) as census:
            setup.optimizer.step()
            setup.forward()
        assert (setup.optimizer.rounds, setup.optimizer._due) == (2, False)
        found = {f"{group}: {kind}": n for (kind, group), n in census.collectives.items() if group != "model"}
        rounds.append({**found, "layers": len(setup.held)})
    return rounds


def timing(turns: int) -> dict[str, Any]:
    """(a), (b) and (c) of the module's text, of every turn, in seconds; here R = 2."""
    setup = Setup(2, 1, interval=2)
    flat = torch.randn(sum(setup.held))
    other = Setup(2, 1, interval=10**9)

    def after_barrier(call: Callable[[], Any]) -> float:
        dist.barrier()
        return seconds(call)

    def step_and_forward(of: Setup) -> Callable[[], None]:
        def run() -> None:
            of.optimizer.step()
            of.forward()

        return run

    found: dict[str, list[float]] = {"reduce": [], "sync": [], "with": [], "without": []}
    for _ in range(turns + 5):
        found["reduce"].append(after_barrier(lambda: dist.all_reduce(flat)))
        flat.div_(2)
        setup.step()
        found["sync"].append(after_barrier(setup.optimizer.sync))
        other.backward()
        found["without"].append(after_barrier(step_and_forward(other)))
        setup.step()
        setup.backward()
        found["with"].append(after_barrier(step_and_forward(setup)))
    assert setup.optimizer.rounds == 2 * (turns + 5)
    waited = [report.seconds_waited for report in setup.reports[11::2]]
    return {"numel": flat.numel(), "waited": waited} | {name: of[5:] for name, of in found.items()}


def memory(replicas: int, shards: int, offload: str | None) -> dict[str, Any]:
    """Peak of live bytes in a round beyond those before it."""
    setup = Setup(replicas, shards, interval=10**9, offload=offload)
    for _ in range(3):
        setup.step()
        setup.optimizer.sync()
    setup.step()
    setup.optimizer.zero_grad()
    with LiveBytes() as live:
        setup.optimizer.sync()
        left = live.now
    return {"peak": live.peak, "left": left, "unit": max(setup.held) * 4}


# ------------------------------------------------------------------------------------------------ main

SHAPES = {"plain R=2": (2, 1), "plain R=4": (4, 1), "FSDP2 2x2": (2, 2)}
KINDS = ("control: allreduce", "control: broadcast", "sync: allreduce", "inside: allreduce")


def show_bytes(quick: bool) -> tuple[bool, dict[str, Any]]:
    """Bytes out of a rank, and how long it waited."""
    rows, result, within = [], {}, []
    for label, (replicas, shards) in SHAPES.items():
        with network(replicas) as lab:
            found = run_ranks(
                "traffic",
                replicas * shards,
                network=lab,
                replicas=replicas,
                shards=shards,
                rounds=5 if quick else 20,
            )
        sharing = shards if lab.names else replicas * shards  # ranks behind one counter
        worst = max(found, key=lambda rank: rank["bytes"] / rank["bound"])
        sent, bound = worst["bytes"] / sharing, worst["bound"]
        waited, total = (max(rank[key] for rank in found) for key in ("waited_s", "total_s"))
        result |= {f"{label}: bytes_over_bound": sent / bound, f"{label}: waited_s": waited}
        if lab.names or shards == 1:
            within.append(sent / bound <= BYTES)
        where = "namespaces" if lab.names else "loopback"
        rows.append(
            [
                label,
                where,
                f"{sent:,.0f}",
                f"{worst['reported']:,}",
                f"{bound:,.0f}",
                f"{sent / bound:.4f}",
                BYTES,
                f"{waited * 1e3:.1f} ms",
                f"{total * 1e3:.1f} ms",
            ]
        )
    head = [
        "",
        "counted at",
        "bytes out",
        "report's",
        "ring bound",
        "ratio",
        "bound",
        "waited",
        "launch to done",
    ]
    table("A round of one rank: bytes and waiting", head, rows)
    return all(within), result


def show_collectives(quick: bool) -> tuple[bool, dict[str, Any]]:
    """Collectives of one round, on every rank."""
    rows, result, within = [], {}, []
    for label, (replicas, shards) in SHAPES.items():
        ranks = run_ranks("collectives", replicas * shards, replicas=replicas, shards=shards)
        for buffers, found in zip((False, True), zip(*ranks, strict=True), strict=True):
            layers = max(rank.pop("layers") for rank in found)
            bound = [1, 1, layers + buffers, layers if shards > 1 else 0]
            counts = [found[0].get(kind, 0) for kind in KINDS]
            others = sum(sum(rank.values()) for rank in found) - len(found) * sum(counts)
            within.append(counts == bound and others == 0)
            name = f"{label}, buffers" if buffers else label
            pairs = (f"{n} / {most}" for n, most in zip(counts, bound, strict=True))
            rows.append([name, layers, *pairs, others])
            result[f"{name}: collectives"] = found[0]
    head = ["", "layers", *KINDS, "others"]
    table("Collectives of one round: counted / bound", head, rows)
    return all(within), result


def show_time(quick: bool) -> tuple[bool, dict[str, Any]]:
    """A round against one all-reduce."""
    found = run_ranks("timing", 2, turns=20 if quick else 200, timeout=1200)
    slower = {
        key: torch.tensor([rank[key] for rank in found], dtype=torch.float64).amax(0)
        for key in ("reduce", "sync", "with", "without", "waited")
    }
    base = slower["reduce"].median().item()
    rows = [[f"all-reduce of {found[0]['numel']:,} fp32", f"{base * 1e3:.2f} ms", "", ""]]
    result: dict[str, Any] = {"reduce_s": base}
    for name, key, times in (
        ("(a) sync() after a step", "sync_over_reduce", slower["sync"]),
        ("(b) step and forward, extra", "forward_over_reduce", slower["with"] - slower["without"]),
    ):
        took = times.median().item()
        result[key] = took / base
        rows.append([name, f"{took * 1e3:.2f} ms", f"{took / base:.2f}", TIME])
    rows.append(["waited in (b)", f"{slower['waited'].median() * 1e3:.2f} ms", "", ""])
    table("A whole round after a barrier, R=2, loopback", ["", "median", "ratio", "bound"], rows)
    return max(result["sync_over_reduce"], result["forward_over_reduce"]) <= TIME, result


def show_memory(quick: bool) -> tuple[bool, dict[str, Any]]:
    """Live bytes in a round."""
    rows, result, within = [], {}, []
    for label, (replicas, shards) in SHAPES.items():
        found = run_ranks("memory", replicas * shards, replicas=replicas, shards=shards, offload="cpu")
        worst = max(found, key=lambda rank: rank["peak"] / rank["unit"])
        ratio = result[f"{label}: peak_shards"] = worst["peak"] / worst["unit"]
        within.append(round(ratio, 2) <= MEMORY)
        rows.append(
            [label, f"{worst['unit']:,}", f"{worst['peak']:,}", f"{worst['left']:,}", f"{ratio:.3f}", MEMORY]
        )
    head = ["", "largest layer", "peak", "left behind", "peak in layers", "bound"]
    table(f'Live bytes in a round, offload="cpu", prefetch={PREFETCH}', head, rows)
    return all(within), result


def main() -> None:
    """Run the parts."""
    assert __doc__
    parts = {"bytes": show_bytes, "collectives": show_collectives, "time": show_time, "memory": show_memory}
    chosen = arguments(__doc__, list(parts))
    result: dict[str, Any] = {"parameters": numel(llama(DEPTH, HIDDEN))}
    within = []
    for part in chosen.parts:
        fits, found = parts[part](chosen.quick)
        within.append(fits)
        result |= found
    print("\n" + json.dumps({**result, "within_bounds": all(within)}))


if __name__ == "__main__":
    if is_rank():
        be_rank({"traffic": traffic, "collectives": collectives, "timing": timing, "memory": memory})
    else:
        main()
