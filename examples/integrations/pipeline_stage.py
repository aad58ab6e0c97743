"""``torch.distributed.pipelining``: each replica is a pipeline of two stages, one rank a stage.

    torchrun --nproc-per-node 4 examples/integrations/pipeline_stage.py

The mesh says which dimension is the pipeline's by its name, ``pp``. A stage is the model without the blocks of the
other stages, so that names stay those of the whole model. The optimizer is built on the stage.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import edit
from common import LR, SETTINGS, STEPS, Model, batches, loss_of, run

STAGES = 2


class Stage(nn.Module):
    """One half of the model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        whole = Model()
        self.embedding = whole.embedding if number == 0 else None
        self.layers = nn.ModuleDict({str(number): whole.layers[number]})
        self.head = whole.head if number == STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or what the stage before made of them."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The stage, and the losses of this replica."""
    mesh = init_device_mesh("cpu", (world // STAGES, STAGES), mesh_dim_names=("replicate", "pp"))
    replica, number = mesh.get_coordinate()
    model = Stage(number)
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.AdamW, lr=LR, mesh=mesh, **SETTINGS)
    pipeline = mesh["pp"].get_group()
    stage = PipelineStage(model, number, STAGES, torch.device("cpu"), group=pipeline)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
    means = torch.zeros(STEPS)
    for step, (tokens, targets) in enumerate(batches(replica)):
        losses: list[Tensor] = []
        schedule.step(*([tokens] if number == 0 else []), target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            means[step] = torch.stack(losses).mean().detach()
    optimizer.sync()
    dist.broadcast(means, group_src=STAGES - 1, group=pipeline)  # only the last stage has losses
    return model, means.tolist()


if __name__ == "__main__":
    run(train)
