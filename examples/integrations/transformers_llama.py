"""Hugging Face transformers: a ``LlamaForCausalLM`` (random weights), sharded by FSDP2 inside each replica.

    torchrun --nproc-per-node 4 examples/integrations/transformers_llama.py

Two ranks a replica. The data of a replica goes to its ranks in halves, and ``fully_shard`` averages their gradients.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import edit
from common import BATCH, LENGTH, LR, SETTINGS, VOCABULARY, batches, run

SHARDS = 2


def make_model() -> LlamaForCausalLM:
    """Two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, **sizes)
    )


def train(rank: int, world: int) -> tuple[nn.Module, list[float]]:
    """The model, and the losses of this rank."""
    mesh = init_device_mesh("cpu", (world // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    replica, member = mesh.get_coordinate()
    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = edit.LocalSGDOptimizer(model, torch.optim.AdamW, lr=LR, mesh=mesh, **SETTINGS)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
    losses = []
    half = BATCH // SHARDS
    for tokens, _ in batches(replica):
        mine = tokens[half * member : half * (member + 1)]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.sync()
    return model, losses


if __name__ == "__main__":
    run(train)
