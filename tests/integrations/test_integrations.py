"""What people use, used as the examples show it: the same parameters as the method by hand, in one process.

``bare`` is the reference of the other tests: plain loops in fp64, without ranks, shards, hooks or integration.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import processes
from reference import Reference, nesterov
from test_models import full

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
sys.path.insert(0, str(EXAMPLES))
import common  # noqa: E402

# Other packages' warnings are theirs.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
REPLICAS = 2


def launched(
    rank: int, name: str, world: int, port: int, steps: int
) -> tuple[dict[str, Tensor], list[float]]:
    """``train`` of an example, in fp64, on a rank that believes that torchrun has started it."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {key: str(value) for key, value in where.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.path.insert(0, str(EXAMPLES))
    torch.set_default_dtype(torch.float32 if name == "adamw_8bit" else torch.float64)  # torchao has no fp64
    common.STEPS = steps
    model, losses = importlib.import_module(name).train(rank, world)
    return {key: full(p) for key, p in model.named_parameters()}, losses


def trained(
    name: str, world: int = REPLICAS, steps: int = common.STEPS
) -> tuple[dict[str, Tensor], list[float]]:
    """All parameters, whoever of the first replica's ranks holds them, and its losses."""
    ranks = processes(world, launched, name, world, 1, steps, timeout=300, group_timeout=120)
    members = world // REPLICAS
    params: dict[str, Tensor] = {}
    for replica in range(REPLICAS):
        for own, _ in ranks[members * replica : members * (replica + 1)]:
            for key, value in own.items():
                torch.testing.assert_close(value, params.setdefault(key, value), rtol=0, atol=0)
    losses = [own for _, own in ranks[:members] if own]
    return params, torch.tensor(losses).mean(0).tolist()


def bare(
    model: nn.Module,
    inner: Callable[[list[nn.Parameter]], Any],
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda model, x, y: common.loss_of(model(x), y),
    edit_gradients: Callable[[int, nn.Module], None] | None = None,
    apart: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float64,
    steps: int = common.STEPS,
) -> Reference:
    """The run by hand; ``apart``: names that begin so are a layer, not of the root."""
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        block = ".".join(parts[: parts.index("layers") + 2]) if "layers" in parts else ""
        block = block or next((start for start in apart if name.startswith(start)), "")
        groups.setdefault(block, []).append(name)
    schedule = common.SETTINGS["schedule"]
    run = Reference(
        model,
        REPLICAS,
        inner=inner,
        layers=[*groups.values()],
        outer=nesterov(0.8, 0.85),
        interval=schedule.interval,
        warmup_steps=schedule.warmup_steps,
        dtype=dtype,
    )
    data = [list(common.batches(replica)) for replica in range(REPLICAS)]
    run.run([steps] * REPLICAS, lambda i, t: lambda model: loss(model, *data[i][t]), edit_gradients)
    return run


def agrees(got: dict[str, Tensor], run: Reference) -> None:
    for key, value in run.models[0].named_parameters():
        torch.testing.assert_close(
            got[key], value.detach(), rtol=1e-6, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )


def falls(losses: list[float]) -> None:
    assert sum(losses[-4:]) / 4 < 0.7 * sum(losses[:4]) / 4, losses


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=common.LR)


@pytest.fixture(autouse=True)
def fp64() -> Any:
    """Models are made in it, here and in the ranks."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def needs(package: str) -> Any:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"needs {package}: pip install -e .[integrations]"
    )


SAME_MODEL = [
    pytest.param("accelerate_prepare", marks=needs("accelerate")),
    pytest.param("fabric_setup", marks=needs("lightning_fabric")),
    "compiled_blocks",
    "grad_scaler",
]


@pytest.mark.parametrize("name", SAME_MODEL)
def test_loops(name: str) -> None:
    params, losses = trained(name)
    falls(losses)
    agrees(params, bare(common.Model(), adamw))


@needs("transformers")
def test_transformers_llama_sharded_by_fsdp2() -> None:
    params, losses = trained("transformers_llama", 4)
    falls(losses)
    made: dict[int, int] = {}

    def clip_and_schedule(replica: int, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step = made.setdefault(replica, 0)
        for group in run_optimizers[replica].param_groups:
            group["lr"] = common.LR * (1.0 - 0.9 * min(step, 60) / 60)
        made[replica] = step + 1

    run_optimizers: list[torch.optim.Optimizer] = []

    def inner(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        run_optimizers.append(adamw(parameters))
        return run_optimizers[-1]

    model = importlib.import_module("transformers_llama").make_model()
    agrees(
        params, bare(model, inner, lambda model, x, _: model(input_ids=x, labels=x).loss, clip_and_schedule)
    )


def test_pipeline_stages() -> None:
    """Each stage has a root layer of its own."""
    params, losses = trained("pipeline_stage", 4)
    falls(losses)
    agrees(params, bare(common.Model(), adamw, apart=("embedding", "head")))


def test_torchtitan_meshes() -> None:
    params, losses = trained("torchtitan_meshes", 8)
    falls(losses)
    agrees(params, bare(common.Model(), adamw))


@needs("torchao")
def test_adamw_of_8_bits() -> None:
    """In fp32, as it has no fp64, through the warm-up and two rounds: later, where the last bit of a norm differs, so do
    codes of 8 bits, and then parameters."""
    _, losses = trained("adamw_8bit")
    falls(losses)
    params, _ = trained("adamw_8bit", steps=9)
    torch.set_default_dtype(torch.float32)
    AdamW8bit = importlib.import_module("torchao.optim").AdamW8bit

    def inner(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return AdamW8bit(parameters, lr=common.LR, block_size=64)

    run = bare(common.Model(), inner, dtype=torch.float32, steps=9)
    assert len(run.after_round) == 2
    agrees(params, run)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch.optim.Muon")
def test_muon() -> None:
    muon = importlib.import_module("muon")
    params, losses = trained("muon")
    falls(losses)

    def inner(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        named = dict(zip((name for name, _ in common.Model().named_parameters()), parameters, strict=True))
        blocks = [p for name, p in named.items() if p.ndim == 2 and name.startswith("layers.")]
        rest = [p for name, p in named.items() if not (p.ndim == 2 and name.startswith("layers."))]
        groups = [
            {"params": blocks, "lr": 0.02, "muon": True},
            {"params": rest, "lr": common.LR, "muon": False},
        ]
        return muon.MuonAndAdamW(groups)

    agrees(params, bare(common.Model(), inner))


def test_averages_of_the_anchors() -> None:
    params, losses = trained("weight_average")
    falls(losses)
    run = bare(common.Model(), adamw)
    decay = importlib.import_module("weight_average").DECAY
    average: dict[str, Tensor] = {}
    for of_round in run.after_round[:8]:  # the ninth is sync()'s
        assert of_round[0] is not None
        for name, value in of_round[0].items():
            average[name] = decay * average[name] + (1 - decay) * value if name in average else value
    for name, value in average.items():
        torch.testing.assert_close(params[name], value, rtol=1e-6, atol=1e-6)


def test_experts_on_a_mesh_of_their_own() -> None:
    params, losses = trained("experts", 4)
    falls(losses)
    agrees(params, bare(importlib.import_module("experts").make_model(), adamw))
