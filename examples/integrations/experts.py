"""Mixture of experts: the experts are spread over a mesh of their own, the rest is sharded by FSDP2.

    torchrun --nproc-per-node 4 examples/integrations/experts.py

A replica is two ranks. Dense parameters are sharded over both; of the four experts of a layer, each rank has two,
as a DTensor over the mesh dimension ``ep``. Every rank routes its own tokens, and sends them to where the expert is.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import edit
from common import BATCH, LR, SETTINGS, WIDTH, Model, batches, loss_of, run

RANKS, EXPERTS = 2, 4  # of a replica


class Gather(torch.autograd.Function):
    """All ranks' tokens; backwards, the sum of their gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """``[N, D]`` to ``[ranks * N, D]``."""
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """The part of this rank."""
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class Scatter(torch.autograd.Function):
    """The sum over ranks, of which each gets its tokens; backwards, all ranks' gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """``[ranks * N, D]`` to ``[N, D]``."""
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """From all ranks."""
        parts = [torch.empty_like(gradient) for _ in range(ctx.group.size())]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.Module):
    """Four linear maps, of which a router chooses one for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.mesh: DeviceMesh | None = None

    def spread(self, mesh: DeviceMesh) -> None:
        """Over the ranks of ``mesh``."""
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]``, of the same shape."""
        flat = x.flatten(0, -2)
        share, chosen = self.router(flat).softmax(-1).max(-1)
        weight, first = self.weight, 0
        if self.mesh is not None:
            group = self.mesh.get_group()
            weight = self.weight.to_local()
            first = group.rank() * len(weight)
            flat = Gather.apply(flat, group)
            chosen = Gather.apply(chosen.double(), group).long()
        y = torch.zeros_like(flat)
        for number, matrix in enumerate(weight, first):
            mask = (chosen == number).unsqueeze(-1)
            y = y + torch.where(mask, flat @ matrix, 0.0)
        if self.mesh is not None:
            y = Scatter.apply(y, group)
        return x + (share.unsqueeze(-1) * y).view_as(x)


def make_model() -> nn.Module:
    """The common one, with experts in place of its second block."""
    model = Model()
    model.layers[1] = Experts()
    return model


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The model, and the losses of this rank."""
    mesh = init_device_mesh("cpu", (world // RANKS, RANKS), mesh_dim_names=("replicate", "shard"))
    of_experts = init_device_mesh("cpu", (world // RANKS, RANKS), mesh_dim_names=("replicate", "ep"))
    replica, member = mesh.get_coordinate()
    model = make_model()
    model.layers[1].spread(of_experts["ep"])
    for layer in model.layers:
        ignored = {p for p in layer.parameters() if isinstance(p, DTensor)}
        fully_shard(layer, mesh=mesh["shard"], ignored_params=ignored)
    fully_shard(model, mesh=mesh["shard"], ignored_params={model.layers[1].weight})
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.AdamW, lr=LR, mesh=mesh, **SETTINGS)
    losses = []
    half = BATCH // RANKS
    for tokens, targets in batches(replica):
        mine = slice(half * member, half * (member + 1))
        loss = loss_of(model(tokens[mine]), targets[mine])
        loss.backward()
        # A gradient of experts is the sum over the tokens of both ranks; all others are means.
        model.layers[1].weight.grad.div_(RANKS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.sync()
    return model, losses


if __name__ == "__main__":
    run(train)
