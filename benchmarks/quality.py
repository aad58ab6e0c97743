"""At what price in quality? Held-out perplexity, at equal tokens, of every method and of every setting of ours.

    python benchmarks/quality.py                   # all parts, three seeds; about 45 minutes on two idle cores
    python benchmarks/quality.py methods penalty   # these parts alone
    python benchmarks/quality.py --quick           # one seed, fewer and shorter runs: a tenth

methods        the baseline (gradients averaged in every step), Post Local SGD, DiLoCo, CO2, CO2*, EDiT, A-EDiT, and
               replicas that never synchronise (the mean of their own perplexities)
delay          EDiT whose rounds are applied 0 to 16 steps late
penalty        EDiT with each part of its penalty alone; clean, and with a replica that reads noise for four rounds
exponent       `step_exponent` where one replica is half as fast
sizes          the published temperature (1) and clip (10) on models of growing width
learning_rate  the inner learning rate for 1, 2 and 4 replicas

The model is a Llama with two blocks over bytes, 29 thousand parameters; the text the example's, the standard library
of this Python (its bytes' frequencies alone have perplexity 28, those of pairs 11.7). A run is 384 steps of 4 windows
of 32 bytes on each of four replicas, 196,608 bytes. Replica i reads the same windows in every method, from the same
weights. AdamW (0.9, 0.95, decay 0.1), gradients clipped to 1; the learning rate rises in the first eighth of the
steps and falls to a hundredth in a cosine. Rounds come every 16 steps. EDiT, A-EDiT and Post Local SGD average
gradients in the first eighth; DiLoCo and CO2 have no warm-up as published, and are run with it, too.

What was tuned: the inner learning rate of each method, over one grid, to the least perplexity of seed 0 on a
*tuning* text that is neither trained on nor reported (A-EDiT takes EDiT's, CO2* CO2's). Delays, parts of the
penalty and exponents run at EDiT's, which was found with delay 0 and the whole penalty. Outer learning rates
and momenta are the published ones. EDiT's temperature and clip have the unit of a norm: 1 and 10 were
published for layers of 5e7 parameters at lr 1.5e-4 and 128 steps, where `lr * sqrt(interval * parameters)` is
12, and stand here in the same proportion to that scale.

Replicas of A-EDiT go by a clock that counts their own steps, the last of them half as fast, so runs can be repeated.
It and EDiT end with the same tokens of all replicas.

Finished runs are kept in `quality.jsonl`, where a benchmark that was killed finds them; delete it to begin anew.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import edit
from harness import arguments, be_rank, is_rank, numel, run_ranks, table
from llama import Config, Llama
from train_llama import Windows, evaluate, load_text

SEEDS = (0, 1, 2)
STEPS, BATCH, LENGTH, INTERVAL = 384, 4, 32, 16
DEPTH, HEADS = 2, 2
WARMUP = 8  # it is one step in so many
RATES = (4e-3, 8e-3, 16e-3, 32e-3)
SPEEDS = (1.0, 1.0, 1.0, 0.5)  # of A-EDiT's replicas
NOISE_FROM, NOISE_ROUNDS = 14, 4  # when the last replica reads noise; the test judges after ten rounds
DELAYS = (0, 1, INTERVAL // 4, INTERVAL // 2, INTERVAL)
EXPONENTS = (0.0, 0.5, 1.0)
WIDTHS = (16, 32, 64, 128, 256)
SIZES_STEPS, SIZES_RATE = 192, 3e-3
SCALE = 1.5e-4 * math.sqrt(128 * 5e7)  # of norms, where temperature 1 and clip 10 come from
KEPT = 3.6  # effective replicas, of 4
WINDOWS, CURVE_WINDOWS, CURVE_EVERY = 512, 128, 32
RESULTS, PICTURE = Path("quality.jsonl"), Path("quality.png")
POOLS = 2  # side by side, so that one computes while the other waits

METHODS = {
    "baseline": "baseline",
    "post_local_sgd": "Post Local SGD",
    "diloco": "DiLoCo",
    "diloco_warm": "DiLoCo, warm-up",
    "co2": "CO2",
    "co2_warm": "CO2, warm-up",
    "co2_star": "CO2*",
    "edit": "EDiT",
    "a_edit": "A-EDiT",
    "local": "never syncing",
}
TUNED_AS = {"a_edit": "edit", "co2_star": "co2"}


@dataclass(frozen=True)
class Run:
    """All that a run depends on, besides the constants in :data:`COMMON`."""

    method: str
    lr: float
    seed: int = 0
    replicas: int = 4
    steps: int = STEPS
    parts: str = "all"  # of the penalty: none, anomaly, weights, clip, all; published: all, not rescaled
    noise: int = 0  # rounds after which the last replica reads noise for a while; 0: never
    delay: int = 0
    exponent: float = 0.5
    dim: int = 32


COMMON = [
    *(BATCH, LENGTH, INTERVAL, DEPTH, HEADS, WARMUP, NOISE_ROUNDS, SPEEDS, SCALE, CURVE_EVERY, WINDOWS),
    *(torch.__version__, platform.python_version()),  # the latter for the text
]
Result = dict[str, Any]
Found = dict[Run, Result]


# ------------------------------------------------------------------------------------------- on a rank


class Ticks:
    """A clock that a replica's own steps move, so that A-EDiT does the same in every run."""

    def __init__(self, speed: float) -> None:
        self.now, self.speed = 0.0, speed

    def __call__(self) -> float:
        """Seconds, if a step of a replica of speed 1 takes one."""
        return self.now


@cache
def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Bytes to train on; windows to tune by, and windows to report: of two halves of the held-out bytes."""
    training, unseen = load_text(None)
    halves = [Windows(half, LENGTH) for half in unseen.chunk(2)]
    tuning, held_out = (
        torch.stack([half[index * len(half) // WINDOWS] for index in range(WINDOWS)]) for half in halves
    )
    return training, tuning, held_out


@cache
def alone() -> dist.ProcessGroup:
    """The group of this rank alone."""
    return dist.new_subgroups(1)[0]


def penalty_of(run: Run, layer: float) -> edit.PseudoGradientPenalty:
    """The parts that the run has; temperature and clip for layers of so many parameters."""
    unit = 1.0 if run.parts == "published" else run.lr * math.sqrt(INTERVAL * layer) / SCALE
    on = {"all", "published"}
    return edit.PseudoGradientPenalty(
        anomaly=edit.EMAZTest() if run.parts in {"anomaly", *on} else None,
        temperature=1.0 * unit if run.parts in {"weights", *on} else None,
        max_norm=10.0 * unit if run.parts in {"clip", *on} else None,
        step_exponent=run.exponent,
    )


def optimizer_of(run: Run, model: Llama, warmup: int, clock: Ticks) -> torch.optim.Optimizer:
    """AdamW, or what replaces it."""
    inner: dict[str, Any] = {"lr": run.lr, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    if run.method in ("baseline", "local"):
        return torch.optim.AdamW(model.parameters(), **inner)
    settings = getattr(edit.methods, run.method.removesuffix("_warm"))(INTERVAL)
    if run.method == "a_edit":
        settings["schedule"] = edit.EverySeconds(INTERVAL, warmup, clock)
    elif run.method in ("edit", "post_local_sgd") or run.method.endswith("_warm"):
        settings["schedule"] = edit.EverySteps(INTERVAL, warmup)
    if run.method in ("edit", "a_edit"):
        settings["penalty"] = penalty_of(run, numel(model) / (len(model.layers) + 1))
    if run.delay:
        settings["delay"] = run.delay
    return edit.LocalSGDOptimizer(model, **inner, **settings)


def train(run: Run) -> Result:
    """One run, of which this rank is a replica."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text, tuning, held_out = texts()
    torch.manual_seed(run.seed)
    model = Llama(Config(run.dim, DEPTH, HEADS, HEADS, hidden=2 * run.dim))
    speeds = SPEEDS if run.method == "a_edit" else (1.0,) * world
    warmup = run.steps // WARMUP
    clock = Ticks(speeds[rank])
    optimizer = optimizer_of(run, model, warmup, clock)
    ours = isinstance(optimizer, edit.LocalSGDOptimizer)
    averages = run.method == "baseline" and world > 1
    trained: nn.Module = nn.parallel.DistributedDataParallel(model) if averages else model
    reports: list[edit.RoundReport] = []
    if ours:
        optimizer.register_round_hook(reports.append)

    def perplexity(windows: Tensor) -> float:
        share = len(windows) // world
        if ours:
            with optimizer.consensus():
                return evaluate(model, windows, share, None)
        if run.method == "baseline":
            return evaluate(model, windows, share, None)
        own = torch.tensor(evaluate(model, windows, share, alone()))
        dist.all_reduce(own)
        return own.item() / world

    length = (run.steps - warmup) * world / sum(speeds)  # of the local phase, by the clock
    generator = torch.Generator().manual_seed(1000 * run.seed + rank)
    within = torch.arange(LENGTH + 1)
    curve = []
    for step in range(warmup + round(length * clock.speed)):
        at = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        batch = text[at + within].long()
        rounds = (step - warmup) / INTERVAL
        if run.noise and rank == world - 1 and run.noise <= rounds < run.noise + NOISE_ROUNDS:
            batch = torch.randint(256, batch.shape, generator=generator)
        # Tokens of all so far, in steps of the baseline.
        done = min(step, warmup) + max(0, step - warmup) / clock.speed * sum(speeds) / world
        rise = min(1.0, (done + 1) / warmup)
        lr = run.lr * rise * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done / run.steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        trained(batch[:, :-1], batch[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clock.now += 1.0 if step < warmup else 1 / clock.speed  # in the warm-up all wait for the slowest
        optimizer.step()
        optimizer.zero_grad()
        # CO2*'s replicas have no whole anchor between rounds.
        if clock.now % CURVE_EVERY == 0 and run.method not in ("local", "co2_star"):
            curve.append((int(clock.now), perplexity(held_out[:: WINDOWS // CURVE_WINDOWS])))
    if ours:
        optimizer.sync()
    result = {"held_out": perplexity(held_out), "tuning": perplexity(tuning), "curve": curve}
    if ours:
        optimizer.close()
        reports = [report for report in reports if report.steps.any()]  # not that in which all just meet
        names = dict(model.named_modules())
        sizes = [numel(names[name]) if name in names else 0 for name in reports[0].layers]
        result |= {
            "norms": [
                [[float(f"{x:.5g}") for x in row] for row in report.norms.tolist()] for report in reports
            ],
            "effective": [report.effective_replicas.tolist() for report in reports],
            "clip": [report.clip.tolist() for report in reports],
            "weight_of_last": statistics.mean(report.weights[-1].mean().item() for report in reports),
            "out": sum(int(report.out.sum()) for report in reports),
            "sizes": [size or numel(model) - sum(sizes) for size in sizes],  # the root has the rest
        }
    return result


def work(folder: str, results: str, starter: int) -> None:
    """What a pool of ranks does: it takes runs that no other pool has taken, until none is left."""
    runs = [Run(**run) for run in json.loads(Path(folder, "runs").read_text())]
    for number, run in enumerate(runs):
        taken = [False]
        if dist.get_rank() == 0 and os.getppid() == starter:  # or it was killed, and nobody wants them
            try:
                Path(folder, str(number)).touch(exist_ok=False)
                taken = [True]
            except FileExistsError:
                pass
        dist.broadcast_object_list(taken)
        if not taken[0]:
            continue
        began = time.process_time()
        result = train(run)
        seconds = torch.tensor(time.process_time() - began)
        dist.all_reduce(seconds)
        result["cpu_seconds"] = seconds.item()  # of all ranks
        if dist.get_rank() == 0:
            with open(results, "a") as file:
                file.write(json.dumps({"common": COMMON, "run": asdict(run), "result": result}) + "\n")


# ----------------------------------------------------------------------------------------- the runs


def load() -> Found:
    """The runs in the file."""
    found: Found = {}
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # cut off when the benchmark was killed
            continue
        if entry["common"] == json.loads(json.dumps(COMMON)):
            found[Run(**entry["run"])] = entry["result"]
    return found


def perform(runs: Iterable[Run]) -> Found:
    """Do what is not done. Returns all runs that there are."""
    runs = list(dict.fromkeys(runs))
    left = [run for run in runs if run not in load()]
    if RESULTS.exists() and not RESULTS.read_text().endswith("\n"):
        with RESULTS.open("a") as file:
            file.write("\n")
    with tqdm(total=len(runs), initial=len(runs) - len(left), unit="run", disable=None) as bar:
        for world in sorted({run.replicas for run in left}):
            here = [run for run in left if run.replicas == world]
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(POOLS) as starters:
                Path(folder, "runs").write_text(json.dumps([asdict(run) for run in here]))
                settings = {"folder": folder, "results": str(RESULTS.resolve()), "starter": os.getpid()}
                pools = [
                    starters.submit(run_ranks, "work", world, timeout=24 * 3600, **settings)
                    for _ in range(min(POOLS, len(here)))
                ]
                while not all(pool.done() for pool in pools):
                    time.sleep(1)
                    found = load()
                    if new := sum(run in found for run in runs) - bar.n:
                        bar.update(new)
                for pool in pools:
                    pool.result()
    return load()


class Plan:
    """Which runs each part needs, at which learning rate."""

    def __init__(self, quick: bool) -> None:
        self.seeds = SEEDS[:1] if quick else SEEDS
        self.steps = 256 if quick else STEPS
        self.sizes_steps = 64 if quick else SIZES_STEPS
        self.noise = 10 if quick else NOISE_FROM
        self.rates = RATES[1::2] if quick else RATES
        self.widths = WIDTHS[:3] if quick else WIDTHS
        self.best: dict[str, float] = {}

    def tuning(self, methods: Iterable[str]) -> list[Run]:
        """Seed 0 at every learning rate."""
        tuned = dict.fromkeys(TUNED_AS.get(method, method) for method in methods)
        return [Run(method, lr, steps=self.steps) for method in tuned for lr in self.rates]

    def choose(self, methods: Iterable[str], found: Found) -> None:
        """The best learning rate of each method, on the tuning text."""
        for method in methods:
            runs = self.tuning([method])
            self.best[method] = min(runs, key=lambda run: found[run]["tuning"]).lr

    def runs(self, method: str, **settings: Any) -> list[Run]:
        """One for each seed, at the method's learning rate."""
        settings = {"lr": self.best[method], "steps": self.steps} | settings
        return [Run(method, seed=seed, **settings) for seed in self.seeds]


# --------------------------------------------------------------------------------------------- the parts


def ends(found: Found, runs: Iterable[Run]) -> list[float]:
    """Held-out perplexities."""
    return [found[run]["held_out"] for run in runs]


def ratios(found: Found, runs: Iterable[Run], others: Iterable[Run]) -> list[float]:
    """Their ratios, seed by seed."""
    return [one / other for one, other in zip(ends(found, runs), ends(found, others), strict=True)]


def spread(values: list[float]) -> float:
    """Standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def told(values: list[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {spread(values):.{digits}f}" if len(values) > 1 else mean


def possible(methods: Iterable[str]) -> list[str]:
    """Those that this version of ``edit`` has."""
    plain = ("baseline", "local")
    return [m for m in methods if m in plain or hasattr(edit.methods, m.removesuffix("_warm"))]


class Methods:
    """What each method comes to."""

    methods = tuple(METHODS)

    def runs(self, plan: Plan) -> dict[str, list[Run]]:
        """By method."""
        return {method: plan.runs(method) for method in possible(METHODS)}

    def show(self, plan: Plan, found: Found) -> Any:
        """The table."""
        runs = self.runs(plan)
        rows = []
        for method, of in runs.items():
            share = ratios(found, of, runs["baseline"])
            row = [METHODS[method], f"{plan.best[method]:g}", *(f"{end:.3f}" for end in ends(found, of))]
            rows.append([*row, told(ends(found, of)), told(share), *habits(found, of)])
        seeds = [f"seed {seed}" for seed in plan.seeds]
        head = ["held-out perplexity", "lr", *seeds, "mean ± sd", "÷ baseline", "effective", "clipped", "out"]
        table("Methods: four replicas", head, rows)
        return {method: ends(found, of) for method, of in runs.items()}

    def draw(self, axes: Any, plan: Plan, found: Found) -> None:
        """Ratios to the baseline, with each seed."""
        runs = self.runs(plan)
        for at, of in enumerate(runs.values()):
            share = ratios(found, of, runs["baseline"])
            axes.errorbar(at, statistics.mean(share), spread(share), fmt="o", capsize=4, color="C0")
            axes.plot([at] * len(share), share, "_", color="C1", markersize=12)
        axes.set_xticks(range(len(runs)), [METHODS[method] for method in runs], rotation=30, ha="right")
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(title="Methods, four replicas", ylabel="held-out perplexity ÷ baseline's")


def habits(found: Found, runs: list[Run]) -> list[str]:
    """Effective replicas, share of layers' rounds that were clipped, and of pseudo gradients left out."""
    if "clip" not in found[runs[0]]:
        return ["", "", ""]
    effective = torch.tensor([x for run in runs for row in found[run]["effective"] for x in row])
    clip = torch.tensor([x for run in runs for row in found[run]["clip"] for x in row])
    out = sum(found[run]["out"] for run in runs) / (effective.numel() * runs[0].replicas)
    return [f"{effective.mean():.2f}", f"{100 * (clip < 1).double().mean():.0f} %", f"{100 * out:.1f} %"]


class Delay:
    """EDiT, its rounds applied late."""

    methods = ("edit",)

    def runs(self, plan: Plan) -> dict[str, list[Run]]:
        """By delay."""
        delays = DELAYS if possible(["co2"]) else DELAYS[:1]
        return {str(delay): plan.runs("edit", delay=delay) for delay in delays}

    def show(self, plan: Plan, found: Found) -> Any:
        """The table."""
        runs = self.runs(plan)
        share = {delay: ratios(found, of, runs["0"]) for delay, of in runs.items()}
        rows = [[delay, told(ends(found, of)), told(share[delay])] for delay, of in runs.items()]
        table(f"Delay: EDiT, a round every {INTERVAL} steps", ["steps late", "perplexity", "÷ delay 0"], rows)
        return {delay: ends(found, of) for delay, of in runs.items()}

    def draw(self, axes: Any, plan: Plan, found: Found) -> None:
        """Ratios."""
        runs = self.runs(plan)
        share = [ratios(found, of, runs["0"]) for of in runs.values()]
        delays = [int(delay) for delay in runs]
        axes.errorbar(delays, [*map(statistics.mean, share)], [*map(spread, share)], fmt="o-", capsize=4)
        axes.set_xticks(delays)
        axes.set(title=f"Rounds applied late (every {INTERVAL} steps)", xlabel="delay (steps)")
        axes.set(ylabel="held-out perplexity ÷ that of delay 0")


class Penalty:
    """EDiT's penalty part by part, clean and with a replica that reads noise."""

    methods = ("edit", "diloco", "baseline")
    variants: ClassVar = {
        "EDiT, no penalty": ("edit", "none"),
        "EDiT, anomaly test": ("edit", "anomaly"),
        "EDiT, weights": ("edit", "weights"),
        "EDiT, clip": ("edit", "clip"),
        "EDiT, all": ("edit", "all"),
        "DiLoCo": ("diloco", "all"),
        "baseline": ("baseline", "all"),
    }

    def runs(self, plan: Plan) -> dict[str, list[Run]]:
        """By variant, clean; and the same with noise."""
        clean = {name: plan.runs(method, parts=parts) for name, (method, parts) in self.variants.items()}
        noise = plan.noise
        return clean | {
            f"{name}, noise": [replace(run, noise=noise) for run in clean[name]] for name in clean
        }

    def show(self, plan: Plan, found: Found) -> Any:
        """The table."""
        runs = self.runs(plan)
        rows = []
        for name in self.variants:
            clean, noisy = runs[name], runs[f"{name}, noise"]
            against = ratios(found, clean, runs["EDiT, no penalty"])
            rows.append([name, told(ends(found, clean)), told(against), *habits(found, clean)])
            rows[-1] += [told(ends(found, noisy)), told(ratios(found, noisy, clean)), habits(found, noisy)[2]]
        head = ["", "clean", "÷ no penalty", "effective", "clipped", "out", "noise", "÷ own clean", "out"]
        table(f"Penalty: one of four replicas reads random bytes for {NOISE_ROUNDS} rounds", head, rows)
        return {name: ends(found, of) for name, of in runs.items()}

    def draw(self, axes: Any, plan: Plan, found: Found) -> None:
        """Perplexity over steps, of noisy runs; relative to the clean ones."""
        runs = self.runs(plan)
        for name, style in zip(self.variants, ("-", "--", "-", "--", ":", "-", "-"), strict=True):
            pairs = zip(runs[name], runs[f"{name}, noise"], strict=True)
            curves = [(found[clean]["curve"], found[noisy]["curve"]) for clean, noisy in pairs]
            steps = [step for step, _ in curves[0][0]]
            share = [
                statistics.mean(noisy[at][1] / clean[at][1] for clean, noisy in curves)
                for at in range(len(steps))
            ]
            axes.plot(steps, share, style, label=name)
        first = plan.steps // WARMUP + INTERVAL * plan.noise
        axes.axvspan(first, first + INTERVAL * NOISE_ROUNDS, color="grey", alpha=0.2, label="noise")
        axes.legend(fontsize="small")
        axes.set(title="One of four replicas reads noise", xlabel="step")
        axes.set(ylabel="held-out perplexity ÷ own clean run's")


class Exponent:
    """A-EDiT with a straggler."""

    methods = ("a_edit",)

    def runs(self, plan: Plan) -> dict[str, list[Run]]:
        """By exponent."""
        return {f"{exponent:g}": plan.runs("a_edit", exponent=exponent) for exponent in EXPONENTS}

    def show(self, plan: Plan, found: Found) -> Any:
        """The table, with the weight of the straggler."""
        runs = self.runs(plan)
        rows = []
        for exponent, of in runs.items():
            share = ratios(found, of, runs["0.5"])
            weight = [found[run]["weight_of_last"] for run in of]
            rows.append([exponent, told(ends(found, of)), told(share), told(weight), *habits(found, of)])
        speeds = ", ".join(f"{speed:g}" for speed in SPEEDS)
        head = ["step_exponent", "perplexity", "÷ 0.5", "weight of the last", "effective", "clipped", "out"]
        table(f"Steps differ: A-EDiT, replicas of speeds {speeds}", head, rows)
        return {exponent: ends(found, of) for exponent, of in runs.items()}

    def draw(self, axes: Any, plan: Plan, found: Found) -> None:
        """Perplexities and weights."""
        runs = self.runs(plan)
        values = [ends(found, of) for of in runs.values()]
        means = [*map(statistics.mean, values)]
        axes.errorbar(range(len(runs)), means, [*map(spread, values)], fmt="o", capsize=4)
        labels = [
            f"e = {exponent}\nstraggler's\nweight {statistics.mean(found[run]['weight_of_last'] for run in of):.2f}"
            for exponent, of in runs.items()
        ]
        axes.set_xticks(range(len(runs)), labels)
        axes.set_xlim(-0.5, len(runs) - 0.5)
        axes.set(title="A-EDiT, one of four replicas at half speed", ylabel="held-out perplexity")


class Sizes:
    """Published temperature and clip on models of growing width."""

    methods = ()

    def runs(self, plan: Plan) -> dict[str, list[Run]]:
        """By width; one learning rate for all."""
        settings = {"parts": "published", "steps": plan.sizes_steps}
        return {
            str(dim): [Run("edit", SIZES_RATE, seed, dim=dim, **settings) for seed in plan.seeds]
            for dim in plan.widths
        }

    def rows(self, plan: Plan, found: Found) -> list[dict[str, float]]:
        """For each width: norms of its layers while the learning rate is above half its peak, and what follows."""
        rows = []
        for width, runs in self.runs(plan).items():
            results = [found[run] for run in runs]
            norms, effective, clip = (
                torch.tensor([row for of in results for row in of[key][: len(of[key]) // 2]]).double()
                for key in ("norms", "effective", "clip")
            )
            size = statistics.mean(results[0]["sizes"])
            norm = norms.median().item()
            rows.append(
                {
                    "width": int(width),
                    "size": size,
                    "norm": norm,
                    "unit": norm / (SIZES_RATE * math.sqrt(INTERVAL * size)),
                    "differ": (norms.std(1) / norms.mean(1)).mean().item(),
                    "effective": effective.mean().item(),
                    "clipped": (clip < 1).double().mean().item(),
                    "temperature": temperature_for(norms, KEPT),
                }
            )
        return rows

    def show(self, plan: Plan, found: Found) -> Any:
        """The table."""
        rows = self.rows(plan, found)
        head = ["width", "parameters of a layer", "norm G", "G / (lr·√(τn))", "replicas' G differ by"]
        head += ["effective, T = 1", "clipped, φ = 10", f"T for {KEPT}", "÷ G"]
        cells = [
            [
                f"{row['width']}", f"{row['size']:,.0f}", f"{row['norm']:.2f}", f"{row['unit']:.2f}",
                f"{100 * row['differ']:.1f} %", f"{row['effective']:.2f}", f"{100 * row['clipped']:.0f} %",
                f"{row['temperature']:.3f}", f"{row['temperature'] / row['norm']:.3f}",
            ]
            for row in rows
        ]  # fmt: skip
        table(f"Sizes: EDiT with temperature 1 and clip 10, lr {SIZES_RATE:g}", head, cells)
        return rows

    def draw(self, axes: Any, plan: Plan, found: Found) -> None:
        """Effective replicas and the temperature over the size."""
        rows = self.rows(plan, found)
        size = [row["size"] for row in rows]
        axes.plot(size, [row["norm"] for row in rows], "o-", label="norm G, median")
        axes.plot(size, [row["temperature"] for row in rows], "s-", label=f"T for {KEPT} effective replicas")
        axes.plot(size, [row["effective"] for row in rows], "^-", label="effective replicas, T = 1")
        axes.axhline(10, color="grey", linewidth=0.8, linestyle=":", label="φ = 10")
        axes.legend(fontsize="small")
        axes.set(title="Size of layers", xscale="log", yscale="log", xlabel="parameters of a layer (mean)")


def temperature_for(norms: Tensor, effective: float) -> float:
    """T at which ``norms [rounds, R, L]`` have on average so many effective replicas."""
    low, high = 1e-6, 1e6
    for _ in range(60):
        middle = math.sqrt(low * high)
        weights = torch.softmax(-norms / middle, dim=1)
        if (1 / weights.square().sum(1)).mean() < effective:
            low = middle
        else:
            high = middle
    return high


class LearningRate:
    """The inner learning rate, by method and number of replicas."""

    methods = ("baseline", "edit")
    replicas = (1, 2, 4)

    def runs(self, plan: Plan) -> dict[str, list[Run]]:
        """By method, replicas and rate."""
        return {
            f"{method} {replicas} {lr:g}": plan.runs(method, lr=lr, replicas=replicas)
            for method in self.methods
            for replicas in self.replicas
            for lr in plan.rates
        }

    def show(self, plan: Plan, found: Found) -> Any:
        """The table."""
        runs = self.runs(plan)
        rows = []
        for method in self.methods:
            for replicas in self.replicas:
                values = [ends(found, runs[f"{method} {replicas} {lr:g}"]) for lr in plan.rates]
                best = min(range(len(values)), key=lambda at, of=values: statistics.mean(of[at]))
                cells = [told(of) + ("*" if at == best else " ") for at, of in enumerate(values)]
                rows.append([f"{METHODS[method]}, {replicas}", *cells])
        head = ["method, replicas", *(f"lr {lr:g}" for lr in plan.rates)]
        table("Learning rate: as many steps, so more replicas see more tokens (*: best)", head, rows)
        return {name: ends(found, of) for name, of in runs.items()}

    def draw(self, axes: Any, plan: Plan, found: Found) -> None:
        """Perplexity over the rate."""
        runs = self.runs(plan)
        for method, line in zip(self.methods, ("--", "-"), strict=True):
            for color, replicas in enumerate(self.replicas):
                values = [ends(found, runs[f"{method} {replicas} {lr:g}"]) for lr in plan.rates]
                mean = [*map(statistics.mean, values)]
                label = f"{METHODS[method]}, R = {replicas}"
                axes.errorbar(
                    plan.rates, mean, [*map(spread, values)], linestyle=line, color=f"C{color}", label=label
                )
                best = min(range(len(mean)), key=mean.__getitem__)
                axes.plot(plan.rates[best], mean[best], "*", color=f"C{color}", markersize=12)
        axes.legend(fontsize="small")
        axes.set(title="Inner learning rate (star: best)", xlabel="learning rate")
        axes.set(xscale="log", ylabel="held-out perplexity")
        axes.set_xticks(plan.rates, [f"{rate:g}" for rate in plan.rates])
        axes.minorticks_off()


PARTS: dict[str, Any] = {
    "methods": Methods(),
    "delay": Delay(),
    "penalty": Penalty(),
    "exponent": Exponent(),
    "sizes": Sizes(),
    "learning_rate": LearningRate(),
}


def plot(names: list[str], plan: Plan, found: Found) -> None:
    """One panel a part."""
    from matplotlib.figure import Figure

    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(5.5 * columns, 4.5 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, name in zip(panels, names, strict=False):
        PARTS[name].draw(axes, plan, found)
    for axes in panels[len(names) :]:
        axes.remove()
    figure.savefig(PICTURE, dpi=110)
    print(f"\nPicture: {PICTURE}")


def main() -> None:
    """Tune what is needed; then all runs of all parts; then tables, picture and numbers."""
    assert __doc__
    chosen = arguments(__doc__, list(PARTS))
    plan = Plan(chosen.quick)
    methods = possible(dict.fromkeys(method for name in chosen.parts for method in PARTS[name].methods))
    if missing := [METHODS[method] for method in METHODS if method not in possible(METHODS)]:
        late = "" if possible(["co2"]) else ", and all delays but 0"
        print(f"Skipped, as this version of edit does not have them: {', '.join(missing)}{late}")
    plan.choose(methods, perform(plan.tuning(methods)))
    runs = [run for name in chosen.parts for of in PARTS[name].runs(plan).values() for run in of]
    found = perform(runs)
    result = {name: PARTS[name].show(plan, found) for name in chosen.parts}
    plot(chosen.parts, plan, found)
    print("\n" + json.dumps({"learning_rates": plan.best, **result}))


if __name__ == "__main__":
    if is_rank():
        be_rank({"work": work})
    else:
        main()
