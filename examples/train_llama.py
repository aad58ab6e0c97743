"""Train a Llama on bytes of text with EDiT and the methods it is compared with.

    torchrun --nproc-per-node 4 examples/train_llama.py --compare baseline,edit

By default the text is Python's own standard library. Every method sees the same windows of it in the same
order, from the same weights. `local` never synchronises, `mean` is EDiT without its penalty: the controls.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_llama.py --out runs/1 --save-every 50 --resume auto

goes on by itself from the newest checkpoint when a rank dies (on the CPU with torch 2.13 also set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, see docs/checkpointing.md), and also when started again with another number of
ranks or another --mesh; then give --stop-tokens, and the learning rate follows the tokens.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import sysconfig
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from tqdm import tqdm

import edit
from edit.monitor import JsonLines, TensorBoard
from llama import SIZES, Llama

METHODS = ("baseline", "local", "edit", "a_edit", "diloco", "post_local_sgd", "co2", "mean")


def make_parser() -> argparse.ArgumentParser:
    """Flags. torchrun completes its own ones even behind the script's name: none of these begins one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def add(flag: str, default: object = None, help: str = "", **settings: Any) -> None:
        help += f"; default: {default}" if default is not None else ""
        parser.add_argument(flag, default=default, help=help, **settings)

    add("--method", "edit", "what trains", choices=METHODS)
    add("--compare", metavar="A,B,...", help="several methods, one after the other")
    add("--data", nargs="+", type=Path, metavar="PATH", help="files, or folders: all files in them")
    add("--mesh", metavar="RxS", help="replicas x shards; default: a replica per node, or two")
    add("--size", "small", choices=SIZES, help="of the model")
    add("--steps", 800, "inner steps of a replica", type=int)
    add("--batch", 4, "windows per rank and step", type=int)
    add("--length", 64, "bytes of a window", type=int)
    add("--lr", 3e-3, "peak of the inner AdamW's", type=float)
    add("--lr-warmup", 64, "steps up to the peak; then a cosine", type=int)
    add("--grad-norm", 1.0, "to which gradients are clipped", type=float)
    add("--interval", 16, "inner steps between rounds", type=int)
    add("--interval-seconds", 2.0, "the same for a_edit", type=float)
    add("--delay", 0, "inner steps by which a round is applied late; of co2 its interval", type=int)
    add("--sync-warmup", help="steps that average gradients first; default: a fifth", type=int)
    add("--outer-lr", 0.8, "of edit, a_edit and mean", type=float)
    add("--outer-momentum", 0.7, "of edit, a_edit and mean", type=float)
    add("--max-norm", 1.2, "to which a layer's pseudo gradient is clipped", type=float)
    add("--seed", 0, "of weights and data", type=int)
    add("--eval-windows", 1024, "held-out windows", type=int)
    add("--out", type=Path, metavar="DIR", help="default: runs/llama-TIME")
    add(
        "--save-every",
        metavar="N",
        help="steps between checkpoints (a_edit after its warm-up: rounds)",
        type=int,
    )
    add("--keep", 2, "newest checkpoints", type=int)
    add(
        "--resume",
        metavar="auto|PATH",
        help="auto: the newest complete checkpoint under --out, if there is one",
    )
    add(
        "--stop-tokens",
        metavar="N",
        help="tokens of all ranks, instead of --steps, also from a resumed run",
        type=int,
    )
    return parser


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Flags, checked."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    args.methods = args.compare.split(",") if args.compare else [args.method]
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"--compare: {', '.join(sorted(unknown))} is none of {', '.join(METHODS)}")
    for name in ("steps", "batch", "length", "interval", "eval_windows", "save_every", "keep", "stop_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but is {value}")
    if args.length > SIZES[args.size].max_length:
        parser.error(f"--length must be at most {SIZES[args.size].max_length}, but is {args.length}")
    plain = {"baseline", "local"} & set(args.methods)
    if plain and (args.save_every or args.resume or args.stop_tokens):
        parser.error(f"--save-every, --resume and --stop-tokens are not for {', '.join(sorted(plain))}")
    if args.resume == "auto" and args.out is None:
        parser.error("--resume auto needs --out, the same one in every start")
    if missing := [path for path in args.data or () if not path.exists()]:
        parser.error(f"--data: there is no {missing[0]}")
    if args.sync_warmup is None:  # what makes the rest whole rounds
        args.sync_warmup = max(0, args.steps - args.interval * max(1, args.steps * 4 // 5 // args.interval))
    return args


# ------------------------------------------------------------------------------------------------ data


def find_files(paths: list[Path] | None) -> list[tuple[str, Path]]:
    """Names and paths of the files, in the order of names. Default: the standard library without tests."""
    if paths is None:
        root = Path(sysconfig.get_path("stdlib"))
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        named = [(path.relative_to(root), path) for path in root.rglob("*.py")]
        return sorted((name.as_posix(), path) for name, path in named if not skip & set(name.parts))
    found = set()
    for root in paths:
        inside = [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else [root]
        hidden = {path for path in inside if any(p.startswith(".") for p in path.relative_to(root).parts)}
        found |= set(inside) - hidden
    return sorted((path.as_posix(), path) for path in found)


def split_files(files: list[tuple[str, Path]]) -> tuple[list[Path], list[Path]]:
    """Files to train on, and the twentieth of them with the least hash of the name, held out."""
    by_hash = sorted(files, key=lambda file: (zlib.crc32(file[0].encode()), file[0]))
    held_out = {name for name, _ in by_hash[: max(1, len(files) // 20)]}
    return [p for name, p in files if name not in held_out], [p for name, p in files if name in held_out]


def read(paths: list[Path]) -> Tensor:
    """The bytes of the files, each with a zero byte behind it."""
    joined = b"".join(path.read_bytes() + b"\0" for path in paths)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def load_text(paths: list[Path] | None) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out. A single file is cut: its last twentieth is held out."""
    files = find_files(paths)
    if len(files) == 1:
        text = read([files[0][1]])
        cut = len(text) * 19 // 20
        return text[:cut], text[cut:]
    training, held_out = split_files(files)
    return read(training), read(held_out)


class Windows(Dataset[Tensor]):
    """``text`` in windows of ``length`` bytes and the byte after each, the last target."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * self.length : (index + 1) * self.length + 1]


def make_loader(windows: Windows, batch: int, rank: int, world: int, seed: int) -> StatefulDataLoader:
    """Every rank's own part of the windows, shuffled anew in each epoch."""
    sampler = StatefulDistributedSampler(windows, world, rank, shuffle=True, seed=seed, drop_last=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
        loader = StatefulDataLoader(windows, batch, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise SystemExit(f"too little text: {len(windows)} windows for {world} ranks of --batch {batch}")
    return loader


def endless(
    loader: StatefulDataLoader, device: torch.device, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets, epoch after epoch."""
    for epoch in itertools.count(first):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            batch = batch.to(device, torch.long)
            yield batch[:, :-1], batch[:, 1:]


# ---------------------------------------------------------------------------------- model and optimizer


def make_model(method: str, args: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """The Llama: for the baseline sharded over the whole mesh, else within a replica."""
    torch.manual_seed(args.seed)  # the same weights on every rank and for every method
    model = Llama(SIZES[args.size]).to(mesh.device_type)
    settings = {}
    if mesh.device_type == "cuda":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif method != "baseline" and mesh["shard"].size() == 1:
        return model
    settings["mesh"] = mesh if method == "baseline" else mesh["shard"]
    for layer in model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def make_optimizer(
    method: str, args: argparse.Namespace, model: nn.Module, mesh: DeviceMesh
) -> torch.optim.Optimizer:
    """AdamW, or what replaces it."""
    adamw = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    if method in ("baseline", "local"):
        return torch.optim.AdamW(model.parameters(), **adamw)
    if method == "diloco":
        settings = edit.methods.diloco(args.interval)
    elif method == "co2":
        settings = edit.methods.co2(args.interval)
    elif method == "post_local_sgd":
        settings = edit.methods.post_local_sgd(args.interval, args.sync_warmup)
    else:
        if method == "a_edit":
            settings = edit.methods.a_edit(args.interval_seconds, args.sync_warmup)
        else:
            settings = edit.methods.edit(args.interval, args.sync_warmup)
        settings["outer"] = edit.Nesterov(args.outer_lr, args.outer_momentum)
        settings["penalty"] = edit.PseudoGradientPenalty(max_norm=args.max_norm) if method != "mean" else None
    settings.setdefault("delay", args.delay)
    return edit.LocalSGDOptimizer(model, mesh=mesh, **adamw, **settings)


# --------------------------------------------------------------------------------------------- one run


@dataclass
class Result:
    """What one method came to: the same on all ranks."""

    method: str
    perplexity: float  # held out; `local`: mean of the replicas' own, the others: of the consensus
    tokens: int  # of all ranks
    tokens_per_second: float
    megabytes: float  # sent to other replicas by a rank, mean over ranks
    seconds_waited: float  # in rounds, mean over ranks
    losses: list[float]  # by step, mean over ranks
    reports: list[edit.RoundReport]


def train(
    method: str, args: argparse.Namespace, mesh: DeviceMesh, windows: Windows, held_out: Tensor, out: Path
) -> Result:
    """One run of one method."""
    rank, world, (replicas, members) = dist.get_rank(), dist.get_world_size(), mesh.shape
    model = make_model(method, args, mesh)
    optimizer = make_optimizer(method, args, model, mesh)
    ours = isinstance(optimizer, edit.LocalSGDOptimizer)
    board = TensorBoard(out / method) if rank == 0 else None
    reports: list[edit.RoundReport] = []
    losses: list[Tensor] = []
    ahead = 0.0  # steps by which the average replica was ahead of this one at the last round: a_edit only
    # A run on another mesh goes on where the last one was in tokens; its steps count from `start`.
    run: dict[str, Any] = {"tokens_before": 0, "steps_before": 0, "start": 0, "epoch": 0, "sent": 0}
    per_step = args.batch * args.length * members  # tokens of a replica
    budget = args.stop_tokens or args.steps * replicas * per_step  # tokens of all
    whole = budget / (per_step * replicas)  # the same in steps of a replica

    def tokens_of_all() -> int:
        """Equal on all ranks; where replicas make different numbers of steps, as of the last round."""
        steps = (len(losses) - run["start"]) * replicas
        if method == "a_edit":
            steps = optimizer.total_steps - run["steps_before"]
        return run["tokens_before"] + steps * per_step

    def after_round(report: edit.RoundReport) -> None:
        nonlocal ahead
        ahead += report.steps.double().mean().item() - report.steps[mesh["replicate"].get_local_rank()].item()
        reports.append(report)
        if board:
            board(report)

    def learning_rate(_: int) -> float:
        done = run["tokens_before"] / (per_step * replicas) + len(losses) - run["start"] + ahead
        if done < args.lr_warmup:
            return (done + 1) / (args.lr_warmup + 1)
        way = min(1.0, (done - args.lr_warmup) / max(1, whole - args.lr_warmup))
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * way))

    if ours:
        optimizer.register_round_hook(after_round)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    loader = make_loader(windows, args.batch, rank, world, args.seed)
    checkpoints = out / method / "checkpoints"
    path = find_checkpoint(args.resume, checkpoints) if ours else None
    if args.save_every and (newest := find_checkpoint("auto", checkpoints)) and newest != path:
        raise SystemExit(
            f"--out: {checkpoints} has a run's checkpoints up to {newest.name}, which this one would not go on with, but "
            "remove: give --resume auto, or another --out"
        )
    if args.resume and rank == 0:
        print(
            f"{method}: "
            + (f"goes on from {path}" if path else f"no checkpoint in {checkpoints}: starts anew")
        )
    if ours:
        if not path:
            (out / method / f"rounds.{rank}.jsonl").unlink(missing_ok=True)  # of an older run
        optimizer.register_round_hook(JsonLines(out / method))
    if path:
        extra = edit.load(path, model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        losses, reports = list(extra["losses"].to(mesh.device_type)), extra["reports"]
        run, ahead = extra["run"], extra["ahead"]
        if extra["world"] == tuple(mesh.shape):
            if (len(losses) - run["start"]) % len(loader):  # else an epoch was at its end
                loader.load_state_dict(extra["loader"])
        else:
            epoch = run["epoch"] + (len(losses) - run["start"]) // extra["epoch_steps"]
            run |= {"tokens_before": extra["tokens"], "steps_before": optimizer.total_steps}
            run |= {"start": len(losses), "epoch": epoch + 1}
            ahead = 0.0

    def save(name: str) -> None:
        extra = {
            "scheduler": scheduler.state_dict(),
            "loader": loader.state_dict(),
            "losses": torch.stack(losses).cpu(),
            "reports": reports,
            "run": {**run, "sent": run["sent"] + optimizer.bytes_sent},
            "ahead": ahead,
            "tokens": tokens_of_all(),
            "world": tuple(mesh.shape),
            "epoch_steps": len(loader),
        }
        edit.save(checkpoints / name, model, optimizer, extra, keep=args.keep, background=True)

    began = len(losses)
    bar = tqdm(total=int(whole), initial=began, desc=method, unit="step", disable=True if rank else None)
    epoch = run["epoch"] + (began - run["start"]) // len(loader)
    saved_round = optimizer.rounds if ours else 0
    for tokens, targets in endless(loader, torch.device(mesh.device_type), epoch):
        if tokens_of_all() >= budget:  # as it was saved
            if rank == 0:
                print(f"{method}: {tokens_of_all()} tokens were seen already, of {budget}: no step is made. For more, "
                      "give more --steps, or on another mesh --stop-tokens")  # fmt: skip
            break
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        scheduler.step()
        bar.update(1)
        if bar.disable and rank == 0 and len(losses) % max(1, int(whole) // 10) == 0:  # not a terminal
            print(f"{method}: step {len(losses)} of {int(whole)}, loss {loss.item():.3f}", file=sys.stderr)
        if args.save_every:
            # Replicas of a_edit make different numbers of steps: what they all have is rounds.
            by_rounds = method == "a_edit" and optimizer.local_steps > args.sync_warmup
            if by_rounds and optimizer.rounds > saved_round and optimizer.rounds % args.save_every == 0:
                saved_round = optimizer.rounds
                save(f"round-{saved_round:06}")
            elif not by_rounds and len(losses) % args.save_every == 0:
                save(f"step-{len(losses):07}")
        if len(losses) == began + 1:  # the clock starts here: the first step sets things up
            start = last = time.perf_counter()
        elif board and len(losses) % 10 == 0:
            now = time.perf_counter()
            board.scalar("train/loss", loss.item(), len(losses))
            board.scalar("train/lr", scheduler.get_last_lr()[0], len(losses))
            board.scalar("train/tokens_per_second", 10 * world * tokens.numel() / (now - last), len(losses))
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
            last = now
        if tokens_of_all() >= budget:
            break
    if ours:
        optimizer.sync()
    seconds = time.perf_counter() - start if len(losses) > began else 1.0
    bar.close()

    if ours:
        sent = run["sent"] + optimizer.bytes_sent
        with optimizer.consensus():
            perplexity = evaluate(model, held_out, args.batch, None)
        optimizer.close()
    elif method == "baseline":  # by the formula of a ring: an all-reduce of the fp32 gradients a step
        shard = 4 * sum(param.to_local().numel() for param in model.parameters())
        sent = len(losses) * 2 * (replicas - 1) * shard // replicas
        perplexity = evaluate(model, held_out, args.batch, None)
    else:
        sent = 0
        perplexity = evaluate(model, held_out, args.batch, mesh["shard"].get_group())
    if board:
        board.scalar("held_out/perplexity", perplexity, len(losses))
        board.close()

    mine = {
        "perplexity": perplexity,
        "tokens": run["tokens_before"] / world + (len(losses) - run["start"]) * args.batch * args.length,
        "speed": max(0, len(losses) - began - 1) * args.batch * args.length / seconds,
        "sent": sent / 1e6,
        "waited": sum(report.seconds_waited for report in reports),
    }
    everyone: list[tuple[dict[str, float], list[float]]] = [({}, [])] * world
    dist.all_gather_object(everyone, (mine, torch.stack(losses).tolist()))
    total = {key: sum(numbers[key] for numbers, _ in everyone) for key in mine}
    return Result(
        method,
        total["perplexity"] / world,
        int(total["tokens"]),
        total["speed"],
        total["sent"] / world,
        total["waited"] / world,
        [sum(step) / world for step in zip(*(curve for _, curve in everyone), strict=False)],
        [report for report in reports if report.steps.any()],  # without the last, in which all just meet
    )


def find_checkpoint(resume: str | None, checkpoints: Path) -> Path | None:
    """The one that is asked for, or the newest one; the same on all ranks."""
    if resume != "auto":
        return Path(resume) if resume else None
    found = [edit.latest(checkpoints)]
    dist.broadcast_object_list(found)
    return found[0]


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch: int, group: dist.ProcessGroup | None) -> float:
    """Perplexity per byte; the ranks of ``group`` (``None``: all) share the work and get the same number."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, len(windows), batch * size):
        # As many forwards on every rank, or the gathering of shards would hang: some may be for nothing.
        mine = torch.arange(batch) + first + rank * batch
        chosen = windows[mine.clamp(max=len(windows) - 1)].to(device, torch.long)
        logits = model(chosen[:, :-1]).float().transpose(1, 2)
        losses = F.cross_entropy(logits, chosen[:, 1:], reduction="none")
        total += losses[mine < len(windows)].double().sum()
    dist.all_reduce(total, group=group)
    return math.exp(total.item() / windows[:, 1:].numel())


# -------------------------------------------------------------------------------------------- all runs


def show(results: list[Result], mesh: DeviceMesh) -> None:
    """Print the table."""
    print(
        f"\n{'method':<16}{'held-out ppl':>12}{'ratio':>8}{'tokens/s':>10}{'MB sent':>9}{'rounds':>8}{'waited':>9}"
    )
    for r in results:
        print(
            f"{r.method:<16}{r.perplexity:>12.4f}{r.perplexity / results[0].perplexity:>8.4f}"
            f"{r.tokens_per_second:>10.0f}{r.megabytes:>9.1f}{len(r.reports):>8}{r.seconds_waited:>7.1f} s"
        )
    print(
        "\nPerplexity: per byte, of the consensus; local: the mean of the replicas' own. MB sent: to other replicas,\n"
        "mean of the ranks; baseline: a ring all-reduce of its gradients, by formula. Waited: for others, in rounds.\n"
        f"Mesh {' x '.join(map(str, mesh.shape))} (replicas x ranks of each), {results[0].tokens:,} tokens."
    )
    for r in results:
        if r.reports:
            clipped = sum(bool((report.clip < 1).any()) for report in r.reports)
            out = sum(int(report.out.sum()) for report in r.reports)
            norms = torch.cat([report.norms.flatten() for report in r.reports])
            print(
                f"{r.method}: clip reached in {clipped} of {len(r.reports)} rounds, {out} of {norms.numel()} pseudo "
                f"gradients left out, their norms {norms.min():.2f}-{norms.max():.2f}, median {norms.median():.2f}"
            )


def plot(results: list[Result], path: Path) -> None:
    """All curves in one picture."""
    from matplotlib.figure import Figure  # on one rank, at the end

    rounds = [r for r in results if r.reports]
    figure = Figure(figsize=(11 if rounds else 6, 4.5), layout="constrained")
    left, *right = figure.subplots(1, 2 if rounds else 1, squeeze=False)[0]
    for r in results:
        width = max(1, len(r.losses) // 50)
        smooth = torch.tensor(r.losses).unfold(0, width, 1).mean(1)
        tokens = r.tokens / len(r.losses) * torch.arange(width, len(r.losses) + 1) / 1e6
        left.plot(tokens, smooth, label=f"{r.method}: held-out perplexity {r.perplexity:.3f}")
    left.set(xlabel="million tokens", ylabel=f"training loss (nats per byte, mean of {width} steps)")
    left.legend()
    for axes in right:
        for r in rounds:
            norms = torch.stack([report.norms.nanmean() for report in r.reports])
            (line,) = axes.plot(range(1, len(norms) + 1), norms, label=r.method)
            for mark, what, marked in (
                (".", "clipped", [bool((report.clip < 1).any()) for report in r.reports]),
                ("x", "some left out", [bool(report.out.any()) for report in r.reports]),
            ):
                at = torch.tensor(marked).nonzero().flatten()
                if len(at):
                    axes.plot(at + 1, norms[at], mark, color=line.get_color(), label=f"{r.method}: {what}")
        axes.set(xlabel="round", ylabel="norm of a pseudo gradient (mean of layers and replicas)")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def start(args: argparse.Namespace) -> DeviceMesh:
    """Process group, threads and mesh; NCCL if there is a GPU for every rank, else gloo."""
    world, here = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    nodes = world // here
    if args.mesh is None:
        replicas = nodes if nodes > 1 else 2 if world % 2 == 0 and world > 2 else world
        shape = replicas, world // replicas
    else:
        try:
            shape = tuple(int(size) for size in args.mesh.split("x"))
        except ValueError:
            shape = ()
        if len(shape) != 2 or min(shape) < 1 or math.prod(shape) != world:
            raise SystemExit(f"--mesh must be RxS with R * S = {world} (ranks), but is {args.mesh}")
    cuda = torch.cuda.device_count() >= here
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // here))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if world > 1:
        dist.init_process_group(backend)
    else:  # also without torchrun
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=("replicate", "shard"))


def main() -> None:
    """All methods asked for, in turn."""
    args = parse()
    mesh = start(args)
    named = [args.out or Path("runs", time.strftime("llama-%Y%m%d-%H%M%S"))]
    dist.broadcast_object_list(named)
    out = named[0]
    training, unseen = (Windows(text, args.length) for text in load_text(args.data))
    number = min(len(unseen), args.eval_windows)
    held_out = torch.stack([unseen[index * len(unseen) // number] for index in range(number)])
    first = dist.get_rank() == 0
    results = []
    for method in args.methods:
        results.append(train(method, args, mesh, training, held_out, out))
        if first:
            print(f"{method}: held-out perplexity {results[-1].perplexity:.4f}", flush=True)
    if first:
        show(results, mesh)
        plot(results, out / "curves.png")
        print(f"Curves: {out / 'curves.png'}   More: tensorboard --logdir {out}")
        ours = [method for method in args.methods if method not in ("baseline", "local")]
        if ours:
            print(f"Rounds: python -m edit.monitor {out / ours[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
