"""What a round costs on a GPU: time of steps with and without, at once, late and from host memory.

    python benchmarks/gpu_round.py                # one device, one replica: all but the traffic
    torchrun --nproc-per-node 8 benchmarks/gpu_round.py --shards 4

A decoder in bf16 with fp32 parameters, AdamW (fused). Times are of CUDA events around whole steps; a round's cost is
the time of the steps in which it is launched and applied, less that of the others. Prints a table, and one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import edit

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from harness import numel, table
from llama import Config, Llama

INTERVAL, ROUNDS = 8, 6
CASES: dict[str, dict[str, Any]] = {
    "at once": {},
    "at once, host memory": {"offload": "cpu"},
    "late by 4": {"delay": 4},
    "late by 4, host memory": {"delay": 4, "offload": "cpu"},
}


def measure(case: str, shards: int, config: Config, batch: int) -> dict[str, float]:
    """Milliseconds of a plain step, and those that a round adds; bytes of device memory at the most."""
    torch.manual_seed(0)
    gc.collect()  # the case before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    mesh = None
    with torch.device("cuda"):
        model = Llama(config)
    if dist.is_initialized():
        mesh = init_device_mesh(
            "cuda", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard")
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["shard"], mp_policy=policy)
        fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
    schedule = edit.EverySteps(INTERVAL)
    optimizer = edit.LocalSGDOptimizer(
        model, lr=1e-4, fused=True, mesh=mesh, schedule=schedule, **CASES[case]
    )
    tokens = torch.randint(config.vocab, (batch, config.max_length + 1), device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(INTERVAL * (ROUNDS + 1) + 1)]
    events[0].record()
    for event in events[1:]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        event.record()
    torch.cuda.synchronize()
    took = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    optimizer.sync()
    optimizer.close()
    # From the step that launches to the one before the next: steps 7, 8, ..., 14 of each eight.
    turns = [took[i : i + INTERVAL] for i in range(INTERVAL - 1, len(took) - INTERVAL, INTERVAL)]
    plain = statistics.median(t for turn in turns for t in turn[-2:])
    added = statistics.median(sum(turn) - INTERVAL * plain for turn in turns)
    return {"step": plain, "round": added, "peak": torch.cuda.max_memory_allocated()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=1, help="ranks of a replica")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark is for one")
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    heads = options.width // 128
    config = Config(
        options.width, options.depth, heads, heads, 3 * options.width, vocab=8192, max_length=options.length
    )
    found = {case: measure(case, options.shards, config, options.batch) for case in CASES}
    if not dist.is_initialized() or dist.get_rank() == 0:
        rows = [
            [
                case,
                f"{n['step']:.1f}",
                f"{n['round']:.1f}",
                f"{n['round'] / n['step']:.3f}",
                f"{n['peak'] / 1e9:.2f}",
            ]
            for case, n in found.items()
        ]
        with torch.device("meta"):
            parameters = numel(Llama(config))
        title = f"{parameters / 1e6:.0f}M parameters on {torch.cuda.get_device_name()}"
        table(title, ["", "step, ms", "round adds, ms", "steps", "peak, GB"], rows)
        print(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
