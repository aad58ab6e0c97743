"""How much faster, on which link: all methods, side by side, on a network whose bandwidth is really limited.

    python benchmarks/compare.py             # everything; half an hour on two cores, as root on Linux
    python benchmarks/compare.py --quick     # a part of the scenarios, shorter
    python benchmarks/compare.py rates exposed

One model, one rank per replica, R = 4 hosts of the laboratory network (netlab.py), AdamW inside. Four busy processes
share the machine's cores, so the speed of "the computer" is imposed: every block sleeps until its forward has taken
its part of a third of STEP, and its backward its part of two thirds; traffic goes on meanwhile, as beside a GPU.
What the CPU does for a method itself (norms, sums, copies, its optimizer) comes on top and is counted.

Parts:

* *methods*: every method in every scenario: tokens/s of all replicas; utilisation, against the same steps with plain
  AdamW and no communication in the same scenario; bytes that leave a host, and seconds beyond those steps, per
  interval of replica 0. Scenarios: link rates; a consistent straggler (replica 3 takes 1 + lag times as long);
  random stragglers (in every step one replica, drawn anew, takes twice as long).
* *regime*: the rate at which the hybrid-sharded baseline falls to 36 % of its speed without communication, as the
  paper's did (85.18 of 236.39 TFLOPS), and EDiT there.
* *exposed*: seconds that a round adds, at once and late, by link rate; with LONG_STEP. (The paper's 7B model takes
  4.46 s for a step on 8 GPUs: 5 ns per parameter and GPU, whose memory is some hundred times as fast as this one's.)
* *torchft*: time that a round adds, from a barrier before it, of ours and of torchft's DiLoCo.

Prints tables; writes compare.png; last, one line of JSON.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import edit
from harness import arguments, be_rank, is_rank, numel, run_ranks, table
from netlab import Network, bytes_out, network
from peers import PEERS, installed

REPLICAS, INTERVAL, LR = 4, 32, 1e-3
LATE = 8  # the delay, where there is one
STEP, LONG_STEP = 0.1, 1.0  # seconds imposed on a step; in "exposed"
WIDTH, DEPTH, VOCABULARY = 256, 8, 64  # 0.56M parameters
BATCH, LENGTH = 1, 16
RATES: tuple[float | None, ...] = (None, 1000, 200, 50)  # Mbit/s that leave a host
LAGS = (0.35, 0.7, 1.0)  # of STEP
CLOCKED = 4  # rounds that A-EDiT makes; the first two set out from unequal starts
PICTURE = "compare.png"
EVERY_STEP = ("DDP", "FSDP2 hybrid")
ALL_AHEAD = "EDiT, all layers ahead"
TORCHFT = "torchft DiLoCo"
SHOWN = (*EVERY_STEP, "PostLocalSGD", TORCHFT, "Accelerate LocalSGD")

Steps = dict[str, Any]


# ------------------------------------------------------------------------------------ the imposed time


class _Before(torch.autograd.Function):
    """Hands ``x`` on; calls ``wait`` when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait: Callable[[], None]) -> Tensor:
        ctx.wait = wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.wait()
        return gradient, None


class Paced(nn.Module):
    """A block whose forward takes ``seconds``, and whose backward twice that, plus what it computes.

    The backward waits before it computes: a gradient is there, and may be sent, when its time is over.
    """

    def __init__(self, block: nn.Module, seconds: float) -> None:
        super().__init__()
        self.block, self.seconds = block, seconds

    def forward(self, x: Tensor) -> Tensor:
        """Of the block."""
        end = time.perf_counter() + self.seconds
        y = _Before.apply(self.block(x), lambda: time.sleep(2 * self.seconds))
        time.sleep(max(0.0, end - time.perf_counter()))
        return y


class Block(nn.Module):
    """Little to compute, and all the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """The model of all measurements; ``seconds`` are imposed on a step."""

    def __init__(self, seconds: float = STEP) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Paced(Block(), seconds / 3 / DEPTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------------- methods


class Ours:
    """``LocalSGDOptimizer``, or no communication at all, as peers.py has the others."""

    def __init__(self, model: nn.Module, settings: dict[str, Any] | None) -> None:
        self.model, self.rounds = model, list[tuple[float, int, int]]()
        if settings is None:
            self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        else:
            self.optimizer = edit.LocalSGDOptimizer(model, torch.optim.AdamW, lr=LR, fused=True, **settings)
            self.optimizer.register_round_hook(
                lambda report: self.rounds.append((time.perf_counter(), report.total_steps, bytes_out()))
            )

    def step(self) -> None:
        """Inner step, and what comes of it."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Of the optimizer."""
        self.optimizer.zero_grad()

    def close(self) -> None:
        """End what is under way."""
        if isinstance(self.optimizer, edit.LocalSGDOptimizer):
            self.optimizer.sync()
            self.optimizer.close()


def presets(interval: int, late: int) -> dict[str, dict[str, Any] | None]:
    """Settings of our methods; ``None``: no communication."""
    methods = edit.methods
    return {
        "no communication": None,
        "Post Local SGD": methods.post_local_sgd(interval, 0),
        "DiLoCo": methods.diloco(interval),
        "CO2": methods.co2(interval),
        **({"CO2*": methods.co2_star(interval)} if hasattr(methods, "co2_star") else {}),
        "EDiT": methods.edit(interval, 0),
        ALL_AHEAD: {**methods.edit(interval, 0), "prefetch": DEPTH + 1},
        f"EDiT, delay {late}": {**methods.edit(interval, 0), "delay": late},
        "A-EDiT": methods.a_edit(interval * STEP, 0),
        f"A-EDiT, delay {late}": {**methods.a_edit(interval * STEP, 0), "delay": late},
    }


def trainer(name: str, lab: Network, interval: int, late: int, seconds: float = STEP) -> Any:
    """A method, ready to train. Collective."""
    model = Model(seconds)
    settings = presets(interval, late)
    if name in settings:
        return Ours(model, settings[name])
    rank = dist.get_rank()
    return PEERS[name](model, interval, LR, address=lab.address(rank), master=lab.address(0), fused=True)


# --------------------------------------------------------------------------------------- measuring


def lag_of(scenario: dict[str, Any], step: int) -> float:
    """Seconds by which this rank's step is late."""
    rank = dist.get_rank()
    if scenario.get("random"):
        return STEP * (random.Random(step).randrange(REPLICAS) == rank)
    return STEP * scenario.get("lag", 0.0) * (rank == REPLICAS - 1)


def one_step(method: Any, late: float = 0.0) -> None:
    """Forward, backward, step."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    method.model(tokens[:, :-1], tokens[:, 1:]).backward()
    if late:
        time.sleep(late)
    method.step()
    method.zero_grad()


def cell(lab: Network, name: str, scenario: dict[str, Any], steps: int, late: int = LATE) -> Steps:
    """Train for ``steps``; when this rank's steps ended, what its host had sent by then, and its rounds."""
    dist.barrier()
    if dist.get_rank() == 0 and lab.names:
        lab.limit(scenario.get("mbit"))
    dist.barrier()
    method = trainer(name, lab, INTERVAL, late)
    times, sent = [], []
    dist.barrier()
    step = 0
    # By the clock replicas make different numbers of steps, and all the same rounds.
    while len(getattr(method, "rounds", ())) < CLOCKED if name.startswith("A-EDiT") else step < steps:
        one_step(method, lag_of(scenario, step))
        times.append(time.perf_counter())
        sent.append(bytes_out())
        step += 1
    method.close()
    return {"times": times, "sent": sent, "rounds": getattr(method, "rounds", [])}


def cells(names: list[str], plan: list[tuple[str, dict[str, Any], int]]) -> list[Steps]:
    """All cells, one after the other, on this rank."""
    lab = Network(names, "")
    return [cell(lab, name, scenario, steps) for name, scenario, steps in plan]


def window(name: str) -> tuple[int, int]:
    """Steps after which measuring begins and ends: some of a method that talks in each, or two intervals.

    Late methods first run ahead of a straggler; only then do they wait for it in every round.
    """
    if name in EVERY_STEP:
        return 2, 12
    begin = INTERVAL // 2 + 2 * INTERVAL * ("delay" in name or "CO2" in name)
    return begin, begin + 2 * INTERVAL


def numbers(name: str, ranks: list[Steps]) -> dict[str, float]:
    """Of a cell, from what its ranks said: steps/s of all replicas together, and bytes and seconds per step."""
    begin, end = window(name)
    if ranks[0]["rounds"] and name.startswith("A-EDiT"):
        (t0, steps0, sent0), *rest = ranks[0]["rounds"][1:CLOCKED]
        t1, steps1, sent1 = rest[-1]
        return {"speed": (steps1 - steps0) / (t1 - t0), "bytes": (sent1 - sent0) / len(rest) / INTERVAL}
    spans = [rank["times"][end - 1] - rank["times"][begin - 1] for rank in ranks]
    first = ranks[0]["sent"]
    sent = (first[end - 1] - first[begin - 1]) / (end - begin)
    return {"speed": sum((end - begin) / span for span in spans), "bytes": sent}


def scenarios(quick: bool) -> dict[str, dict[str, Any]]:
    """By name: the link's rate, and who is late."""
    links = {f"{mbit} Mbit/s" if mbit else "unlimited": {"mbit": mbit} for mbit in RATES}
    slow = {f"one {lag:g} steps late": {"lag": lag} for lag in LAGS} | {"random stragglers": {"random": True}}
    both = links | slow
    return {key: both[key] for key in ("unlimited", "50 Mbit/s", "one 1 steps late")} if quick else both


# -------------------------------------------------------------------------------------------- parts


def show_methods(lab: Network, quick: bool) -> dict[str, Any]:
    """Every method in every scenario."""
    where = {
        title: scenario
        for title, scenario in scenarios(quick).items()
        if lab.names or not scenario.get("mbit")
    }
    found: dict[str, Any] = {title: {} for title in where}
    ours = [name for name in presets(INTERVAL, LATE) if name != ALL_AHEAD]
    # Processes of their own for each peer: what one leaves behind, or its failure, is its own.
    for group in [ours, *([name] for name in SHOWN if installed(name))]:
        plan = [(name, scenario, window(name)[1]) for scenario in where.values() for name in group]
        try:
            results = iter(_run(lab, plan))
        except RuntimeError as error:  # a peer's failure is a result
            print(f"{group}: {str(error).strip().splitlines()[-1]}")
            continue
        for title in where:
            found[title] |= {name: numbers(name, next(results)) for name in group}
    for title, cells in found.items():
        own = cells["no communication"]["speed"]
        rows = []
        for name, cell in cells.items():
            cell["utilisation"] = cell["speed"] / own
            # Replicas that wait, wait together: seconds of one of them.
            cell["lost"] = INTERVAL * (REPLICAS / cell["speed"] - REPLICAS / own)
            speed, lost = f"{cell['speed'] * BATCH * LENGTH:.1f}", f"{cell['lost']:.2f}"
            rows.append(
                [name, speed, f"{cell['utilisation']:.1%}", f"{cell['bytes'] * INTERVAL / 1e6:.2f}", lost]
            )
        head = ["", "tokens/s", "utilisation", "MB per interval", "seconds lost per interval"]
        table(title, head, rows)
    return found


def bits(replicas: int = REPLICAS) -> float:
    """That a rank sends in a round: a ring all-reduce of float32."""
    return 8 * edit.plan(numel(Model()), math.inf, STEP, replicas).bytes_per_round


def regime(names: list[str], tries: int) -> dict[str, Any]:
    """On one rank: the rate at which the baseline falls to the paper's share, and what others do there."""
    lab, baseline, wanted = Network(names, ""), "FSDP2 hybrid", 85.18 / 236.39

    def speed(name: str, mbit: float | None) -> float:
        found = numbers(name, [cell(lab, name, {"mbit": mbit}, window(name)[1])])["speed"]
        mean = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(mean)
        return mean.item()  # of one rank times the ranks

    own = before = speed("no communication", None)
    mbit = bits() / 1e6 * own / REPLICAS / (1 / wanted - 1)  # if nothing overlapped
    tried: list[tuple[float, float]] = []
    while not tried or (abs(tried[-1][1] - wanted) > 0.003 and len(tried) < tries):
        mbit = round(mbit, 2)
        tried.append((mbit, speed(baseline, mbit) / own))
        mbit *= (1 / tried[-1][1] - 1) / (
            1 / wanted - 1
        )  # time beyond the step is nearly inverse to the rate
    mbit, share = min(tried, key=lambda pair: abs(pair[1] - wanted))
    ours = {name: speed(name, mbit) for name in ("DDP", "EDiT", f"EDiT, delay {LATE}", "CO2")}
    own = (before + speed("no communication", None)) / 2  # the machine may have changed meanwhile
    return {"mbit": mbit, "own": own, baseline: share * before / own} | {k: v / own for k, v in ours.items()}


def show_regime(lab: Network, quick: bool) -> dict[str, Any]:
    """EDiT where the hybrid-sharded baseline falls to 36 % of its speed without communication."""
    if not lab.names:
        return {}
    found = run_ranks("regime", REPLICAS, network=lab, names=lab.names, tries=2 if quick else 5)[0]
    share = found["FSDP2 hybrid"]
    rows = [
        [name, f"{value:.3f}", f"{value / share:.2f}"]
        for name, value in found.items()
        if name not in ("mbit", "own")
    ]
    title = f"At {found['mbit']:.1f} Mbit/s (without communication: {1 / share:.2f} of the baseline)"
    table(title, ["", "utilisation", "÷ FSDP2 hybrid"], rows)
    return found


def _run(lab: Network, plan: list[tuple[str, dict[str, Any], int]]) -> list[list[Steps]]:
    """Of each cell, what each rank said."""
    ranks = run_ranks("cells", REPLICAS, network=lab, timeout=7200, names=lab.names, plan=plan)
    return [[rank[index] for rank in ranks] for index in range(len(plan))]


def rounds(names: list[str], plan: list[tuple[float | None, int]], interval: int, count: int) -> Any:
    """Of each rate and delay, seconds of every step of this rank; rounds every ``interval`` steps."""
    return [_rounds(Network(names, ""), mbit, delay, interval, count) for mbit, delay in plan]


def _rounds(lab: Network, mbit: float | None, delay: int, interval: int, count: int) -> list[float]:
    dist.barrier()
    if dist.get_rank() == 0 and lab.names:
        lab.limit(mbit)
    dist.barrier()
    method = Ours(Model(LONG_STEP), {**edit.methods.edit(interval, 0), "delay": delay})
    took = []
    for _ in range(count * interval):
        start = time.perf_counter()
        one_step(method)
        took.append(time.perf_counter() - start)
    method.close()
    return took


def show_exposed(lab: Network, quick: bool) -> dict[str, Any]:
    """What a round adds to the training loop, at once and late."""
    interval, count = 4, 4 if quick else 8
    found: dict[str, Any] = {}
    rows = []
    plan = []
    for mbit in (*RATES, 20) if lab.names else RATES[:1]:
        enough = max(1, math.ceil(1.2 * bits() / 1e6 / mbit / LONG_STEP)) if mbit else 1
        plan += [(mbit, 0), (mbit, enough)]
    settings = {"names": lab.names, "plan": plan, "interval": interval, "count": count}
    results = run_ranks("rounds", REPLICAS, network=lab, timeout=3600, **settings)
    for (mbit, delay), *ranks in zip(plan, *results, strict=True):
        seconds = bits() / 1e6 / mbit if mbit else 0.0
        # Step numbers within an interval: launched in the last one, applied `delay` later, or in the forward
        # of the first.
        touched = {0, interval - 1} if delay == 0 else {(delay - 1) % interval, interval - 1}
        added, plain = [], []
        for took in ranks:
            parts = [took[i : i + interval] for i in range(interval - 1, len(took) - interval, interval)]
            for part in parts:  # from a launch to the step before the next
                calm = [t for i, t in enumerate(part) if (i - 1) % interval not in touched]
                plain.append(statistics.median(calm))
                added.append(sum(t for i, t in enumerate(part) if (i - 1) % interval in touched)
                             - len(touched) * plain[-1])  # fmt: skip
        exposed, step = statistics.median(added), statistics.median(plain)
        bound = max(0.0, seconds - LONG_STEP / 3)
        rate = f"{mbit} Mbit/s" if mbit else "unlimited"
        ratio = f"{exposed / bound:.2f}" if bound and not delay else ""
        rows.append([rate, str(delay), f"{seconds:.3f}", f"{bound:.3f}" if not delay else "", f"{exposed:.4f}",
                     ratio, f"{exposed / step:.1%}"])  # fmt: skip
        found[f"{rate}, delay {delay}"] = {"exposed": exposed, "bound": bound, "step": step}
    head = ["", "delay", "traffic, s", "less a forward, s", "exposed, s", "ratio", "of a step"]
    table(f"What a round adds (medians over {count} rounds and {REPLICAS} ranks)", head, rows)
    return found


def barriers(names: list[str], plan: list[tuple[float | None, str]], interval: int, count: int) -> Any:
    """Of each rate and method, seconds of a step and the next forward, from a barrier: without and with a round."""
    return [_barriers(Network(names, ""), mbit, name, interval, count) for mbit, name in plan]


def _barriers(lab: Network, mbit: float | None, name: str, interval: int, count: int) -> list[list[float]]:
    dist.barrier()
    if dist.get_rank() == 0 and lab.names:
        lab.limit(mbit)
    dist.barrier()
    method = trainer(name, lab, interval, 0, 0.0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    took: list[list[float]] = [[], []]
    for step in range(count * interval):
        loss = method.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        dist.barrier()
        start = time.perf_counter()
        method.step()
        method.zero_grad()
        method.model(tokens[:, :-1], tokens[:, 1:])
        took[step % interval == interval - 1].append(time.perf_counter() - start)
    method.close()
    return took


def show_torchft(lab: Network, quick: bool) -> dict[str, Any]:
    """What a round adds, of ours and of torchft's DiLoCo, measured from a barrier."""
    found: dict[str, Any] = {}
    rows = []
    if not installed(TORCHFT):
        print("torchft is not installed: pip install .[benchmarks]")
        return found
    names = ("EDiT", ALL_AHEAD, "DiLoCo", TORCHFT)
    rates = (None, 200, 50) if lab.names else (None,)
    plan = [(mbit, name) for mbit in rates for name in names]
    settings = {"names": lab.names, "plan": plan, "interval": 4, "count": 5 if quick else 15}
    results = run_ranks("barriers", REPLICAS, network=lab, timeout=3600, **settings)
    took = dict(zip(plan, zip(*results, strict=True), strict=True))
    for mbit in rates:
        added = {}
        for name in names:
            # The slowest rank of each turn: that is who all wait for.
            kinds = zip(*took[mbit, name], strict=True)
            plain, due = ([max(turn) for turn in zip(*kind, strict=True)] for kind in kinds)
            added[name] = statistics.median(due[2:]) - statistics.median(plain)
        rate = f"{mbit} Mbit/s" if mbit else "unlimited"
        row = [f"{1e3 * seconds:.1f}" for seconds in added.values()]
        rows.append([rate, *row, *(f"{added[name] / added[TORCHFT]:.2f}" for name in names[:-1])])
        found[rate] = added
    table("What a round adds, ms", ["", *added, *(f"{name} ÷ torchft" for name in names[:-1])], rows)
    return found


def show_model(found: dict[str, Any]) -> dict[str, float]:
    """``edit.plan`` against the cells: seconds of an interval, expected ÷ measured."""
    ratios: dict[str, float] = {}
    rows = []
    late = f"EDiT, delay {LATE}"
    for title, cells in found.items():
        if not title.endswith("bit/s"):
            continue
        link = float(title.split()[0]) * 1e6 / 8
        step = REPLICAS / cells["no communication"]["speed"]
        row = [title]
        for name, delay in (("DDP", None), ("EDiT", 0), (late, LATE), ("CO2", INTERVAL)):
            if name not in cells:
                continue
            expected = edit.plan(numel(Model()), link, step, REPLICAS, interval=INTERVAL, delay=delay)
            seconds = expected.seconds_per_step if delay is not None else expected.baseline_seconds_per_step
            ratios[f"{title}, {name}"] = seconds * cells[name]["speed"] / REPLICAS
            row.append(f"{ratios[f'{title}, {name}']:.3f}")
        rows.append(row)
    if rows:
        table("Seconds that edit.plan expects ÷ measured", ["", "DDP", "EDiT", late, "CO2"], rows)
    return ratios


def draw(found: dict[str, Any], path: str) -> None:
    """Utilisation of all methods, by scenario."""
    import matplotlib.pyplot as plt

    rates = [title for title in found if title == "unlimited" or title.endswith("bit/s")]
    others = [title for title in found if title not in rates]
    names = [name for name in found[rates[0]] if name != "no communication"]
    figure, panels = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    for panel, titles in zip(panels, (rates, others), strict=True):
        for index, name in enumerate(names):
            places = [place + 0.8 * (index / len(names) - 0.5) for place in range(len(titles))]
            heights = [found[title].get(name, {}).get("utilisation", 0.0) for title in titles]
            panel.bar(places, heights, 0.75 / len(names), label=name, color=plt.get_cmap("tab20")(index))
        panel.set_xticks(range(len(titles)), titles)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    panels[0].set_ylabel("steps/s of all replicas ÷ without communication")
    panels[0].set_title(f"Link rate: {REPLICAS} replicas, a round every {INTERVAL} steps")
    panels[1].set_title("Unequal replicas, unlimited link")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=110)


PARTS = {"exposed": show_exposed, "torchft": show_torchft, "regime": show_regime, "methods": show_methods}


def main() -> None:
    """The command line."""
    options = arguments(__doc__ or "", list(PARTS))
    found: dict[str, Any] = {}
    with network(REPLICAS) as lab:
        if not lab.names:
            print(f"no network ({lab.why_not}): the loopback, without limits")
        for part in options.parts:
            found[part] = PARTS[part](lab, options.quick)
            if part == "methods":
                found["model"] = show_model(found[part])
                draw(found[part], PICTURE)
    print(json.dumps(found))


if __name__ == "__main__":
    if is_rank():
        be_rank({"cells": cells, "regime": regime, "rounds": rounds, "barriers": barriers})
    else:
        main()
